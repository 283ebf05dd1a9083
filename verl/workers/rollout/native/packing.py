"""From slots and prefill spans to the arrays of a `StepBatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl.workers.rollout.native.session import Session, SlotTable
from verl.workers.rollout.native.step_batch import PrefillSpan, StepBatch


class Span(NamedTuple):
    """`length` tokens of a session that are computed in this step, from position `start` on."""

    session: Session
    start: int
    length: int


def pack(
    slots: SlotTable, decoding: np.ndarray, spans: Sequence[Span], sampled: Sequence[int], block_size: int
) -> StepBatch:
    """One row per decoding slot, then the spans' tokens.

    Args:
        decoding: int64 [D], slots that decode.
        sampled: indices of spans whose last row is sampled from, an index once per session that does.
    """
    num_decode = len(decoding)
    kv_len = slots.kv_len[decoding]
    longest = int(kv_len.max()) + 1 if num_decode else 0
    tables = slots.blocks[decoding, : -(-longest // block_size)]
    own_block = tables[np.arange(num_decode), kv_len // block_size]
    token_ids, positions = [slots.last_token[decoding]], [kv_len]
    places = [_places(own_block, kv_len, block_size)]
    prefill = []
    last_rows = []
    row = num_decode
    for session, start, count in spans:
        table = np.array(session.blocks[: -(-(start + count) // block_size)], dtype=np.int32)
        where = np.arange(start, start + count)
        prefill.append(PrefillSpan(row, count, start, table))
        token_ids.append(np.array(session.tokens[start : start + count], dtype=np.int64))
        positions.append(where)
        places.append(_places(table[where // block_size], where, block_size))
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
