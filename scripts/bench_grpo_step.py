"""Whole GRPO steps (rollout with searches, reward, update): this project beside TRL's GRPOTrainer.

    python scripts/bench_grpo_step.py --trl-python ENV/bin/python          steps per CPU second
    python scripts/bench_grpo_step.py --trl-python .. --curves 480 --picture curves.png

The shipped tiny model learns on a microworld; both get the same weights, questions in the same order, group
and batch sizes, lengths, learning rate (constant), AdamW, reward (exact match) and BM25 server, no KL, and
one thread each.

    ours   RayPPOTrainer.fit, native rollouts, in one process      scripts/bench/grpo_step_ours.py
    TRL    GRPOTrainer.train with its tool loop on `generate`      scripts/bench/grpo_step_trl.py

Steps per CPU second: the contenders take turns, `--rounds` times, each in a process of its own; the CPU time
of the first steps (`--warm-up`) is not counted. With `--curves S` both learn for S seconds at the same time,
each on a core of its own; afterwards both models answer the test questions through this project's validation.
In TRL a turn without an action ends the trajectory (ours answers with a hint), so its trajectories are
shorter.

TRL has an environment of its own: `pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import pandas as pd

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_prep.microworld import write_world  # noqa: E402
from scripts.bench.grpo_step_task import GrpoTask, Row, Step  # noqa: E402
from scripts.bench.servers import PORT, running  # noqa: E402

OURS, TRL = "ours", "TRL"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}
NUM_TRAIN = 6000  # questions
SMOOTHED_STEPS = 8  # of the curves


def training_rows(folder: Path) -> list[Row]:
    frame = pd.read_parquet(folder / "train.parquet")
    return [
        Row(prompt[0]["content"], [str(answer) for answer in model["ground_truth"]["target"]])
        for prompt, model in zip(frame["prompt"], frame["reward_model"], strict=True)
    ]


def start(contender: str, trl_python: str, task: GrpoTask, folder: Path) -> subprocess.Popen[str]:
    path = folder / f"{contender}.json"
    path.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    python, script = {
        OURS: (sys.executable, "grpo_step_ours.py"),
        TRL: (trl_python, "grpo_step_trl.py"),
    }[contender]
    log = (folder / f"{contender}.log").open("w", encoding="utf-8")
    command = [python, str(ROOT / "scripts" / "bench" / script), str(path)]
    return subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log, text=True)


def finish(process: subprocess.Popen[str], contender: str, task: GrpoTask, folder: Path) -> list[Step]:
    """Raises RuntimeError with the end of its log if the contender fails."""
    try:
        if process.wait():
            log = (folder / f"{contender}.log").read_text(encoding="utf-8")
            raise RuntimeError(f"{contender} ended with {process.returncode}\n{log[-3000:]}")
    finally:
        process.kill()
    lines = Path(task.records).read_text(encoding="utf-8").splitlines()
    return [Step(**json.loads(line)) for line in lines]


def cpu_seconds_per_step(steps: list[Step], warm_up: int) -> float:
    return (steps[-1].cpu_s - steps[warm_up - 1].cpu_s) / (len(steps) - warm_up)


def table(runs: dict[str, list[list[Step]]], warm_up: int) -> str:
    """Medians over the rounds, Markdown."""
    columns = ["contender", "CPU s per step", "ours is", "sampled tokens each", "context tokens each"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    ours = median(cpu_seconds_per_step(steps, warm_up) for steps in runs[OURS])
    for contender, rounds in runs.items():
        cost = [cpu_seconds_per_step(steps, warm_up) for steps in rounds]
        counted = [step for steps in rounds for step in steps[warm_up:]]
        cells = [contender, f"{median(cost):.2f} ({min(cost):.2f} to {max(cost):.2f})"]
        cells += [f"{median(cost) / ours:.2f} x", f"{mean(s.sampled_tokens for s in counted):.1f}"]
        cells.append(f"{mean(s.context_tokens for s in counted):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def picture(curves: dict[str, list[Step]], path: Path) -> None:
    """Exact match of each step's trajectories, a running mean, over wall seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for contender, steps in curves.items():
        smooth = [
            mean(step.em for step in steps[max(0, i + 1 - SMOOTHED_STEPS) : i + 1]) for i in range(len(steps))
        ]
        axes.plot([step.wall_s for step in steps], smooth, label=f"{contender} ({len(steps)} steps)")
    axes.set(
        xlabel="wall seconds", ylabel=f"exact match, training (mean of {SMOOTHED_STEPS} steps)", ylim=(0, 1)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def validation_scores(task: GrpoTask) -> dict[str, float]:
    """Exact match of the trained model on the world's test questions, sampled and greedy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", "trainer.val_only=true"]
        command += [
            "trainer.val_modes=[sampled,greedy]",
            "trainer.progress=plain",
            "algorithm.adv_estimator=grpo",
        ]
        command += [f"data.train_files={task.folder}/train.parquet", f"trainer.default_local_dir={folder}"]
        command += [
            f"data.val_files={task.folder}/test.parquet",
            f"actor_rollout_ref.model.path={task.final_model}",
        ]
        command += [f"retriever.url={task.url}", f"retriever.topk={task.topk}", f"max_turns={task.max_turns}"]
        for key in ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length"):
            command.append(f"data.{key}={getattr(task, key)}")
        subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, check=True, stdout=subprocess.PIPE, cwd=ROOT
        )
        summary = json.loads((Path(folder) / "summary.json").read_text(encoding="utf-8"))
    return {"sampled": summary["em_before"], "greedy": summary["em_before_greedy"]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", required=True, help="interpreter with TRL")
    parser.add_argument("--model", default=str(ROOT / "data_prep" / "base_model"))
    parser.add_argument("--steps", type=int, default=8, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=8e-4)
    parser.add_argument("--trl-micro-batch", type=int, default=32)
    parser.add_argument("--curves", type=float, help="let both learn for this many seconds instead")
    parser.add_argument("--picture", type=Path, help="where the curves are drawn")
    parser.add_argument("--json", type=Path, help="also write every step here")
    options = parser.parse_args()
    runs: dict[str, list[list[Step]]] = {OURS: [], TRL: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(options.seed, folder, NUM_TRAIN, num_test=400, num_3hop=2)
        rows = training_rows(folder)
        server = [sys.executable, "-m", "search_r1.search.server", "--host", "127.0.0.1", "--port", PORT]
        server += ["--retriever_name", "bm25", "--corpus_path", str(folder / "corpus.jsonl")]
        with running("retrieval server", server, folder / "server.log", ENVIRONMENT) as running_server:

            def task(contender: str, number: int) -> GrpoTask:
                return GrpoTask(
                    model=options.model,
                    url=f"http://127.0.0.1:{running_server.port}/retrieve",
                    folder=name,
                    rows=rows,
                    records=f"{name}/{contender}-{number}.jsonl",
                    final_model=f"{name}/{contender}-{number}",
                    num_steps=10_000 if options.curves else options.steps,
                    max_seconds=options.curves or float("inf"),
                    seed=options.seed + number,
                    lr=options.lr,
                    trl_micro_batch=options.trl_micro_batch,
                )

            if options.curves:
                tasks = {contender: task(contender, 0) for contender in runs}
                started = {c: start(c, options.trl_python, tasks[c], folder) for c in runs}
                for contender, process in started.items():
                    runs[contender].append(finish(process, contender, tasks[contender], folder))
                if options.picture:
                    picture({contender: steps[0] for contender, steps in runs.items()}, options.picture)
                for contender in runs:
                    print(
                        f"{contender}: {len(runs[contender][0])} steps, {validation_scores(tasks[contender])}"
                    )
            else:
                for number in range(options.rounds):
                    for contender in list(runs)[:: 1 if number % 2 == 0 else -1]:
                        given = task(contender, number)
                        process = start(contender, options.trl_python, given, folder)
                        runs[contender].append(finish(process, contender, given, folder))
                        cost = cpu_seconds_per_step(runs[contender][-1], options.warm_up)
                        print(
                            f"round {number + 1}, {contender}: {cost:.2f} CPU s a step",
                            file=sys.stderr,
                            flush=True,
                        )
                print(table(runs, options.warm_up))
    if options.json:
        records = {c: [[dataclasses.asdict(s) for s in steps] for steps in runs[c]] for c in runs}
        options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
