"""Does it learn? A short run of each algorithm on the microworld, two seeds each, as a table.

    python scripts/compare_algorithms.py                                 all of them
    python scripts/compare_algorithms.py --only cispo lora --seeds 0     some of them
    python scripts/compare_algorithms.py --add sapo:actor_rollout_ref.actor.policy_loss.loss_mode=sapo

Each run is `train_grpo.sh` (or `train_ppo.sh`, for GAE) with a few overrides, which this file holds: what can
be read here is all that differs from the quickstart. Those without a critic take two optimizer steps per
batch, so that the probability ratio, which most of them differ in, is not 1 in the second. Exact match is
measured on the 400 test questions before and after, sampling at temperature 1. `--jobs` runs go on at the
same time, one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ACTOR, ALGORITHM = "actor_rollout_ref.actor", "algorithm.adv_estimator"
GRPO, PPO = "train_grpo.sh", "train_ppo.sh"
TWO_UPDATES = (f"{ACTOR}.ppo_mini_batch_size=64", f"{ACTOR}.optim.lr=5e-4")


@dataclass(frozen=True)
class Algorithm:
    """A script and what is added to its command line."""

    script: str
    overrides: tuple[str, ...]


def _loss(name: str, *overrides: str) -> Algorithm:
    return Algorithm(GRPO, (*TWO_UPDATES, f"{ACTOR}.policy_loss.loss_mode={name}", *overrides))


def _advantage(name: str) -> Algorithm:
    return Algorithm(GRPO, (*TWO_UPDATES, f"{ALGORITHM}={name}"))


ALGORITHMS = {
    "gae": Algorithm(PPO, ("trainer.critic_warmup=3",)),
    "grpo": _advantage("grpo"),
    "rloo": _advantage("rloo"),
    "reinforce_plus_plus": _advantage("reinforce_plus_plus"),
    "gspo": _loss(
        "gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=0.03",
        f"{ACTOR}.clip_ratio_high=0.04",
    ),
    "cispo": _loss("cispo"),
    "aipo": _loss("aipo"),
    "lora": Algorithm(
        GRPO,
        (
            f"{ACTOR}.ppo_mini_batch_size=64",
            "actor_rollout_ref.model.lora_rank=16",
            "actor_rollout_ref.model.lora_alpha=32",
            f"{ACTOR}.optim.lr=3e-3",
        ),
    ),
}


@dataclass(frozen=True)
class Result:
    """Exact match (0 to 1) on the test questions, and wall seconds."""

    before: float
    after: float
    greedy: float
    seconds: float


def run(name: str, algorithm: Algorithm, seed: int, num_steps: int) -> Result:
    """Raises RuntimeError with the end of its output if the run fails."""
    experiment = f"compare-{name}-seed{seed}"
    environment = os.environ | {"SEED": str(seed), "EXPERIMENT_NAME": experiment, "OMP_NUM_THREADS": "1"}
    command = ["bash", str(ROOT / algorithm.script), *algorithm.overrides]
    command += [f"trainer.total_training_steps={num_steps}", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    command += ["trainer.resume_mode=none", "trainer.progress=plain"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{experiment} ended with {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}"
        )
    summary = json.loads(
        (ROOT / "verl_checkpoints" / experiment / "summary.json").read_text(encoding="utf-8")
    )
    result = Result(
        summary["em_before"], summary["em_after"], summary["em_after_greedy"], summary["wall_seconds"]
    )
    print(f"{experiment}: {result}", file=sys.stderr, flush=True)
    return result


def table(results: dict[tuple[str, int], Result]) -> str:
    """One row a run, Markdown."""
    lines = ["| algorithm | seed | sampled, before | sampled, after | gain | greedy, after | wall s |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (name, seed), result in results.items():
        cells = [name, str(seed), f"{result.before:.3f}", f"{result.after:.3f}"]
        cells += [f"{result.after - result.before:+.3f}", f"{result.greedy:.3f}", f"{result.seconds:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def added(text: str) -> tuple[str, Algorithm]:
    """`name:key=value,key=value` as an algorithm beside the others."""
    name, separator, overrides = text.partition(":")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected name:key=value,key=value")
    return name, Algorithm(GRPO, (*TWO_UPDATES, *overrides.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), help="these of the table")
    parser.add_argument("--add", type=added, nargs="+", default=[], help="name:key=value,... another one")
    options = parser.parse_args()
    chosen = {name: ALGORITHMS[name] for name in options.only or ([] if options.add else ALGORITHMS)}
    chosen |= dict(options.add)
    with ThreadPoolExecutor(options.jobs) as pool:
        started = {
            (name, seed): pool.submit(run, name, algorithm, seed, options.steps)
            for name, algorithm in chosen.items()
            for seed in options.seeds
        }
        results = {key: future.result() for key, future in started.items()}
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
