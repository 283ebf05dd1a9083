"""Whole GRPO steps (rollout with searches, reward, update): this project beside TRL's GRPOTrainer.

    python scripts/bench_grpo_step.py --trl-python ENV/bin/python          CPU seconds a step, Markdown

The shipped tiny model learns on a microworld; both get the same weights, questions in the same order, group
and batch sizes, lengths, learning rate (constant), AdamW, reward (exact match) and BM25 server, no KL, and
one thread each: `python -m verl.trainer.main_ppo` here, `GRPOTrainer.train` with its tool loop on `generate`
there (scripts/bench/grpo_step_trl.py). They take turns, `--rounds` times, each in a process of its own, whose
CPU time is read whenever it has written a step down; the first steps (`--warm-up`) don't count. In TRL a turn
without an action ends the trajectory (ours answers with a hint), so its trajectories are shorter.

TRL has an environment of its own: `pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import pandas as pd  # noqa: E402
import psutil  # noqa: E402

from data_prep.microworld import write_world  # noqa: E402
from scripts.bench.servers import PORT, running  # noqa: E402

OURS, TRL = "ours", "TRL"
MODEL = str(ROOT / "data_prep" / "base_model")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
PROMPTS, GROUP = 16, 8  # of a step
LENGTHS = {
    "max_start_length": 64,
    "max_prompt_length": 768,
    "max_response_length": 32,
    "max_obs_length": 250,
}
MAX_TURNS, TOPK, LEARNING_RATE = 3, 2, 8e-4


def our_command(world: Path, url: str, run_dir: Path, steps: int, seed: int) -> list[str]:
    """The quickstart's settings, without what TRL does not do (search cost, entropy bonus, lr schedule)."""
    settings = {
        "data.train_files": world / "train.parquet",
        "data.val_files": world / "test.parquet",
        "data.shuffle_train_dataloader": "false",
        "data.train_batch_size": PROMPTS,
        **{f"data.{name}": value for name, value in LENGTHS.items()},
        "actor_rollout_ref.model.path": MODEL,
        "actor_rollout_ref.rollout.n_agent": GROUP,
        "actor_rollout_ref.rollout.max_num_seqs": PROMPTS * GROUP,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS * GROUP,
        "actor_rollout_ref.actor.ppo_micro_batch_size": PROMPTS * GROUP,
        "actor_rollout_ref.actor.entropy_coeff": 0,
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "actor_rollout_ref.actor.optim.weight_decay": 0,
        "algorithm.adv_estimator": "grpo",
        "algorithm.kl_ctrl.kl_coef": 0,
        "retriever.url": url,
        "retriever.topk": TOPK,
        "max_turns": MAX_TURNS,
        "trainer.default_local_dir": run_dir,
        "trainer.seed": seed,
        "trainer.total_training_steps": steps
        + 1,  # the last one, which validates and saves, is not waited for
        "trainer.val_before_train": "false",
        "data.val_data_num": 1,
        "trainer.device": "cpu",
    }
    program = [sys.executable, "-m", "verl.trainer.main_ppo"]
    return [*program, *(f"{key}={value}" for key, value in settings.items())]


def trl_command(python: str, world: Path, url: str, records: Path, steps: int, seed: int) -> list[str]:
    rows = [
        {"prompt": row["prompt"][0]["content"], "answers": list(row["golden_answers"])}
        for row in pd.read_parquet(world / "train.parquet").to_dict("records")
    ]
    task = {
        **LENGTHS,
        **{"model": MODEL, "url": url, "rows": rows, "records": str(records), "steps": steps, "seed": seed},
        **{"group": GROUP, "prompts_per_step": PROMPTS, "micro_batch": 32},
        **{"lr": LEARNING_RATE, "topk": TOPK, "max_turns": MAX_TURNS},
    }
    path = world / "task.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    return [python, str(ROOT / "scripts" / "bench" / "grpo_step_trl.py"), str(path)]


def run(command: list[str], records: Path, steps: int) -> tuple[list[float], list[dict[str, float]]]:
    """(CPU seconds of the process after each step, what it wrote of each step).

    Raises:
        RuntimeError: the process failed; with the end of its log.
    """
    log = records.with_suffix(".log")
    with log.open("wb") as output:
        options: dict[str, Any] = {"env": os.environ | ENVIRONMENT, "stdout": output, "stderr": output}
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **options)
    cpu_seconds: list[float] = []
    try:
        while process.poll() is None and len(cpu_seconds) < steps:
            done = records.read_text(encoding="utf-8").count("\n") if records.exists() else 0
            if done > len(cpu_seconds):
                cpu_seconds.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
            time.sleep(0.005)
        if len(cpu_seconds) < steps:
            end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{end}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return cpu_seconds, [
        json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()[:steps]
    ]


def table(runs: dict[str, list[tuple[list[float], list[dict[str, float]]]]], warm_up: int) -> str:
    """Medians over the rounds, Markdown."""
    costs = {
        name: [(cpu[-1] - cpu[warm_up - 1]) / (len(cpu) - warm_up) for cpu, _ in rounds]
        for name, rounds in runs.items()
    }
    lines = ["| contender | CPU s per step | ours is | sampled tokens each | context tokens each |"]
    lines.append("|---" * 5 + "|")
    for name, rounds in runs.items():
        rows = [row for _, written in rounds for row in written[warm_up:]]
        if name == OURS:
            sampled = mean(row["response_length/mean"] for row in rows)
            fixed = mean(
                row["prompt_length/mean"] + row["state_tokens/total"] / (PROMPTS * GROUP) for row in rows
            )
            context = fixed + sampled
        else:
            sampled, context = (
                mean(row[key] for row in rows) for key in ("sampled_tokens", "context_tokens")
            )
        cost, low, high = median(costs[name]), min(costs[name]), max(costs[name])
        ratio = f"{cost / median(costs[OURS]):.2f} x"
        lines.append(
            f"| {name} | {cost:.2f} ({low:.2f} to {high:.2f}) | {ratio} | {sampled:.1f} | {context:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trl-python", help="interpreter with TRL (default: ours alone)")
    parser.add_argument("--steps", type=int, default=8, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runs: dict[str, list[Any]] = {OURS: []} | ({TRL: []} if options.trl_python else {})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(0, folder, num_train=6000, num_test=2, num_3hop=2)
        server = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1", "--port", PORT]
        server += ["--retriever_name", "bm25", "--corpus_path", str(folder / "corpus.jsonl")]
        with running(server, folder / "server.log", ENVIRONMENT) as (port, _):
            url = f"http://127.0.0.1:{port}/retrieve"
            for seed in range(options.rounds):
                for contender in list(runs)[:: 1 if seed % 2 == 0 else -1]:
                    if contender == OURS:
                        records = folder / f"ours-{seed}" / "metrics.jsonl"
                        records.parent.mkdir()
                        command = our_command(folder, url, records.parent, options.steps, seed)
                    else:
                        records = folder / f"trl-{seed}.jsonl"
                        command = trl_command(options.trl_python, folder, url, records, options.steps, seed)
                    runs[contender].append(run(command, records, options.steps))
                    print(f"round {seed + 1}, {contender}: done", file=sys.stderr, flush=True)
            print(table(runs, options.warm_up))
    return 0


if __name__ == "__main__":
    sys.exit(main())
