"""Attention over packed sequences, as an attention implementation that any Hugging Face decoder can use.

A model built with `attn_implementation="packed"` gets one row of T tokens (several sequences end to end) and
the keyword `packing`, a `Packing`, which travels through the model's forward to every layer. On CPU the
sequences are attended one by one (neighbours of equal length together), which beats any mask; on CUDA with
16-bit floats torch's variable-length flash kernel takes the pack at once, where torch and the GPU have it. No
mask is built, but for sliding windows on the first way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "packed"


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a pack begin and end.

    seq_lens: length of each sequence, in order, on the host. cu_seqlens [B + 1] int32: their running sum
    from 0, on the model's device.
    """

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor

    @classmethod
    def of(cls, seq_lens: Sequence[int], device: torch.device | str) -> Packing:
        sums = torch.tensor([0, *seq_lens]).cumsum(0)
        return cls(tuple(seq_lens), sums.to(device=device, dtype=torch.int32))

    @property
    def runs(self) -> list[tuple[int, int]]:
        """(count, length) of each run of neighbouring sequences of equal length."""
        return [(len(list(group)), length) for length, group in groupby(self.seq_lens)]


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Causal attention of each sequence with itself by SDPA. q [1, H, T, D], k and v [1, G, T, D] -> [1,
    T, H, D].
    """
    runs = packing.runs
    sizes = [count * length for count, length in runs]
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    # split, not slices: its backward is one concatenation, where each slice's would be a full tensor of zeros
    for (count, length), *parts in zip(
        runs, *(x[0].split(sizes, dim=1) for x in (query, key, value)), strict=True
    ):
        q, k, v = (x.view(x.shape[0], count, length, x.shape[-1]).transpose(0, 1) for x in parts)
        mask = None
        if window is not None and length > window:
            at = torch.arange(length, device=q.device)
            distance = at[:, None] - at[None, :]
            mask = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).reshape(count * length, query.shape[1], v.shape[-1]))
    return torch.cat(outputs).unsqueeze(0)


def _flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """The same by torch's variable-length flash attention (CUDA, 16-bit floats)."""
    kernel = _varlen_kernel()
    assert kernel is not None
    longest = max(packing.seq_lens)
    out = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packing.cu_seqlens,
        packing.cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


@cache
def _varlen_kernel() -> Callable[..., Any] | None:
    """torch's `varlen_attn`; None where torch has none, or one without scale, windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    has = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= has.keys() else None


@cache
def _is_recent_gpu(device: torch.device) -> bool:
    """Whether flash attention's kernels run there: compute capability 8.0 (Ampere) or more."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _takes_flash(query: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and _varlen_kernel() is not None
        and _is_recent_gpu(query.device)
    )


def _in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """As autocast would cast the inputs of scaled_dot_product_attention, which the flash kernel is not.

    Under autocast the rotary embedding leaves queries and keys in float32 and values in the 16-bit type.
    """
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def packed_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packing: Packing | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function in transformers' sense: q [1, H, T, D], k and v [1, G, T, D] -> ([1, T, H, D],
    None).

    `dropout` is not applied: the probability of a sampled token must not depend on chance. A window of w
    tokens (itself among them) is kept where a layer has one.
    """
    if packing is None:
        raise ValueError(
            "A model with packed attention was called without packing=Packing.of(lengths, device)."
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"Packed attention has no {name!r}, which {type(module).__name__} asks for; "
                "use a model without it (Qwen2, Qwen3, Llama and Mistral are tested)."
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = _in_autocast_type(query, key, value)
    attend = _flash_varlen if _takes_flash(query) else _one_by_one
    return attend(query, key, value, packing, scale, sliding_window), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
