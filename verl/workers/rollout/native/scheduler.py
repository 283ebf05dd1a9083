"""Decides what runs in a step: slots, blocks, prefill budget; makes the model runner's batch.

    add -> [queue] --admit: slot + blocks--> [prefill, maybe in chunks] -> [decode] --turn ended--> park
              ^                                        |                      |                      |
              +------------------ preempt -------------+----------------------+     add (resumed) <--+

There are `max_num_seqs` slots, for the sessions that run. Parked ones have none; they only keep their blocks.
Each step takes the next token of every decoding session and, beside them, at most `max_prefill_tokens` new
tokens. The queue is served in order, sessions that were begun before new ones: a resumed session still has KV
state, and finishing it frees memory. At most one prompt, the last one taken, is cut at the budget; it goes on
first in the next step.

Blocks. A session gets the blocks for all its tokens when it is admitted, and one more whenever its last one
is full. When there is none, KV state goes in this order: parked sessions, the one parked longest ago first;
sessions that wait in the queue, the last one first; and only for a session that runs, the running session
that was opened last: it is preempted, that is, put at the head of the queue and computed again from its
tokens. One sequence of full length fits the pool, so the session opened first always goes on: no deadlock.

Shared prefixes. Blocks are found by their contents (see `block_pool.py`), so full blocks at the beginning of
several sessions are computed once and shared, those of an observation that was resumed with too. Sessions
with the very same tokens as one that is prefilled in this step sample from its row; those that come later
copy the last, partly filled block of a prompt and compute its last token.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

import numpy as np

from verl.workers.rollout.native.block_pool import BlockPool
from verl.workers.rollout.native.packing import Span, pack
from verl.workers.rollout.native.prefixes import Prefix, find_prefix, publish, publish_prompt_end
from verl.workers.rollout.native.sampler import SamplingRows
from verl.workers.rollout.native.session import NO_SLOT, Session, SlotTable, State
from verl.workers.rollout.native.step_batch import StepBatch


@dataclass
class Step:
    """One step, planned: what the runner is to do, and whom its results belong to.

    Attributes:
        sessions: one per row that is sampled, in the order of `batch.out_rows`.
        copies_before, copies_after: blocks (source, target) to copy before the batch runs, and after it.
    """

    batch: StepBatch
    rows: SamplingRows
    sessions: list[Session]
    copies_before: list[tuple[int, int]]
    copies_after: list[tuple[int, int]]


@dataclass
class _Draft:
    """What is new in the step that is being planned.

    Attributes:
        room: new tokens that may still be taken.
        spans: prefill, in order.
        out: sessions that sample, with the index in `spans` of the one whose last row it is.
        leaders: by all tokens of a session (as bytes): the same, for those that end in this step.
        decode_first: sessions that have one token to compute and take part as decoding ones at once.
        promised: blocks that this step fills: later rows may read them, copies may not.
    """

    room: int
    spans: list[Span] = field(default_factory=list)
    out: list[tuple[Session, int]] = field(default_factory=list)
    leaders: dict[bytes, tuple[Session, int]] = field(default_factory=dict)
    decode_first: list[Session] = field(default_factory=list)
    promised: set[int] = field(default_factory=set)
    copies_before: list[tuple[int, int]] = field(default_factory=list)
    copies_after: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """Queue, slots and blocks; see above. Between `plan` and `finish` no other method may be called, save
    `drop_kv` if the step failed.

    Attributes:
        pool: the blocks.
        num_running, num_queued: sessions with a slot, and those that wait for one.
        prefilled_tokens, prefix_hit_tokens, preemptions, evictions: sums since construction.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_prefill_tokens: int,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefilled_tokens = self.prefix_hit_tokens = self.preemptions = self.evictions = 0
        self._block_size = block_size
        self._max_prefill_tokens = max_prefill_tokens
        self._slots = SlotTable(max_num_seqs, -(-max_model_len // block_size))
        self._free_slots = list(range(max_num_seqs))  # a heap, so that low slots are used first
        self._begun: deque[Session] = deque()  # resumed or preempted: before the new ones
        self._new: deque[Session] = deque()
        self._queued_kv: OrderedDict[int, Session] = OrderedDict()  # in the queue, with KV state
        self._parked_kv: OrderedDict[int, Session] = OrderedDict()  # parked, with KV state
        self._running: dict[int, Session] = {}  # by slot
        self._cut: Session | None = None  # the one whose prefill goes on in the next step
        self._decoding = np.zeros(0, dtype=np.int64)  # slots, ascending
        self._draft: _Draft | None = None

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

    def add(self, session: Session) -> None:
        """Queue a session that has tokens to compute: a new one, or one whose next turn begins."""
        if session.num_sampled == 0:
            self._new.append(session)
            return
        self._begun.append(session)
        if self._parked_kv.pop(session.session_id, None) is not None:
            self._queued_kv[session.session_id] = session

    def park(self, session: Session) -> None:
        """The turn of a running session ended; its KV state stays until somebody needs the blocks."""
        self._leave_slot(session)
        session.state = State.PARKED
        self._parked_kv[session.session_id] = session

    def remove(self, session: Session) -> None:
        """Forget a session in whatever state it is."""
        if session.state is State.RUNNING:
            self._leave_slot(session)
        elif session.state is State.QUEUED:
            (self._begun if session in self._begun else self._new).remove(session)
        self._parked_kv.pop(session.session_id, None)
        self._queued_kv.pop(session.session_id, None)
        self._drop_blocks(session)

    def drop_kv(self) -> None:
        """Forget all KV state; running sessions go to the head of the queue, the first opened foremost."""
        for session in sorted(self._running.values(), key=_age, reverse=True):
            self._leave_slot(session)
            self._to_head(session)
        for session in (*self._begun, *self._new, *self._parked_kv.values()):
            session.forget_kv()
        self._parked_kv.clear()
        self._queued_kv.clear()
        self.pool.clear()
        self._draft = None

    # ---- one step ----

    def plan(self) -> Step:
        """Choose what runs now. There must be something (`has_runnable`)."""
        draft = self._draft = _Draft(self._max_prefill_tokens)
        self._extend_decoding()
        if self._cut is not None:
            session, self._cut = self._cut, None
            self._compute(session, draft)
        while self._admit_next(draft):
            pass
        self.pool.release([source for source, _ in draft.copies_before])
        if draft.decode_first:
            started = np.array([session.slot for session in draft.decode_first], dtype=np.int64)
            self._decoding = np.sort(np.concatenate((self._decoding, started)))
        return self._step(draft)

    def finish(self, step: Step, token_ids: np.ndarray) -> None:
        """Book a step that was run, before the sampled tokens are appended to the sessions.

        Args:
            token_ids: int64, one per entry of `step.sessions`.
        """
        draft, self._draft = self._draft, None
        assert draft is not None
        decoding = self._decoding
        self._slots.kv_len[decoding] += 1
        self._slots.last_token[decoding] = token_ids[: len(decoding)]
        if draft.out:
            started = np.array([session.slot for session, _ in draft.out], dtype=np.int64)
            self._slots.kv_len[started] = [len(session.tokens) for session, _ in draft.out]
            self._slots.last_token[started] = token_ids[len(decoding) :]
            self._decoding = np.sort(np.concatenate((decoding, started)))
        for session, start, count in draft.spans:
            session.kv_len = start + count
            publish_prompt_end(self.pool, session, session.kv_len, self._block_size)
        for session in [*(session for session, _ in draft.out), *draft.decode_first]:
            publish_prompt_end(self.pool, session, len(session.tokens), self._block_size)

    # ---- planning ----

    def _extend_decoding(self) -> None:
        """A block for every decoding session whose last one is full; the first opened is served first."""
        slots = self._decoding
        full = slots[self._slots.kv_len[slots] == self._slots.room[slots]]
        for session in sorted((self._running[slot] for slot in full.tolist()), key=_age):
            if session.state is not State.RUNNING:  # preempted for an older one
                continue
            while not self.pool.num_free and session.state is State.RUNNING:
                if not self._evict_one():
                    self._preempt(max(self._running.values(), key=_age))
            if session.state is State.RUNNING:
                self._publish(session, len(session.blocks) * self._block_size)
                (block,) = self.pool.take(1)
                self._slots.blocks[session.slot, len(session.blocks)] = block
                self._slots.room[session.slot] += self._block_size
                session.blocks.append(block)

    def _admit_next(self, draft: _Draft) -> bool:
        """Give the head of the queue a slot and its blocks; False if it has to wait, or there is none."""
        queue = self._begun or self._new
        if not queue or not self._free_slots:
            return False
        session = queue[0]
        if session.blocks and self._is_behind_an_equal_one(session, draft):
            self._queued_kv.pop(session.session_id, None)
            self._publish(session, session.kv_len)
            self._drop_blocks(session)
        leader = None if session.blocks else draft.leaders.get(session.tokens.tobytes())
        if leader is not None:
            admitted = self._follow(session, leader, draft)
        else:
            admitted = draft.room > 0 and self._begin(session, draft)
        if admitted:
            queue.popleft()
        return admitted

    def _is_behind_an_equal_one(self, session: Session, draft: _Draft) -> bool:
        """Whether there is KV state for more of a resumed session's tokens than its own: of another one of
        the group, say, that asked the same and found the same documents.
        """
        if session.tokens.tobytes() in draft.leaders:
            return True
        prefix = find_prefix(self.pool, session, draft.promised, self._block_size)
        return prefix.num_tokens >= session.kv_len + self._block_size

    def _follow(self, session: Session, leader: tuple[Session, int], draft: _Draft) -> bool:
        """Admit a session that samples from the row of one with the same tokens."""
        other, span = leader
        count = len(session.tokens)
        num_full = count // self._block_size
        copied = self._num_blocks(count) - num_full
        if not self._make_room(copied + self._reserve()):
            return False
        self.pool.share(other.blocks[:num_full])
        session.blocks = other.blocks[:num_full] + self.pool.take(copied)
        session.contents = other.contents[:num_full]
        if copied:
            draft.copies_after.append((other.blocks[num_full], session.blocks[num_full]))
        self.prefix_hit_tokens += count
        session.kv_len = count
        self._enter_slot(session)
        draft.out.append((session, span))
        return True

    def _begin(self, session: Session, draft: _Draft) -> bool:
        """Admit a session on what KV state there is for its tokens: its own, or an equal beginning."""
        was_queued_kv = self._queued_kv.pop(session.session_id, None) is not None
        prefix = None if session.blocks else find_prefix(self.pool, session, draft.promised, self._block_size)
        if prefix is not None:
            self._hold(prefix)
        total = self._num_blocks(len(session.tokens))
        needed = total - len(session.blocks if prefix is None else prefix.blocks)
        admitted = self._make_room(needed + self._reserve())
        if not admitted and prefix is not None and prefix.source is not None:
            # The block to copy from may be the very one that is missing: do without.
            self._drop_source(prefix)
            admitted = self._make_room(needed + self._reserve())
        if not admitted:
            if prefix is not None:
                self._let_go(prefix)
            if was_queued_kv:
                self._queued_kv[session.session_id] = session
                self._queued_kv.move_to_end(session.session_id, last=False)
            return False
        if prefix is not None:
            session.blocks, session.contents = prefix.blocks, prefix.contents
            session.kv_len = prefix.num_tokens
            self.prefix_hit_tokens += prefix.num_tokens
        taken = self.pool.take(needed)
        if prefix is not None and prefix.source is not None:
            draft.copies_before.append((prefix.source, taken[0]))  # held until the plan is made
        session.blocks += taken
        self._enter_slot(session)
        if session.kv_len + 1 == len(session.tokens) and draft.promised.isdisjoint(session.blocks):
            draft.room -= 1
            self.prefilled_tokens += 1
            draft.decode_first.append(session)
        else:
            self._compute(session, draft)
        return True

    def _compute(self, session: Session, draft: _Draft) -> None:
        """Take a session's next tokens into the step, as many as the budget allows."""
        start = session.kv_len
        count = min(len(session.tokens) - start, draft.room)
        draft.room -= count
        self.prefilled_tokens += count
        draft.spans.append(Span(session, start, count))
        first_filled = start // self._block_size
        self._publish(session, start + count)
        draft.promised.update(session.blocks[first_filled : self._num_blocks(start + count)])
        if start + count < len(session.tokens):
            self._cut = session
            return
        out = (session, len(draft.spans) - 1)
        draft.out.append(out)
        draft.leaders.setdefault(session.tokens.tobytes(), out)

    def _step(self, draft: _Draft) -> Step:
        started = [session for session, _ in draft.out]
        sessions = [self._running[slot] for slot in self._decoding.tolist()] + started
        out_slots = np.array([session.slot for session in started], dtype=np.int64)
        return Step(
            pack(self._slots, self._decoding, draft.spans, [span for _, span in draft.out], self._block_size),
            self._slots.sampling_rows(np.concatenate((self._decoding, out_slots))),
            sessions,
            draft.copies_before,
            draft.copies_after,
        )

    def _hold(self, prefix: Prefix) -> None:
        self.pool.share(prefix.blocks)
        if prefix.source is not None:
            self.pool.share([prefix.source])

    def _drop_source(self, prefix: Prefix) -> None:
        if prefix.source is not None:
            self.pool.release([prefix.source])
        prefix.source, prefix.num_tokens = None, len(prefix.blocks) * self._block_size

    def _let_go(self, prefix: Prefix) -> None:
        self._drop_source(prefix)
        self.pool.release(prefix.blocks)

    def _publish(self, session: Session, num_tokens: int) -> None:
        publish(self.pool, session, num_tokens, self._block_size)

    # ---- memory ----

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _reserve(self) -> int:
        """Blocks that admission leaves to the running ones, so that a newcomer isn't preempted at once."""
        return len(self._running) // 4

    def _make_room(self, wanted: int) -> bool:
        """Get `wanted` blocks free, at the cost of sessions that don't run; False if that is too little."""
        idle = self._parked_kv.values(), self._queued_kv.values()
        missing = wanted - self.pool.num_free
        if missing > 0 and missing > sum(len(session.blocks) for group in idle for session in group):
            return False
        while self.pool.num_free < wanted:
            if not self._evict_one():
                return False
        return True

    def _evict_one(self) -> bool:
        """Drop the KV state of one session that doesn't run; False if there is none."""
        if self._parked_kv:
            _, session = self._parked_kv.popitem(last=False)
        elif self._queued_kv:
            _, session = self._queued_kv.popitem()
        else:
            return False
        self._publish(session, session.kv_len)
        self._drop_blocks(session)
        self.evictions += 1
        return True

    def _preempt(self, session: Session) -> None:
        """Take slot and blocks from a running session and put it at the head of the queue."""
        self._leave_slot(session)
        self._publish(session, session.kv_len)
        self._drop_blocks(session)
        self._to_head(session)
        self.preemptions += 1

    def _to_head(self, session: Session) -> None:
        session.state = State.QUEUED
        self._begun.appendleft(session)

    def _enter_slot(self, session: Session) -> None:
        session.slot = heapq.heappop(self._free_slots)
        session.state = State.RUNNING
        self._running[session.slot] = session
        self._slots.load(session, self._block_size)

    def _leave_slot(self, session: Session) -> None:
        """Also fixes `kv_len`, which is not kept up while a session decodes."""
        if session is self._cut:
            self._cut = None
        else:
            session.kv_len = len(session.tokens) - 1
            self._decoding = self._decoding[self._decoding != session.slot]
        del self._running[session.slot]
        heapq.heappush(self._free_slots, session.slot)
        session.slot = NO_SLOT

    def _drop_blocks(self, session: Session) -> None:
        self.pool.release(session.blocks)
        session.forget_kv()


def _age(session: Session) -> int:
    """Sessions are numbered as they are opened: the larger, the younger."""
    return session.session_id
