"""The scheduler of the native engine.

It decides what runs in a step (slots, blocks, prefill budget) and makes the model runner's batch.

    add -> [queue] --admit: slot + blocks--> [prefill, maybe in chunks] -> [decode] --turn ended--> park
              ^                                        |                      |                      |
              +------------------ preempt -------------+----------------------+     add (resumed) <--+

There are `max_num_seqs` slots, for the sessions that run. Parked sessions have none and only keep their
blocks. Each step takes the next token of every decoding session and, beside them, at most
`max_prefill_tokens` new tokens. The queue is served in order, and sessions that were begun are served before
new ones: a resumed session still has KV state, and finishing it frees memory. At most one prompt, the last
one taken, is cut at the budget. It goes on first in the next step.

Blocks. A session gets the blocks for all its tokens when it is admitted, and one more whenever its last one
is full. When no block is free, KV state is dropped in this order: that of parked sessions, the one parked
longest ago first; that of sessions that wait in the queue, the last one first; and, only for a session that
runs, that of the running session that was opened last. This session is preempted, which means that it is put
at the head of the queue and computed again from its tokens. One sequence of full length fits the pool, so the
session opened first always goes on, and there is no deadlock.

Shared prefixes. Blocks are found by their contents (see `block_pool.py`), so full blocks at the beginning of
several sessions are computed once and shared. This includes the blocks of an observation with which a session
was resumed. Sessions with the very same tokens as one that is prefilled in this step sample from its row.
Those that come later copy the last, partly filled block of a prompt and compute its last token.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from verl.workers.rollout.native.block_pool import ROOT, BlockPool
from verl.workers.rollout.native.session import NO_SLOT, NativeSession, SlotTable
from verl.workers.rollout.native.step_batch import Span, StepBatch, pack
from verl.workers.rollout.sampler import SamplingRows


@dataclass
class Step:
    """One step: what is new in it, and, once it is planned, what the runner has to do.

    Attributes:
        room: Number of new tokens that may still be taken.
        spans: The tokens to prefill, in order.
        started: Sessions that sample from the last row of a span, with the index of that span.
        row_of: For all tokens of a session (as bytes), the entry of `started` that samples after them.
        decode_first: Sessions that have one token to compute, and take part as decoding ones at once.
        filled: Blocks that this step fills. Later rows may read them, copies may not.
        copies_before: Blocks (source, target) to copy before the batch runs.
        copies_after: Blocks (source, target) to copy after the batch has run.
        sessions: One session per row that is sampled, in the order of `batch.out_rows`.
        batch: The batch for the model runner.
        rows: The sampling choices of `sessions`.
    """

    room: int
    spans: list[Span] = field(default_factory=list)
    started: list[tuple[NativeSession, int]] = field(default_factory=list)
    row_of: dict[bytes, tuple[NativeSession, int]] = field(default_factory=dict)
    decode_first: list[NativeSession] = field(default_factory=list)
    filled: set[int] = field(default_factory=set)
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    copies_after: list[tuple[int, int]] = field(default_factory=list)
    sessions: list[NativeSession] = field(default_factory=list)
    batch: StepBatch = field(init=False)
    rows: SamplingRows = field(init=False)


class _Prefix(NamedTuple):
    """The KV state for the first `num_tokens` tokens of a session.

    Attributes:
        blocks: Full blocks to share.
        contents: The content numbers of these blocks.
        num_tokens: Number of tokens that the KV state covers.
        source: A block whose first positions hold the tokens after the full blocks, or None if there is none.
    """

    blocks: list[int]
    contents: list[int]
    num_tokens: int
    source: int | None


class Scheduler:
    """The queue, slots and blocks of an engine (see above).

    Between `plan` and `finish` no other method may be called, except `drop_kv` if the step failed.

    Attributes:
        pool: The blocks.
        num_running: Number of sessions with a slot.
        num_queued: Number of sessions that wait for a slot.
        prefilled_tokens: Number of tokens that were computed, since construction.
        prefix_hit_tokens: Number of tokens whose KV state already existed, since construction.
        preemptions: Number of preemptions since construction.
        evictions: Number of times that a session that did not run lost its KV state, since construction.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int, max_prefill_tokens: int
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefilled_tokens = self.prefix_hit_tokens = self.preemptions = self.evictions = 0
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._slots = SlotTable(max_num_seqs, -(-max_model_len // block_size))
        self._free_slots = list(range(max_num_seqs))  # a heap, so that low slots are used first
        self._begun: deque[NativeSession] = deque()  # resumed or preempted; served before the new ones
        self._new: deque[NativeSession] = deque()
        self._idle: OrderedDict[int, NativeSession] = OrderedDict()  # parked or queued, with KV state
        self._running: dict[int, NativeSession] = {}  # by slot
        # The session whose prefill goes on in the next step.
        self._partly_prefilled: NativeSession | None = None
        self._decoding = np.zeros(0, dtype=np.int64)  # slots, ascending

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        return bool(self._running or self._begun or self._new)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_queued(self) -> int:
        return len(self._begun) + len(self._new)

    def add(self, session: NativeSession) -> None:
        """Queue a session that has tokens to compute: a new one, or one whose next turn begins."""
        if session.num_sampled == 0:
            self._new.append(session)
            return
        self._begun.append(session)
        if session.session_id in self._idle:
            self._idle.move_to_end(session.session_id)

    def park(self, session: NativeSession) -> None:
        """Park a running session whose turn ended. Its KV state stays until somebody needs the blocks."""
        self._leave_slot(session)
        self._idle[session.session_id] = session

    def remove(self, session: NativeSession) -> None:
        """Forget a session in whatever state it is."""
        if session.slot != NO_SLOT:
            self._leave_slot(session)
        elif session.under_way:
            (self._begun if session in self._begun else self._new).remove(session)
        self._idle.pop(session.session_id, None)
        self.pool.release(session.blocks)
        session.forget_kv()

    def drop_kv(self) -> None:
        """Forget all KV state. Running sessions go to the head of the queue, the first opened foremost."""
        for session in sorted(self._running.values(), key=_age, reverse=True):
            self._leave_slot(session)
            self._begun.appendleft(session)
        for session in (*self._begun, *self._new, *self._idle.values()):
            session.forget_kv()
        self._idle.clear()
        self.pool.clear()

    # ---- one step ----

    def plan(self) -> Step:
        """Choose what runs now. There must be something to run (`has_runnable`)."""
        step = Step(self._max_prefill_tokens)
        self._extend_decoding()
        if self._partly_prefilled is not None:
            session = self._partly_prefilled
            self._partly_prefilled = None
            self._add_to_step(session, step)
        while self._admit_next(step):
            pass
        self.pool.release([source for source, _ in step.copies_before])
        if step.decode_first:
            slots = np.array([session.slot for session in step.decode_first], dtype=np.int64)
            self._decoding = np.sort(np.concatenate((self._decoding, slots)))
        started = [session for session, _ in step.started]
        step.sessions = [self._running[slot] for slot in self._decoding.tolist()] + started
        sampled = [span for _, span in step.started]
        step.batch = pack(self._slots, self._decoding, step.spans, sampled, self._block_size)
        slots = np.array([session.slot for session in started], dtype=np.int64)
        step.rows = self._slots.sampling_rows(np.concatenate((self._decoding, slots)))
        return step

    def finish(self, step: Step, token_ids: np.ndarray) -> None:
        """Record a step that was run, before the sampled tokens are appended to the sessions.

        Args:
            step: The step.
            token_ids: int64, one per entry of `step.sessions`.
        """
        rows = self._slots.rows
        decoding = self._decoding
        rows["kv_len"][decoding] += 1
        rows["last_token"][decoding] = token_ids[: len(decoding)]
        if step.started:
            slots = np.array([session.slot for session, _ in step.started], dtype=np.int64)
            rows["kv_len"][slots] = [len(session.tokens) for session, _ in step.started]
            rows["last_token"][slots] = token_ids[len(decoding) :]
            self._decoding = np.sort(np.concatenate((decoding, slots)))
        for session, start, count in step.spans:
            session.kv_len = start + count
            self._publish_prompt_end(session, session.kv_len)
        for session in [*(session for session, _ in step.started), *step.decode_first]:
            self._publish_prompt_end(session, len(session.tokens))

    # ---- planning ----

    def _extend_decoding(self) -> None:
        """Give a block to every decoding session whose last one is full. The first opened is served first."""
        slots = self._decoding
        rows = self._slots.rows
        full = slots[rows["kv_len"][slots] == rows["room"][slots]]
        for session in sorted((self._running[slot] for slot in full.tolist()), key=_age):
            if session.slot == NO_SLOT:  # it was preempted for an older one
                continue
            while not self.pool.num_free and session.slot != NO_SLOT:
                if not self._evict_one():
                    self._preempt(max(self._running.values(), key=_age))
            if session.slot != NO_SLOT:
                self._publish(session, len(session.blocks) * self._block_size)
                (block,) = self.pool.take(1)
                self._slots.blocks[session.slot, len(session.blocks)] = block
                rows["room"][session.slot] += self._block_size
                session.blocks.append(block)

    def _admit_next(self, step: Step) -> bool:
        """Give the head of the queue a slot and its blocks.

        Returns False if it has to wait, or the queue is empty.
        """
        queue = self._begun or self._new
        if not queue or not self._free_slots:
            return False
        session = queue[0]
        equal = step.row_of.get(session.tokens.tobytes())
        if session.blocks:
            # Another session of its group, for example, made the same search and got the same documents.
            worthwhile = session.kv_len + self._block_size
            if equal is not None or self._find_prefix(session, step).num_tokens >= worthwhile:
                self._give_up_kv(session)
        if equal is not None:
            admitted = self._admit_duplicate(session, *equal, step)
        else:
            admitted = step.room > 0 and self._begin(session, step)
        if admitted:
            queue.popleft()
        return admitted

    def _admit_duplicate(self, session: NativeSession, other: NativeSession, span: int, step: Step) -> bool:
        """Admit a session that samples from the row of another session with the same tokens.

        Returns False if there is no room.
        """
        count = len(session.tokens)
        num_full = count // self._block_size
        num_copied = self._num_blocks(count) - num_full
        if not self._make_room(num_copied + self._reserve(), session):
            return False
        self.pool.share(other.blocks[:num_full])
        session.blocks = other.blocks[:num_full] + self.pool.take(num_copied)
        session.contents = other.contents[:num_full]
        if num_copied:
            step.copies_after.append((other.blocks[num_full], session.blocks[num_full]))
        self.prefix_hit_tokens += count
        session.kv_len = count
        self._enter_slot(session)
        step.started.append((session, span))
        return True

    def _begin(self, session: NativeSession, step: Step) -> bool:
        """Admit a session on the KV state that exists for its tokens: its own, or an equal beginning.

        Returns False if there is no room.
        """
        is_own = bool(session.blocks)
        source = None
        if not is_own:
            session.blocks, session.contents, session.kv_len, source = self._find_prefix(session, step)
            self.pool.share(session.blocks if source is None else [*session.blocks, source])
        num_wanted = self._num_blocks(len(session.tokens)) - len(session.blocks)
        admitted = self._make_room(num_wanted + self._reserve(), session)
        if not admitted and source is not None:
            # The block to copy from may be the very one that is missing, so admit the session without it.
            self.pool.release([source])
            source = None
            session.kv_len = len(session.blocks) * self._block_size
            admitted = self._make_room(num_wanted + self._reserve(), session)
        if not admitted:
            if not is_own:
                self.pool.release(session.blocks)
                session.forget_kv()
            return False
        new_blocks = self.pool.take(num_wanted)
        if source is not None:
            step.copies_before.append((source, new_blocks[0]))  # held until the plan is made
        if not is_own:
            self.prefix_hit_tokens += session.kv_len
        session.blocks += new_blocks
        self._enter_slot(session)
        if session.kv_len + 1 == len(session.tokens) and step.filled.isdisjoint(session.blocks):
            step.room -= 1
            self.prefilled_tokens += 1
            step.decode_first.append(session)
        else:
            self._add_to_step(session, step)
        return True

    def _add_to_step(self, session: NativeSession, step: Step) -> None:
        """Take a session's next tokens into the step, as many as the budget allows."""
        start = session.kv_len
        count = min(len(session.tokens) - start, step.room)
        step.room -= count
        self.prefilled_tokens += count
        step.spans.append(Span(session, start, count))
        self._publish(session, start + count)
        step.filled.update(session.blocks[start // self._block_size : self._num_blocks(start + count)])
        if start + count < len(session.tokens):
            self._partly_prefilled = session
            return
        step.started.append((session, len(step.spans) - 1))
        step.row_of.setdefault(session.tokens.tobytes(), step.started[-1])

    # ---- shared prefixes ----

    def _find_prefix(self, session: NativeSession, step: Step) -> _Prefix:
        """Return the longest beginning of a session that is computed, except for its last token.

        The last token must be computed, as the next one is sampled from it.
        """
        tokens = session.tokens
        size = self._block_size
        max_tokens = len(tokens) - 1
        blocks: list[int] = []
        contents: list[int] = []
        before = ROOT
        start = 0
        while start + size <= max_tokens:
            match = self.pool.find(before, tokens[start : start + size].tobytes())
            if match is None:
                break
            before = match.content
            blocks.append(match.block)
            contents.append(before)
            start += size
        for end in (start + size, session.prompt_len):  # one more block to copy from, or a part of one
            if start < end <= min(len(tokens), start + size) and min(end, max_tokens) > start:
                match = self.pool.find(before, tokens[start:end].tobytes())
                # A whole block may be one that this step fills; the end of a prompt is computed already.
                if match is not None and (end - start < size or match.block not in step.filled):
                    return _Prefix(blocks, contents, min(end, max_tokens), match.block)
        return _Prefix(blocks, contents, start, None)

    def _publish(self, session: NativeSession, num_tokens: int) -> None:
        """Let others find the full blocks among a session's first `num_tokens` positions."""
        size = self._block_size
        for index in range(len(session.contents), num_tokens // size):
            before = session.contents[-1] if index else ROOT
            tokens = session.tokens[index * size : (index + 1) * size].tobytes()
            session.contents.append(self.pool.publish(session.blocks[index], before, tokens))

    def _publish_prompt_end(self, session: NativeSession, num_computed: int) -> None:
        """Let others find the partly filled last block of a prompt, once it is computed."""
        index, rest = divmod(session.prompt_len, self._block_size)
        if rest and num_computed >= session.prompt_len:
            before = session.contents[index - 1] if index else ROOT
            tokens = session.tokens[index * self._block_size : session.prompt_len].tobytes()
            self.pool.publish(session.blocks[index], before, tokens)

    # ---- memory ----

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _reserve(self) -> int:
        """Return the number of blocks that admission leaves to running sessions.

        They keep a newcomer from being preempted at once.
        """
        return len(self._running) // 4

    def _make_room(self, wanted: int, newcomer: NativeSession) -> bool:
        """Free `wanted` blocks at the cost of sessions that don't run. Return False if these have too few."""
        missing = wanted - self.pool.num_free
        others = (other for other in self._idle.values() if other is not newcomer)
        if missing > 0 and missing > sum(len(other.blocks) for other in others):
            return False
        while self.pool.num_free < wanted:
            if not self._evict_one(newcomer):
                return False
        return True

    def _evict_one(self, newcomer: NativeSession | None = None) -> bool:
        """Drop the KV state of one session that doesn't run, not the newcomer's.

        Returns False if there is no such session.
        """
        others = [other for other in self._idle.values() if other is not newcomer]
        if not others:
            return False
        parked = (other for other in others if not other.under_way)
        self._give_up_kv(next(parked, others[-1]))
        self.evictions += 1
        return True

    def _preempt(self, session: NativeSession) -> None:
        """Take slot and blocks from a running session, and put it at the head of the queue."""
        self._leave_slot(session)
        self._give_up_kv(session)
        self._begun.appendleft(session)
        self.preemptions += 1

    def _give_up_kv(self, session: NativeSession) -> None:
        """Let go of a session's blocks. Others can find them until they are taken."""
        self._idle.pop(session.session_id, None)
        self._publish(session, session.kv_len)
        self.pool.release(session.blocks)
        session.forget_kv()

    def _enter_slot(self, session: NativeSession) -> None:
        self._idle.pop(session.session_id, None)
        session.slot = heapq.heappop(self._free_slots)
        self._running[session.slot] = session
        self._slots.load(session, self._block_size)

    def _leave_slot(self, session: NativeSession) -> None:
        """Take a running session from its slot.

        This also corrects `kv_len`, which is not updated while a session decodes.
        """
        if session is self._partly_prefilled:
            self._partly_prefilled = None
        else:
            session.kv_len = len(session.tokens) - 1
            self._decoding = self._decoding[self._decoding != session.slot]
        del self._running[session.slot]
        heapq.heappush(self._free_slots, session.slot)
        session.slot = NO_SLOT


def _age(session: NativeSession) -> int:
    """Return the session's id. Ids are given in the order of opening, so a larger one is younger."""
    return session.session_id
