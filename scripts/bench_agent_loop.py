"""The agent loop beside that of another commit: trajectories per CPU second, with searches.

    python scripts/bench_agent_loop.py [--reference COMMIT] [--rounds 9]      the ratio of the medians

The shipped tiny model answers questions of the microworld on the native engine, and gets documents from a
retriever in memory, the same in both. Both checkouts run in a process each and take turns with the same
batches, so that what else the machine does hits both. Their trajectories must be the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, GROUP = 16, 8
CHILD_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def child() -> int:
    """Runs a batch for each number on the input, and prints its CPU seconds and the trajectories' digest."""
    import time
    from concurrent.futures import Future

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from data_prep.prompts import MICROWORLD_PROMPT
    from search_r1.llm_agent.generation import GenerationConfig, LLMGenerationManager
    from verl.protocol import DataProto, object_array
    from verl.workers.rollout.native import NativeEngine

    class MemoryRetriever:
        def submit(self, queries: list[str], topk: int) -> list[Future]:
            futures: list[Future] = [Future() for _ in queries]
            for query, future in zip(queries, futures, strict=True):
                text = f'"{query[:40]}"\nIt was founded in {len(query)} near Orlen, by the sea.'
                future.set_result([{"contents": text, "score": 1.0}] * topk)
            return futures

        def statistics(self) -> dict[str, float]:
            return {}

    torch.set_num_threads(1)
    folder = "data_prep/base_model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = NativeEngine(model.config, PROMPTS * GROUP, 800, torch.float32, "cpu")
    engine.load_weights(model.state_dict().items(), version=0)
    config = GenerationConfig(3, 100, 768, 32, 200, topk=2, search_delay_steps=4)
    manager = LLMGenerationManager(tokenizer, engine, MemoryRetriever(), config)  # type: ignore[arg-type]
    for line in sys.stdin:
        number, rows = int(line), range(PROMPTS * GROUP)
        asked = [f"Who is the director of Hotel {number * PROMPTS + row // GROUP}?" for row in rows]
        ids = [tokenizer.encode(MICROWORLD_PROMPT.format(question=text)) for text in asked]
        seeds = torch.arange(len(ids)) + 1000 * number
        batch = DataProto.from_dict({"sampling_seeds": seeds}, {"raw_prompt_ids": object_array(ids)})
        started = time.process_time()
        made = manager.run_llm_loop(batch)
        seconds = time.process_time() - started
        digest = hashlib.sha256(made.tensors["responses"].numpy().tobytes()).hexdigest()
        searches = [record["num_searches"] for record in made.non_tensor_batch["trajectory"]]
        print(json.dumps([seconds, digest, sum(searches)]), flush=True)
    return 0


def start(checkout: Path) -> subprocess.Popen[str]:
    environment = os.environ | CHILD_ENVIRONMENT | {"PYTHONPATH": str(checkout)}
    command, pipe = [sys.executable, str(Path(__file__).resolve()), "--child"], subprocess.PIPE
    return subprocess.Popen(command, cwd=checkout, env=environment, stdin=pipe, stdout=pipe, text=True)


def ask(process: subprocess.Popen[str], number: int) -> list:
    assert process.stdin is not None and process.stdout is not None
    print(number, file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference", default="448ebf0", help="commit (default: the last search loop)")
    parser.add_argument("--rounds", type=int, default=9, help="batches of each, after one that warms up")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "reference"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "-q", str(other), arguments.reference], check=True)
        for checkout in (ROOT, other):
            process = start(checkout)  # a kernel compiled just now rounds otherwise than one of numba's cache
            ask(process, 0)
            process.terminate()
            process.wait()
        processes = [start(ROOT), start(other)]
        numbers = range(arguments.rounds + 1)
        try:
            rounds = [[ask(each, n) for each in processes[:: 1 - 2 * (n % 2)]] for n in numbers]
        finally:
            for each in processes:
                each.terminate()
                each.wait()
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    pairs = [pair[:: 1 - 2 * (n % 2)] for n, pair in enumerate(rounds)][1:]
    here, there = (median(pair[side][0] for pair in pairs) for side in (0, 1))
    equal = all(pair[0][1:] == pair[1][1:] for pair in pairs)
    rows, searches = PROMPTS * GROUP, sum(pair[0][2] for pair in pairs) / len(pairs)
    print(f"here {rows / here:.1f}, {arguments.reference} {rows / there:.1f} trajectories per CPU second")
    print(f"{searches / rows:.2f} searches each; same tokens: {equal}")
    print(f"ratio {there / here:.3f}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
