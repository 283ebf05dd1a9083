"""Does it learn? A short run of each algorithm on the microworld, two seeds each, as a table.

    python scripts/compare_algorithms.py --steps 30                      all of them
    python scripts/compare_algorithms.py --only cispo lora --seeds 0     some of them

Each run is `train_grpo.sh` (or `train_ppo.sh`, for GAE) with a few overrides, which this file holds: what can
be read here is all that differs from the quickstart. Those without a critic take two optimizer steps per
batch, so that the probability ratio, which most of them differ in, is not 1 in the second. Exact match is
measured on the 400 test questions before and after, sampling at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADVANTAGE = "algorithm.adv_estimator="
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode="
TWO_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=5e-4"
ALGORITHMS = {  # what is added to the command line
    "gae": "trainer.critic_warmup=3",
    "grpo": f"{TWO_UPDATES} {ADVANTAGE}grpo",
    "rloo": f"{TWO_UPDATES} {ADVANTAGE}rloo",
    "reinforce_plus_plus": f"{TWO_UPDATES} {ADVANTAGE}reinforce_plus_plus",
    "gspo": f"""{TWO_UPDATES} {LOSS}gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
        actor_rollout_ref.actor.clip_ratio_low=0.03 actor_rollout_ref.actor.clip_ratio_high=0.04""",
    "cispo": f"{TWO_UPDATES} {LOSS}cispo",
    "aipo": f"{TWO_UPDATES} {LOSS}aipo",
    "lora": """actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=3e-3
        actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_alpha=32""",
}


def run(name: str, seed: int, num_steps: int) -> dict[str, float]:
    """What the run's summary.json holds. CalledProcessError: the run failed."""
    experiment = f"compare-{name}-seed{seed}"
    environment = os.environ | {"SEED": str(seed), "EXPERIMENT_NAME": experiment, "OMP_NUM_THREADS": "1"}
    script = "train_ppo.sh" if name == "gae" else "train_grpo.sh"
    settings = f"""{ALGORITHMS[name]} trainer.total_training_steps={num_steps} trainer.test_freq=-1
        trainer.save_freq=-1 trainer.resume_mode=none trainer.progress=plain"""
    subprocess.run(["bash", script, *settings.split()], env=environment, cwd=ROOT, check=True)
    return json.loads((ROOT / "verl_checkpoints" / experiment / "summary.json").read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    options = parser.parse_args()
    lines = ["| algorithm | seed | sampled, before | sampled, after | gain | greedy, after | wall s |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name in options.only:
        for seed in options.seeds:
            one = run(name, seed, options.steps)
            before, after, greedy = (one[f"em_{when}"] for when in ("before", "after", "after_greedy"))
            lines.append(
                f"| {name} | {seed} | {before:.3f} | {after:.3f} | {after - before:+.3f} | {greedy:.3f} "
                f"| {one['wall_seconds']:.0f} |"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
