"""One trajectory inside the engine, and the table of numbers that a decode step reads as arrays.

A session keeps all its token ids, so its KV state can be dropped and computed again at any time. What the
scheduler needs of every running session in every step lies in `SlotTable`, a row per running session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl.workers.rollout.base import RolloutSession
from verl.workers.rollout.sampler import SamplingRows, uniforms

NO_SLOT = -1


@dataclass(eq=False)
class NativeSession(RolloutSession):
    """A trajectory and the KV state it holds. Its last token is always still to compute.

    It is parked when its turn ended: no slot, but blocks until someone needs them. While a turn is under way
    it is queued (new, resumed or preempted) or has a slot: it is prefilled at once or chunk by chunk, then it
    gets one token per step.

    Attributes:
        prompt_len: tokens of the first prompt, which other sessions may have too.
        slot: NO_SLOT if it does not run.
        blocks: its KV blocks in order of position; empty if it holds no KV state.
        kv_len: positions that are computed; not kept up while it decodes (then it is len(tokens) - 1).
        contents: content numbers of the first blocks, as many as are published.
    """

    prompt_len: int = 0
    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    contents: list[int] = field(default_factory=list)

    def forget_kv(self) -> None:
        """What it has is computed anew when it runs again."""
        self.blocks = []
        self.contents = []
        self.kv_len = 0


_COLUMNS = [
    ("last_token", np.int64),  # the token to feed next
    ("kv_len", np.int64),  # its position
    ("room", np.int64),  # positions that the slot's blocks have
    ("counter", np.uint64),  # numbers the next random draw
    ("seed", np.uint64),
    ("temperature", np.float64),
    ("top_k", np.int64),
    ("top_p", np.float64),
    ("min_p", np.float64),
]


class SlotTable:
    """Numbers of the running sessions, a row for each slot. rows: numpy record array [slots] with the fields
    of `_COLUMNS`. blocks: int32 [slots, most blocks], 0 beyond a session's own.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.rows = np.zeros(num_slots, dtype=_COLUMNS)
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)

    def load(self, session: NativeSession, block_size: int) -> None:
        """Fill the session's slot from what it has."""
        params = session.params
        self.rows[session.slot] = (
            session.tokens[-1],
            session.kv_len,
            len(session.blocks) * block_size,
            session.num_sampled + params.drawn_before,
            params.seed & 0xFFFFFFFFFFFFFFFF,
            params.temperature,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
        )
        self.blocks[session.slot] = 0
        self.blocks[session.slot, : len(session.blocks)] = session.blocks

    def sampling_rows(self, slots: np.ndarray) -> SamplingRows:
        """What the sampler needs for these slots; each call draws the next number of each slot."""
        rows = self.rows[slots]
        self.rows["counter"][slots] += np.uint64(1)
        choices = {
            name: np.ascontiguousarray(rows[name]) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return SamplingRows(**choices, uniform=uniforms(rows["seed"], rows["counter"]))
