"""A run that lost a worker goes on by itself, as far as it may; one test with Ray's own processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import replace

import pytest

from verl.checkpoints.run_state import CheckpointStore, RunState, RunStopped
from verl.config import Config, load_config, replace_values
from verl.planning.placement import ResourcePoolManager
from verl.sessions.engine_contract import EngineUnavailable
from verl.single_controller.base import WorkerDiedError
from verl.trainer import restarts
from verl.trainer.command import Command
from verl.trainer.restarts import RestartingRun, run_program


def test_a_driver_that_cannot_end_after_sigterm_ends_all_the_same(monkeypatch):
    ended = threading.Event()
    statuses: list[int] = []
    monkeypatch.setattr(restarts, "_SECONDS_TO_END", 0.01)
    monkeypatch.setattr(os, "_exit", lambda status: (statuses.append(status), ended.set()))

    def start(closing, stop_request):
        closing.callback(ended.wait, 10)  # as for an answer of Ray's, which is gone
        closing.callback(signal.raise_signal, signal.SIGTERM)  # a second one, which breaks nothing off
        signal.raise_signal(signal.SIGTERM)

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        with pytest.raises(SystemExit):
            run_program(start)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert statuses == [128 + signal.SIGTERM]


def settings(run_dir, **values) -> Config:
    defaults = {
        "backend": "ray",
        "default_local_dir": str(run_dir),
        "max_ckpt_to_keep": None,
        "max_restarts": 0,
        "restart_timeout": 30,
        "resume_mode": "auto",
        "resume_from_path": None,
    }
    settings = {f"trainer.{name}": value for name, value in (defaults | values).items()}
    return replace_values(load_config([]), settings)


def save(store: CheckpointStore, step: int) -> None:
    RunState(step=step).save(store.begin(step))
    store.commit(step)


class CountingTrainer:
    """Counts to `steps`, saving each; `at_step(step)` may raise, as a call on a worker that died would."""

    def __init__(self, config: Config, at_step=lambda step: None, steps=5) -> None:
        self.config = config
        self.at_step = at_step
        self.steps = steps
        trainer = config.trainer
        self.checkpoints = CheckpointStore(trainer.default_local_dir, trainer.max_ckpt_to_keep)
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        self.resource_pool_manager = ResourcePoolManager({}, {}, "ray", False)
        self.num_restarts = 0
        self.done: list[int] = []
        self.is_up = False

    def init_workers(self) -> None:
        self.checkpoints.lock()
        self.is_up = True

    def fit(self) -> None:
        first = 0 if self.resume_folder is None else RunState.load(self.resume_folder).step
        for step in range(first + 1, self.steps + 1):
            self.at_step(step)
            self.done.append(step)
            save(self.checkpoints, step)

    def shutdown(self) -> None:
        self.is_up = False
        self.checkpoints.unlock()


class Attempts:
    """Builds CountingTrainers, of which the first ones fail at the steps given."""

    def __init__(self, *fail_at: int, error: type[Exception] = WorkerDiedError) -> None:
        self.fail_at = list(fail_at)
        self.error = error
        self.trainers = []

    def __call__(self, config: Config) -> CountingTrainer:
        assert not any(trainer.is_up for trainer in self.trainers), "the one before has ended"
        number = len(self.trainers)

        def at_step(step: int) -> None:
            if number < len(self.fail_at) and step == self.fail_at[number]:
                raise self.error(f"attempt {number} died")

        self.trainers.append(CountingTrainer(config, at_step))
        return self.trainers[-1]


@pytest.mark.parametrize("error", [WorkerDiedError, EngineUnavailable])
def test_each_failure_is_taken_up_at_the_last_checkpoint_and_written_down(tmp_path, capsys, error):
    attempts = Attempts(3, 3, 5, error=error)
    run = RestartingRun(settings(tmp_path, max_restarts=3), attempts)
    run.start()
    run.fit()
    run.shutdown()
    assert [trainer.done for trainer in attempts.trainers] == [[1, 2], [], [3, 4], [5]]
    assert [trainer.num_restarts for trainer in attempts.trainers] == [0, 1, 2, 3]
    assert not any(trainer.is_up for trainer in attempts.trainers)
    records = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert [(record["restart"], record["from_step"]) for record in records] == [(1, 2), (2, 2), (3, 4)]
    assert records[0]["reason"] == "attempt 0 died"
    said = capsys.readouterr()
    assert "error: attempt 0 died" in said.err
    assert "restart 1 of 3 (trainer.max_restarts): the run goes on from step 2" in said.out


def test_without_restarts_the_run_ends_and_says_how_it_goes_on(tmp_path):
    run = RestartingRun(settings(tmp_path), attempts := Attempts(3))
    run.start()
    with pytest.raises(RunStopped, match="same command again: the run goes on from step 2.*max_restarts=3"):
        run.fit()
    assert len(attempts.trainers) == 1 and not attempts.trainers[0].is_up


def test_no_more_restarts_than_allowed(tmp_path):
    run = RestartingRun(settings(tmp_path, max_restarts=1), Attempts(2, 3))
    run.start()
    with pytest.raises(RunStopped, match="trainer.max_restarts=1 restarts are used up.*from step 2"):
        run.fit()


def test_a_failure_that_comes_again_without_progress_is_not_tried_for_ever(tmp_path):
    run = RestartingRun(settings(tmp_path, max_restarts=100), attempts := Attempts(*[3] * 50))
    run.start()
    with pytest.raises(RunStopped, match="failed 3 times in a row without getting from step 2"):
        run.fit()
    assert len(attempts.trainers) == 3


def test_a_cluster_that_stays_too_small_ends_the_run_with_what_it_lacks(tmp_path, monkeypatch):
    run = RestartingRun(settings(tmp_path, max_restarts=3), Attempts(3))
    run.start()

    def init_workers(trainer: CountingTrainer) -> None:
        raise ValueError("no room in the Ray cluster after 30 s: the run needs one node each with GPUs.")

    monkeypatch.setattr(CountingTrainer, "init_workers", init_workers)
    with pytest.raises(RunStopped, match="could not be started again: no room .* goes on from step 2"):
        run.fit()


def test_a_run_started_from_elsewhere_goes_on_from_its_own_checkpoint_only_if_that_is_later(tmp_path):
    elsewhere = CheckpointStore(tmp_path / "elsewhere", None)
    own = CheckpointStore(tmp_path / "own", None)
    save(elsewhere, 2)
    save(own, 1)  # of a run before this one
    path = {"resume_mode": "from_path", "resume_from_path": str(elsewhere.folder(2))}
    run = RestartingRun(settings(own.run_dir, max_restarts=9, **path), attempts := Attempts(3, 4, 5))
    run.start()
    run.fit()
    run.shutdown()
    assert [trainer.done for trainer in attempts.trainers] == [[], [3], [4], [5]]
    modes = [trainer.config.trainer.resume_mode for trainer in attempts.trainers]
    assert modes == ["from_path", "from_path", "auto", "auto"]
    records = [json.loads(line) for line in (own.run_dir / "restarts.jsonl").read_text().splitlines()]
    assert [record["from_step"] for record in records] == [2, 3, 4]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("none", "the same command again with trainer.resume_mode=auto: the run goes on from step 2"),
        (
            "from_path",
            "with trainer.resume_mode=auto trainer.resume_from_path=null: the run goes on from step 2",
        ),
        ("latest", "the same command again: the run goes on from step 2"),
    ],
)
def test_the_command_that_goes_on_is_one_that_does(tmp_path, mode, words):
    if mode != "none":
        save(CheckpointStore(tmp_path, None), 1)
    path = str(tmp_path / "global_step_1") if mode == "from_path" else None
    run = RestartingRun(settings(tmp_path, resume_mode=mode, resume_from_path=path), Attempts(3))
    run.start()
    with pytest.raises(RunStopped, match=words):
        run.fit()


def test_a_run_whose_orchestrator_was_lost_begins_as_a_restart(tmp_path, capsys):
    earlier = CheckpointStore(tmp_path, None)
    save(earlier, 1)  # of a run before this command
    command = Command("this-command", time.time() - 60)
    first = RestartingRun(settings(tmp_path, max_restarts=4), Attempts(4, 5), command)
    first.start()
    with pytest.raises(ZeroDivisionError):  # killed in step 5, after one worker was lost in step 4
        first.trainer.at_step = lambda step: 1 / (5 - step)
        first.fit()
    first.shutdown()
    after = replace(command, death="orchestrator on node a (10.0.0.1, pid 7) was killed by SIGKILL")
    second = RestartingRun(settings(tmp_path, max_restarts=4), attempts := Attempts(), after)
    second.start()
    second.fit()
    second.shutdown()
    assert [trainer.done for trainer in attempts.trainers] == [[5]]
    assert attempts.trainers[0].num_restarts == 1
    (record,) = [json.loads(line) for line in (tmp_path / "restarts.jsonl").read_text().splitlines()]
    assert (record["restart"], record["from_step"], record["command"]) == (1, 4, "this-command")
    assert record["reason"].startswith("orchestrator on node a")
    assert "restart 1 of 4 (trainer.max_restarts): the run goes on from step 4" in capsys.readouterr().out


@pytest.mark.parametrize(("mode", "starts_at"), [("none", None), ("auto", 1)])
def test_an_orchestrator_that_was_lost_before_a_checkpoint_begins_as_the_command_says(
    tmp_path, mode, starts_at
):
    save(CheckpointStore(tmp_path, None), 1)  # of a run before this command
    command = Command("this-command", time.time() + 60, "orchestrator was killed")
    run = RestartingRun(settings(tmp_path, max_restarts=4, resume_mode=mode), Attempts(), command)
    run.start()
    assert run.trainer.config.trainer.resume_mode == mode
    found = run.trainer.resume_folder
    run.shutdown()
    assert (None if found is None else RunState.load(found).step) == starts_at


def test_orchestrators_that_are_lost_again_and_again_use_the_restarts_up_or_get_nowhere(tmp_path):
    command = Command("this-command", time.time() - 60, "orchestrator was killed")

    def lost_again(max_restarts: int) -> None:
        run = RestartingRun(settings(tmp_path, max_restarts=max_restarts), Attempts(), command)
        run.start()
        run.shutdown()

    lost_again(9)
    with pytest.raises(RunStopped, match="max_restarts=1 restarts are used up"):
        lost_again(1)
    lost_again(9)
    with pytest.raises(RunStopped, match="3 times in a row without getting from step 0"):
        lost_again(9)


@pytest.mark.slow
@pytest.mark.ray
def test_with_ray_a_killed_process_is_replaced_by_a_new_one(tmp_path, capfd):
    ray_backend = pytest.importorskip("verl.single_controller.ray")
    from verl.single_controller import ClassWithInitArgs, Worker, register

    class Victim(Worker):
        @register()
        def work(self, dies: bool) -> int:
            print("about to work", flush=True)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return os.getpid()

    pids: list[int] = []

    class RayTrainer(CountingTrainer):
        def init_workers(self) -> None:
            super().init_workers()
            pool = ray_backend.RayResourcePool([1])
            self.resource_pool_manager.resource_pool_dict["pool"] = pool
            self.group = ray_backend.RayWorkerGroup(pool, ClassWithInitArgs(Victim))
            self.at_step = lambda step: pids.extend(self.group.work(step == 3 and self.num_restarts == 0))

        def shutdown(self) -> None:
            self.group.shutdown()
            super().shutdown()

    ends = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    own = signal.getsignal(signal.SIGTERM)
    with ray_backend.init_ray(num_cpus=1):
        assert signal.getsignal(signal.SIGTERM) is own, "the program ends as it likes"
        signal.signal(signal.SIGTERM, ends)
        run = RestartingRun(settings(tmp_path, max_restarts=1), lambda config: RayTrainer(config, steps=4))
        run.start()
        started = time.monotonic()
        run.fit()
        assert time.monotonic() - started < 60
        run.shutdown()
    assert len(pids) == 4 and len(set(pids[:2])) == 1 and len(set(pids[2:])) == 1 and pids[0] != pids[2]
    said = capfd.readouterr().err
    named = rf"rank 0 of worker group 'Victim' on node .*pid {pids[0]}\) was killed by SIGKILL during work"
    assert re.search(named, said) and "| about to work" in said
