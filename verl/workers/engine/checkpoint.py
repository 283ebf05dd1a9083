"""A policy or a critic on disk: a distributed checkpoint to resume from, and a Hugging Face folder to use.

A snapshot is the folder `<folder>/dcp` and the files `<folder>/schedule.pt` and `<folder>/rng_rank<r>.pt`.
`dcp` (torch.distributed.checkpoint) has the weights and the optimizer's state, with LoRA only those that are
trained. Each rank writes its shard, and any number of ranks can load it. `dcp` is written at once or in the
background, the other files at once. All ranks call each function together. The trainer writes a checkpoint
aside and renames it.

The settings of the configuration (learning rate, betas, weight decay, schedule) are not taken from a
checkpoint: a run resumes with its present settings. A folder with weights alone
(scripts/convert_checkpoint.py makes one) is a start from step 0.

A Hugging Face folder is made from `dcp`, a few tensors at a time. It has model.safetensors, or several files
with an index. A checkpoint's names are those of the training module (`PolicyModel`), which has the model as
`model`. A checkpoint has tied weights under each of their names, a Hugging Face folder has them under one.
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
from verl.workers.engine.dcp_reader import TensorReader
from verl.workers.engine.model_files import stored_dtype
from verl.workers.engine.optim import resume_schedule

COPIED_FILES = ("prompt_template.txt", "generation_config.json")
ADAPTER_FOLDER = "adapter"
MODEL_PREFIX = "model.model."  # comes before a Hugging Face name in a checkpoint
MAX_FILE_SIZE = "5GB"
BYTES_AT_ONCE = 2**28  # bytes of tensors that are read together
# torch warns that a single process is not distributed
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def save_tensors(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write tensors, of which each rank may have a shard, into a folder; all ranks call it together.

    Args:
        tensors: nested dictionaries of tensors.
        folder: the folder.
        group: a group of all ranks for a background thread, which must not be used otherwise. None means the
            default group.
    """
    dcp.save(tensors, checkpoint_id=folder, process_group=group, no_dist=not dist.is_initialized())


def load_tensors(tensors: dict[str, Any], folder: Path) -> None:
    """Fill tensors from a folder that any number of ranks wrote with `save_tensors`."""
    dcp.load(tensors, storage_reader=TensorReader(folder), no_dist=not dist.is_initialized())


def check_fits(expected: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Check that the checkpoint holds exactly the expected tensors.

    Args:
        expected: name -> shape of each tensor.
        folder: the checkpoint's folder.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape.
    """
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
    """Copy the tensors of `source` into those of `target`; each rank copies its shards.

    Dtypes, devices and the ranks that hold the shards may differ.
    """
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
    """Write the state that an engine depends on besides its tensors.

    It is the schedule, the weights' version and this rank's random state.
    """
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    torch.save(rng, folder / f"rng_rank{rank}.pt")
    if rank == 0:
        schedule = {"scheduler": scheduler.state_dict(), "weights_version": weights_version}
        torch.save(schedule, folder / "schedule.pt")


def load_progress(folder: Path, scheduler: LambdaLR, device: torch.device, rank: int) -> int:
    """Restore the schedule and the random state of `save_progress`, and return the weights' version."""
    schedule = torch.load(folder / "schedule.pt", weights_only=True)
    resume_schedule(scheduler, schedule["scheduler"])
    rng_file = folder / f"rng_rank{rank}.pt"
    if rng_file.is_file():  # a rank that the saving run did not have keeps its own random state
        rng = torch.load(rng_file, weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if device.type == "cuda" and "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], device)
    return int(schedule["weights_version"])


def has_optimizer(folder: Path) -> bool:
    """Return whether a checkpoint holds an optimizer's state; otherwise it has weights alone to start with.

    Raises ValueError if the folder is not a checkpoint.
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
    checkpoint_folder: str | Path,
) -> None:
    """Write a Hugging Face folder, with weights of the dtype that they have in `base`.

    Args:
        model: the model, for its class and configuration.
        weights: the names of the tensors to take from the policy's checkpoint in `checkpoint_folder` (see
            `write_hf_weights`), or the whole tensors.
        folder: the folder to write.
        tokenizer: the model's tokenizer, or None.
        base: the folder that the model came from.
        checkpoint_folder: the folder of the policy's checkpoint.
    """
    dtype = stored_dtype(base)
    if isinstance(weights, dict):
        _save_pretrained(model, folder, {name: _cast(tensor, dtype) for name, tensor in weights.items()})
    else:
        write_hf_weights(model, weights, Path(checkpoint_folder) / "dcp", folder, dtype)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for name in COPIED_FILES:
        if (Path(base).expanduser() / name).is_file():
            shutil.copyfile(Path(base).expanduser() / name, folder / name)


def saved_tensors(dcp_folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint whose names begin with `prefix`.

    The result maps a name without the prefix to a tensor on the device "meta".
    """
    entries = TensorReader(dcp_folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }


def read_tensors(
    dcp_folder: Path, tensors_on_meta: Mapping[str, Tensor], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor on CPU) of a checkpoint, with a few in memory at a time.

    The order is that of `tensors_on_meta`. One process reads by itself, whatever other processes there are.
    """
    batch: list[str] = []
    for number, (name, tensor) in enumerate(tensors_on_meta.items(), start=1):
        batch.append(name)
        size = sum(tensors_on_meta[key].nbytes for key in batch)
        if size + tensor.nbytes >= BYTES_AT_ONCE or number == len(tensors_on_meta):
            loaded = {prefix + key: torch.empty_like(tensors_on_meta[key], device="cpu") for key in batch}
            dcp.load(loaded, storage_reader=TensorReader(dcp_folder), no_dist=True)
            yield from ((key, loaded.pop(prefix + key)) for key in batch)
            batch = []


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a floating tensor in another dtype; None leaves it as it is."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _save_pretrained(model: PreTrainedModel, folder: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights as transformers does, and their dtype into config.json."""
    model.save_pretrained(folder, state_dict=weights)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["dtype"] = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_hf_weights(
    model: PreTrainedModel,
    names: Sequence[str],
    dcp_folder: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the weights of a policy's checkpoint, and its configuration, into a Hugging Face folder.

    Args:
        model: a model with the same configuration. Its weights don't matter, and may be on "meta". It may
            compute meanwhile.
        names: `tensor_names` of the model.
        dcp_folder: the folder `dcp` of the checkpoint.
        folder: the folder to write.
        dtype: the floating dtype of the weights; None for that of the checkpoint.

    Raises:
        ValueError: the checkpoint lacks some of the model's tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = saved_tensors(dcp_folder, MODEL_PREFIX)
    tensors_on_meta = {name: saved[name] for name in names if name in saved}
    if missing := [name for name in names if name not in saved]:
        raise ValueError(
            f"{dcp_folder} has no {missing[0]} (and {len(missing) - 1} more tensors of the model); expected "
            "a policy's checkpoint with whole weights, of the model in question."
        )
    reverted = revert_weight_conversion(model, dict(tensors_on_meta))
    # The model's files may have other tensors than the model in memory.
    if reverted.keys() != tensors_on_meta.keys():
        tensors = read_tensors(dcp_folder, tensors_on_meta, MODEL_PREFIX)
        _save_pretrained(model, folder, {name: _cast(tensor, dtype) for name, tensor in tensors})
        return
    cast_on_meta = {name: _cast(tensor, dtype) for name, tensor in tensors_on_meta.items()}
    model.config.dtype = str(next(iter(cast_on_meta.values())).dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    split = split_torch_state_dict_into_shards(cast_on_meta, max_shard_size=MAX_FILE_SIZE)
    for file, in_file in split.filename_to_tensors.items():
        chosen = {name: tensors_on_meta[name] for name in in_file}
        stream = ((name, _cast(x, dtype)) for name, x in read_tensors(dcp_folder, chosen, MODEL_PREFIX))
        write_safetensors(folder / file, {name: cast_on_meta[name] for name in in_file}, stream)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def tensor_names(model: PreTrainedModel) -> Sequence[str]:
    """Return the names of a model's parameters (tied ones once) and of the buffers that are saved.

    Do not call it while the model computes. For a module that FSDP2 has sharded, `state_dict` takes the
    weights that a pass has gathered.
    """
    parameters = [name for name, _ in model.named_parameters()]
    saved_names = model.state_dict(keep_vars=True).keys()
    return [*parameters, *(name for name, _ in model.named_buffers() if name in saved_names)]
