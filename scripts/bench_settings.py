"""CPU seconds of a training step with and without some settings.

    python scripts/bench_settings.py actor_rollout_ref.actor.max_step_kl=null
    python scripts/bench_settings.py --config configs/agent.yaml --steps 20 --rounds 5 KEY=VALUE...

Runs of --config as it is, and with the settings given beside it, take turns: each round has one of either,
with the same seed, on the microworld of seed 0, with one thread. The CPU time of the training process is
read whenever it has written a step down; the first steps (--warm-up) don't count. Neither validates. What a
run does every few steps (evals, checkpoints) counts if it falls within --steps.

Prints a table in Markdown: the median over the rounds, and the ratio of the run as it is to the other one of
the same round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
from data_prep.microworld import write_world  # noqa: E402
from scripts.bench.servers import bm25_server, running  # noqa: E402
from scripts.bench_grpo_step import run  # noqa: E402

AS_IT_IS = "as it is"
CHANGED = "changed"


def seconds_per_step(command: list[str], run_dir: Path, steps: int, warm_up: int) -> float:
    """Run a training up to its step `steps`; return the CPU seconds of a step after the warm-up."""
    run_dir.mkdir()
    command = [*command, f"trainer.default_local_dir={run_dir}"]
    cpu_seconds, _ = run(command, run_dir / "metrics.jsonl", steps)
    return (cpu_seconds[-1] - cpu_seconds[warm_up - 1]) / (len(cpu_seconds) - warm_up)


def table(seconds: dict[str, list[float]]) -> str:
    """Return the medians of both contenders, and of the ratio within a round, in Markdown."""
    ratios = [before / after for before, after in zip(seconds[AS_IT_IS], seconds[CHANGED], strict=True)]
    lines = ["| contender | CPU s per step, median (least to most) |", "|---|---|"]
    for name, costs in seconds.items():
        lines.append(f"| {name} | {median(costs):.3f} ({min(costs):.3f} to {max(costs):.3f}) |")
    lines.append(f"| ratio | {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("changes", nargs="+", metavar="KEY=VALUE", help="settings of the other runs")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "microworld_grpo.yaml")
    parser.add_argument("--steps", type=int, default=12, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_intermixed_args()
    if not 0 < options.warm_up < options.steps:
        parser.error(
            f"Found --warm-up {options.warm_up} and --steps {options.steps}; expected 0 < warm-up < steps."
        )
    seconds: dict[str, list[float]] = {AS_IT_IS: [], CHANGED: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(0, folder, num_train=6000, num_test=400, num_3hop=2)
        # There is one more step, because the last one validates and saves, and is not waited for.
        settings = f"""actor_rollout_ref.model.path={ROOT}/data_prep/base_model
            data.train_files={folder}/train.parquet data.val_files={folder}/test.parquet
            trainer.total_training_steps={options.steps + 1} trainer.val_before_train=false
            trainer.test_freq=-1 trainer.device=cpu trainer.backend=local trainer.nnodes=1
            trainer.n_gpus_per_node=1""".split()
        with running(bm25_server(folder / "corpus.jsonl"), folder / "server.log") as (port, _):
            for seed in range(options.rounds):
                command = [sys.executable, "-m", "verl.trainer.main_ppo", f"@{options.config}", *settings]
                command += [f"retriever.url=http://127.0.0.1:{port}/retrieve", f"trainer.seed={seed}"]
                order = [AS_IT_IS, CHANGED] if seed % 2 == 0 else [CHANGED, AS_IT_IS]
                for contender in order:
                    changes = options.changes if contender == CHANGED else []
                    run_dir = folder / f"{contender}-{seed}".replace(" ", "-")
                    cost = seconds_per_step([*command, *changes], run_dir, options.steps, options.warm_up)
                    seconds[contender].append(cost)
                    message = f"round {seed + 1}, {contender}: {cost:.3f} CPU s per step"
                    print(message, file=sys.stderr, flush=True)
    print(table(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
