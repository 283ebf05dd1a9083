"""vLLM in this process, which trains or samples, as a `RolloutEngine` (verl/sessions/engine_contract.py).

    open/resume -> request with all tokens so far -> vLLM's scheduler -> step(): one token each
                                                                           |
    close <- waiting for its owner <- Completion <- stop string, eos, limit +

This engine is exact where vLLM by itself is not:

- A stop string ends a turn at the token that completes it. It is matched on the bytes of tokens
  (`verl/sessions/stop.py`), while vLLM looks at detokenised text, which leaves special tokens out and waits
  for whole characters.
- Random numbers belong to (seed, number of tokens drawn with it) (`sampler.py`).
- After new weights no KV state of older ones is used, and nothing derived from them is left
  (`weight_transfer.py`).

Several processes may share one model (tensor parallelism). Each has vLLM's scheduler and its slice of the
weights. The first of them leads: it alone has sessions, and before each step it tells the others what it has
given to vLLM since the last one. vLLM decides by that alone, so all run the same batches. In a process that
only samples vLLM itself starts the processes that share a model (`worker_processes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.sessions.engine_contract import (
    Completion,
    RolloutEngine,
    RolloutSession,
    SamplingParams,
    checked_weights,
)
from verl.utils.device import HostCopy
from verl.workers.rollout.vllm import check_supported, sampling_arguments
from verl.workers.rollout.vllm import start as vllm_process
from verl.workers.rollout.vllm.weight_transfer import expected_shapes, weights_in_memory


@dataclass(eq=False)
class VllmSession(RolloutSession):
    """A trajectory and, while a turn is under way, vLLM's own record of its request.

    Attributes:
        request: vLLM's record.
        cache_salt: With `keeps_kv` the version of the weights at which the session was opened. Sessions find
            only KV state of others with the same salt.
    """

    request: Any = None
    cache_salt: str | None = None

    @property
    def request_id(self) -> str:
        """Return the present turn's name in vLLM."""
        return f"{self.session_id}-{self.turn}"


class VllmEngine(RolloutEngine[VllmSession]):
    """The `RolloutEngine` on vLLM's V1 engine, driven step by step.

    Requests that don't fit wait in vLLM's queue. When the KV cache is full, vLLM preempts the youngest
    request. A session whose turn ended holds no memory that others could not take. Its blocks stay in the
    prefix cache until they are needed, and after that they are computed again.
    """

    session_class = VllmSession

    def __init__(
        self,
        model: str | Path,
        *,
        max_model_len: int,
        tensor_parallel_size: int = 1,
        worker_processes: bool = False,
        **engine_args: Any,
    ) -> None:
        """Start vLLM with random weights. `load_weights` comes before the first step.

        Args:
            model: Folder or hub name of a Hugging Face model, of which only the configuration is read.
            max_model_len: Maximum number of tokens of a session.
            tensor_parallel_size: Number of processes that share the model, neighbours among
                torch.distributed's ranks. All of them make this engine and call its methods, except for those
                of sessions and `step`.
            worker_processes: Whether vLLM starts the processes that share the model, on this machine. They
                are none of torch.distributed's, and this process alone makes the engine.
            engine_args: Arguments of vLLM's `EngineArgs`. Without kv_cache_memory_bytes the KV cache takes
                what `gpu_memory_utilization` leaves (CUDA), or what vLLM takes by itself (CPU, where
                VLLM_CPU_KVCACHE_SPACE in the environment takes precedence over both).

        Raises:
            ValueError: If vLLM is not installed, or does not know an argument or the model, if the KV cache
                does not hold one sequence of max_model_len, or if the number of processes is no multiple of
                tensor_parallel_size.
        """
        num_processes = dist.get_world_size() if dist.is_initialized() else 1
        if not worker_processes and num_processes % tensor_parallel_size:
            raise ValueError(
                f"tensor_model_parallel_size={tensor_parallel_size}, and {num_processes} processes train; "
                "expected a divisor of their number"
            )
        self._keep_process_group = dist.is_initialized()
        arguments = {"model": str(model), "max_model_len": max_model_len}
        arguments |= {"tensor_parallel_size": tensor_parallel_size}
        self._llm: Any = vllm_process.start(arguments | engine_args, worker_processes=worker_processes)
        from vllm.distributed import get_tp_group
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self._worker_processes = worker_processes
        self._sharing = get_tp_group() if tensor_parallel_size > 1 and not worker_processes else None
        self._orders: list[tuple[str, Any]] = []  # for the other processes that share the model
        self._llm.collective_rpc("rollout_install_sampler")
        self._sampler: Any = None  # the sampler of this process, which gives both log-probs
        if not worker_processes:
            (self._sampler,) = self._llm.collective_rpc(lambda worker: worker.model_runner.sampler)
        _allocate_only_at_block_edges(self._scheduler)
        super().__init__(max_model_len, self._llm.model_config.hf_config.get_text_config().vocab_size)
        self._requests: dict[str, VllmSession] = {}
        self._names: list[str] = []  # the last step's requests
        self._drawn = HostCopy(torch.empty(3, 0))  # float64, their tokens and both log-probs
        self._prefilled_tokens = self._prefix_hit_tokens = self._preemptions = 0

    @property
    def has_runnable(self) -> bool:
        return bool(self._requests or self._without_room)

    def _check_params(self, params: SamplingParams) -> None:
        check_supported(params)

    def _queue(self, session: VllmSession) -> None:
        from vllm.inputs import tokens_input

        if session.turn == 1 and self.keeps_kv:
            session.cache_salt = str(self.version)
        prompt = tokens_input(session.tokens.tolist(), cache_salt=session.cache_salt)
        params = vllm_params(session, num_log_probs=1 if self._worker_processes else None)
        request = self._llm.input_processor.process_inputs(session.request_id, prompt, params, ("generate",))
        self._call_core("add_request", request)
        session.request = self._scheduler.requests[session.request_id]
        self._requests[session.request_id] = session

    def _drop(self, session: VllmSession) -> None:
        if session.request is not None:
            self._drop_request(session)
            self._call_core("abort_requests", [session.request_id])

    def _drop_request(self, session: VllmSession) -> None:
        del self._requests[session.request_id]
        self._preemptions += session.request.num_preemptions
        session.request = None

    # ---- one step ----

    def _advance(self) -> list[Completion]:
        """Advance everything that runs by one token."""
        ended: list[Completion] = []
        stopped: list[str] = []
        if not self._requests:  # there are only turns without room
            return []
        self._broadcast_orders(steps=True)
        # vLLM would make request outputs of these, which costs the host more time than all that happens here.
        outputs = self._llm.engine_core.get_output().outputs
        if self._worker_processes:
            log_probs = {output.request_id: output.new_logprobs.logprobs[0].tolist() for output in outputs}
        else:
            self._take_step()
            drawn = self._drawn.get()[1:].T.tolist()
            log_probs = dict(zip(self._names, drawn, strict=True))
        for output in outputs:
            session = self._requests[output.request_id]
            (token_id,) = output.new_token_ids
            log_prob, model_log_prob = log_probs[output.request_id]
            if not (math.isfinite(log_prob) and math.isfinite(model_log_prob)):
                raise RuntimeError(
                    f"sampling met a log-prob that is not finite: weights version {self.version} hold or "
                    "produce NaN or infinity"
                )
            if output.prefill_stats is not None:  # this is the turn's first token
                hits = output.prefill_stats.num_cached_tokens
                self._prefix_hit_tokens += hits
                self._prefilled_tokens += len(session.tokens) - hits
            self._generated_tokens += 1
            finish = session.accept(token_id, log_prob, model_log_prob, self.version)
            assert finish is not None or not output.finished, "vLLM ended a turn that has room to go on"
            if finish is not None:
                if not output.finished:
                    stopped.append(session.request_id)
                self._drop_request(session)
                ended.append(session.end_turn(*finish, self.version))
        # One at a time: vLLM frees several in the order of a set, which differs from process to process.
        for name in stopped:
            self._call_core("abort_requests", [name])
        return ended

    def _take_step(self) -> None:
        """Take the results of the step whose outputs vLLM has given.

        With asynchronous scheduling the next step is under way by then, and nothing is taken of it yet. The
        first call gives no outputs. Raises the error of the next step if it failed.
        """
        self._names = []
        self._drawn = HostCopy(torch.empty(3, 0))
        queue = self._llm.engine_core.engine_core.batch_queue or ()  # it is None if scheduling is synchronous
        for future, _, _ in queue:
            if future.done():  # it failed, or had nothing to do
                future.result()
        num_under_way = sum(scheduled.total_num_scheduled_tokens > 0 for _, scheduled, _ in queue)
        while len(self._sampler.steps) > num_under_way:
            self._names, self._drawn = self._sampler.steps.popleft()

    # ---- several processes that share the model ----

    @contextmanager
    def leading(self) -> Iterator[bool]:
        if self._sharing is None or self._sharing.rank_in_group == 0:
            try:
                yield True
            finally:
                self._broadcast_orders(steps=False)
            return
        while self._follow():
            pass
        yield False

    def _call_core(self, method: str, argument: Any) -> None:
        """Call a method of vLLM's core, here and, before the next step, in the processes that follow."""
        if self._sharing is not None:
            self._orders.append((method, argument))
        getattr(self._llm.engine_core, method)(argument)

    def _broadcast_orders(self, steps: bool) -> None:
        """Tell the other processes what to do, and whether a step or the end of this generation comes next.

        They also receive the tokens that the last step gave here, because it must have given the same there.
        """
        if self._sharing is not None:
            orders = self._orders
            self._orders = []
            message = [orders, steps, self._drawn.get()[0].long().tolist()]
            dist.broadcast_object_list(message, self._sharing.ranks[0], self._sharing.cpu_group)

    def _follow(self) -> bool:
        """Do what the leader does, up to its next step.

        Returns:
            False if the leader's generation is over.

        Raises:
            RuntimeError: If the last step gave other tokens here.
        """
        assert self._sharing is not None
        message: list[Any] = [None, None, None]
        dist.broadcast_object_list(message, self._sharing.ranks[0], self._sharing.cpu_group)
        orders, steps, tokens = message
        if tokens != (own_tokens := self._drawn.get()[0].long().tolist()):
            raise RuntimeError(
                f"the processes that share a model have sampled different tokens: {tokens} and {own_tokens}, "
                f"for {self._names}; expected the same of the same logits"
            )
        for method, argument in orders:
            getattr(self._llm.engine_core, method)(argument)
        if steps:
            self._llm.engine_core.get_output()
            self._take_step()
        return bool(steps)

    # ---- weights and memory ----

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if not self.keeps_kv or self.version < 0:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self.version = -1
        if self._asleep == 2 and not self._on_cpu:
            self._llm.wake_up(["weights"])
        if self._worker_processes:
            model_config = self._llm.model_config
            shapes = expected_shapes(model_config.hf_config, model_config.trust_remote_code)
            with weights_in_memory(checked_weights(weights, shapes)) as file:
                self._llm.collective_rpc("rollout_load_file", args=(str(file),))
        else:
            self._llm.collective_rpc("rollout_load_weights", args=(weights,))
        self.version = version

    def sleep(self, level: int = 1) -> int:
        """Give memory to the trainer by vLLM's sleep, on CUDA.

        Level 1 drops the KV cache and moves the weights to the host until `wake`. Level 2 drops both. On CPU
        vLLM has no sleep, and keeps its memory.

        Raises:
            ValueError: If `level` is neither 1 nor 2.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}; expected 1 or 2")
        if self._asleep:
            return 0
        self._llm.reset_prefix_cache(reset_running_requests=True)
        freed = 0
        if not self._on_cpu:
            free_before = torch.cuda.mem_get_info()[0]
            self._llm.sleep(level, mode="keep")
            freed = max(0, torch.cuda.mem_get_info()[0] - free_before)
        self._asleep = level
        if level == 2:
            self.version = -1
        return freed

    def wake(self) -> None:
        if self._asleep and not self._on_cpu:
            self._llm.wake_up()
        self._asleep = 0

    def stats(self) -> dict[str, float]:
        """Return the figures of `RolloutEngine.stats`.

        `prefilled_tokens` leaves out tokens that are computed again after preemption.
        """
        running, queued = self._scheduler.get_request_counts()
        used_share = self._scheduler.get_kv_cache_usage()
        size = sum(tensor.size for tensor in self._scheduler.kv_cache_config.kv_cache_tensors)
        preemptions = sum(session.request.num_preemptions for session in self._requests.values())
        return super().stats() | {
            "running": float(running),
            "queued": float(queued),
            "kv_bytes": float(used_share * size),
            "kv_used_share": float(used_share),
            "prefilled_tokens": float(self._prefilled_tokens),
            "prefix_hit_tokens": float(self._prefix_hit_tokens),
            "preemptions": float(self._preemptions + preemptions),
        }

    def shutdown(self) -> None:
        if self._llm is not None:
            vllm_process.end(self._llm, keep_process_group=self._keep_process_group)
        self._llm = None
        self._sessions = {}
        self._requests = {}
        self._without_room = []

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler


def _allocate_only_at_block_edges(scheduler: Any) -> None:
    """Let vLLM's scheduler ask for a slot only at the first and the last token of a block.

    By itself it asks for each token, which takes a quarter of the host's time of a decoding step. Where all
    layers keep all tokens, only two tokens matter: the first of a block, which takes the block, and the last,
    which makes it one that others can share.
    """
    from vllm.v1.kv_cache_interface import is_full_attention_spec
    from vllm.v1.request import RequestStatus

    manager = scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    size = managers[0].block_size
    if not all(m.block_size == size and is_full_attention_spec(m.kv_cache_spec) for m in managers):
        return
    vllm_allocate_slots = manager.allocate_slots
    no_blocks = manager.empty_kv_cache_blocks

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        is_within = 0 < request.num_computed_tokens % size < size - 1
        if num_new_tokens == 1 and is_within and request.status == RequestStatus.RUNNING:
            return no_blocks
        return vllm_allocate_slots(request, num_new_tokens, *args, **kwargs)

    manager.allocate_slots = allocate_slots


def vllm_params(session: RolloutSession, num_log_probs: int | None = None) -> Any:
    """Return the parameters of a session's turn in the terms of vLLM.

    The request returns token ids as they are sampled, with two log-probs each (see `sampler.py`). vLLM ends
    it at an eos token or the limit. Stop strings are matched here, on the bytes of whole tokens.

    Args:
        session: The session, whose turn is set up.
        num_log_probs: 1 if the log-probs are to come as vLLM's answer, otherwise None.
    """
    from vllm import SamplingParams as VllmSamplingParams

    params = session.params
    return VllmSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        max_tokens=session.limit,
        logprobs=num_log_probs,
        stop_token_ids=None if params.ignore_eos else sorted(params.eos_token_ids),
        ignore_eos=True,
        detokenize=False,
        extra_args=sampling_arguments(session),
    )
