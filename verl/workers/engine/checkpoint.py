"""A policy or a critic on disk: a distributed checkpoint to go on from, and a Hugging Face folder to use.

A snapshot is `<folder>/dcp` (torch.distributed.checkpoint: weights and optimizer, each rank its
shard; loads on any number of ranks; with LoRA only what is trained), at once or in the background, and
`<folder>/schedule.pt` and `<folder>/rng_rank<r>.pt` at once. All ranks call each function together. Writing
aside and renaming is the trainer's business. What the configuration says (learning rate, betas, weight decay,
schedule) is not taken from a checkpoint: a run goes on with its present settings. A folder with weights alone
(scripts/convert_checkpoint.py makes one) is a start from step 0.

A Hugging Face folder is made from `dcp`, a few tensors at a time: model.safetensors, or several files with an
index. A checkpoint's names are those of the training module (`PolicyModel`), which has the model as `model`;
tied weights are there under each of their names, in a Hugging Face folder under one.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from verl.utils.safetensors_file import write_safetensors
from verl.workers.engine.optim import resume_schedule

COPIED_FILES = ("prompt_template.txt", "generation_config.json")
ADAPTER_FOLDER = "adapter"
MODEL_PREFIX = "model.model."  # of a Hugging Face name in a checkpoint
MAX_FILE_SIZE = "5GB"
BYTES_AT_ONCE = 2**28  # read together
# torch's remark that a single process is not distributed
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Writes tensors, of which each rank may have a shard, into a folder; all ranks together. group: one of
    all ranks of its own, for a thread in the background.
    """
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())


def load_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fills tensors from a folder of `save_tensors`, written by any number of ranks."""
    dcp.load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())


def check_fits(expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raises ValueError unless the checkpoint holds exactly these tensors, in these shapes."""
    saved = {name: tuple(tensor.shape) for name, tensor in saved_tensors(folder / "dcp").items()}
    names = saved.keys() | expected.keys()
    differing = sorted(name for name in names if saved.get(name) != expected.get(name))
    if differing:
        first = differing[0]
        raise ValueError(
            f"Checkpoint {folder} doesn't fit this run in {len(differing)} tensors, the first of them "
            f"{first}: found {saved.get(first, 'none')}, expected {expected.get(first, 'none')}. Go on with "
            "the model.path, lora_rank, target_modules and optim.name that it was made with."
        )


@torch.no_grad()
def copy_tensors(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Each rank copies its shards; dtypes, devices and which ranks shard may differ."""
    assert source.keys() == target.keys()
    for name, tensor in target.items():
        new = source[name]
        if isinstance(new, DTensor) and isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            if new.device_mesh.shape != mesh.shape:
                new = distribute_tensor(new.full_tensor(), mesh, tensor.placements, src_data_rank=None)
        _local(tensor).copy_(_local(new))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_progress(
    folder: Path, scheduler: LambdaLR, weights_version: int, device: torch.device, rank: int
) -> None:
    """Writes what an engine depends on besides its tensors: schedule, version, this rank's random state."""
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


def has_optimizer(folder: Path) -> bool:
    """Whether a checkpoint holds an optimizer's state, or weights alone to start with. Raises ValueError for
    a folder that is no checkpoint.
    """
    missing = [name for name in ("dcp/.metadata", "schedule.pt") if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"Checkpoint {folder} has no {' and no '.join(missing)}; expected a folder that a run saved."
        )
    return any(name.startswith("optimizer.state.") for name in saved_tensors(folder / "dcp"))


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


def saved_tensors(dcp_folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Name (without `prefix`, which those of others lack) -> a tensor on "meta", of each in a checkpoint."""
    entries = dcp.FileSystemReader(dcp_folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }


def read_tensors(
    dcp_folder: Path, like: Mapping[str, Tensor], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on CPU) of a checkpoint in the order of `like`, a few of them in memory at a time. In one
    process alone, whatever others there are.
    """
    batch: list[str] = []
    for number, (name, tensor) in enumerate(like.items(), start=1):
        batch.append(name)
        size = sum(like[other].nbytes for other in batch)
        if size + tensor.nbytes >= BYTES_AT_ONCE or number == len(like):
            found = {prefix + other: torch.empty_like(like[other], device="cpu") for other in batch}
            dcp.load(found, checkpoint_id=dcp_folder, no_dist=True)
            yield from ((other, found.pop(prefix + other)) for other in batch)
            batch = []


def write_hf_weights(model: PreTrainedModel, names: Sequence[str], dcp_folder: Path, folder: Path) -> None:
    """Writes the weights of a policy's checkpoint, and its configuration, into a Hugging Face folder.

    model: one with the same configuration; its weights don't matter, and may be on "meta". It may be
    computing meanwhile. names: `tensor_names` of it. ValueError: the checkpoint has not all of the model's
    tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = saved_tensors(dcp_folder, MODEL_PREFIX)
    like = {name: saved[name] for name in names if name in saved}
    if missing := [name for name in names if name not in saved]:
        raise ValueError(
            f"{dcp_folder} has no {missing[0]} (and {len(missing) - 1} more tensors of the model); expected "
            "a policy's checkpoint with whole weights, of the model in question."
        )
    reverted = revert_weight_conversion(model, dict(like))
    if reverted.keys() != like.keys():  # a model that is kept in another form than in its files
        model.save_pretrained(folder, state_dict=dict(read_tensors(dcp_folder, like, MODEL_PREFIX)))
        return
    model.config.dtype = str(next(iter(like.values())).dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    split = split_torch_state_dict_into_shards(like, max_shard_size=MAX_FILE_SIZE)
    for file, in_file in split.filename_to_tensors.items():
        chosen = {name: like[name] for name in in_file}
        write_safetensors(folder / file, chosen, read_tensors(dcp_folder, chosen, MODEL_PREFIX))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def tensor_names(model: PreTrainedModel) -> Sequence[str]:
    """Parameters, tied ones once, and buffers that are saved. Not to be asked while the model computes:
    `state_dict` takes from a module that FSDP2 has sharded the weights that a pass has gathered.
    """
    parameters = [name for name, _ in model.named_parameters()]
    kept = model.state_dict(keep_vars=True).keys()
    return [*parameters, *(name for name, _ in model.named_buffers() if name in kept)]
