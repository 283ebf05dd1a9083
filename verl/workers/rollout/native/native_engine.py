"""The native rollout engine: sessions in, completions out, on a model runner of our own.

    open/resume -> Scheduler.plan -> StepBatch -> PagedRunner.step -> Sampled -> sessions -> Completion
                        ^                                                            |
                        +---- Scheduler.finish / park (turn ended) <-----------------+

Log-probs come from the pass that samples. `open`, `resume` and `close` are methods of `RolloutEngine`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.sessions.engine_contract import Completion, RolloutEngine, Scores
from verl.workers.rollout.native.runner import PagedRunner
from verl.workers.rollout.native.scheduler import Scheduler
from verl.workers.rollout.native.session import NativeSession


class NativeEngine(RolloutEngine[NativeSession]):
    """The engine for Qwen2, Qwen3, Llama, Mistral and Gemma 3 on CPU or CUDA.

    A session whose turn ended gives up its slot at once. Its KV state stays as long as no other session needs
    the blocks. If it was dropped, it is computed again from the session's tokens when the session is resumed.

    The k-th sampled token of a session depends on its seed, k and its own tokens only. It does not depend on
    the sessions that run beside it, nor on preemption.

    Weights are packed copies on CPU. On CUDA they are the very tensors given to `load_weights` (where dtypes
    agree). After a change in place the owner calls `load_weights` again before it goes on.

    Attributes:
        max_num_seqs: Maximum number of sessions that run at a time.
        num_blocks: Number of blocks of the KV pool.
    """

    session_class = NativeSession

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
        """Create an engine without weights. It takes no memory for KV state before the first step.

        Args:
            model_config: The model's Hugging Face config.
            max_num_seqs: Maximum number of sessions that run side by side.
            max_model_len: Maximum number of tokens of a session.
            dtype: The dtype of compute and KV state. Weights of another dtype are cast once per update.
            device: The device that the engine runs on.
            kv_budget_bytes: The size of the KV pool. None means as much as `max_num_seqs` sequences of full
                length need (on CPU memory is only taken as it is used).
            max_prefill_tokens: Maximum number of new tokens in one step, beside those of decoding sessions. A
                longer prompt is computed in several steps.
            block_size: Number of positions of one KV block.

        Raises:
            ValueError: If a size is too small, the budget does not hold one sequence, or the engine does not
                run the model.
        """
        if max_num_seqs < 1 or max_model_len < 2 or max_prefill_tokens < 1:
            raise ValueError(
                f"max_num_seqs={max_num_seqs}, max_model_len={max_model_len}, "
                f"max_prefill_tokens={max_prefill_tokens}; expected at least 1, 2 and 1"
            )
        self._runner = PagedRunner(model_config, dtype, device, block_size, max_model_len)
        super().__init__(max_model_len, self._runner.vocab_size)
        num_needed = -(-max_model_len // block_size)
        self.num_blocks = max_num_seqs * num_needed
        if kv_budget_bytes is not None:
            self.num_blocks = kv_budget_bytes // self._runner.bytes_per_block
            if self.num_blocks < num_needed:
                raise ValueError(
                    f"kv_budget_bytes is {kv_budget_bytes:,}, but one sequence of "
                    f"max_model_len={max_model_len} needs {num_needed * self._runner.bytes_per_block:,}; "
                    "raise the budget or lower max_model_len"
                )
        self.max_num_seqs = max_num_seqs
        self._scheduler = Scheduler(
            self.num_blocks, block_size, max_num_seqs, max_model_len, max_prefill_tokens
        )
        self._has_pool = False

    @property
    def has_runnable(self) -> bool:
        return bool(self._without_room) or self._scheduler.has_runnable

    def _queue(self, session: NativeSession) -> None:
        if not session.num_sampled:
            session.prompt_len = len(session.tokens)
        self._scheduler.add(session)

    def _drop(self, session: NativeSession) -> None:
        self._scheduler.remove(session)

    def score(self, token_ids: Sequence[int], num_most_probable: int) -> Scores:
        tokens = self._checked(token_ids)
        if not 0 < len(tokens) <= self.max_model_len:
            raise ValueError(f"a text of {len(tokens)} tokens; expected 1 to {self.max_model_len}")
        return self._runner.score(tokens, num_most_probable)

    # ---- one step ----

    def _advance(self) -> list[Completion]:
        """Prefill what is new, and sample a token for every session that has all its tokens computed.

        If the model raises, all KV state is dropped and the sessions stay as they were before the step.
        """
        if not self._has_pool:
            self._runner.allocate(self.num_blocks)
            self._has_pool = True
        try:
            return self._run() if self._scheduler.has_runnable else []
        except BaseException:  # after any error, also Ctrl-C, it is unknown what the pool holds
            self._scheduler.drop_kv()
            raise

    def _run(self) -> list[Completion]:
        """Plan a step, run the model on it, and give each session its token; return the turns that ended."""
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
                ended.append(session.end_turn(*finish, self.version))
        return ended

    # ---- weights and memory ----

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.keeps_kv and self.version >= 0:
            self._scheduler.pool.forget_contents()  # sessions that begin from now on compute their own
        else:
            self._scheduler.drop_kv()
        self.version = -1
        self._runner.load_weights(weights)
        self.version = version

    def sleep(self, level: int = 1) -> int:
        """Give memory to the trainer, as in `RolloutEngine.sleep`.

        On CPU only that part of the KV cache counts that was ever used, because the rest takes no memory.

        Raises:
            ValueError: If `level` is neither 1 nor 2.
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
            self.version = -1
        return freed

    def wake(self) -> None:
        if self._asleep:
            self._runner.allocate(self.num_blocks)
            self._has_pool = True
            self._asleep = False

    def shutdown(self) -> None:
        for session_id in list(self._sessions):
            self.close(session_id)
        self.sleep(2)

    def stats(self) -> dict[str, float]:
        """Return the figures of `RolloutEngine.stats`, and `kv_bytes` and `evictions`.

        `kv_bytes` is the number of bytes of the blocks in use. `prefix_hit_tokens` counts all tokens whose KV
        state already existed when a session was admitted, both prompts that others have too and a session's
        own tokens after preemption. `evictions` (sum) counts how often a parked or queued session lost its KV
        state to others.
        """
        scheduler = self._scheduler
        num_used = scheduler.pool.num_used
        return super().stats() | {
            "running": float(scheduler.num_running),
            "queued": float(scheduler.num_queued + len(self._without_room)),
            "kv_bytes": float(num_used * self._runner.bytes_per_block),
            "kv_used_share": num_used / self.num_blocks,
            "prefilled_tokens": float(scheduler.prefilled_tokens),
            "prefix_hit_tokens": float(scheduler.prefix_hit_tokens),
            "preemptions": float(scheduler.preemptions),
            "evictions": float(scheduler.evictions),
        }
