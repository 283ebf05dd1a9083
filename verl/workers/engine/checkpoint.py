"""An FSDP2 engine on disk: a distributed checkpoint to go on from, and a Hugging Face folder to use.

A snapshot is `<folder>/dcp` (torch.distributed.checkpoint: weights and optimizer, each rank its
shard; loads on any number of ranks; with LoRA only what is trained), at once or in the background, and
`<folder>/schedule.pt` and `<folder>/rng_rank<r>.pt` at once. All ranks call each function together. Writing
aside and renaming is the trainer's business. What the configuration says (learning rate, betas, weight decay,
schedule) is not taken from a checkpoint: a run goes on with its present settings. A folder with weights alone
(scripts/convert_checkpoint.py makes one) is a start from step 0.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl.workers.engine.base import Engine
from verl.workers.engine.hf_weights import tensor_names, write_hf_weights
from verl.workers.engine.lora import save_adapter
from verl.workers.engine.optim import resume_schedule
from verl.workers.engine.snapshot import Snapshot, copied_to_cpu

COPIED_FILES = ("prompt_template.txt", "generation_config.json")
ADAPTER_FOLDER = "adapter"


def save_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes tensors, of which each rank may have a shard, into a folder; all ranks together.

    group: a group of all ranks of its own, for a thread in the background.
    """
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())


def load_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fills tensors from a folder of `save_tensors`, written by any number of ranks."""
    dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


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


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Each rank copies its shards; dtypes, devices and which ranks shard may differ."""
    assert source.keys() == target.keys()
    for name, tensor in target.items():
        _local(tensor).copy_(_local(_sharded_like(source[name], tensor)))


def _sharded_like(source: Tensor, target: Tensor) -> Tensor:
    if not (isinstance(source, DTensor) and isinstance(target, DTensor)):
        return source
    if source.device_mesh.shape == target.device_mesh.shape:
        return source
    return distribute_tensor(source.full_tensor(), target.device_mesh, target.placements, src_data_rank=None)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def write_hf_folder(
    model: PreTrainedModel,
    weights: Sequence[str] | dict[str, Tensor],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    base: str | Path,
    saved: str | Path,
) -> None:
    """Writes a Hugging Face folder. weights: names of those to take from the policy's checkpoint in `saved`
    (see `write_hf_weights`), or the whole tensors; base: the folder that the model came from.
    """
    if isinstance(weights, dict):
        model.save_pretrained(folder, state_dict=weights)
    else:
        write_hf_weights(model, weights, Path(saved) / "dcp", folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name in COPIED_FILES:
        if (Path(base).expanduser() / name).is_file():
            shutil.copyfile(Path(base).expanduser() / name, folder / name)


class SavedEngine(Engine):
    """What an FSDP2 engine does with files; see the top of this one.

    Attributes:
        module: the trained `PolicyModel` or `ValueModel`, with the Hugging Face model as `model`.
        optimizer: None if the module is frozen. offloads: weights or optimizer are in CPU memory between
        uses.
    """

    module: Any
    optimizer: torch.optim.Optimizer | None
    _writing_group: dist.ProcessGroup | None = None  # of threads that write snapshots

    @property
    @abstractmethod
    def offloads(self) -> bool: ...

    @property
    def _rank(self) -> int:
        return dist.get_rank() if self.world_size > 1 else 0

    def _tensors(self) -> dict[str, Any]:
        """The weights that are trained, and the optimizer with its settings (`param_groups`)."""
        assert self.optimizer is not None
        model = get_model_state_dict(self.module)
        if self.adapters is not None:
            trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
            model = {name: tensor for name, tensor in model.items() if name in trained}
        return {"model": model, "optimizer": get_optimizer_state_dict(self.module, self.optimizer)}

    def _frozen_tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def copy_weights(self, source: Engine) -> None:
        assert isinstance(source, SavedEngine)
        copy_tensors(dict(source.module.named_parameters()), dict(self.module.named_parameters()))

    def save_weights(self, folder: Path) -> None:
        save_tensors(self._frozen_tensors(), folder)

    def load_weights(self, folder: Path) -> None:
        load_tensors(self._frozen_tensors(), folder)

    def snapshot(self, path: str | Path) -> Snapshot:
        """The tensors are in the snapshot, all else is written at once; LoRA adapters also as a PEFT folder,
        `<folder>/adapter`.
        """
        assert self.scheduler is not None
        if self._writing_group is None and self.world_size > 1:
            self._writing_group = dist.new_group(backend="gloo")
        folder, offloads = Path(path), self.offloads
        folder.mkdir(parents=True, exist_ok=True)
        with self.loaded(optimizer=True):
            state = self._tensors()
            held: list[Any] = [{"model": state["model"], "optimizer": {"state": state["optimizer"]["state"]}}]
            if offloads:  # else the snapshot would keep all of it on the device
                held.append(copied_to_cpu(held.pop()))
            if self.adapters is not None:
                save_adapter(self.adapters, folder / ADAPTER_FOLDER, writes=self._rank == 0)
        save_progress(folder, self.scheduler, self.weights_version, self.device, self._rank)

        def copy() -> None:
            held.append(copied_to_cpu(held.pop()))

        def write() -> None:
            save_tensors(held.pop(), folder / "dcp", self._writing_group)

        self._snapshot = Snapshot(None if offloads else copy, write)
        return self._snapshot

    def load(self, path: str | Path) -> None:
        assert self.scheduler is not None and self.optimizer is not None
        folder = Path(path)
        check_complete(folder)
        groups = self.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        with self.loaded(optimizer=True):
            state = self._tensors()
            saved: dict[str, Any] = {"model": state["model"]}
            if has_optimizer(folder):
                saved["optimizer"] = {"state": state["optimizer"]["state"]}
            check_fits(dict(_shapes(saved)), folder)
            load_tensors(saved, folder / "dcp")
            options = StateDictOptions(strict=self.adapters is None)  # with LoRA the base is not in it
            set_model_state_dict(self.module, state["model"], options=options)
            if "optimizer" in saved:
                set_optimizer_state_dict(self.module, self.optimizer, state["optimizer"])
        for group, settings_of_group in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(settings_of_group)
        self.weights_version = load_progress(folder, self.scheduler, self.device, self._rank)
        if self.world_size > 1:
            dist.barrier()

    def snapshot_hf(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path, saved: str | Path
    ) -> Snapshot:
        """Weights that adapters are merged into are gathered now, as a checkpoint has the adapters alone."""
        model = self.module.model
        weights: Sequence[str] | dict[str, Tensor] = tensor_names(model)
        if self.adapters is not None:
            buffers = {name: t for name, t in model.named_buffers() if name in model.state_dict()}
            with self.loaded():
                whole = chain(self.weights(), buffers.items())
                weights = {name: tensor.cpu() for name, tensor in whole if self._rank == 0}
        if self._rank > 0:
            return Snapshot()
        return Snapshot(write=partial(write_hf_folder, model, weights, Path(path), tokenizer, base, saved))
