"""The native rollout engine: sessions in, completions out, on a model runner of our own.

    open/resume -> Scheduler.plan -> StepBatch -> PagedRunner.step -> Sampled -> sessions -> Completion
                        ^                                                            |
                        +---- Scheduler.finish / park (turn ended) <-----------------+

`SessionEngine` is all of it but the model; `NativeEngine` is that engine on the policy's own weights.
Log-probs come from the pass that samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.workers.rollout.base import Completion, Partial, SamplingParams, checked_prompt, checked_tokens
from verl.workers.rollout.native.runner import PagedRunner
from verl.workers.rollout.native.scheduler import Scheduler
from verl.workers.rollout.native.session import Session, State


class SessionEngine:
    """`RolloutEngine` (verl/workers/rollout/base.py) on a runner.

    A session whose turn ended gives up its slot at once. Its KV state stays as long as no other session needs
    the blocks; if it was dropped, it is computed again from the session's tokens when the session is resumed.

    The k-th sampled token of a session depends on its seed, k and its own tokens only, not on what runs
    beside it, nor on preemption.

    Attributes:
        max_model_len: most tokens of one session, prompt and observations included; a turn that reaches it
            ends with "length".
        max_num_seqs: sessions that run at a time.
        num_blocks: of the KV pool.
        version: of the present weights, -1 while there are none.
    """

    def __init__(
        self,
        runner: PagedRunner,
        max_num_seqs: int,
        max_model_len: int,
        kv_budget_bytes: int | None = None,
        max_prefill_tokens: int = 8192,
    ) -> None:
        """The arguments are those of `NativeEngine`. Takes no memory for KV state before the first step."""
        if max_num_seqs < 1 or max_model_len < 2 or max_prefill_tokens < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}, max_model_len={max_model_len}, "
                f"max_prefill_tokens={max_prefill_tokens}; expected at least 1, 2 and 1"
            )
        per_sequence = -(-max_model_len // runner.block_size)
        self.num_blocks = max_num_seqs * per_sequence
        if kv_budget_bytes is not None:
            self.num_blocks = kv_budget_bytes // runner.bytes_per_block
            if self.num_blocks < per_sequence:
                raise ValueError(
                    f"kv_budget_bytes is {kv_budget_bytes:,}, but one sequence of "
                    f"max_model_len={max_model_len} needs {per_sequence * runner.bytes_per_block:,}; "
                    "raise the budget or lower max_model_len"
                )
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.version = -1
        self._runner = runner
        self._scheduler = Scheduler(
            self.num_blocks, runner.block_size, max_num_seqs, max_model_len, max_prefill_tokens
        )
        self._sessions: dict[int, Session] = {}
        self._full: list[Session] = []  # resumed with more tokens than max_model_len has room for
        self._next_id = 0
        self._has_weights = self._has_pool = self._asleep = False
        self._steps = self._generated_tokens = 0
        self._seconds = 0.0

    # ---- sessions ----

    @property
    def has_runnable(self) -> bool:
        """True if `step` has something to do: everything but parked sessions."""
        return bool(self._full) or self._scheduler.has_runnable

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a prompt. ValueError if it is empty, has unknown ids, or leaves no room to generate."""
        tokens = checked_prompt(token_ids, self._runner.vocab_size, self.max_model_len)
        session = Session(self._next_id, params, prompt_len=len(tokens))
        self._next_id += 1
        session.begin_turn(params, tokens, self.max_model_len)
        self._sessions[session.session_id] = session
        self._scheduler.add(session)
        return session.session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Append observation tokens (none is fine) and sample another turn.

        If they leave no room within max_model_len, the next `step` returns an empty completion with "length".
        """
        session = self._session(session_id)
        if session.state is not State.PARKED:
            raise ValueError(
                f"session {session_id} is {session.state.value}; only one whose turn ended can be resumed"
            )
        session.begin_turn(params, checked_tokens(token_ids, self._runner.vocab_size), self.max_model_len)
        if session.limit < 1:
            self._full.append(session)
        else:
            self._scheduler.add(session)

    def partial(self, session_id: int) -> Partial:
        """What the present turn has sampled so far, also while it is preempted."""
        return self._session(session_id).partial()

    def close(self, session_id: int) -> None:
        """Forget a session in whatever state it is. Its slot and blocks are free at once."""
        session = self._session(session_id)
        del self._sessions[session_id]
        if session in self._full:
            self._full.remove(session)
            session.state = State.PARKED
        self._scheduler.remove(session)

    def _session(self, session_id: int) -> Session:
        if session_id not in self._sessions:
            raise ValueError(f"no session {session_id}: it was closed, or never opened")
        return self._sessions[session_id]

    # ---- one step ----

    def step(self) -> list[Completion]:
        """Prefill what is new, sample a token for every session that has all its tokens computed.

        Returns the turns that ended. If the model raises, all KV state is dropped and the sessions stay as
        they were before the step.
        """
        if self._asleep:
            raise RuntimeError("the engine is asleep; call wake first")
        if not self.has_runnable:
            return []
        if not self._has_weights:
            raise RuntimeError("the engine has no weights; call load_weights first")
        start = time.perf_counter()
        if not self._has_pool:
            self._runner.allocate(self.num_blocks)
            self._has_pool = True
        try:
            ended = self._run_one() if self._scheduler.has_runnable else []
        except BaseException:  # whatever it was, also Ctrl-C: what the pool holds is not known any more
            self._scheduler.drop_kv()
            raise
        ended += [self._end(session, "length", None) for session in self._full]
        self._full = []
        self._steps += 1
        self._seconds += time.perf_counter() - start
        return ended

    def _run_one(self) -> list[Completion]:
        step = self._scheduler.plan()
        if step.copies_before:
            self._runner.copy_blocks(*zip(*step.copies_before, strict=True))
        sampled = self._runner.step(step.batch, step.rows)
        if step.copies_after:
            self._runner.copy_blocks(*zip(*step.copies_after, strict=True))
        self._scheduler.finish(step, sampled.token_ids)
        self._generated_tokens += len(step.sessions)
        arrays = (sampled.token_ids, sampled.log_probs, sampled.model_log_probs)
        ended = []
        for session, *drawn in zip(step.sessions, *(array.tolist() for array in arrays), strict=True):
            finish = session.accept(*drawn, self.version)
            if finish is not None:
                self._scheduler.park(session)
                ended.append(self._end(session, *finish))
        return ended

    def _end(self, session: Session, reason: str, stop_string: str | None) -> Completion:
        session.state = State.PARKED
        return session.completion(reason, stop_string, self.version)

    # ---- weights and memory ----

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take all parameters, as (Hugging Face name, full tensor); sessions stay, their KV state goes.

        ValueError for unknown, missing or wrongly shaped ones; the engine then has no weights until the next
        call.
        """
        self._scheduler.drop_kv()
        self._has_weights, self.version = False, -1
        self._runner.load_weights(weights)
        self._has_weights, self.version = True, version

    def sleep(self, level: int = 1) -> int:
        """Give back the KV cache and, at level 2, the weights too. Returns the bytes given back.

        On CPU only the part of the KV cache that was ever used counts: the rest is no memory.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level is {level}; expected 1 (KV cache) or 2 (KV cache and weights)")
        on_cpu = self._runner.device.type == "cpu"
        num_blocks = self._scheduler.pool.num_touched if on_cpu else self.num_blocks
        freed = num_blocks * self._runner.bytes_per_block if self._has_pool else 0
        self._scheduler.drop_kv()
        self._runner.release_cache()
        self._has_pool = False
        self._asleep = True
        if level == 2:
            freed += self._runner.release_weights()
            self._has_weights = False
            self.version = -1
        return freed

    def wake(self) -> None:
        """Take the memory again: that of the KV cache at once, weights with the next `load_weights`."""
        if self._asleep:
            self._runner.allocate(self.num_blocks)
            self._has_pool = True
            self._asleep = False

    def shutdown(self) -> None:
        """Forget all sessions, give back all memory. Safe to call twice."""
        for session_id in list(self._sessions):
            self.close(session_id)
        self.sleep(2)

    def stats(self) -> dict[str, float]:
        """Load now, and sums since construction; see `RolloutEngine.stats`.

        `prefix_hit_tokens` counts all tokens whose KV state was there already when a session was admitted:
        prompts that others have too, and a session's own after preemption. `evictions` (sum): times that a
        parked or queued session lost its KV state to others.
        """
        scheduler = self._scheduler
        parked = sum(session.state is State.PARKED for session in self._sessions.values())
        used = scheduler.pool.num_used
        return {
            "running": float(scheduler.num_running),
            "queued": float(scheduler.num_queued + len(self._full)),
            "parked": float(parked),
            "kv_bytes": float(used * self._runner.bytes_per_block),
            "kv_used_share": used / self.num_blocks,
            "weight_version": float(self.version),
            "steps": float(self._steps),
            "generated_tokens": float(self._generated_tokens),
            "prefilled_tokens": float(scheduler.prefilled_tokens),
            "prefix_hit_tokens": float(scheduler.prefix_hit_tokens),
            "preemptions": float(scheduler.preemptions),
            "evictions": float(scheduler.evictions),
            "seconds": self._seconds,
        }


class NativeEngine(SessionEngine):
    """The engine for Qwen2, Qwen3, Llama, Mistral, Gemma 2 and Gemma 3 on CPU or CUDA.

    Weights are packed copies on CPU and the very tensors given to `load_weights` on CUDA (where dtypes
    agree): after a change in place the owner calls `load_weights` again before it goes on.
    """

    def __init__(
        self,
        model_config: PretrainedConfig,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_budget_bytes: int | None = None,
        max_prefill_tokens: int = 8192,
        block_size: int = 32,
    ) -> None:
        """
        Args:
            max_num_seqs: sessions that run side by side.
            dtype: of compute and KV state; weights of another dtype are cast once per update.
            kv_budget_bytes: size of the KV pool; None = as much as `max_num_seqs` sequences of full length
                need (on CPU memory is only taken as it is used).
            max_prefill_tokens: new tokens in one step beside those of decoding sessions; a longer prompt is
                computed in several steps.
            block_size: positions of one KV block.
        """
        runner = PagedRunner(model_config, dtype, device, block_size, max_model_len)
        super().__init__(runner, max_num_seqs, max_model_len, kv_budget_bytes, max_prefill_tokens)
