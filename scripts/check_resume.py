"""Shows that a run that is killed and started again ends as an undisturbed one.

    python scripts/check_resume.py [--steps N] [--seed N] [--ahead K]

PPO in the microworld, with an adaptive KL weight; with --ahead rollouts go on in a process of their own while
the policy is trained, up to K updates ahead, repeatably. One run goes through undisturbed. Another one is
killed with SIGKILL three times and started again each time: twice at a random moment, once while it writes a
checkpoint. Then every number of the two `metrics.jsonl` is compared bit by bit, times and speeds left out,
and so are the weights in the end. Exit status 0 means that all were equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.check_golden import SCENARIOS, Checkout, compare  # noqa: E402

AHEAD = (
    "actor_rollout_ref.rollout.placement=apart actor_rollout_ref.rollout.name=native trainer.backend=ray "
    "trainer.async_training.repeatable=true algorithm.rollout_correction.bypass_mode=true"
)
# What the engine did since the last step: when that was, is chance.
ENGINE = ("async/", "retrieval/", "rollout/generated", "rollout/kv", "rollout/parked", "rollout/pre")
ENGINE += ("rollout/queued", "rollout/running", "rollout/steps", "rollout/seconds", "rollout/tokens")
MIN_STEPS = 4  # a checkpoint after each one, and three kills, each after another checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run (6)")
    parser.add_argument("--seed", type=int, help="of the moments of the kills; default: random")
    parser.add_argument("--ahead", type=int, help="trainer.async_training.max_staleness; default: no overlap")
    options = parser.parse_args()
    if options.steps < MIN_STEPS:
        parser.error(
            f"--steps: found {options.steps}, expected {MIN_STEPS} or more: the run is killed three times, "
            "each time after another checkpoint"
        )
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    moments = random.Random(seed)
    kills = [("global_step_*[0-9]", moments.uniform(0.0, 0.5)) for _ in range(2)]
    kills.append(("global_step_*.incomplete/actor", 0.0))
    name = "resume-kl"
    scenario = SCENARIOS[name]
    settings, skip = f"{scenario.settings} trainer.total_training_steps={options.steps}", scenario.skip
    if options.ahead is not None:
        settings += f" {AHEAD} trainer.async_training.max_staleness={options.ahead}"
        skip += ENGINE
    scenario = SCENARIOS[name] = replace(scenario, settings=settings, skip=skip)
    with tempfile.TemporaryDirectory() as folder:
        here = Checkout(ROOT, Path(folder) / "work")
        try:
            undisturbed = here.result(name)
            print(f"undisturbed run: done; kills (--seed {seed}): {kills}", flush=True)
            killed = here.result(name, kills)
        except ChildProcessError as error:
            print(error, file=sys.stderr)
            return 1
    num_compared, lines = compare(scenario, undisturbed, killed)
    print("half-written checkpoints that the kills left:", *killed["half_written"])
    print(*lines, f"{num_compared} values compared, {len(lines)} differ", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
