"""Host time of a decoding step of colocated vLLM: our engine beside vLLM's own requests.

    python scripts/bench_vllm_step.py [--sessions 256] [--vocabulary 1024] [--steps 60] [--rounds 5]

Both drive the same vLLM in one process, by turns; the script prints Markdown. vLLM's own way has a seed for
each request, which is a generator for each row, one log-prob, and its `LLMEngine.step`. The model is tiny,
and its passes are subtracted from the time (CPU seconds of the thread). What remains is scheduling,
preparing, drawing and reading results. On a GPU, drawing is a kernel; a small vocabulary keeps its share
small here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
from transformers import AutoModelForCausalLM, Qwen3Config

from scripts.bench.vllm_checks import our_way, their_way
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
    length = WARM_UP + args.steps + 20  # tokens of a sequence
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        sizes = {"max_num_seqs": args.sessions, "kv_cache_memory_bytes": 256 << 20}
        engine = VllmEngine(folder, max_model_len=length, **sizes)
    engine.load_weights(AutoModelForCausalLM.from_config(config).named_parameters(), 1)
    runner = engine._llm.model_executor.driver_worker.worker.model_runner
    passes = PassTimer()
    runner._model_forward = passes.timed(runner._model_forward)
    runner.model.compute_logits = passes.timed(runner.model.compute_logits)
    ours: list[float] = []
    theirs: list[float] = []
    measure = partial(host_seconds, passes, args.steps)
    for _ in range(args.rounds):
        for way, times in ((our_way, ours), (their_way, theirs)):
            times.append(way(engine, args.sessions, length, measure))
    engine.shutdown()
    print(f"| {args.sessions} sessions | host ms a step, each round | median |\n|---|---|---|")
    for name, times in (("ours", ours), ("vLLM's own", theirs)):
        print(f"| {name} | {', '.join(f'{1e3 * t:.1f}' for t in times)} | {1e3 * median(times):.1f} |")
    print(f"\nratio of medians: {median(ours) / median(theirs):.2f}")


class PassTimer:
    """A timer of the CPU seconds of the model's passes."""

    seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds += time.thread_time() - begun
            return result

        return run


def host_seconds(passes: PassTimer, steps: int, step: Callable[[], Any]) -> float:
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(steps):
        begun = time.thread_time()
        before = passes.seconds
        step()
        times.append(time.thread_time() - begun - (passes.seconds - before))
    return median(times)


if __name__ == "__main__":
    main()
