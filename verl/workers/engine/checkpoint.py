"""A TrainEngine on disk: a distributed checkpoint to go on from, and a Hugging Face folder to use.

`save_checkpoint` writes `<folder>/dcp` (torch.distributed.checkpoint: weights and optimizer, each rank its
shard; loads on any number of ranks), `<folder>/schedule.pt` and `<folder>/rng_rank<r>.pt`. All ranks call
each function together. Writing aside and renaming is the trainer's business.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedTokenizerBase

from verl.workers.engine.engine import TrainEngine

COPIED_FILES = ("prompt_template.txt",)


def _rank(engine: TrainEngine[Any]) -> int:
    return dist.get_rank() if engine.world_size > 1 else 0


def _barrier(engine: TrainEngine[Any]) -> None:
    if engine.world_size > 1:
        dist.barrier()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remark that a single process is not distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def save_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Writes tensors, of which each rank may have a shard, into a folder; all ranks together."""
    with _quiet():
        dcp.save(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def load_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fills tensors from a folder of `save_tensors`, written by any number of ranks."""
    with _quiet():
        dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def _tensors(engine: TrainEngine[Any]) -> dict[str, Any]:
    assert engine.optimizer is not None
    return {
        "model": get_model_state_dict(engine.module),
        "optimizer": get_optimizer_state_dict(engine.module, engine.optimizer),
    }


def save_checkpoint(engine: TrainEngine[Any], path: str | Path) -> None:
    """Writes everything that the next update depends on into a folder, which is made."""
    assert engine.scheduler is not None
    folder, rank = Path(path), _rank(engine)
    folder.mkdir(parents=True, exist_ok=True)
    with engine.loaded(optimizer=True), _quiet():
        dcp.save(_tensors(engine), checkpoint_id=folder / "dcp", no_dist=engine.world_size == 1)
    rng = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(engine.device)
    torch.save(rng, folder / f"rng_rank{rank}.pt")
    if rank == 0:
        schedule = {"scheduler": engine.scheduler.state_dict(), "weights_version": engine.weights_version}
        torch.save(schedule, folder / "schedule.pt")
    _barrier(engine)


def load_checkpoint(engine: TrainEngine[Any], path: str | Path) -> None:
    """Puts the engine where `save_checkpoint` left another one, on this or any other number of ranks."""
    assert engine.scheduler is not None and engine.optimizer is not None
    folder = Path(path)
    missing = [name for name in ("dcp/.metadata", "schedule.pt") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Checkpoint {folder} has no {' and no '.join(missing)}; expected a folder that a run saved."
        )
    with engine.loaded(optimizer=True):
        state = _tensors(engine)
        with _quiet():
            dcp.load(state, checkpoint_id=folder / "dcp", no_dist=engine.world_size == 1)
        set_model_state_dict(engine.module, state["model"])
        set_optimizer_state_dict(engine.module, engine.optimizer, state["optimizer"])
    schedule = torch.load(folder / "schedule.pt", weights_only=True)
    engine.scheduler.load_state_dict(schedule["scheduler"])
    engine.weights_version = schedule["weights_version"]
    rng_file = folder / f"rng_rank{_rank(engine)}.pt"
    if rng_file.is_file():  # a rank that the saving run did not have keeps its own
        rng = torch.load(rng_file, weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if engine.device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], engine.device)
    _barrier(engine)


def save_hf(
    engine: TrainEngine[Any], path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path
) -> None:
    """Writes a Hugging Face folder: config, safetensors under plain names and in the weights' dtype,
    tokenizer.

    `base` is the folder that the model came from; files of COPIED_FILES found there come along.
    """
    folder = Path(path)
    model = engine.module.model
    with engine.loaded():
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(engine.module, options=options) if engine.world_size > 1 else None
        if _rank(engine) == 0:
            if state is not None:
                state = {
                    name.removeprefix("model."): t for name, t in state.items() if name.startswith("model.")
                }
            model.save_pretrained(folder, state_dict=state)
    if _rank(engine) == 0:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for name in COPIED_FILES:
            if (Path(base).expanduser() / name).is_file():
                shutil.copyfile(Path(base).expanduser() / name, folder / name)
    _barrier(engine)
