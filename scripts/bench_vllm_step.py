"""Host time of a decoding step of colocated vLLM: our engine beside vLLM's own requests.

    python scripts/bench_vllm_step.py [--sessions 256] [--vocabulary 1024] [--steps 60] [--rounds 5]

Both drive the same vLLM in one process, by turns; prints Markdown. vLLM's own way: a seed for each request,
which is a generator for each row, one log-prob, and its `LLMEngine.step`. The model is tiny, and its passes
are taken out of the time (CPU seconds of the thread). What is left is scheduling, preparing, drawing and
reading results. On a GPU drawing is a kernel: a small vocabulary keeps it small here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.vllm.colocated_engine import VllmEngine

WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("sessions", 256), ("vocabulary", 1024), ("steps", 60), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    config = Qwen3Config(
        vocab_size=args.vocabulary, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=64, architectures=["Qwen3ForCausalLM"],
        eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    length = WARM_UP + args.steps + 20
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        sizes = {"max_num_seqs": args.sessions, "kv_cache_memory_bytes": 256 << 20}
        engine = VllmEngine(folder, max_model_len=length, **sizes)
    engine.load_weights(AutoModelForCausalLM.from_config(config).named_parameters(), 1)
    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    passes = PassTimer()
    runner._model_forward = passes.timed(runner._model_forward)
    runner.model.compute_logits = passes.timed(runner.model.compute_logits)
    ours, theirs = [], []
    for _ in range(args.rounds):
        ours.append(ours_step(engine, passes, args.sessions, args.steps))
        theirs.append(their_step(engine, runner, passes, args.sessions, args.steps))
    engine.shutdown()
    print(f"| {args.sessions} sessions | host ms a step, each round | median |\n|---|---|---|")
    for name, times in (("ours", ours), ("vLLM's own", theirs)):
        print(f"| {name} | {', '.join(f'{1e3 * t:.1f}' for t in times)} | {1e3 * median(times):.1f} |")
    print(f"\nratio of medians: {median(ours) / median(theirs):.2f}")


class PassTimer:
    """CPU seconds of the model's passes."""

    seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds += time.thread_time() - begun
            return result

        return run


def host_seconds(step: Callable[[], Any], passes: PassTimer, steps: int) -> float:
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(steps):
        begun, before = time.thread_time(), passes.seconds
        step()
        times.append(time.thread_time() - begun - (passes.seconds - before))
    return median(times)


def ours_step(engine: VllmEngine, passes: PassTimer, sessions: int, steps: int) -> float:
    params = [SamplingParams(WARM_UP + steps + 5, seed=seed) for seed in range(sessions)]
    ids = [engine.open([seed % 100, 5, 6], one) for seed, one in enumerate(params)]
    seconds = host_seconds(engine.step, passes, steps)
    for session_id in ids:
        engine.close(session_id)
    return seconds


def their_step(engine: VllmEngine, runner: Any, passes: PassTimer, sessions: int, steps: int) -> float:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.sample.sampler import Sampler

    llm, sampler = engine._llm, runner.sampler
    slots = engine._scheduler.kv_cache_manager
    seldom = slots.__dict__.pop("allocate_slots")
    runner.sampler = Sampler(logprobs_mode="processed_logprobs")
    for seed in range(sessions):
        params = VllmSamplingParams(
            max_tokens=WARM_UP + steps + 5, seed=seed, logprobs=0, detokenize=False, flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        llm.add_request(str(seed), tokens_input([seed % 100, 5, 6]), params)
    seconds = host_seconds(llm.step, passes, steps)
    llm.abort_request([str(seed) for seed in range(sessions)])
    runner.sampler, slots.allocate_slots = sampler, seldom
    return seconds


if __name__ == "__main__":
    main()
