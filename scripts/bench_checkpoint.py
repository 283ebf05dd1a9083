"""What a checkpoint costs the step after it: written before it begins, or in the background while it runs.

    python scripts/bench_checkpoint.py [--sizes 36M 100M] [--rounds 3] [--rows 8] [--json FILE]

One process, one thread that trains, AdamW in float32. A step is what a trainer asks of its workers after the
rollout: old and reference log-probs of the trajectories (two passes without gradient), then an update. (A
rollout, in which weights stand still as in these passes, makes steps longer and the share of a checkpoint
smaller.) The three kinds of steps take turns:

    plain   nothing is written
    sync    the checkpoint of the step before it is written, and forced to the disk, before the step begins
    async   a thread copies and writes it while the step runs (trainer.async_checkpoint=true)

Printed are medians. "held up" is the time that the training thread spent in the calls that save, and waiting
for the copy; "CPU" is what that thread computed in the whole step, beside a plain one, and what all threads
did. "slower" is how much longer the step took than a plain one, which also has what the thread in the
background takes away (cores, memory bandwidth, Python's lock) and, on a busy machine, mostly noise.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from scripts.bench.update_ours import as_data  # noqa: E402
from scripts.bench.update_task import draw_trajectories  # noqa: E402
from scripts.bench_update import SIZES, write_model  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.base import ClassWithInitArgs  # noqa: E402
from verl.single_controller.local import LocalWorkerGroup  # noqa: E402
from verl.trainer.config.loading import load_config  # noqa: E402
from verl.trainer.ppo.checkpoint_writing import CheckpointWriting  # noqa: E402
from verl.trainer.ppo.run_state import CheckpointStore  # noqa: E402
from verl.workers.engine.snapshot import Snapshot  # noqa: E402
from verl.workers.fsdp_workers import ActorRolloutRefWorker  # noqa: E402

SIZES["100M"] = (768, 10, 2304, 32_000, 1)
KINDS = ("plain", "sync", "async")


@dataclass
class Step:
    """Seconds of one step. cpu: of all threads; own_cpu: of the training thread. held_up: of that one, by the
    checkpoint.
    """

    wall: float
    cpu: float
    own_cpu: float
    held_up: float
    written_in_time: bool = True


class Bench:
    """A policy worker in this process, and the trainer's way to save it."""

    def __init__(self, size: str, num_rows: int, folder: Path) -> None:
        model = write_model(folder / "model", size)
        batch = draw_trajectories(1, num_rows, 50, 1000, 0.6, SIZES[size][3], seed=0)
        self.data: DataProto = as_data(batch)
        self.num_tokens = int(batch["attention_mask"].sum())
        config = load_config(
            [
                f"actor_rollout_ref.model.path={model}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}",
                f"actor_rollout_ref.actor.ppo_micro_batch_size={num_rows}",
                f"actor_rollout_ref.rollout.log_prob_micro_batch_size={num_rows}",
            ]
        )
        worker = ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, "actor", device="cpu")
        self.group = LocalWorkerGroup(worker)
        self.group.init_model()
        self.store = CheckpointStore(folder / "run", max_to_keep=1)
        self.number = 0
        self.waited = 0.0  # for copies, in all

    def step(self, kind: str) -> Step:
        """One step with the checkpoint before it, if its kind has one."""
        writing = CheckpointWriting(self.store, background=kind == "async")
        before = self.waited
        started, cpu, own_cpu, held_up = time.perf_counter(), time.process_time(), time.thread_time(), 0.0
        if kind != "plain":
            self.number += 1
            writing.save(self.number, {"actor": self.group}, lambda folder: None)
            held_up += time.perf_counter() - started
        for _ in range(2):
            self.group.compute_log_prob(self.data)
        held_up += _timed(writing.commit_if_written)
        self.group.update_actor(self.data)
        held_up += _timed(writing.commit_if_written)
        wall, used = time.perf_counter() - started, time.process_time() - cpu
        own = time.thread_time() - own_cpu
        late = _timed(writing.finish)
        return Step(wall, used, own, held_up + self.waited - before, written_in_time=late < 0.05)

    def count_waits(self) -> None:
        """From now on the time that updates wait for copies is added up."""
        wait = Snapshot.wait_until_taken

        def counted(snapshot: Snapshot) -> None:
            self.waited += _timed(lambda: wait(snapshot))

        Snapshot.wait_until_taken = counted  # type: ignore[method-assign]


def _timed(call: object) -> float:
    started = time.perf_counter()
    assert callable(call)
    call()
    return time.perf_counter() - started


def measure(size: str, rounds: int, num_rows: int, folder: Path) -> dict[str, list[Step]]:
    bench = Bench(size, num_rows, folder)
    bench.count_waits()
    steps: dict[str, list[Step]] = {kind: [] for kind in KINDS}
    for kind in KINDS[:2]:  # warms up
        bench.step(kind)
    for number in range(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            steps[kind].append(bench.step(kind))
            print(f"{size} {kind}: {steps[kind][-1]}", file=sys.stderr, flush=True)
    files = bench.store.folder(bench.number).rglob("*")
    on_disk = sum(file.stat().st_size for file in files if file.is_file()) / 2**20
    print(f"{size}: {bench.num_tokens} tokens a step, {on_disk:,.0f} MB a checkpoint")
    bench.group.shutdown()
    return steps


def report(steps: dict[str, list[Step]]) -> None:
    plain = median(step.wall for step in steps["plain"])
    cpu = median(step.cpu for step in steps["plain"])
    own = median(step.own_cpu for step in steps["plain"])
    print(f"  plain   {plain:7.2f} s, {own:.2f} CPU s")
    for kind in KINDS[1:]:
        held = median(step.held_up for step in steps[kind])
        slower = median(step.wall for step in steps[kind]) - plain
        more = median(step.cpu for step in steps[kind]) - cpu
        more_own = median(step.own_cpu for step in steps[kind]) - own
        late = sum(not step.written_in_time for step in steps[kind])
        print(
            f"  {kind:6}  held up {held:6.3f} s ({held / plain:6.1%} of a step); CPU {more_own:+6.2f} s "
            f"({more_own / own:+6.1%}), of all threads {more:+.2f} s; slower by {slower:6.2f} s "
            f"({slower / plain:6.1%})"
            + (f"; {late} of {len(steps[kind])} were still being written at its end" if late else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["36M", "100M"], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="trajectories of 50 to 1000 tokens in a step")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="write each step's figures there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for size in options.sizes:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            results[size] = measure(size, options.rounds, options.rows, folder)
        finally:
            shutil.rmtree(folder)
        report(results[size])
    if options.json:
        figures = {
            size: {kind: [asdict(step) for step in of_kind] for kind, of_kind in steps.items()}
            for size, steps in results.items()
        }
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
