"""Runs of `verl.rl`: named processes on Ray, each of which may be killed; how signals and statuses pass."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import psutil
import pytest
from safetensors.torch import load_file
from small_runs import ROOT, arguments, metrics

from verl.config import load_config
from verl.single_controller.names import RunNames
from verl.trainer import main_ppo

pytest.importorskip("ray")

from verl.single_controller.ray.deaths import ProcessPlace
from verl.single_controller.ray.environment import PROCESS_NAME
from verl.trainer import orchestrator

KILLED = ("trainer-0", "sampler-0", "orchestrator")
# They depend on the clock, or on when the engine was asked.
CLOCK = ("timing", "perf/", "async/", "retrieval/", "rollout/seconds", "rollout/tokens", "rollout/generated")
CLOCK += ("rollout/kv", "rollout/parked", "rollout/pre", "rollout/queued", "rollout/running", "rollout/steps")


def settings(world, url, folder, **more):
    return arguments(
        world,
        url,
        folder,
        actor_rollout_ref__rollout__name="native",
        actor_rollout_ref__rollout__placement="apart",
        actor_rollout_ref__actor__optim__lr=1e-6,
        algorithm__rollout_correction__bypass_mode="true",
        trainer__async_training__max_staleness=1,
        trainer__async_training__repeatable="true",
        trainer__total_training_steps=5,
        trainer__experiment_name="small",
        **more,
    )


def results(folder):
    logged = metrics(folder)
    rows = {row["step"]: {k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in logged}
    for row in rows.values():
        row.pop("trainer/num_restarts", None)
    return rows, load_file(folder / "global_step_5/actor/huggingface/model.safetensors")


@contextmanager
def running(line, log):
    """`verl.rl` with these settings, in a process group of its own as in a terminal; it is ended."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-m", "verl.rl", *line]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            process_group=0,
            # as in a terminal, also where the tests were started with `&`, by which a shell has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def processes(command):
    """The actors of a run by their names, such as "trainer-0"."""
    named = {}
    with suppress(psutil.NoSuchProcess):  # the command has just ended
        for process in psutil.Process(command.pid).children(recursive=True):
            with suppress(psutil.Error):
                title = process.cmdline()[:1]  # empty while the process ends
                if title and title[0].startswith("ray::"):
                    named[process.environ().get(PROCESS_NAME, "").removeprefix("small/")] = process
    return named


def wait_for(condition, process, log):
    while not (result := condition()):
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    return result


def all_three(command):
    """The processes of a run, or None if one is not there, or is about to change its title."""
    named = processes(command)
    return named if set(named) >= set(KILLED) else None


def gone(process, seconds=20):
    with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
        process.wait(seconds)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def undisturbed(world, url, tmp_path_factory):
    """The rows and the last weights of a run that nobody kills, over Ray."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main_ppo.run(settings(world, url, folder / "ray", trainer__backend="ray")) == 0
    return results(folder / "ray")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transfer", ["delta", "collective"])
def test_whoever_is_killed_the_run_ends_as_the_undisturbed_one_over_ray(
    transfer, undisturbed, world, url, tmp_path
):
    rows, weights = undisturbed
    folder = tmp_path / "killed"
    log = tmp_path / "log"
    elsewhere = tmp_path / "weights"
    line = settings(
        world,
        url,
        folder,
        actor_rollout_ref__rollout__weight_transfer=transfer,
        actor_rollout_ref__rollout__weight_dir=elsewhere,
        actor_rollout_ref__rollout__anchor_every=3,
        trainer__max_restarts=9,
    )
    with running(line, log) as command:
        everybody = []
        for step, name in enumerate(KILLED, 1):
            wait_for((folder / f"global_step_{step}").exists, command, log)
            named = wait_for(lambda: all_three(command), command, log)
            everybody += named.values()
            named[name].send_signal(signal.SIGKILL)
        assert command.wait(300) == 0, log.read_text()
    text = log.read_text()
    for name in KILLED:
        named = rf"{name} on node \S+ \([\d.]+, pid \d+\) was killed by SIGKILL during"
        assert re.search(named, text), text
    records = [json.loads(row) for row in (folder / "restarts.jsonl").read_text().splitlines()]
    assert [record["restart"] for record in records] == [1, 2, 3]
    assert [record["from_step"] for record in records] == sorted(record["from_step"] for record in records)
    found, others = results(folder)
    assert len(rows) >= 5 and found == rows
    assert all((others[name] == tensor).all() for name, tensor in weights.items())
    assert not elsewhere.exists() or list(elsewhere.iterdir()) == []  # versions go with the run
    assert [process for process in everybody if not gone(process)] == []


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_run_after_its_step_and_leaves_no_process(world, url, tmp_path):
    line = settings(world, url, tmp_path / "run", trainer__save_freq=-1)
    line.append("trainer.total_training_steps=200")  # it can't be over before it is asked
    log = tmp_path / "log"
    with running(line, log) as command:
        path = tmp_path / "run/metrics.jsonl"
        wait_for(lambda: path.exists() and '"step": 1' in path.read_text(), command, log)
        children = psutil.Process(command.pid).children(recursive=True)
        os.killpg(command.pid, signal.SIGINT)
        assert command.wait(120) == 3, log.read_text()
    text = log.read_text()
    assert text.count("stopping: the run ends after step") == 1
    assert re.search("^stopped: asked to stop; the checkpoint of step", text, re.MULTILINE)
    assert len(children) > 3 and [child for child in children if not gone(child)] == []
    assert 1 <= int((tmp_path / "run/latest_checkpointed_iteration.txt").read_text()) < 200


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_sigterm_ends_the_run_and_a_mistake_of_the_user_is_said_once(world, url, tmp_path):
    log = tmp_path / "log"
    folder = tmp_path / "run"
    with running(settings(world, url, folder), log) as command:
        wait_for((folder / "metrics.jsonl").exists, command, log)
        children = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        assert command.wait(120) == 143, log.read_text()
    assert len(children) > 3 and [child for child in children if not gone(child)] == []
    changed = [*settings(world, url, folder), "algorithm.gamma=0.9", "trainer.resume_mode=latest"]
    with running(changed, log) as command:
        assert command.wait(120) == 2
    assert log.read_text().count("error: ") == 1, log.read_text()


def test_roles_of_other_programs_and_mistakes_are_answered_before_anything_starts(
    world, url, tmp_path, capsys
):
    from verl import rl

    assert rl.run(["--trainer", "@", "a.toml", "--orchestrator", "@", "b.toml"]) == 2
    assert "expected one configuration for all roles" in capsys.readouterr().err
    assert rl.run([*settings(world, url, tmp_path), "trainer.max_restart=1"]) == 2
    assert "trainer.max_restarts" in capsys.readouterr().err


def test_runs_of_one_name_in_two_folders_have_names_of_their_own(tmp_path):
    first = RunNames.of("quickstart", str(tmp_path / "a"))
    second = RunNames.of("quickstart", str(tmp_path / "b"))
    assert first.full("trainer-0") == second.full("trainer-0") == "quickstart/trainer-0"
    assert first.namespace != second.namespace
    assert first.namespace.startswith("quickstart-")
    assert RunNames.of("quickstart", str(tmp_path / "a")) == first


def test_signals_wait_for_an_orchestrator_that_listens_and_go_on_as_the_driver_treats_them(monkeypatch):
    sent = []
    monkeypatch.setattr(orchestrator, "_send_signal", lambda place, number: sent.append(number))
    run = orchestrator.OrchestratedRun([], load_config([]))

    def come(*numbers):
        for number in numbers:
            run._note(number, None)
        run._pass_on_signals()
        return sent

    assert come(signal.SIGUSR1) == []
    with pytest.raises(orchestrator.EndedBySignal, match="SIGINT"):
        come(signal.SIGINT)
    run.place = ProcessPlace(1, "alpha", "10.0.0.3", "node")
    run.listens = True
    run.asked = [signal.SIGUSR1]  # as it was kept
    assert come(signal.SIGINT, signal.SIGUSR1) == [signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1]
    assert run.ends_by == 0  # the run may finish its step
    come(signal.SIGINT)
    assert run.ends_by == signal.SIGINT
    assert come(signal.SIGHUP)[-1] == signal.SIGTERM


def test_lines_of_the_orchestrator_are_shown_as_they_are_to_the_last(capsys):
    output = orchestrator.OutputOfRun()
    message = {
        "actor_name": "orchestrator",
        "pid": "1",
        "ip": "10.0.0.3",
        "job": "1",
        "localhost": "10.0.0.3",
    }
    output.show(message | {"is_err": False, "lines": ["step 1/4", output.last_line]})
    assert not output.ended.is_set()
    output.show(message | {"is_err": True, "lines": ["error: no", output.last_line]})
    assert output.ended.is_set()
    output.show(message | {"actor_name": "trainer-0", "is_err": False, "lines": ["loading"]})
    said = capsys.readouterr()
    assert said.out.startswith("step 1/4\n") and "trainer-0" in said.out and said.err == "error: no\n"
