"""A run that goes on by itself when a worker, its node or its engine is gone (`trainer.max_restarts`).

    start: build, load the models                  a user's mistake ends the run here, with its line
    fit:   train ---> done
             | WorkerDiedError, EngineUnavailable
             v
           end all workers -> wait for the cluster to have room again -> build anew -> train from the last
           checkpoint, as after a restart by hand: records cut back, same next step

Each restart is a line in `<run folder>/restarts.jsonl`; `trainer/num_restarts` counts them in the metrics.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from verl.config import Config
from verl.single_controller.base.errors import WorkerDiedError
from verl.trainer.ppo.run_state import CheckpointStore, RunState, RunStopped
from verl.workers.rollout.base import EngineUnavailable

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

RECOVERABLE = (WorkerDiedError, EngineUnavailable)
MOST_FAILURES_FROM_ONE_STEP = 3  # what fails so often without a new checkpoint in between fails for ever
RESTARTS_FILE = "restarts.jsonl"
_SECONDS_FOR_NODES_TO_JOIN = 60.0  # at the start of a run in a cluster that may still be coming up


class RestartingRun:
    """A trainer, and those that take its place.

    Args:
        config: validated, its `trainer.backend` decided. It is not changed.
        build: makes a trainer from a configuration of its own, with no process started.
    """

    def __init__(self, config: Config, build: Callable[[Config], RayPPOTrainer]) -> None:
        self.config, self._build = config, build
        trainer = config.trainer
        self.max_restarts = trainer.max_restarts if trainer.backend == "ray" else 0
        self.num_restarts = 0
        self.trainer: RayPPOTrainer | None = None
        self._started_from: int | None = None  # step of the checkpoint of trainer.resume_from_path
        self._left_behind: set[int] = set()  # later checkpoints in the run's folder, by inode
        self._failures: list[int] = []  # the step that each attempt would have gone on from

    def start(self) -> None:
        """Build the trainer and load the models.

        Raises:
            ValueError: the user's mistake, e.g. more processes than the cluster has room for.
        """
        self._start(self.config)
        assert self.trainer is not None
        if self.config.trainer.resume_mode == "from_path" and self.trainer.resume_folder is not None:
            self._started_from = RunState.load(self.trainer.resume_folder).step
            store = self.trainer.checkpoints
            later = [store.folder(step) for step in store.steps() if step > self._started_from]
            self._left_behind = {folder.stat().st_ino for folder in later}

    def fit(self) -> None:
        """Train to the end, over as many restarts as that takes and `trainer.max_restarts` allows.

        Raises:
            RunStopped: it can't go on.
        """
        while True:
            try:
                if self.trainer is None:
                    self._start_again()
                assert self.trainer is not None
                self.trainer.fit()
                return
            except RECOVERABLE as error:
                self._after(error)

    def shutdown(self) -> None:
        """End the workers. Safe to call twice."""
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            trainer.shutdown()

    def _start(self, config: Config) -> None:
        self.trainer = self._build(copy.deepcopy(config))
        self.trainer.num_restarts = self.num_restarts
        if config.trainer.backend == "ray":
            joining = _SECONDS_FOR_NODES_TO_JOIN if os.environ.get("RAY_ADDRESS") else 0.0
            if (missing := _wait_for_room(self.trainer, joining, "nodes may still join")) is not None:
                raise ValueError(
                    f"the run asks for more than the Ray cluster has; it lacks {missing}. Lower "
                    "trainer.n_gpus_per_node or trainer.nnodes, or let others join (scripts/ray_node.sh)."
                )
        self.trainer.init_workers()

    def _start_again(self) -> None:
        config = copy.deepcopy(self.config)
        store = CheckpointStore(config.trainer.default_local_dir, config.trainer.max_ckpt_to_keep)
        if self._goes_on_from(store) != self._started_from:
            config.trainer.resume_mode, config.trainer.resume_from_path = "auto", None
        try:
            self._start(config)
        except ValueError as error:  # what was right at the start: the cluster or a disk is another one now
            raise RunStopped(f"the run could not be started again: {error}") from error

    def _goes_on_from(self, store: CheckpointStore) -> int:
        """The step of the newest checkpoint. A run that was started from a checkpoint elsewhere starts from
        there again until it has saved a later one; later ones that were there before it don't count (they are
        set aside when it has loaded its own).
        """
        own = [step for step in store.steps() if store.folder(step).stat().st_ino not in self._left_behind]
        return max([*own[-1:], self._started_from or 0])

    def _after(self, error: Exception) -> None:
        """Ends what is left; returns when the run can be built anew. RunStopped if it can't."""
        trainer = self.trainer
        assert trainer is not None
        print(f"error: {error}", file=sys.stderr, flush=True)
        self.shutdown()
        last = self._goes_on_from(trainer.checkpoints)
        self._failures.append(last)
        self._check_allowed(last)
        self.num_restarts += 1
        started = time.monotonic()
        setting = f"trainer.restart_timeout={self.config.trainer.restart_timeout:g}"
        missing = _wait_for_room(trainer, self.config.trainer.restart_timeout, setting)
        if missing is not None:
            raise RunStopped(
                f"the Ray cluster still lacks {missing} after {setting} seconds. When it is there: "
                f"{self._by_hand(last)}"
            )
        waited = time.monotonic() - started
        print(
            f"restart {self.num_restarts} of {self.max_restarts} (trainer.max_restarts), after waiting "
            f"{waited:.0f} s: the run goes on from step {last}",
            flush=True,
        )
        record = {
            "restart": self.num_restarts,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "from_step": last,
            "waited_seconds": round(waited, 1),
            "reason": str(error),
        }
        with (trainer.checkpoints.run_dir / RESTARTS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def _by_hand(self, last: int) -> str:
        command = "the same command again"
        if self.config.trainer.resume_mode == "none" or self._started_from not in (None, last):
            command += " with trainer.resume_mode=auto"  # as it stands it would leave this run's steps behind
            command += " trainer.resume_from_path=null" if self._started_from is not None else ""
        return f"Run {command}: the run goes on from step {last}."

    def _check_allowed(self, last: int) -> None:
        again = self._by_hand(last)
        if self.max_restarts == 0:
            raise RunStopped(f"{again} With trainer.max_restarts=3 (and Ray) it does so by itself.")
        if self.num_restarts >= self.max_restarts:
            raise RunStopped(f"trainer.max_restarts={self.max_restarts} restarts are used up. {again}")
        failures = self._failures[-MOST_FAILURES_FROM_ONE_STEP:]
        if len(failures) == MOST_FAILURES_FROM_ONE_STEP and set(failures) == {last}:
            raise RunStopped(
                f"the run failed {len(failures)} times in a row without getting from step {last} to another "
                "checkpoint: it would fail again. The causes are above; a smaller trainer.save_freq helps if "
                "they only come often."
            )


def _wait_for_room(trainer: RayPPOTrainer, seconds: float, why: str) -> str | None:
    """Waits until the cluster has room for a trainer's pools; returns what it lacks still, if it does."""
    from verl.single_controller.ray.resource_pool import RayResourcePool, wait_for_room

    pools = trainer.resource_pool_manager.resource_pool_dict.values()
    return wait_for_room([pool for pool in pools if isinstance(pool, RayResourcePool)], seconds, why)
