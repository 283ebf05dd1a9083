"""The weights of a checkpoint as files of a Hugging Face folder, a few tensors at a time.

    <step>/actor/dcp --tensors of the model, in its order--> model.safetensors, or several files with an index

A checkpoint's names are those of the training module (`PolicyModel`), which has the model as `model`; tied
weights are there under each of their names, in a Hugging Face folder under one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl.utils.safetensors_file import write_safetensors

MODEL_PREFIX = "model.model."  # of a Hugging Face name in a checkpoint
MAX_FILE_SIZE = "5GB"
BYTES_AT_ONCE = 2**28  # read together
# torch's remark that a single process is not distributed
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


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

    Args:
        model: one with the same configuration; its weights don't matter, and may be on "meta". It may be
            computing meanwhile.
        names: `tensor_names` of it.

    Raises:
        ValueError: the checkpoint has not all of the model's tensors.
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
