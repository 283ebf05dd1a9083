"""Rollout engines side by side on CPU: this project's, vLLM's, transformers' generate.

    model, prompts, forced output lengths (uneven) -> each engine in a process of its own, warmed up
        -> rounds in which they take turns -> tokens per CPU second (medians), ratios, share of the ceiling

Sampling at temperature 1 with log-probs (generate: without), one thread each, the same dtype. CPU seconds are
those of the whole process with all its threads; only sampled tokens are counted, but prompts are part of the
work. "ceiling" is the matrix products of the same work alone. vLLM lives in an environment of its own:
`--vllm-python`. Each model and dtype becomes a JSON file in `--output`; the tables of all files there are
written to rollout.md.

Example: python scripts/bench_rollout.py --models tiny --dtypes float32 --vllm-python ~/vllm/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    "d256": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "62m": {
        "vocab_size": 16384,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
    },
}
MODELS = ("tiny", *SHAPES)  # tiny: the one that the project ships
PROMPT_LENGTHS = (16, 96)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
VLLM = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Worker:
    """An engine's process; see `scripts/bench/rollout_worker.py`."""

    def __init__(self, engine: str, python: str, model_dir: Path, dtype: str, sizes: tuple[int, int]) -> None:
        script = ROOT / "scripts" / "bench" / "rollout_worker.py"
        environment = os.environ | ONE_THREAD | {"HF_HUB_OFFLINE": "1"} | (VLLM if engine == "vllm" else {})
        self._process = subprocess.Popen(
            [python, str(script), engine, str(model_dir), dtype, *map(str, sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._engine = engine

    def wait(self) -> None:
        """Until it has loaded its model."""
        self._reply()

    def run(self, prompts: list[list[int]], lengths: list[int], seed: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "lengths": lengths, "seed": seed}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._engine} ended; what it said stands above")
        return json.loads(line)


def workload(vocab_size: int, count: int, new_tokens: int, seed: int) -> tuple[list[list[int]], list[int]]:
    """`count` random prompts, and output lengths spread evenly over new_tokens / 3 to new_tokens * 5 / 3."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_LENGTHS))] for _ in range(count)]
    low, high = new_tokens / 3, new_tokens * 5 / 3
    lengths = [round(low + (high - low) * i / max(1, count - 1)) for i in range(count)]
    rng.shuffle(lengths)
    return prompts, lengths


def measure(model: str, dtype: str, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rounds of all engines on one model and dtype."""
    model_dir = ROOT / "data_prep" / "base_model" if model == "tiny" else _random_model(model, folder)
    vocab_size = json.loads((model_dir / "config.json").read_text())["vocab_size"]
    sizes = max(arguments.sequences), PROMPT_LENGTHS[1] + 2 * arguments.new_tokens
    pythons = dict.fromkeys(arguments.engines, sys.executable) | {"vllm": arguments.vllm_python}
    workers: dict[str, Worker] = {}
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        for name in arguments.engines:
            workers[name] = Worker(name, pythons[name], model_dir, dtype, sizes)
            workers[name].wait()
        for count in arguments.sequences:
            for worker in workers.values():
                worker.run(*workload(vocab_size, count, max(6, arguments.new_tokens // 4), seed=0), seed=0)
            cell = cells[str(count)] = {name: [] for name in workers}
            for number in range(arguments.rounds):
                prompts, lengths = workload(vocab_size, count, arguments.new_tokens, seed=number + 1)
                for name, worker in workers.items():
                    cell[name].append(worker.run(prompts, lengths, seed=1000 * number))
                    print(f"{model} {dtype} {count:4} {name:8} {_rate(cell[name][-1]):9.0f}", flush=True)
    finally:
        for worker in workers.values():
            worker.stop()
    return {"model": model, "dtype": dtype, "new_tokens": arguments.new_tokens, "cells": cells}


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: medians of tokens per CPU second, ratios of them, and native's share of the ceiling."""
    lines = [
        "| model | dtype | sequences | native | vLLM | generate | native / vLLM | native / generate "
        "| share of ceiling |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        for count, cell in result["cells"].items():
            rate = {name: median(map(_rate, runs)) for name, runs in cell.items()}
            row = [result["model"], result["dtype"], count]
            row += [f"{rate[name]:,.0f}" if name in rate else "-" for name in ("native", "vllm", "generate")]
            row += [
                f"{rate['native'] / rate[name]:.2f}" if {"native", name} <= set(rate) else "-"
                for name in ("vllm", "generate", "ceiling")
            ]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _rate(run: dict[str, Any]) -> float:
    return run["tokens"] / run["cpu_seconds"]


def _random_model(name: str, folder: Path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[name], max_position_embeddings=2048, tie_word_embeddings=name == "d256")
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--sequences", nargs="+", type=int, default=[8, 64, 256])
    parser.add_argument("--engines", nargs="+", default=["native", "vllm", "generate", "ceiling"])
    parser.add_argument("--new_tokens", type=int, default=96, help="mean output length")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="interpreter that has vLLM; without it vLLM is left out")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_rollout"))
    arguments = parser.parse_args()
    if not arguments.vllm_python:
        arguments.engines = [name for name in arguments.engines if name != "vllm"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            for dtype in arguments.dtypes:
                result = measure(model, dtype, arguments, Path(folder))
                path = arguments.output / f"{model}-{dtype}-{'-'.join(map(str, arguments.sequences))}.json"
                path.write_text(json.dumps(result, indent=1))
    results = [json.loads(path.read_text()) for path in sorted(arguments.output.glob("*.json"))]
    (arguments.output / "rollout.md").write_text(table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
