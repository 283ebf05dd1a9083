"""The native rollout engine: a slot-based decode loop in torch on the policy's own weights.

    open/resume -> queue -> [slot] -> step(): pack new tokens + last tokens -> Decoder -> logits -> sample
                                      ^                                                            |
                                      +------- running <-------- not ended --------- token, log-prob
                                                                                                   |
    close/resume <- waiting (slot and KV state kept) <------ ended ------- Completion ------------+

Everything that runs advances by one token per step; new prompts and observations are prefilled in the same
step, packed without padding. Log-probs come from the pass that samples. There is one host synchronisation per
step (a few more where a turn truncates its distribution).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from verl.workers.rollout.engine import Completion, SamplingParams
from verl.workers.rollout.native.architecture import ModelSpec, rotary_table
from verl.workers.rollout.native.attention import PrefillSpan, plan_decode
from verl.workers.rollout.native.kv_cache import KVCache
from verl.workers.rollout.native.model import Decoder, PackedBatch
from verl.workers.rollout.native.sampler import sample
from verl.workers.rollout.native.session import Session, SlotTable, State
from verl.workers.rollout.native.weights import ModelWeights, WeightStore

_MAX_LOGITS = 1 << 27  # elements of logits held at once; more rows are sampled in pieces


class NativeEngine:
    """`RolloutEngine` (verl/workers/rollout/engine.py) for Qwen2, Qwen3, Llama and Mistral on CPU or CUDA.

    Weights are references to the tensors given to `update_weights` where dtype and device agree. If the owner
    changes them in place, KV state of open sessions is stale until it calls `update_weights` again, which
    drops all sessions.

    A session whose turn ended keeps its slot until it is resumed or closed. If waiting sessions hold every
    slot, `has_runnable` is False although others are queued: the owner has to resume or close some.

    Attributes:
        max_model_len: most tokens of one session, prompt and observations included; a turn that reaches it
            ends with "length".
        num_slots: sessions that can hold KV state at a time.
        version: of the present weights, -1 before the first update.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        num_slots: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_budget_bytes: int | None = None,
        max_prefill_tokens: int = 8192,
    ) -> None:
        """
        Args:
            num_slots: sessions side by side; fewer if `kv_budget_bytes` does not hold as many.
            dtype: of compute and KV state; weights of another dtype are cast once per update.
            kv_budget_bytes: bound on the KV state at full length (None = no bound).
            max_prefill_tokens: new tokens in one forward pass (a longer prompt goes alone); bounds memory.
        """
        if num_slots < 1 or max_model_len < 2 or max_prefill_tokens < 1:
            raise ValueError(
                f"num_slots={num_slots}, max_model_len={max_model_len}, "
                f"max_prefill_tokens={max_prefill_tokens}; expected at least 1, 2 and 1"
            )
        self.device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0", as tensors name it
        self.spec = ModelSpec.from_config(model_config)
        self.max_model_len = max_model_len
        self.version = -1
        table = rotary_table(model_config, self.spec.head_dim, max_model_len, dtype, self.device)
        self._decoder = Decoder(self.spec, *table)
        self._store = WeightStore(self.spec, dtype, self.device)
        self._weights: ModelWeights | None = None
        self._cache = KVCache(self.spec, num_slots, max_model_len, dtype, self.device, kv_budget_bytes)
        self.num_slots = self._cache.num_slots
        self._max_prefill_tokens = max_prefill_tokens
        self._next_id = 0
        self._counts = dict.fromkeys(("steps", "generated_tokens", "prefilled_tokens", "shared_tokens"), 0)
        self._seconds = 0.0
        self._sessions: dict[int, Session] = {}
        self._queue: deque[Session] = deque()
        self._ready: list[Session] = []  # have a slot, and tokens to prefill
        self._full: list[Session] = []  # resumed with more than max_model_len holds
        self._running: dict[int, Session] = {}  # by slot
        self._free = list(range(self.num_slots))  # a heap, so that low slots are used first
        self._slots = SlotTable(self.num_slots)

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        """True if `step` has something to do: a running session, new tokens, or a queue and a free slot."""
        return bool(self._running or self._ready or self._full or (self._queue and self._free))

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt. ValueError if it is empty, has unknown ids, or leaves no room to generate."""
        tokens = self._checked(token_ids)
        if not tokens or len(tokens) >= self.max_model_len:
            raise ValueError(
                f"a prompt of {len(tokens)} tokens; expected 1 to {self.max_model_len - 1}, "
                f"one less than max_model_len={self.max_model_len}"
            )
        session = Session(self._next_id, params, [])
        self._next_id += 1
        session.begin_turn(params, tokens, self.max_model_len)
        self._sessions[session.session_id] = session
        self._queue.append(session)
        return session.session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens (none is fine) and sample another turn.

        If they leave no room within max_model_len, the next `step` returns an empty completion with "length".
        """
        session = self._session(session_id)
        if session.state is not State.WAITING:
            raise ValueError(
                f"session {session_id} is {session.state.value}; only one whose turn ended can be resumed"
            )
        session.begin_turn(params, session.pending + self._checked(token_ids), self.max_model_len)
        if session.limit < 1:
            self._full.append(session)
        else:
            self._ready.append(session)
        session.state = State.READY

    def partial(self, session_id: int) -> list[int]:
        """What the running turn has sampled so far; empty for a session that is not running."""
        session = self._session(session_id)
        return list(session.token_ids) if session.state is State.RUNNING else []

    def close(self, session_id: int) -> None:
        """Forget a session, running or not. Its slot is taken from the queue in the next `step`."""
        session = self._sessions.pop(self._session(session_id).session_id)
        if session.state is State.QUEUED:
            self._queue.remove(session)
        elif session.state is State.READY:
            (self._full if session in self._full else self._ready).remove(session)
        elif session.state is State.RUNNING:
            del self._running[session.slot]
        if session.slot >= 0:
            heapq.heappush(self._free, session.slot)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all parameters, as (Hugging Face name, full tensor); drops all sessions and their KV state.

        ValueError for unknown, missing or wrongly shaped ones; the engine then has no weights until the next
        call. `lm_head.weight` may be left out when embeddings are tied.
        """
        self._drop_all()
        self._weights = None
        self._weights = self._store.update(weights)
        self.version = version

    def release_weights(self) -> None:
        """Drop all sessions and every reference to weights; `update_weights` comes before the next step."""
        self._drop_all()
        self._weights = None
        self._store.clear()
        self.version = -1

    def release_cache(self) -> None:
        """Drop all sessions and give the KV memory back until the next step (for a trainer on one device)."""
        self._drop_all()
        self._cache.release()

    def stats(self) -> dict[str, float]:
        """Load now (running, waiting, queued, slots, slots_used, kv_bytes) and sums since construction.

        `generated_tokens`; `prefilled_tokens` (computed); `shared_tokens` (prompt tokens taken from an equal
        prompt of the same step); `seconds` in `step`; `tokens_per_second` (generated).
        """
        states = [session.state for session in self._sessions.values()]
        return {
            "running": float(states.count(State.RUNNING) + states.count(State.READY)),
            "waiting": float(states.count(State.WAITING)),
            "queued": float(len(self._queue)),
            "slots": float(self.num_slots),
            "slots_used": float(self.num_slots - len(self._free)),
            "kv_bytes": float(self._cache.num_bytes),
            **{name: float(count) for name, count in self._counts.items()},
            "seconds": self._seconds,
            "tokens_per_second": self._counts["generated_tokens"] / self._seconds if self._seconds else 0.0,
        }

    # ---- one step ----

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Prefill what is new, sample one token for every running session; return the turns that ended."""
        if not self.has_runnable:
            return []
        if self._weights is None:
            raise RuntimeError("the engine has no weights; call update_weights first")
        start = time.perf_counter()
        ended = [self._end(session, "length", None) for session in self._full]
        self._full = []
        decode = [self._running[slot] for slot in sorted(self._running)]
        prefill = self._admit()
        sampled = decode + prefill
        if sampled:
            slots = np.array([session.slot for session in sampled])
            hidden = self._forward(slots[: len(decode)], prefill)
            tokens, log_probs = self._sample(hidden, slots)
            self._slots.last_token[slots] = tokens
            ended += self._advance(sampled, tokens.tolist(), log_probs.tolist())
        self._counts["steps"] += 1
        self._seconds += time.perf_counter() - start
        return ended

    def _admit(self) -> list[Session]:
        """Give free slots to the queue; all sessions that now have a slot and tokens to prefill."""
        while self._queue and self._free:
            session = self._queue.popleft()
            session.slot = heapq.heappop(self._free)
            session.state = State.READY
            self._ready.append(session)
        prefill, self._ready = self._ready, []
        for session in prefill:
            self._slots.begin_turn(session)
            self._slots.kv_len[session.slot] = session.context_len
        return prefill

    def _forward(self, decode_slots: np.ndarray, prefill: list[Session]) -> Tensor:
        """Hidden states [A, hidden] of the last tokens, decode rows first, then `prefill` in its order."""
        longest = [int(self._slots.kv_len[decode_slots].max()) + 1] if len(decode_slots) else []
        self._cache.ensure(max(longest + [session.context_len for session in prefill]))
        assert self._weights is not None
        parts = []
        for chunk in self._chunks(prefill) or [[]]:
            batch = self._pack(decode_slots, chunk)
            parts.append(self._decoder.hidden_states(self._weights, self._cache, batch))
            self._slots.kv_len[decode_slots] += 1
            decode_slots = decode_slots[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _chunks(self, prefill: list[Session]) -> list[list[Session]]:
        """Cut into runs whose new tokens stay below max_prefill_tokens."""
        chunks: list[list[Session]] = []
        room = 0
        for session in prefill:
            if not chunks or len(session.pending) > room:
                chunks.append([])
                room = self._max_prefill_tokens
            chunks[-1].append(session)
            room -= len(session.pending)
        return chunks

    def _pack(self, decode_slots: np.ndarray, chunk: list[Session]) -> PackedBatch:
        """One packed batch: a row per decode slot, then the chunk's new tokens, equal prompts only once."""
        num_decode = len(decode_slots)
        positions_now = self._slots.kv_len[decode_slots]
        token_ids, positions = [self._slots.last_token[decode_slots]], [positions_now]
        write_slots, write_rows = [decode_slots], [np.arange(num_decode)]
        write_positions = [positions_now]
        spans: list[PrefillSpan] = []
        span_of_prompt: dict[tuple[int, ...], PrefillSpan] = {}
        out_rows = list(range(num_decode))
        num_rows = num_decode
        for session in chunk:
            count, start = len(session.pending), session.kv_len
            where = np.arange(start, start + count)
            prompt = tuple(session.pending) if start == 0 else ()
            span = span_of_prompt.get(prompt) if prompt else None
            if span is None:
                span = PrefillSpan(session.slot, start, num_rows, count)
                spans.append(span)
                if prompt:
                    span_of_prompt[prompt] = span
                token_ids.append(np.array(session.pending, dtype=np.int64))
                positions.append(where)
                num_rows += count
                self._counts["prefilled_tokens"] += count
            else:
                self._counts["shared_tokens"] += count
            write_slots.append(np.full(count, session.slot))
            write_rows.append(np.arange(span.first, span.first + count))
            write_positions.append(where)
            out_rows.append(span.first + count - 1)
        rows = np.concatenate(write_rows)
        return PackedBatch(
            token_ids=self._tensor(np.concatenate(token_ids)),
            positions=self._tensor(np.concatenate(positions)),
            write_slots=self._tensor(np.concatenate(write_slots)),
            write_positions=self._tensor(np.concatenate(write_positions)),
            write_rows=None if len(rows) == num_rows else self._tensor(rows),
            num_decode=num_decode,
            decode=plan_decode(
                decode_slots,
                positions_now + 1,
                self._cache.length,
                self.spec.num_kv_heads * self.spec.head_dim,
                self.device,
            ),
            spans=spans,
            out_rows=None if not chunk else self._tensor(np.array(out_rows)),
        )

    def _sample(self, hidden: Tensor, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logits, sampling, and the step's one transfer to the host: int64 and float64 [A]."""
        assert self._weights is not None
        rows = self._slots.sampling_rows(slots)
        most = max(1, _MAX_LOGITS // self.spec.vocab_size)
        parts = []
        for first in range(0, len(slots), most):
            part = slice(first, first + most)
            logits = F.linear(hidden[part], self._weights.lm_head).float()
            parts.append(torch.stack([x.to(torch.float64) for x in sample(logits, rows[part])]))
        tokens, log_probs = torch.cat(parts, 1).cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise RuntimeError(
                f"sampling met a log-prob that is not finite: weights version {self.version} hold or "
                "produce NaN or infinity"
            )
        return tokens.astype(np.int64), log_probs

    def _advance(self, sampled: list[Session], tokens: list[int], log_probs: list[float]) -> list[Completion]:
        """Book the step's tokens; sessions move to running or, if their turn ended, to waiting."""
        self._counts["generated_tokens"] += len(sampled)
        ended = []
        for session, token_id, log_prob in zip(sampled, tokens, log_probs, strict=True):
            if session.state is not State.RUNNING:
                session.state = State.RUNNING
                session.version_first = self.version
                self._running[session.slot] = session
            finish = session.accept(token_id, log_prob)
            if finish is not None:
                del self._running[session.slot]
                session.kv_len = int(self._slots.kv_len[session.slot])
                session.num_sampled += len(session.token_ids)
                session.pending = [token_id]  # sampled, but not in the cache yet
                ended.append(self._end(session, *finish))
        return ended

    def _end(self, session: Session, reason: str, stop_string: str | None) -> Completion:
        session.state = State.WAITING
        return session.completion(reason, stop_string, self.version)

    # ---- small things ----

    def _drop_all(self) -> None:
        self._sessions, self._running = {}, {}
        self._queue, self._ready, self._full = deque(), [], []
        self._free = list(range(self.num_slots))
        self._slots = SlotTable(self.num_slots)

    def _session(self, session_id: int) -> Session:
        if session_id not in self._sessions:
            raise ValueError(f"no session {session_id}: it was closed, or dropped by update_weights")
        return self._sessions[session_id]

    def _checked(self, token_ids: Sequence[int]) -> list[int]:
        tokens = [int(token_id) for token_id in token_ids]
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.spec.vocab_size):
            raise ValueError(
                f"token ids range from {min(tokens)} to {max(tokens)}; the model has 0 to "
                f"{self.spec.vocab_size - 1}. Do the tokenizer and the model belong together?"
            )
        return tokens

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
