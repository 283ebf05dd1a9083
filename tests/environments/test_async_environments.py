"""Environments whose methods are coroutine functions, and ends of episodes that come at a bad moment."""

import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

import psutil
import pytest

from verl.config.environments import EnvironmentConfig
from verl.environments.environment import BaseTextEnv, EpisodeFailed
from verl.environments.executors import Environments, handle_request
from verl.verifiers.workers import KillableWorkers, ProcessEnded

HERE = "test_async_environments"
ACT = "verl.environments.executors:handle_request"
closed: list[str] = []


def until(holds):
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Waits(BaseTextEnv):
    """Its actions: a number of seconds to wait, or "raise", "cancel", "exit"."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.name = extras["name"]

    async def init(self, prompt):
        await asyncio.sleep(float(self.name == "slow start"))
        return [{"role": "user", "content": self.name}], {}

    async def step(self, action):
        if action == "raise":
            raise ValueError("no such move")
        if action == "cancel":
            raise asyncio.CancelledError
        if action == "exit":
            sys.exit(3)
        try:
            await asyncio.sleep(float(action))
        finally:
            await asyncio.sleep(0)
            closed.append(f"{self.name} stepped")
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

    async def get_metrics(self):
        return {"seen": 1}

    async def close(self):
        await asyncio.sleep(0)
        closed.append(self.name)


class Leaves(BaseTextEnv):
    """A plain environment that calls sys.exit; its constructor waits for `go`."""

    go = threading.Event()
    made = threading.Event()

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.made.set()
        self.go.wait(5)

    def step(self, action):
        sys.exit(3)

    def close(self):
        closed.append("leaves")


@pytest.fixture
def stage():
    closed.clear()
    made = []

    def make(**settings):
        made.append(Environments(EnvironmentConfig(**settings)))
        return made[-1]

    yield make
    for environments in made:
        environments.close()


def opened(runner, names):
    episodes = [runner.open({"name": name}, [], 3) for name in names]
    return [episode.result(5) for episode in episodes]


def test_any_number_of_them_wait_at_once_and_each_is_closed_once(stage):
    environments = stage(max_workers=1)
    runner = environments[f"{HERE}:Waits"]
    names = [str(number) for number in range(300)]
    started = time.perf_counter()
    episodes = opened(runner, names)
    assert episodes[7].messages == [{"role": "user", "content": "7"}]
    assert all(future.result(5)["done"] for future in runner.step_many(episodes, ["0.2"] * 300))
    for episode in episodes:
        runner.close(episode)
    environments.wait_until_closed()
    assert time.perf_counter() - started < 3  # one after another they take 60 s
    assert sorted(name for name in closed if "stepped" not in name) == sorted(names)
    assert episodes[0].metrics == {"seen": 1} and episodes[0].seconds_step >= 0.2


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "no such move"),
        ("cancel", "CancelledError"),
        ("exit", r"SystemExit\(3"),
        ("9", "took longer"),
    ],
)
def test_what_goes_wrong_in_one_is_its_own(stage, action, words):
    runner = stage(step_timeout=0.3)[f"{HERE}:Waits"]
    bad, good = runner.step_many(opened(runner, "ab"), [action, "0.01"])
    with pytest.raises((EpisodeFailed, ValueError), match=words):
        bad.result(5)
    assert good.result(5)["done"]
    assert opened(runner, "c")[0].messages  # the event loop goes on


def test_one_that_is_cut_in_its_step_is_closed_after_it(stage):
    environments = stage()
    runner = environments[f"{HERE}:Waits"]
    (episode,) = opened(runner, "a")
    (step,) = runner.step_many([episode], ["9"])
    time.sleep(0.05)
    assert step.cancel()
    runner.close(episode)
    environments.wait_until_closed()
    assert closed == ["a stepped", "a"]


def test_a_run_that_ends_in_haste_closes_what_waits_and_what_is_being_made(stage):
    environments = stage()
    runner = environments[f"{HERE}:Waits"]
    (episode,) = opened(runner, "a")
    (step,) = runner.step_many([episode], ["9"])
    making = runner.open({"name": "slow start"}, [], 3)
    time.sleep(0.05)
    started = time.perf_counter()
    environments.fail_pending_calls()
    runner.close(episode)
    environments.wait_until_closed(5.0)
    wait([step, making], 5)
    until(lambda: len(closed) >= 3)
    assert sorted(closed) == ["a", "a stepped", "slow start"] and time.perf_counter() - started < 3


def test_they_need_an_event_loop_which_a_process_has(stage):
    with pytest.raises(ValueError, match="executor=inline .* coroutine function .* expected auto"):
        stage(executor="inline")[f"{HERE}:Waits"]
    environments = stage(executor="process")
    runner = environments[f"{HERE}:Waits"]
    (episode,) = opened(runner, "a")
    (step,) = runner.step_many([episode], ["0.01"])
    assert step.result(5)["done"] and episode.messages == [{"role": "user", "content": "a"}]
    assert "SystemExit: 3" in str(runner.step_many([episode], ["exit"])[0].exception(5))
    runner.close(episode)
    environments.wait_until_closed()
    assert episode.metrics == {"seen": 1} and closed == []


@pytest.mark.parametrize("executor", ["inline", "thread"])
def test_an_environment_that_exits_fails_alone(stage, executor):
    Leaves.go.set()
    runner = stage(executor=executor)[f"{HERE}:Leaves"]
    episode = runner.open({}, [], 3)
    episode = episode.result(5) if executor == "thread" else episode
    (result,) = runner.step_many([episode], ["x"])
    error = result.exception(5) if executor == "thread" else result
    assert isinstance(error, EpisodeFailed) and "SystemExit" in str(error)


def test_one_that_is_made_when_the_run_ends_is_closed_once(stage):
    Leaves.go.clear()
    Leaves.made.clear()
    environments = stage()
    future = environments[f"{HERE}:Leaves"].open({}, [], 3)
    assert Leaves.made.wait(5)
    environments.fail_pending_calls()
    assert isinstance(future.exception(5), EpisodeFailed)
    Leaves.go.set()
    until(lambda: closed)
    time.sleep(0.1)
    assert closed == ["leaves"]


class Stuck(Waits):
    """Holds the event loop ("block"), or does not let itself be cancelled ("deaf")."""

    async def step(self, action):
        if action == "block":
            self.go.wait(20)
        while action == "deaf":
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                continue
        return await super().step(action)

    go = threading.Event()


@pytest.mark.parametrize("action", ["block", "deaf"])
def test_a_step_that_can_not_be_cancelled_is_given_up_and_others_go_on(stage, action):
    Stuck.go.clear()
    environments = stage(step_timeout=0.2)
    runner = environments[f"{HERE}:Stuck"]
    (episode,) = opened(runner, "a")
    (step,) = runner.step_many([episode], [action])
    with pytest.raises(EpisodeFailed, match="took longer"):
        step.result(5)
    runner.close(episode)
    started = time.perf_counter()
    environments.wait_until_closed()
    assert time.perf_counter() - started < 5
    assert opened(runner, "b")[0].messages
    Stuck.go.set()


@pytest.mark.parametrize("name", ["Waits", "Leaves"])
def test_an_end_in_haste_closes_all_episodes_that_are_at_nothing(stage, name):
    Leaves.go.set()
    environments = stage()
    runner = environments[f"{HERE}:{name}"]
    episodes = opened(runner, map(str, range(40)))
    environments.fail_pending_calls()
    for episode in episodes:
        runner.close(episode)
    environments.wait_until_closed(5.0)
    assert len(closed) == 40


def test_nothing_of_it_goes_on_after_its_end(stage):
    before = set(threading.enumerate())
    environments = stage()
    opened(environments[f"{HERE}:Waits"], "ab")
    opened(environments[f"{HERE}:Leaves"], "ab")
    environments.close()
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_a_process_that_is_late_or_starts_late_is_killed_before_the_next_ones_turn(stage, delay):
    runner = stage(max_workers=2, executor="process", step_timeout=0.2)[f"{HERE}:Leaves"]
    taken = []
    take = runner.workers.take
    most = 0
    runner.workers.give_back(take())  # the nursery has started
    runner.workers.take = lambda: time.sleep(delay) or taken.append(take()) or taken[-1]
    episodes = [runner.open({}, [], 3) for _ in range(6)]
    steps = runner.step_many(episodes, ["x"] * 6)
    for episode, step in zip(episodes, steps, strict=True):
        step.add_done_callback(lambda _, episode=episode: runner.close(episode))
    while wait(steps, 0.02).not_done or len(taken) < 6:
        most = max(most, sum(process.is_alive for process in taken))
    assert most <= 3  # one may be at its end
    until(lambda: not any(process.is_alive for process in taken))


def test_an_episode_that_can_not_be_made_does_not_close_the_one_before(stage):
    for extras, metrics in (({"name": "a"}, {"seen": 1}), ({}, {})):
        with suppress(KeyError):
            handle_request("make", Waits, {"extras": extras})
        assert handle_request("close") == metrics and closed == ["a"]


def test_a_nursery_that_hangs_in_an_import_or_has_died_holds_up_nothing(tmp_path, monkeypatch):
    (tmp_path / "hangs_on_import.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    nursery = KillableWorkers(ACT, 0.0, ["import", "hangs_on_import"])
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(nursery.take)
        time.sleep(1.0)
        started = time.perf_counter()
        nursery.close()
        assert isinstance(taking.exception(5), OSError) and time.perf_counter() - started < 5
    nursery = KillableWorkers(ACT, 0.0, ["import", "json"])
    nursery.take()
    nursery._program.kill()
    nursery._program.wait()
    assert nursery.take().call("make", dict, {}, seconds=10) is None
    nursery.close()


def test_a_process_is_killed_with_what_it_has_started(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's, which a process has
    nursery = KillableWorkers("subprocess:getoutput", 0.0, ["true"])
    busy = nursery.take()
    idle = nursery.take()
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(busy.call, f"sleep 60 & echo $! > {tmp_path}/pid; wait")
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        assert idle.call("echo $OMP_NUM_THREADS") == "3"
        nursery.give_back(idle)
        busy.kill()
        nursery.close()
        assert isinstance(calling.exception(5), ProcessEnded)
    for pid in (busy.pid, idle.pid, int((tmp_path / "pid").read_text())):
        until(lambda p=pid: not psutil.pid_exists(p) or psutil.Process(p).status() == psutil.STATUS_ZOMBIE)
