"""The arrays that pass between the scheduler and the model in one step.

    Scheduler (sessions, blocks, budget) -- StepBatch, SamplingRows --> PagedRunner (weights, KV, sampling)
                                         <------- Sampled ------------

KV state lies in a pool of `num_blocks` blocks of `block_size` positions per layer. A sequence has a table
of blocks: its position p lies in block table[p // block_size] at offset p % block_size, which is the flat
place table[p // block_size] * block_size + p % block_size of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl.workers.rollout.native.session import NativeSession, SlotTable


@dataclass(frozen=True)
class PrefillSpan:
    """A run of new tokens of one sequence: rows `first` .. `first + count` of the packed batch.

    Attributes:
        first: The first row.
        count: Number of rows.
        start: Number of positions of the sequence that are in the pool already.
        table: int32, the blocks of the sequence, enough for start + count positions.
    """

    first: int
    count: int
    start: int
    table: np.ndarray


@dataclass(frozen=True)
class StepBatch:
    """The T new tokens of a step, packed without padding: one per decoding sequence first, then the spans.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], the positions of the tokens in their sequences.
        places: int64 [T], where in the pool each token's keys and values go (flat).
        num_decode: D, the number of sequences that decode. They have rows 0 .. D - 1.
        decode_tables: int32 [D, M], the blocks of these sequences. Entries beyond a sequence's own are 0 and
            not read.
        decode_lengths: int64 [D], number of positions to attend to, the new token included.
        spans: The prefill rows, in order. A span may read blocks that earlier spans of the batch fill (a
            shared prefix). Decode rows read no blocks that spans fill.
        out_rows: int64 [O], rows that a token is sampled from: 0 .. D - 1, then the last row of each span
            that completes its sequence (a chunk in the middle of a long prompt has none). A row may appear
            more than once, because several sequences with an equal prompt sample from one row.

    Example: two sequences decode at positions 5 and 40, one prompt of 3 tokens is new, block_size 32:
    token_ids [9, 4, 11, 12, 13], positions [5, 40, 0, 1, 2], places [5, 72, 96, 97, 98], num_decode 2,
    decode_tables [[0, 0], [1, 2]], decode_lengths [6, 41], spans [PrefillSpan(2, 3, 0, [3])],
    out_rows [0, 1, 4].
    """

    token_ids: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    num_decode: int
    decode_tables: np.ndarray
    decode_lengths: np.ndarray
    spans: Sequence[PrefillSpan]
    out_rows: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """One sampled token per entry of `out_rows`.

    Attributes:
        token_ids: int64 [O].
        log_probs: float64 [O] (see `Completion`).
        model_log_probs: float64 [O] (see `Completion`).
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    model_log_probs: np.ndarray


class Span(NamedTuple):
    """The `length` tokens of a session that are computed in this step, from position `start` on."""

    session: NativeSession
    start: int
    length: int


def pack(
    slots: SlotTable, decoding: np.ndarray, spans: Sequence[Span], sampled: Sequence[int], block_size: int
) -> StepBatch:
    """Pack the tokens of a step: one row per decoding slot, then the spans' tokens.

    Args:
        slots: The numbers of the running sessions.
        decoding: int64 [D], slots that decode.
        spans: The tokens to prefill.
        sampled: Indices of spans whose last row is sampled from. An index appears once for each session that
            samples there.
        block_size: Number of positions of a block.
    """
    num_decode = len(decoding)
    kv_len = slots.rows["kv_len"][decoding]
    max_length = int(kv_len.max()) + 1 if num_decode else 0
    tables = slots.blocks[decoding, : -(-max_length // block_size)]
    own_block = tables[np.arange(num_decode), kv_len // block_size]
    token_ids = [slots.rows["last_token"][decoding]]
    positions = [kv_len]
    places = [_places(own_block, kv_len, block_size)]
    prefill = []
    last_rows = []
    row = num_decode
    for session, start, count in spans:
        table = np.array(session.blocks[: -(-(start + count) // block_size)], dtype=np.int32)
        span_positions = np.arange(start, start + count)
        prefill.append(PrefillSpan(row, count, start, table))
        token_ids.append(np.array(session.tokens[start : start + count], dtype=np.int64))
        positions.append(span_positions)
        places.append(_places(table[span_positions // block_size], span_positions, block_size))
        row += count
        last_rows.append(row - 1)
    out_rows = np.array([last_rows[index] for index in sampled], dtype=np.int64)
    return StepBatch(
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        places=np.concatenate(places),
        num_decode=num_decode,
        decode_tables=tables,
        decode_lengths=kv_len + 1,
        spans=prefill,
        out_rows=np.concatenate((np.arange(num_decode), out_rows)),
    )


def _places(blocks: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    return blocks.astype(np.int64) * block_size + positions % block_size
