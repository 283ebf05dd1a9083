"""One trajectory inside the engine, and the table of numbers that a decode step reads as arrays.

A session keeps all its token ids, so its KV state can be dropped and computed again at any time. The numbers
that the scheduler needs of every running session in every step are in `SlotTable`, which has a row per
running session.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from verl.sessions.engine_contract import RolloutSession
from verl.workers.rollout.sampler import SamplingRows, uniforms

NO_SLOT = -1


@dataclass(eq=False)
class NativeSession(RolloutSession):
    """A trajectory and the KV state that it holds. Its last token is always still to be computed.

    When its turn has ended, a session is parked: it has no slot, but keeps its blocks until someone needs
    them. While a turn is under way, it is queued (new, resumed or preempted) or has a slot. With a slot it is
    prefilled, at once or chunk by chunk, and then gets one token per step.

    Attributes:
        prompt_len: Number of tokens of the first prompt, which other sessions may have too.
        slot: The session's slot, or NO_SLOT if it does not run.
        blocks: Its KV blocks in order of position, empty if it holds no KV state.
        kv_len: Number of positions that are computed. It is not updated while the session decodes (then it is
            len(tokens) - 1).
        contents: Content numbers of the first blocks, as many as are published.
    """

    prompt_len: int = 0
    slot: int = NO_SLOT
    blocks: list[int] = field(default_factory=list)
    kv_len: int = 0
    contents: list[int] = field(default_factory=list)

    def forget_kv(self) -> None:
        """Forget the KV state, which is computed anew when the session runs again."""
        self.blocks = []
        self.contents = []
        self.kv_len = 0


_COLUMNS = [
    ("last_token", np.int64),  # the token to feed next
    ("kv_len", np.int64),  # the position of that token
    ("room", np.int64),  # number of positions of the slot's blocks
    ("counter", np.uint64),  # number of the next random draw
    ("seed", np.uint64),
    ("temperature", np.float64),
    ("top_k", np.int64),
    ("top_p", np.float64),
    ("min_p", np.float64),
]


class SlotTable:
    """The numbers of the running sessions, with a row for each slot.

    Attributes:
        rows: numpy record array [slots] with the fields of `_COLUMNS`.
        blocks: int32 [slots, maximum number of blocks], 0 beyond a session's own.
    """

    def __init__(self, num_slots: int, max_blocks: int) -> None:
        self.rows = np.zeros(num_slots, dtype=_COLUMNS)
        self.blocks = np.zeros((num_slots, max_blocks), dtype=np.int32)

    def load(self, session: NativeSession, block_size: int) -> None:
        """Fill the session's slot with the session's numbers."""
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
        """Return the sampling choices of these slots. Each call draws the next number of each slot."""
        rows = self.rows[slots]
        self.rows["counter"][slots] += np.uint64(1)
        choices = {
            name: np.ascontiguousarray(rows[name]) for name in ("temperature", "top_k", "top_p", "min_p")
        }
        return SamplingRows(**choices, uniform=uniforms(rows["seed"], rows["counter"]))
