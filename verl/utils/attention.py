"""Attention over packed sequences, as an attention implementation that any Hugging Face decoder can use.

A model built with `attn_implementation="packed"` gets one row of T tokens (several sequences end to end) and
the keyword `packing`, a `Packing`, which travels through the model's forward to every layer. On CPU the
sequences are attended one by one (neighbours of equal length together), which beats any mask; on CUDA with
16-bit floats torch's variable-length flash kernel takes the pack at once. No mask is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    from torch.nn.attention.varlen import varlen_attn  # not in every build of torch

    longest = max(packing.seq_lens)
    out = varlen_attn(
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
    on_flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    attend = _flash_varlen if on_flash else _one_by_one
    return attend(query, key, value, packing, scale, sliding_window), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
