"""Parameters of a model cut over processes, under Hugging Face's names.

    safetensors --read_folder--> each rank its own slices --fill--> parameters
    parameters (or tensors like them) --whole_tensors--> (Hugging Face name, whole tensor), one at a time

A `WeightMap` says for each parameter of Megatron which tensors of Hugging Face are in it and how they are
cut. q, k and v lie in one matrix, with a key head after the query heads that belong to it. gate and up lie in
another matrix. Nothing is computed, so both ways are exact. A `WeightMap` serves every tensor of a
parameter's shape, so also gradients and the optimizer's averages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from torch import Tensor

from verl.workers.megatron.settings import ModelShape, ParallelSizes

LocalTensors = Callable[[str], Tensor]
"""Maps a parameter's name in Megatron to this process's tensor for it, of the parameter's shape."""


@dataclass(frozen=True)
class Piece:
    """A tensor of Hugging Face.

    Attributes:
        name: its name.
        shape: the shape of the whole tensor.
        cut: the dimension that is divided over tensor ranks, or None.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None

    def region(self, rank: int, size: int) -> tuple[slice, ...]:
        """Return the region of the tensor that tensor rank `rank` of `size` has.

        If `size` does not divide the dimension, the last rank has less.
        """
        index = [slice(None)] * len(self.shape)
        if self.cut is not None:
            count = self.local_shape(size)[self.cut]
            index[self.cut] = slice(rank * count, min((rank + 1) * count, self.shape[self.cut]))
        return tuple(index)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of a rank's part, padded where `size` does not divide."""
        return tuple(-(-n // size) if dim == self.cut else n for dim, n in enumerate(self.shape))


Read = Callable[[Piece, tuple[slice, ...]], Tensor]
"""Maps (a tensor of Hugging Face, a region of it) to the contents of that region."""


@dataclass(frozen=True)
class MegatronParameter:
    """One parameter of Megatron.

    The pieces lie along dimension 0 in `groups` groups on each rank: first group of the first piece, first
    group of the second, ..., second group of the first, ...

    Attributes:
        stage: the pipeline rank that has the parameter.
        name: the parameter's name in that stage.
        pieces: the tensors that the parameter is made of.
        groups: the number of groups.
        is_embedding_copy: whether it is the last stage's copy of the embedding, which has no Hugging Face
            name of its own.
    """

    stage: int
    name: str
    pieces: tuple[Piece, ...]
    groups: int = 1
    is_embedding_copy: bool = False

    def fuse(self, parts: list[Tensor]) -> Tensor:
        """Return a rank's tensor, from its parts of the pieces."""
        if len(parts) == 1:
            return parts[0]
        rest = parts[0].shape[1:]
        return torch.cat([x.reshape(self.groups, -1, *rest) for x in parts], dim=1).reshape(-1, *rest)

    def unfuse(self, tensor: Tensor, size: int) -> list[Tensor]:
        """Return a rank's parts of the pieces, from its tensor; `size` is the number of tensor ranks."""
        if len(self.pieces) == 1:
            return [tensor]
        rest = tensor.shape[1:]
        counts = [piece.local_shape(size)[0] // self.groups for piece in self.pieces]
        split = tensor.view(self.groups, -1, *rest).split(counts, dim=1)
        return [block.reshape(-1, *rest) for block in split]


class WeightMap:
    """The parameters of a model, in Hugging Face's order, and where each lies.

    Args:
        shape: the model's sizes.
        sizes: the sizes of the cut.
        has_head: True for a policy, whose output matrix is `lm_head.weight` (unless tied). False for a value
            model, whose scalar head is `value_head.weight` and `value_head.bias`.

    Attributes:
        parameters: the parameters of all processes.
        local_parameters: the parameters of this process, including copies.
    """

    def __init__(self, shape: ModelShape, sizes: ParallelSizes, has_head: bool):
        self.shape = shape
        self.sizes = sizes
        self.has_head = has_head
        self.last_stage = sizes.pipeline - 1
        self.parameters = [*self._embedding(), *self._layers(), *self._head()]
        stage = mpu.get_pipeline_model_parallel_rank()
        self.local_parameters = [parameter for parameter in self.parameters if parameter.stage == stage]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return Hugging Face name -> shape of the whole tensor, in the order of `whole_tensors`."""
        return {
            piece.name: piece.shape
            for parameter in self.parameters
            if not parameter.is_embedding_copy
            for piece in parameter.pieces
        }

    def local_tensor(self, parameter: MegatronParameter, read: Read) -> Tensor:
        """Return this tensor rank's tensor of a parameter, made from whole tensors or files of them.

        Padding is 0.
        """
        rank = mpu.get_tensor_model_parallel_rank()
        size = self.sizes.tensor
        parts = []
        for piece in parameter.pieces:
            region = read(piece, piece.region(rank, size))
            if region.shape != piece.local_shape(size):
                assert piece.cut == 0
                padding = region.new_zeros(piece.local_shape(size)[0] - len(region), *region.shape[1:])
                region = torch.cat([region, padding])
            parts.append(region)
        return parameter.fuse(parts)

    @torch.no_grad()
    def fill(self, tensors: LocalTensors, read: Read) -> None:
        """Copy the result of `read` into this process's tensors; dtypes and devices may differ."""
        for parameter in self.local_parameters:
            tensors(parameter.name).copy_(self.local_tensor(parameter, read))

    @torch.no_grad()
    def whole_tensors(
        self, tensors: LocalTensors, dtype: torch.dtype, device: torch.device
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of everything, in a fixed order; tied embeddings come once.

        All processes of a replica iterate together, and each gets every tensor. One tensor is gathered at a
        time.

        Args:
            tensors: gives this process's tensor for each parameter.
            dtype: the dtype of the tensors that `tensors` gives.
            device: the device of the tensors that `tensors` gives.
        """
        stage = mpu.get_pipeline_model_parallel_rank()
        for parameter in self.parameters:
            if parameter.is_embedding_copy:
                continue
            own_parts: list[Tensor] | None = None
            if parameter.stage == stage:
                tensor = tensors(parameter.name).detach()
                own_parts = parameter.unfuse(tensor, self.sizes.tensor)
            for number, piece in enumerate(parameter.pieces):
                if own_parts is None:
                    region = torch.empty(piece.local_shape(self.sizes.tensor), dtype=dtype, device=device)
                else:
                    region = own_parts[number].contiguous()
                yield piece.name, self._gather(piece, region, parameter.stage)

    def _gather(self, piece: Piece, region: Tensor, stage: int) -> Tensor:
        """Return the whole tensor, from this rank's part of it on pipeline rank `stage`."""
        if self.sizes.pipeline > 1:
            pipeline = mpu.get_pipeline_model_parallel_group()
            dist.broadcast(region, dist.get_global_rank(pipeline, stage), group=pipeline)
        if piece.cut is None or self.sizes.tensor == 1:
            return region
        parts = [torch.empty_like(region) for _ in range(self.sizes.tensor)]
        dist.all_gather(parts, region, group=mpu.get_tensor_model_parallel_group())
        whole = torch.cat(parts, dim=piece.cut)
        return whole.narrow(piece.cut, 0, piece.shape[piece.cut])

    def _embedding(self) -> Iterator[MegatronParameter]:
        shape = self.shape
        words = Piece("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), cut=0)
        yield MegatronParameter(0, "embedding.word_embeddings.weight", (words,))
        if self.has_head and shape.tied and self.last_stage:
            yield MegatronParameter(self.last_stage, "output_layer.weight", (words,), is_embedding_copy=True)

    def _layers(self) -> Iterator[MegatronParameter]:
        for layer in range(self.shape.num_layers):
            stage, number = divmod(layer, self.shape.num_layers // self.sizes.pipeline)
            for name, pieces, groups in self._layer(f"model.layers.{layer}"):
                yield MegatronParameter(stage, f"decoder.layers.{number}.{name}", tuple(pieces), groups)

    def _layer(self, prefix: str) -> Iterator[tuple[str, list[Piece], int]]:
        """Yield (Megatron's name within the layer, pieces, groups) of a layer's parameters."""
        shape = self.shape
        hidden = self.shape.hidden
        widths = {
            "q": shape.num_heads * shape.head_width,
            "k": shape.num_key_heads * shape.head_width,
            "v": shape.num_key_heads * shape.head_width,
        }
        groups = shape.num_key_heads // self.sizes.tensor
        attention = f"{prefix}.self_attn"
        feed_forward = f"{prefix}.mlp"

        def qkv(kind: str, *rest: int) -> list[Piece]:
            return [Piece(f"{attention}.{x}_proj.{kind}", (n, *rest), cut=0) for x, n in widths.items()]

        yield "input_layernorm.weight", [Piece(f"{prefix}.input_layernorm.weight", (hidden,))], 1
        yield "self_attention.linear_qkv.weight", qkv("weight", hidden), groups
        if shape.biased_qkv:
            yield "self_attention.linear_qkv.bias", qkv("bias"), groups
        if shape.normed_qk:
            for x in "qk":
                norm = Piece(f"{attention}.{x}_norm.weight", (shape.head_width,))
                yield f"self_attention.{x}_layernorm.weight", [norm], 1
        out = Piece(f"{attention}.o_proj.weight", (hidden, widths["q"]), cut=1)
        yield "self_attention.linear_proj.weight", [out], 1
        norm = Piece(f"{prefix}.post_attention_layernorm.weight", (hidden,))
        yield "pre_mlp_layernorm.weight", [norm], 1
        gate_up = [
            Piece(f"{feed_forward}.{x}_proj.weight", (shape.feed_forward, hidden), cut=0)
            for x in ("gate", "up")
        ]
        yield "mlp.linear_fc1.weight", gate_up, 1
        down = Piece(f"{feed_forward}.down_proj.weight", (hidden, shape.feed_forward), cut=1)
        yield "mlp.linear_fc2.weight", [down], 1

    def _head(self) -> Iterator[MegatronParameter]:
        shape = self.shape
        last = self.last_stage
        norm = Piece("model.norm.weight", (shape.hidden,))
        yield MegatronParameter(last, "decoder.final_layernorm.weight", (norm,))
        if not self.has_head:
            for kind, size in (("weight", (1, shape.hidden)), ("bias", (1,))):
                yield MegatronParameter(last, f"value_head.{kind}", (Piece(f"value_head.{kind}", size),))
        elif not shape.tied:
            head = Piece("lm_head.weight", (shape.vocabulary, shape.hidden), cut=0)
            yield MegatronParameter(last, "output_layer.weight", (head,))


def read_folder(folder: str | Path) -> Read:
    """Return a function that reads parts of tensors from a Hugging Face folder's safetensors files.

    Raises ValueError if there are no such files. The returned function raises ValueError for a tensor that is
    missing or has another shape.
    """
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    elif (root / "model.safetensors").is_file():
        with safe_open(root / "model.safetensors", "pt") as file:
            files = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise ValueError(
            f"Model folder {root} has no model.safetensors and no model.safetensors.index.json; "
            "strategy=megatron reads safetensors alone."
        )
    opened: dict[str, Any] = {}

    def read(piece: Piece, region: tuple[slice, ...]) -> Tensor:
        # the folder of a backbone alone has names without the prefix "model."
        name = piece.name if piece.name in files else piece.name.removeprefix("model.")
        if name not in files:
            raise ValueError(
                f"Model folder {root} has no tensor {piece.name!r}; it doesn't fit its config.json."
            )
        if files[name] not in opened:
            opened[files[name]] = safe_open(root / files[name], "pt")
        stored = opened[files[name]].get_slice(name)
        if tuple(stored.get_shape()) != piece.shape:
            raise ValueError(
                f"Model folder {root}: found {name!r} of shape {tuple(stored.get_shape())}, but config.json "
                f"with override_config says {piece.shape}."
            )
        tensor: Tensor = stored[region]
        return tensor

    return read
