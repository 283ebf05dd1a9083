"""Show that a run that is killed and started again ends as an undisturbed one.

    python scripts/check_resume.py [--steps N] [--seed N] [--ahead K] [--kills N]

The run is PPO in the microworld, with an adaptive KL weight. With --ahead, rollouts go on in a process of
their own while the policy is trained, up to K updates ahead, repeatably. One run is undisturbed. Another one
is killed with SIGKILL three times and started again each time: twice at a random moment, once while it writes
a checkpoint. With --kills N, rollouts are ahead and the run is one of verl.rl: N times, at random moments,
one of its actors on Ray (orchestrator, trainer, sampler) is killed. The longest time between two checkpoints
is printed.

Then every number of the two `metrics.jsonl` is compared bit by bit, except times and speeds, and so are the
weights in the end. Exit status 0 means that all were equal.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import psutil  # noqa: E402

from scripts.check_golden import RUN_NAME, SCENARIOS, Checkout, compare  # noqa: E402
from verl.single_controller.ray.environment import PROCESS_NAME  # noqa: E402

AHEAD = """actor_rollout_ref.rollout.placement=apart actor_rollout_ref.rollout.name=native
    trainer.async_training.repeatable=true algorithm.rollout_correction.bypass_mode=true"""
AS_ACTORS = """--rl trainer.max_restarts=1000
    actor_rollout_ref.rollout.weight_transfer=delta actor_rollout_ref.rollout.anchor_every=4"""
# Metrics of what the engine did since the last step begin with one of these. They depend on chance.
ENGINE = ("async/", "retrieval/", "rollout/generated", "rollout/kv", "rollout/parked", "rollout/pre")
ENGINE += ("rollout/queued", "rollout/running", "rollout/steps", "rollout/seconds", "rollout/tokens")
FEW_CONTROLS = "trainer.evals=[{retriever:shuffled,every:40,n:8}]"  # the recipe asks 200 questions at each
MIN_STEPS = 4  # each has a checkpoint, and each of the three kills comes after another checkpoint


class Killer(threading.Thread):
    """A thread that kills actors of the run in a folder, one at a time.

    Half of the kills come soon after the one before, most of them while processes start; the others come
    after another checkpoint. It ends after the last kill, or when the run ends.
    """

    def __init__(self, folder: Path, kills: int, moments: random.Random) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.kills = kills
        self.moments = moments
        self.killed: Counter[str] = Counter()
        self.longest = 0.0  # seconds between two checkpoints
        self.run_is_over = threading.Event()

    def run(self) -> None:
        tracker = self.folder / "latest_checkpointed_iteration.txt"
        last = ""
        since = time.monotonic()
        due = since + self.moments.uniform(0, 30)
        while not self.run_is_over.wait(0.05):
            with suppress(OSError):
                if (step := tracker.read_text()) != last:
                    self.longest = max(self.longest, time.monotonic() - since) if last else 0.0
                    last = step
                    since = time.monotonic()
                    if due == float("inf"):
                        due = since + self.moments.uniform(0, 10)
            if time.monotonic() < due or self.killed.total() == self.kills:
                continue
            process_name = self.moments.choice(["orchestrator", "trainer-0", "sampler-0"])
            if not self.kill(f"{self.folder.name}/{process_name}"):
                continue  # it has not begun yet
            self.killed[process_name] += 1
            is_early = self.moments.random() < 0.5
            due = time.monotonic() + self.moments.uniform(0, 20) if is_early else float("inf")

    def kill(self, name: str) -> bool:
        """Kill the process of this name on this machine; return whether there is one."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                is_actor = process.cmdline()[:1] and process.cmdline()[0].startswith("ray::")
                if is_actor and process.environ().get(PROCESS_NAME) == name:
                    process.kill()
                    return True
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help="training steps of each run (6)")
    parser.add_argument("--seed", type=int, help="of the moments of the kills; default: random")
    parser.add_argument("--ahead", type=int, help="trainer.async_training.max_staleness; default: no overlap")
    parser.add_argument("--kills", type=int, help="kills of single actors of verl.rl; --ahead 1 if not set")
    options = parser.parse_args()
    if options.kills and options.ahead is None:
        options.ahead = 1
    if options.steps < MIN_STEPS:
        reason = "the run is killed three times, each time after another checkpoint"
        parser.error(f"--steps: found {options.steps}, expected {MIN_STEPS} or more: {reason}")
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    moments = random.Random(seed)
    kills = [("global_step_*[0-9]", moments.uniform(0.0, 0.5)) for _ in range(2)]
    kills.append(("global_step_*.incomplete/actor", 0.0))
    name = "resume-kl"
    scenario = SCENARIOS["resume-kl"]
    settings = f"{scenario.settings} {FEW_CONTROLS} trainer.total_training_steps={options.steps}"
    skip = scenario.skip
    if options.ahead is not None:
        settings += f" {AHEAD} trainer.async_training.max_staleness={options.ahead}"
        settings += f" {AS_ACTORS if options.kills else 'trainer.backend=ray'}"
        skip += ENGINE
    scenario = SCENARIOS[name] = replace(scenario, settings=settings, skip=skip)
    with tempfile.TemporaryDirectory() as folder:
        checkout = Checkout(ROOT, Path(folder) / "work")
        try:
            undisturbed = checkout.result(name)
            if options.kills:
                print(f"undisturbed run: done; {options.kills} kills (--seed {seed})", flush=True)
                killer = Killer(ROOT / "verl_checkpoints" / RUN_NAME, options.kills, moments)
                killer.start()
                killed = checkout.result(name, tries=options.kills)
                killer.run_is_over.set()
                kill_counts = ", ".join(
                    f"{count} x {process_name}" for process_name, count in sorted(killer.killed.items())
                )
                fewer = killer.killed.total() < options.kills
                print(f"killed: {kill_counts}" + f" (the run was over before {options.kills} kills)" * fewer)
                print(f"longest time between two checkpoints: {killer.longest:.0f} s")
            else:
                print(f"undisturbed run: done; kills (--seed {seed}): {kills}", flush=True)
                killed = checkout.result(name, kills)
        except ChildProcessError as error:
            print(error, file=sys.stderr)
            return 1
    num_compared, lines = compare(scenario, undisturbed, killed)
    print("half-written checkpoints that the kills left:", *killed["half_written"])
    print(*lines, f"{num_compared} values compared, {len(lines)} differ", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
