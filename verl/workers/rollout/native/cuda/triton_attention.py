"""Attention over a paged KV pool as one Triton kernel: decode with the keys split over programs, and prefill.

A tile is a run of query tokens of one sequence: a single token when decoding, `tile_rows` of them in a
prefill. One program serves a tile, one KV head (with all query heads that share it, so keys are read once)
and one of `num_splits` parts of the keys that the tile may look at. With several splits a second kernel puts
the parts together by their log-sum-exps (FlashDecoding: Dao et al., 2023). Sums are float32.

Nothing here waits for the device, and grids depend on shapes alone: calls can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = 1.4426950408889634
_TILE_ROWS = 64  # query rows (tokens times heads of a group) of a prefill tile, about


@dataclass(frozen=True)
class Tiles:
    """Runs of query tokens, int32 tensors on the device.

    Attributes:
        first: [N], row of the tile's first token in the packed batch.
        count: [N], its tokens, at most `max_count`; 0 = nothing to do.
        position: [N], position of the first token in its sequence.
        sequence: [N], its row of `tables`.
        tables: [S, M], blocks of the sequences, at least as far as their last tokens.
        max_count: 1 when decoding.
    """

    first: Tensor
    count: Tensor
    position: Tensor
    sequence: Tensor
    tables: Tensor
    max_count: int


def tile_tokens(group: int) -> int:
    """Query tokens of a prefill tile, when `group` query heads share a KV head."""
    return max(1, _TILE_ROWS // triton.next_power_of_2(group))


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tiles,
    out: Tensor,
    *,
    window: int | None,
    softcap: float | None,
    scale: float,
    num_splits: int = 1,
) -> None:
    """Causal attention of the tiles' tokens to their sequences' positions, written to their rows of `out`.

    Args:
        query, out: [T, num_heads, head_dim]; keys, values: [num_blocks, block_size, num_kv_heads, head_dim].
        window: positions that a token sees, itself included (None = all); softcap: bound of the scores.
        num_splits: parts that the keys of a tile are read in; more than 1 only with max_count 1.
    """
    num_tiles, (_, num_heads, head_dim) = len(tiles.first), query.shape
    if num_tiles == 0:
        return
    assert num_splits == 1 or tiles.max_count == 1
    num_kv_heads = keys.shape[2]
    constants = attend_constants(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=keys.shape[1],
        dtype=query.dtype,
        max_count=tiles.max_count,
        num_splits=num_splits,
        window=window,
        softcap=softcap,
    )
    parts = lse = out
    if num_splits > 1:
        parts = torch.empty(
            num_splits, len(query), num_heads, head_dim, dtype=torch.float32, device=out.device
        )
        lse = torch.empty(num_splits, len(query), num_heads, dtype=torch.float32, device=out.device)
    _attend[(num_tiles, num_kv_heads, num_splits)](
        query,
        keys,
        values,
        tiles.first,
        tiles.count,
        tiles.position,
        tiles.sequence,
        tiles.tables,
        parts,
        lse,
        scale * (1.0 if softcap else _LOG2_E),
        softcap or 0.0,
        window or 0,
        len(query) * num_heads,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        tiles.tables.stride(0),
        **constants,
        num_warps=4,
        num_stages=2,
    )
    if num_splits > 1:
        _combine[(num_tiles, num_heads)](
            parts,
            lse,
            out,
            tiles.first,
            tiles.count,
            len(query) * num_heads,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_DIM=constants["BLOCK_DIM"],
            SPLITS=num_splits,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        )


def attend_constants(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    max_count: int,
    num_splits: int,
    window: int | None,
    softcap: float | None,
) -> dict[str, int | bool]:
    """What `_attend` is compiled for. Key blocks leave room for several programs on a processor."""
    group, block_dim = num_heads // num_kv_heads, triton.next_power_of_2(head_dim)
    block_keys = min(16384 // (block_dim * dtype.itemsize), 64 if dtype.itemsize == 2 else 32)
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_DIM": block_dim,
        "BLOCK_ROWS": max(16, triton.next_power_of_2(max_count * group)),
        "BLOCK_KEYS": max(16, block_keys),
        "PAGE": block_size,
        "SPLITS": num_splits,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_WINDOW": window is not None,
        "EXACT": dtype == torch.float32,
    }


@triton.jit
def _attend(
    query,
    keys,
    values,
    tile_first,
    tile_count,
    tile_position,
    tile_sequence,
    tables,
    out,
    out_lse,
    scale,
    softcap,
    window,
    rows_per_split,
    query_row_stride,
    query_head_stride,
    page_stride,
    place_stride,
    head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    EXACT: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    count = tl.load(tile_count + tile)
    if count == 0:
        return
    first = tl.load(tile_first + tile).to(tl.int64)
    position = tl.load(tile_position + tile)
    table = tables + tl.load(tile_sequence + tile).to(tl.int64) * table_stride

    # Row r of the tile is query head kv_head * GROUP + r % GROUP of token r // GROUP.
    rows = tl.arange(0, BLOCK_ROWS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_DIM)
    is_row = token < count
    is_dim = dims < HEAD_DIM
    at = (first + token)[:, None] * query_row_stride + head[:, None] * query_head_stride + dims[None, :]
    q = tl.load(query + at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    end = position + count  # one beyond the last position that any row sees
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position + 1 - window, 0)
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_KEYS), SPLITS) * BLOCK_KEYS
        begin = begin + split * share
        end = tl.minimum(begin + share, end)

    best = tl.full([BLOCK_ROWS], -1.0e30, tl.float32)  # finite: a row may see nothing of a whole block
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        places = start + tl.arange(0, BLOCK_KEYS)
        is_place = places < end
        page = tl.load(table + places // PAGE, mask=is_place, other=0).to(tl.int64)
        offset = page * page_stride + (places % PAGE) * place_stride + kv_head * head_stride
        k = tl.load(
            keys + offset[None, :] + dims[:, None], mask=is_place[None, :] & is_dim[:, None], other=0.0
        )
        if EXACT:  # noqa: SIM108 (the compiler picks one branch)
            scores = tl.dot(q, k, input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k) * scale
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0) * 1.4426950408889634
        behind = (position + token)[:, None] - places[None, :]
        seen = (behind >= 0) & is_place[None, :]
        if HAS_WINDOW:
            seen = seen & (behind < window)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        fade = tl.exp2(best - new_best)
        weights = tl.exp2(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            values + offset[:, None] + dims[None, :], mask=is_place[:, None] & is_dim[None, :], other=0.0
        )
        if EXACT:
            sums = sums * fade[:, None] + tl.dot(weights, v, input_precision="ieee")
        else:
            sums = sums * fade[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best

    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    row_out = (first + token) * NUM_HEADS + head
    if SPLITS > 1:
        row_out += split.to(tl.int64) * rows_per_split
        lse = tl.where(total > 0.0, best + tl.log2(total), float("-inf"))
        tl.store(out_lse + row_out, lse, mask=is_row)
    tl.store(
        out + row_out[:, None] * HEAD_DIM + dims[None, :],
        result.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None, :],
    )


@triton.jit
def _combine(
    parts,
    lse,
    out,
    tile_first,
    tile_count,
    rows_per_split,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    tile = tl.program_id(0)
    if tl.load(tile_count + tile) == 0:
        return
    row = tl.load(tile_first + tile).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DIM)
    at = splits.to(tl.int64) * rows_per_split + row
    of_split = tl.load(lse + at, mask=splits < SPLITS, other=float("-inf"))
    weights = tl.exp2(of_split - tl.max(of_split, 0))
    weights = weights / tl.sum(weights, 0)
    inside = (splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    part = tl.load(parts + at[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    result = tl.sum(part * weights[:, None], 0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
