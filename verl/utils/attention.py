"""Attention over packed sequences, as an attention implementation that any Hugging Face decoder can use.

A model built with `attn_implementation="packed"` gets one row of T tokens (several sequences end to end) and
the keyword `packing`, a `Packing`, which travels through the model's forward to every layer. A sequence may
have its beginning in common with others (`Packing.key_index`): its keys are gathered then. On CPU the
sequences are attended one by one (neighbours of equal length together), which beats any mask; on CUDA with
16-bit floats torch's variable-length flash kernel takes the pack at once, where torch and the GPU have it. On
the first way long sequences go to `causal_attention.py` and others to SDPA, with masks for sliding windows,
and for sequences that share more than half of their keys. A layer of which only some tokens' outputs are
wanted (`Packing.wanted`) attends from those alone. Where several processes have a share of the pack each
(`Packing.share`), the model's row is this process's tokens, and attention exchanges them for heads.
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

from verl.utils.causal_attention import causal_attention, is_worth_it
from verl.utils.ulysses import TokenShare

PACKED_ATTENTION = "packed"


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a pack begin and end, and what they attend to.

    seq_lens: length of each sequence in the pack, in order, on the host. cu_seqlens [B + 1] int32: their
    running sum from 0, on the model's device. A sequence attends to itself, causally, and to what it has in
    common with sequences before it: key_lens are the lengths with it, cu_key_lens their running sum,
    key_index [sum of key_lens] the tokens' places in the pack, or None if nothing is shared. wanted: places
    in the pack, ascending, of the tokens whose output is asked for (None: all); others' may be 0. share:
    which of the pack's tokens each process of a group has (None: this one has them all).
    """

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    key_lens: tuple[int, ...]
    cu_key_lens: Tensor
    key_index: Tensor | None
    wanted: Tensor | None = None
    share: TokenShare | None = None

    @classmethod
    def of(
        cls,
        seq_lens: Sequence[int],
        device: torch.device | str,
        key_lens: Sequence[int] | None = None,
        key_index: Tensor | None = None,
    ) -> Packing:
        """Without key_lens and key_index each sequence attends to itself alone."""
        cu_seqlens = _running_sum(seq_lens, device)
        if key_lens is None or key_index is None:
            return cls(tuple(seq_lens), cu_seqlens, tuple(seq_lens), cu_seqlens, None)
        cu_key_lens = _running_sum(key_lens, device)
        return cls(tuple(seq_lens), cu_seqlens, tuple(key_lens), cu_key_lens, key_index.to(device))

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(count, length, length with what is shared) of each run of neighbours with equal lengths."""
        lengths = zip(self.seq_lens, self.key_lens, strict=True)
        return [(len(list(group)), *pair) for pair, group in groupby(lengths)]

    def own(self, places: Tensor) -> Tensor:
        """Places in the pack as places among the tokens that this process has, of those that it has."""
        return places if self.share is None else self.share.own(places)


def _running_sum(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def _mask(places: Tensor, num_keys: int, window: int | None) -> Tensor:
    """[N, num_keys] bool: what the queries at `places` [N] may attend to."""
    distance = places[:, None] - torch.arange(num_keys, device=places.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Attention of each sequence. q [1, H, T, D], k and v [1, G, K, D] (K: keys of all sequences) -> [1, T,
    H, D].
    """
    runs = packing.runs
    query_sizes = [count * length for count, length, _ in runs]
    key_sizes = [count * length for count, _, length in runs]
    outputs = []
    # split, not slices: its backward is one concatenation, where each slice's would be a full tensor of zeros
    split = (query[0].split(query_sizes, 1), key[0].split(key_sizes, 1), value[0].split(key_sizes, 1))
    for (count, num_queries, num_keys), q, k, v in zip(runs, *split, strict=True):
        if count == 1 and is_worth_it(q, num_keys):
            places = torch.arange(num_keys - num_queries, num_keys)
            out = causal_attention(q, k, v, places, scale, window).transpose(0, 1)
        else:
            q, k, v = (x.view(x.shape[0], count, -1, x.shape[-1]).transpose(0, 1) for x in (q, k, v))
            out = _by_sdpa(q, k, v, scale, window).transpose(1, 2).flatten(0, 1)
        outputs.append(out)
    return torch.cat(outputs).unsqueeze(0)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of sequences of equal lengths: q [B, H, N, D], k and v [B, G, K, D] -> [B, H, N, D]; the
    queries are the last ones.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    missing, mask = num_keys - num_queries, None
    if window is not None and num_keys > window or 2 * num_queries < num_keys:
        mask = _mask(torch.arange(missing, num_keys, device=q.device), num_keys, window)
    elif missing:  # no mask needed for queries of nothing in front: what they cost is less than half
        q = F.pad(q, (0, 0, missing, 0))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out if mask is not None else out[:, :, missing:]


def _wanted_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """As `_one_by_one`, of the tokens at `packing.wanted` alone; the others' output is 0."""
    wanted = packing.wanted
    assert wanted is not None
    starts = packing.cu_seqlens.to(wanted.dtype)
    counts = torch.searchsorted(wanted, starts).diff().tolist()
    # of each wanted token, its place among the keys of its sequence
    in_sequence = torch.searchsorted(starts, wanted, right=True) - 1
    shift = starts[1:] - packing.cu_key_lens[1:].to(wanted.dtype)  # both end at a sequence's last token
    key_starts = packing.cu_key_lens[:-1].to(wanted.dtype)
    places = (wanted - shift[in_sequence] - key_starts[in_sequence]).split(counts)
    queries = query[0].index_select(1, wanted).split(counts, 1)
    keys, values = (x[0].split(list(packing.key_lens), 1) for x in (key, value))
    outputs = []
    for q, k, v, at in zip(queries, keys, values, places, strict=True):
        if not len(at):
            continue
        if is_worth_it(q, k.shape[1]):
            out = causal_attention(q, k, v, at, scale, window)
        else:
            mask, grouped = _mask(at, k.shape[1], window), len(q) != len(k)
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=grouped
            )[0]
        outputs.append(out.transpose(0, 1))
    full = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    return full.index_copy(0, wanted, torch.cat(outputs)).unsqueeze(0)


def _flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """The same by torch's variable-length flash attention (CUDA, 16-bit floats).

    Where a sequence has fewer queries than keys, its queries are the last ones: causality is aligned at the
    end, as flash attention does since 2.1.
    """
    kernel = _varlen_kernel()
    assert kernel is not None
    out = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        packing.cu_seqlens,
        packing.cu_key_lens,
        max(packing.seq_lens),
        max(packing.key_lens),
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
    None). With `packing.share` T are the tokens of this process, before and after.

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
    if packing.share is not None:
        own = (x[0].transpose(0, 1) for x in (query, key, value))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in packing.share.to_heads(*own))
    if packing.key_index is not None:
        key, value = (x.index_select(2, packing.key_index) for x in (key, value))
    attend = _one_by_one if packing.wanted is None else _wanted_one_by_one
    if _takes_flash(query):
        attend = _flash_varlen
    out = attend(query, key, value, packing, scale, sliding_window)
    if packing.share is not None:
        out = packing.share.to_tokens(out[0]).unsqueeze(0)
    return out, None


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
