"""Our use of vLLM beside vLLM's own: for benchmarks and the acceptance run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.bench.acceptance import Measurement, Setup
from verl.sessions.engine_contract import SamplingParams
from verl.workers.engine.loading import load_policy
from verl.workers.engine.lora import plain_parameters
from verl.workers.rollout.vllm.colocated_engine import VllmEngine

Measure = Callable[[Callable[[], Any]], float]  # measures a step


def our_way(engine: VllmEngine, sessions: int, length: int, measure: Measure) -> float:
    """Measure steps of so many sessions, each of which has room for `length` tokens."""
    params = [SamplingParams(length - 4, seed=seed, ignore_eos=True) for seed in range(sessions)]
    ids = [engine.open([seed % 90, 5, 6], session_params) for seed, session_params in enumerate(params)]
    try:
        return measure(engine.step)
    finally:
        for session_id in ids:
            engine.close(session_id)


def their_way(engine: VllmEngine, sessions: int, length: int, measure: Measure, seeded: bool = True) -> float:
    """Measure the same with vLLM's own engine, sampler and outputs.

    Each request has a log-prob, and a seed if `seeded`.
    """
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample.sampler import Sampler

    llm = engine._llm
    slots = engine._scheduler.kv_cache_manager
    runner = llm.model_executor.driver_worker.worker.model_runner
    sampler = runner.sampler
    allocate_slots = slots.__dict__.pop("allocate_slots", slots.allocate_slots)
    runner.sampler = Sampler(logprobs_mode="processed_logprobs")
    for seed in range(sessions):
        params = VllmSamplingParams(
            max_tokens=length - 4,
            seed=seed if seeded else None,
            logprobs=0,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
            ignore_eos=True,
        )
        llm.add_request(str(seed), tokens_input([seed % 90, 5, 6]), params)
    try:
        return measure(llm.step)
    finally:
        llm.abort_request([str(seed) for seed in range(sessions)])
        runner.sampler = sampler
        slots.allocate_slots = allocate_slots


def decode(setup: Setup) -> Iterator[Measurement]:
    """Measure tokens a second of both, by turns.

    vLLM's own way is also measured with seeds, where it draws row by row. Then the same is measured while
    vLLM schedules a step ahead (which its CPU build does not do); this must sample the same tokens.
    """
    sessions, steps = (256, 200) if setup.device == "cuda" else (16, 20)
    sizes = {"gpu_memory_utilization": 0.4} if setup.device == "cuda" else {"kv_cache_memory_bytes": 64 << 20}

    def seconds(step: Callable[[], Any]) -> float:
        for _ in range(10):
            step()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - begun

    length = steps + 40
    rounds = 3
    ways = (our_way, partial(their_way, seeded=False), their_way)
    rates = []
    tokens = []
    for name, ahead in (("decode", False), ("decode ahead", True)):
        sizes |= {"max_model_len": length, "max_num_seqs": sessions, "async_scheduling": ahead}
        engine = VllmEngine(setup.model(), dtype="bfloat16", **sizes)
        engine.load_weights(weights(setup), 1)
        round_seconds = [[way(engine, sessions, length, seconds) for way in ways] for _ in range(rounds)]
        tokens.append(_sampled(engine))
        engine.shutdown()
        ours, theirs, seeded = (sorted(times)[rounds // 2] for times in zip(*round_seconds, strict=True))
        rates += [sessions * steps / ours, sessions * steps / theirs]
        words = f"{rates[-2]:,.0f} and {rates[-1]:,.0f} tokens/s of {sessions} sessions"
        yield Measurement(f"{name}, of vLLM's own with seeds", seeded / ours, "")
        yield setup.measurement(f"{name}, of vLLM's own", theirs / ours, words)
    yield Measurement("decode ahead, of decode", rates[2] / rates[0], "")
    equal = [token == token_ahead for token, token_ahead in zip(*tokens, strict=True)]
    yield setup.measurement(
        "decode ahead, tokens equal", sum(equal) / len(equal), f"of {len(equal)}, same seeds"
    )


def _sampled(engine: VllmEngine) -> list[int]:
    """Return the tokens of 64 turns of 32 tokens, in the order of the turns."""
    ids = [engine.open([seed, 5, 6], SamplingParams(32, seed=seed, ignore_eos=True)) for seed in range(64)]
    ended: dict[int, list[int]] = {}
    while engine.has_runnable:
        ended |= {completion.session_id: completion.token_ids for completion in engine.step()}
    for session_id in ids:
        engine.close(session_id)
    return [token for session_id in ids for token in ended[session_id]]


def weights(setup: Setup) -> list[tuple[str, Tensor]]:
    """Return the weights of the setup's model, in bfloat16, on the host."""
    return list(plain_parameters(load_policy({"path": str(setup.model())}, torch.bfloat16).model, None))
