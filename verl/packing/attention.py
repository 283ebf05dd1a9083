"""Attention over packed sequences, as an attention implementation that any Hugging Face decoder can use.

A model built with `attn_implementation="packed"` gets one row of T tokens (several sequences end to end) and
the keyword `packing`, a `Packing`, which travels through the model's forward to every layer. A sequence may
have its beginning in common with others (`Packing.key_index`). Its keys are gathered then.

There are two ways to attend:

- On CPU the sequences are attended one by one (neighbours of equal length together), which beats any mask.
  Long sequences go to `causal_attention` and others to SDPA, with masks for sliding windows, and for
  sequences that share more than half of their keys.
- On CUDA with 16-bit floats, torch's variable-length flash kernel takes the pack at once, where torch and the
  GPU support it. Elsewhere the first way is used.

A layer of which only some tokens' outputs are wanted (`Packing.output_positions`) attends from those alone.
If several processes have a share of the pack each (`Packing.share`), the model's row is this process's
tokens, and attention exchanges them for heads.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import attention
from transformers import AttentionInterface

from verl.packing.ulysses import TokenShare
from verl.utils.device import to_device

logger = logging.getLogger(__name__)
PACKED_ATTENTION = "packed"
BLOCK = 64  # queries of a block of `causal_attention`
BLOCK_SCORES = 2**20  # heads * queries * keys of a block at most, if it has several groups: 2 MB in bfloat16
FEWEST_SCORES = 2**17  # heads * queries * keys; with fewer, SDPA's single call is faster
MOST_SCORES = 2**25  # with more, probabilities are not kept: they would take more than 64 MB a layer


@dataclass(eq=False)  # not frozen: torch 2.11 compiles a layer again for each content of a frozen one
class Packing:
    """The layout of a pack: where its sequences begin and end, and what they attend to.

    A sequence attends to itself, causally, and to what it has in common with sequences before it.

    Attributes:
        seq_lens: length of each sequence in the pack, in order, on the host.
        cu_seqlens: [B + 1] int32, the running sum of `seq_lens` from 0, on the model's device.
        key_lens: length of each sequence with what it shares.
        cu_key_lens: [B + 1] int32, the running sum of `key_lens`.
        key_index: [sum of key_lens], the positions of the keys in the pack, or None if nothing is shared.
        output_positions: positions in the pack, ascending, of the tokens whose output is wanted (None: all).
            The output of other tokens may be 0.
        share: which of the pack's tokens each process of a group has (None: this one has them all).
    """

    seq_lens: tuple[int, ...]
    cu_seqlens: Tensor
    key_lens: tuple[int, ...]
    cu_key_lens: Tensor
    key_index: Tensor | None
    output_positions: Tensor | None = None
    share: TokenShare | None = None

    @classmethod
    def of(
        cls,
        seq_lens: Sequence[int],
        device: torch.device | str,
        key_lens: Sequence[int] | None = None,
        key_index: Tensor | None = None,
    ) -> Packing:
        """Build the layout; without key_lens and key_index each sequence attends to itself alone."""
        cu_seqlens = _running_sum(seq_lens, device)
        if key_lens is None or key_index is None:
            return cls(tuple(seq_lens), cu_seqlens, tuple(seq_lens), cu_seqlens, None)
        cu_key_lens = _running_sum(key_lens, device)
        return cls(tuple(seq_lens), cu_seqlens, tuple(key_lens), cu_key_lens, to_device(key_index, device))

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Return (count, length, length with what is shared) of each run of neighbours with equal lengths."""
        lengths = zip(self.seq_lens, self.key_lens, strict=True)
        return [(len(list(group)), *pair) for pair, group in groupby(lengths)]

    def local_positions(self, positions: Tensor) -> Tensor:
        """Return the positions in the pack that this process has, counted among its own tokens."""
        return positions if self.share is None else self.share.local_positions(positions)


def _running_sum(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    return to_device(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)


def _mask(positions: Tensor, num_keys: int, window: int | None) -> Tensor:
    """Return the keys that the queries at `positions` [N] may attend to, [N, num_keys] bool."""
    distance = positions[:, None] - torch.arange(num_keys, device=positions.device)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Compute the attention of each sequence.

    q [1, H, T, D], k and v [1, G, K, D] (K: keys of all sequences) -> [1, T, H, D].
    """
    runs = packing.runs
    if query.dtype == torch.bfloat16 and query.device.type == "cpu":  # SDPA is slow here
        runs = [(1, *lengths) for lengths in zip(packing.seq_lens, packing.key_lens, strict=True)]
    query_sizes = [count * length for count, length, _ in runs]
    key_sizes = [count * length for count, _, length in runs]
    outputs = []
    # The backward of a split is one concatenation. That of each slice would be a full tensor of zeros.
    split = (query[0].split(query_sizes, 1), key[0].split(key_sizes, 1), value[0].split(key_sizes, 1))
    for (count, num_queries, num_keys), q, k, v in zip(runs, *split, strict=True):
        if count == 1 and is_worth_it(q, num_keys):
            positions = torch.arange(num_keys - num_queries, num_keys)
            out = causal_attention(q, k, v, positions, scale, window).transpose(0, 1)
        else:
            q, k, v = (x.view(x.shape[0], count, -1, x.shape[-1]).transpose(0, 1) for x in (q, k, v))
            out = _by_sdpa(q, k, v, scale, window).transpose(1, 2).flatten(0, 1)
        outputs.append(out)
    return torch.cat(outputs).unsqueeze(0)


def _by_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Compute the attention of sequences of equal lengths; the queries are the last ones.

    q [B, H, N, D], k and v [B, G, K, D] -> [B, H, N, D].
    """
    num_queries = q.shape[2]
    num_keys = k.shape[2]
    num_earlier = num_keys - num_queries
    mask = None
    if window is not None and num_keys > window or 2 * num_queries < num_keys:
        mask = _mask(torch.arange(num_earlier, num_keys, device=q.device), num_keys, window)
    elif num_earlier:  # empty queries in front make a mask unnecessary and cost less than half
        q = F.pad(q, (0, 0, num_earlier, 0))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out if mask is not None else out[:, :, num_earlier:]


def _wanted_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Compute the same as `_one_by_one` for the tokens at `packing.output_positions` alone.

    The other tokens' output is 0.
    """
    output_positions = packing.output_positions
    assert output_positions is not None
    starts = packing.cu_seqlens.to(output_positions.dtype)
    counts = torch.searchsorted(output_positions, starts).diff().tolist()
    in_sequence = torch.searchsorted(starts, output_positions, right=True) - 1
    # Both running sums end at a sequence's last token.
    shift = starts[1:] - packing.cu_key_lens[1:].to(output_positions.dtype)
    key_starts = packing.cu_key_lens[:-1].to(output_positions.dtype)
    # the position of each wanted token among the keys of its sequence
    positions = (output_positions - shift[in_sequence] - key_starts[in_sequence]).split(counts)
    queries = query[0].index_select(1, output_positions).split(counts, 1)
    keys, values = (x[0].split(list(packing.key_lens), 1) for x in (key, value))
    outputs = []
    for q, k, v, q_positions in zip(queries, keys, values, positions, strict=True):
        if not len(q_positions):
            continue
        if is_worth_it(q, k.shape[1]):
            out = causal_attention(q, k, v, q_positions, scale, window)
        else:
            mask = _mask(q_positions, k.shape[1], window)
            grouped = len(q) != len(k)
            out = F.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=grouped
            )[0]
        outputs.append(out.transpose(0, 1))
    full = query.new_zeros(query.shape[2], query.shape[1], value.shape[-1])
    return full.index_copy(0, output_positions, torch.cat(outputs)).unsqueeze(0)


def _flash_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float, window: int | None
) -> Tensor:
    """Compute the same with torch's variable-length flash attention (CUDA, 16-bit floats)."""
    lengths = max(packing.seq_lens), max(packing.key_lens)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(q, k, v, packing.cu_seqlens, packing.cu_key_lens, lengths, scale, window)[None]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_key_lens: Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute causal attention of packed sequences, where `takes_flash` is true.

    If a sequence has fewer queries than keys, its queries are the last ones, as in flash attention since 2.1.

    Args:
        query: [T, H, D].
        key: [K, G, D].
        value: [K, G, D].
        cu_seqlens: int32 [B + 1], running sum of the sequences' queries.
        cu_key_lens: int32 [B + 1], running sum of the sequences' keys.
        longest: the greatest number of queries and the greatest number of keys of a sequence.
        scale: multiplies the scores.
        window: number of keys that a query sees, itself included; None: all.

    Returns:
        [T, H, D].
    """
    kernel, parameters = _varlen_kernel()
    grouped = {}
    if query.shape[1] != key.shape[1] and "enable_gqa" in parameters:
        grouped["enable_gqa"] = True
    elif query.shape[1] != key.shape[1]:  # torch before 2.12
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    window_size = -1 if window is None else window - 1, 0
    out = kernel(
        query, key, value, cu_seqlens, cu_key_lens, *longest, scale=scale, window_size=window_size, **grouped
    )
    assert isinstance(out, Tensor)
    return out


@cache
def _varlen_kernel() -> tuple[Any, set[str]]:
    """Return torch's `varlen_attn` or None, and its parameters.

    It is None where torch has no such function, or one without scale and windows.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, set()
    use_flash_3()
    parameters = set(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, parameters) if {"scale", "window_size"} <= parameters else (None, set())


def use_flash_3() -> bool:
    """Make the kernel use FlashAttention-3 (Shah et al., 2024, arXiv:2407.08608) where that is possible.

    It replaces torch's own version 2 on Hopper GPUs (compute capability 9), if its package
    `flash_attn_interface` is installed. Returns whether it is used.
    """
    has_switch = hasattr(attention, "activate_flash_attention_impl")  # newer versions of torch
    is_installed = has_switch and importlib.util.find_spec("flash_attn_interface") is not None
    if not is_installed or torch.cuda.get_device_capability()[0] != 9:
        return False
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch, or has no backward pass
        logger.warning("FlashAttention-3 can't be used, so version 2 is: %s", error)
        return False
    return True


@cache
def _is_recent_gpu(device: torch.device) -> bool:
    """Return whether flash attention's kernels run on a device: compute capability 8.0 (Ampere) or more."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def takes_flash(dtype: torch.dtype, width: int, device: torch.device) -> bool:
    """Return whether `varlen_attention` runs on a device, on heads of this width."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= 256
        and _varlen_kernel()[0] is not None
        and _is_recent_gpu(device)
    )


def _in_autocast_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast would cast the inputs of scaled_dot_product_attention.

    Autocast does not cast the inputs of the flash kernel. Under autocast the rotary embedding leaves queries
    and keys in float32 and values in the 16-bit type.
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
    """Attend over a pack, as an attention function of transformers.

    q [1, H, T, D], k and v [1, G, T, D] -> ([1, T, H, D], None). With `packing.share`, T are the tokens of
    this process, in the inputs and in the output.

    `dropout` is not applied, because the probability of a sampled token must not depend on chance. If a layer
    has a window of w tokens (a token itself among them), the window is kept.

    Raises ValueError if `packing` is missing, or if the model asks for a kind of attention that is not
    supported.
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
        by_token = (x[0].transpose(0, 1) for x in (query, key, value))
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in packing.share.to_heads(*by_token))
    if packing.key_index is not None:
        key, value = (x.index_select(2, packing.key_index) for x in (key, value))
    attend = _one_by_one if packing.output_positions is None else _wanted_one_by_one
    if takes_flash(query.dtype, query.shape[-1], query.device):
        attend = _flash_varlen
    out = attend(query, key, value, packing, scale, sliding_window)
    if packing.share is not None:
        out = packing.share.to_tokens(out[0]).unsqueeze(0)
    return out, None


# Below is causal attention of one long sequence on CPU, where it beats SDPA (in float32 by about a quarter).
# Queries are taken block by block, each against only the keys that it may see, so the work is that of the
# triangle. Up to MOST_SCORES the probabilities are kept for the backward pass. This saves a fifth of the work
# of SDPA, which computes them again, and takes `itemsize * heads * queries * keys / 2` bytes. Beyond, each
# block's are computed again. `is_worth_it` says where this pays.
def is_worth_it(query: Tensor, num_keys: int) -> bool:
    """Return whether `causal_attention` is the faster way for query [H, N, D]."""
    scores = query.shape[0] * query.shape[1] * num_keys
    if query.device.type != "cpu":
        return False
    if query.dtype == torch.bfloat16:
        return True
    return query.dtype == torch.float32 and FEWEST_SCORES <= scores <= MOST_SCORES


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Compute the attention of a sequence, [H, N, D] float32 or bfloat16.

    Args:
        query: [H, N, D].
        key: [G, K, D]; G divides H.
        value: [G, K, D].
        positions: [N] int64, ascending: the position of each query among the keys. A query sees the keys up
            to its position.
        scale: multiplies the scores.
        window: a query sees only so many keys, the last ones. None: it sees all keys up to its position.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    is_kept = needs_grad and query.shape[0] * query.shape[1] * key.shape[1] <= MOST_SCORES
    return _CausalAttention.apply(query, key, value, positions, scale, window, is_kept)


class _CausalAttention(torch.autograd.Function):
    """Causal attention by blocks of queries.

    The backward pass takes the probabilities that are kept, or computes them again.

    With P the probabilities, O = P V: dV = P' dO, dS = P (dO V' - rowsum(dO O)), dQ = dS K, dK = dS' Q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        scale: float,
        window: int | None,
        is_kept: bool,
    ) -> Tensor:
        # Smaller scores are rounded less, and all scores of a query shift by the same amount.
        if key.dtype == torch.bfloat16:
            key = (key - key.mean(1, keepdim=True, dtype=torch.float32)).to(key.dtype)
        query = _by_group(query, len(key)) * scale
        key_t = key.transpose(1, 2)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        blocks = list(_blocks(query, positions, window))
        kept_probs = []
        for block in blocks:
            groups, rows, keys = block
            probs = _probabilities(query, key_t, positions, block, window)
            out_block = out[groups, :, rows]
            out_block.copy_(torch.bmm(probs, value[groups, keys]).view_as(out_block))
            if is_kept:
                kept_probs.append(probs)
        ctx.save_for_backward(query, key, value, positions, *kept_probs)
        ctx.is_kept = is_kept
        ctx.window = window
        ctx.blocks = blocks
        ctx.scale = scale
        return out.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        query, key, value, positions, *kept_probs = ctx.saved_tensors
        grad_out = _by_group(grad_out, len(key))
        key_t = key.transpose(1, 2)
        value_t = value.transpose(1, 2)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros(x.shape) for x in (key, value))
        for number, block in enumerate(ctx.blocks):
            groups, rows, keys = block
            if ctx.is_kept:
                probs = kept_probs[number]
            else:
                probs = _probabilities(query, key_t, positions, block, ctx.window)
            grad = _rows(grad_out[groups], rows)
            _add_product_(grad_value[groups, keys], probs.transpose(1, 2), grad)
            grad_probs = torch.bmm(grad, value_t[groups, :, keys])
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            grad_block = grad_query[groups, :, rows]
            grad_block.copy_(torch.bmm(grad_scores, key[groups, keys]).view_as(grad_block))
            _add_product_(grad_key[groups, keys], grad_scores.transpose(1, 2), _rows(query[groups], rows))
        grad_key = grad_key.to(key.dtype)
        grad_value = grad_value.to(value.dtype)
        return grad_query.mul_(ctx.scale).flatten(0, 1), grad_key, grad_value, None, None, None, None


def _probabilities(
    query: Tensor, key_t: Tensor, positions: Tensor, block: QueryBlock, window: int | None
) -> Tensor:
    """Return how much each query of a block attends to each of its keys, [groups, r * rows, keys].

    The query [G, r, N, D] is scaled, and key_t is [G, D, K].
    """
    groups, rows, keys = block
    scores = torch.bmm(_rows(query[groups], rows), key_t[groups, :, keys])
    _hide_(scores, positions[rows], keys, window)
    return torch.softmax(scores, -1, out=scores)


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b, computed in the type of a, to total [G, N, D] float32."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """Split the heads into groups, [H, N, D] -> [G, H / G, N, D]."""
    return x.unflatten(0, (groups, -1))


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Stack some rows of all heads of a group below each other, [G, r, N, D] -> [G, r * rows, D]."""
    return x[:, :, rows].flatten(1, 2)


class QueryBlock(NamedTuple):
    """A block of queries: the groups of heads, the queries, and all keys that any of these queries sees."""

    groups: slice
    rows: slice
    keys: slice


def _blocks(query: Tensor, positions: Tensor, window: int | None) -> Iterator[QueryBlock]:
    """Yield the blocks of the query [G, r, N, D]; the scores of a block stay in the processor's cache."""
    num_groups = query.shape[0]
    for start in range(0, len(positions), BLOCK):
        rows = slice(start, min(start + BLOCK, len(positions)))
        first = int(positions[rows.start])
        last = int(positions[rows.stop - 1])
        keys = slice(0 if window is None else max(0, first - window + 1), last + 1)
        scores_of_group = query.shape[1] * (rows.stop - rows.start) * (keys.stop - keys.start)
        num_together = max(1, BLOCK_SCORES // scores_of_group)
        for group in range(0, num_groups, num_together):
            yield QueryBlock(slice(group, min(group + num_together, num_groups)), rows, keys)


def _hide_(scores: Tensor, positions: Tensor, keys: slice, window: int | None) -> None:
    """Put -inf where a query does not see a key; scores [G, r * rows, keys]."""
    # Without a window, every query of the block sees the keys before the first query.
    begin = keys.start if window is not None else int(positions[0])
    key_positions = torch.arange(begin, keys.stop)
    hidden = key_positions > positions[:, None]
    if window is not None:
        hidden |= key_positions <= positions[:, None] - window
    bias = torch.zeros(hidden.shape, dtype=scores.dtype).masked_fill_(hidden, -torch.inf)
    scores.unflatten(1, (-1, len(positions)))[..., begin - keys.start :].add_(bias)


AttentionInterface.register(PACKED_ATTENTION, packed_attention_forward)
