"""A TrainEngine on disk: a distributed checkpoint to go on from, and a Hugging Face folder to use.

`take_snapshot` writes `<folder>/dcp` (torch.distributed.checkpoint: weights and optimizer, each rank its
shard; loads on any number of ranks; with LoRA only what is trained), at once or in the background, and
`<folder>/schedule.pt` and `<folder>/rng_rank<r>.pt` at once. All ranks call each function together. Writing
aside and renaming is the trainer's business. What the configuration says (learning rate, betas, weight decay,
schedule) is not taken from a checkpoint: a run goes on with its present settings. A folder with weights alone
(scripts/convert_checkpoint.py makes one) is a start from step 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from verl.workers.engine.hf_weights import tensor_names, write_hf_weights
from verl.workers.engine.lora import save_adapter
from verl.workers.engine.optim import resume_schedule
from verl.workers.engine.snapshot import Snapshot, copied_to_cpu

if TYPE_CHECKING:
    from verl.workers.engine.engine import TrainEngine

COPIED_FILES = ("prompt_template.txt",)
ADAPTER_FOLDER = "adapter"


def _rank(engine: TrainEngine[Any]) -> int:
    return dist.get_rank() if engine.world_size > 1 else 0


def _barrier(engine: TrainEngine[Any]) -> None:
    if engine.world_size > 1:
        dist.barrier()


def save_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes tensors, of which each rank may have a shard, into a folder; all ranks together.

    group: a group of all ranks of its own, for a thread in the background.
    """
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())


def load_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fills tensors from a folder of `save_tensors`, written by any number of ranks."""
    dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def _tensors(engine: TrainEngine[Any]) -> dict[str, Any]:
    """The weights that are trained, and the optimizer with its settings (`param_groups`)."""
    assert engine.optimizer is not None
    model = get_model_state_dict(engine.module)
    if engine.adapters is not None:
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
        model = {name: tensor for name, tensor in model.items() if name in trained}
    return {"model": model, "optimizer": get_optimizer_state_dict(engine.module, engine.optimizer)}


def check_fits(expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raises ValueError unless the checkpoint holds exactly these tensors, in these shapes."""
    entries = dcp.FileSystemReader(folder / "dcp").read_metadata().state_dict_metadata
    saved = {
        name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    differing = sorted(
        name for name in saved.keys() | expected.keys() if saved.get(name) != expected.get(name)
    )
    if differing:
        first = differing[0]
        raise ValueError(
            f"Checkpoint {folder} doesn't fit this run in {len(differing)} tensors, the first of them "
            f"{first}: found {saved.get(first, 'none')}, expected {expected.get(first, 'none')}. Go on with "
            "the model.path, lora_rank, target_modules and optim.name that it was made with."
        )


def _shapes(state: Any, name: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name as in a checkpoint, shape) of each tensor in nested dictionaries."""
    if isinstance(state, torch.Tensor):
        yield name, tuple(state.shape)
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _shapes(value, f"{name}.{key}" if name else str(key))


def save_checkpoint(engine: TrainEngine[Any], path: str | Path) -> None:
    """Writes everything that the next update depends on into a folder, which is made."""
    take_snapshot(engine, path, None).write()
    _barrier(engine)


def take_snapshot(engine: TrainEngine[Any], path: str | Path, group: dist.ProcessGroup | None) -> Snapshot:
    """What `save_checkpoint` writes, its tensors in the snapshot and all else at once; LoRA adapters also as
    a PEFT folder, `<folder>/adapter`. group: see `save_tensors`.
    """
    assert engine.scheduler is not None
    folder, rank = Path(path), _rank(engine)
    folder.mkdir(parents=True, exist_ok=True)
    with engine.loaded(optimizer=True):
        state = _tensors(engine)
        held: list[Any] = [{"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}]
        if engine.offloads:  # else the snapshot would keep all of it on the device
            held.append(copied_to_cpu(held.pop()))
        if engine.adapters is not None:
            save_adapter(engine.adapters, folder / ADAPTER_FOLDER, writes=rank == 0)
    save_progress(folder, engine.scheduler, engine.weights_version, engine.device, rank)

    def copy() -> None:
        held.append(copied_to_cpu(held.pop()))

    def write() -> None:
        save_tensors(held.pop(), folder / "dcp", group)

    return Snapshot(None if engine.offloads else copy, write)


def save_progress(
    folder: Path, scheduler: LambdaLR, weights_version: int, device: torch.device, rank: int
) -> None:
    """Writes what an engine depends on besides its tensors: schedule and version, and this rank's random
    state.
    """
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    torch.save(rng, folder / f"rng_rank{rank}.pt")
    if rank == 0:
        schedule = {"scheduler": scheduler.state_dict(), "weights_version": weights_version}
        torch.save(schedule, folder / "schedule.pt")


def load_progress(folder: Path, scheduler: LambdaLR, device: torch.device, rank: int) -> int:
    """Puts schedule and random state where `save_progress` left others; returns the weights' version."""
    schedule = torch.load(folder / "schedule.pt", weights_only=True)
    resume_schedule(scheduler, schedule["scheduler"])
    rng_file = folder / f"rng_rank{rank}.pt"
    if rng_file.is_file():  # a rank that the saving run did not have keeps its own
        rng = torch.load(rng_file, weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
    return int(schedule["weights_version"])


def check_complete(folder: Path) -> None:
    """Raises ValueError for a folder that is no checkpoint of an engine."""
    missing = [name for name in ("dcp/.metadata", "schedule.pt") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Checkpoint {folder} has no {' and no '.join(missing)}; expected a folder that a run saved."
        )


def has_optimizer(folder: Path) -> bool:
    """Whether a checkpoint holds an optimizer's state, or weights alone to start with."""
    entries = dcp.FileSystemReader(folder / "dcp").read_metadata().state_dict_metadata
    return any(name.startswith("optimizer.state.") for name in entries)


def load_checkpoint(engine: TrainEngine[Any], path: str | Path) -> None:
    """Puts the engine where `save_checkpoint` left another one, on this or any other number of ranks."""
    assert engine.scheduler is not None and engine.optimizer is not None
    folder = Path(path)
    check_complete(folder)
    groups = engine.optimizer.param_groups
    settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    with engine.loaded(optimizer=True):
        state = _tensors(engine)
        saved: dict[str, Any] = {"model": state["model"]}
        if has_optimizer(folder):
            saved["optimizer"] = {"state": state["optimizer"]["state"]}
        check_fits(dict(_shapes(saved)), folder)
        load_tensors(saved, folder / "dcp")
        options = StateDictOptions(strict=engine.adapters is None)  # with LoRA the base is not in it
        set_model_state_dict(engine.module, state["model"], options=options)
        if "optimizer" in saved:
            set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"])
    for group, settings_of_group in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(settings_of_group)
    engine.weights_version = load_progress(folder, engine.scheduler, engine.device, _rank(engine))
    _barrier(engine)


def save_hf(
    engine: TrainEngine[Any], path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path
) -> None:
    """Writes a Hugging Face folder: config, safetensors under plain names and in the weights' dtype,
    tokenizer. LoRA adapters are merged: it is a plain model.

    `base` is the folder that the model came from; files of COPIED_FILES found there come along.
    """
    folder = Path(path)
    with engine.loaded():
        state = None
        if engine.world_size > 1 or engine.adapters is not None:
            state = _whole_state(engine)
        if _rank(engine) == 0:
            engine.module.model.save_pretrained(folder, state_dict=state)
    if _rank(engine) == 0:
        save_beside(folder, tokenizer, base)
    _barrier(engine)


def _whole_state(engine: TrainEngine[Any]) -> dict[str, torch.Tensor]:
    """Everything in a Hugging Face folder, adapters merged, in rank 0's CPU memory (empty on the others)."""
    model = engine.module.model
    buffers = {name: t for name, t in model.named_buffers() if name in model.state_dict()}
    return {n: t.cpu() for n, t in chain(engine.weights(), buffers.items()) if _rank(engine) == 0}


def hf_snapshot(
    engine: TrainEngine[Any],
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | None,
    base: str | Path,
    saved: str | Path,
) -> Snapshot:
    """What `save_hf` writes. The weights are those that are in `saved` by then, so that none are gathered;
    but those that adapters are merged into are gathered now, as a checkpoint has the adapters alone.
    """
    folder, model = Path(path), engine.module.model
    state: dict[str, torch.Tensor] = {}
    if engine.adapters is not None:
        with engine.loaded():
            state = _whole_state(engine)
    if _rank(engine) > 0:
        return Snapshot()
    names = tensor_names(model)

    def write() -> None:
        if state:
            model.save_pretrained(folder, state_dict=state)
        else:
            write_hf_weights(model, names, Path(saved) / "dcp", folder)
        save_beside(folder, tokenizer, base)

    return Snapshot(write=write)


def save_beside(folder: Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path) -> None:
    """Writes what a Hugging Face folder has besides the model."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name in COPIED_FILES:
        if (Path(base).expanduser() / name).is_file():
            shutil.copyfile(Path(base).expanduser() / name, folder / name)
