"""A run in processes over a folder, each of which is killed once, is that of Ray: compared bit by bit.

Weights go as what changed alone, and over Ray as a whole.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from safetensors.torch import load_file
from small_runs import ROOT, arguments, metrics

from verl.trainer import main_ppo

KILLED = ("train_worker-0", "inference-0", "driver")
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


def wait_for(path, process, log):
    while not path.exists():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(500)
def test_whoever_is_killed_the_run_ends_as_the_undisturbed_one_of_ray(world, url, tmp_path):
    assert main_ppo.run(settings(world, url, tmp_path / "ray", trainer__backend="ray")) == 0
    rows, weights = results(tmp_path / "ray")

    folder = tmp_path / "killed"
    log = tmp_path / "log"
    elsewhere = tmp_path / "weights"
    line = settings(
        world,
        url,
        folder,
        actor_rollout_ref__rollout__weight_transfer="delta",
        actor_rollout_ref__rollout__weight_dir=elsewhere,
        actor_rollout_ref__rollout__anchor_every=3,
        trainer__max_restarts=9,
    )
    with running(line, log) as process:
        for step, place in enumerate(KILLED, 1):
            wait_for(folder / f"global_step_{step}", process, log)
            os.kill(
                json.loads((tmp_path / f"killed.processes/{place}.json").read_text())["pid"], signal.SIGKILL
            )
        assert process.wait(240) == 0, log.read_text()

    for place in ("train_worker-0", "inference-0", "orchestrator"):
        assert f"{place} (pid " in log.read_text()
    assert log.read_text().count("was killed by SIGKILL: it is started again") == 3
    found, others = results(folder)
    assert len(rows) >= 5 and found == rows
    assert all((others[name] == tensor).all() for name, tensor in weights.items())
    assert list(elsewhere.iterdir()) == []  # versions go with the run
    assert not list((tmp_path / "killed.processes").glob("session-*"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_ends_the_run_after_its_step_and_leaves_no_process(world, url, tmp_path):
    more = {"actor_rollout_ref__rollout__weight_transfer": "filesystem", "trainer__save_freq": -1}
    line = settings(world, url, tmp_path / "run", **more)
    line.append("trainer.total_training_steps=200")  # it can't be over before it is asked
    log = tmp_path / "log"
    with running(line, log) as process:
        wait_for(tmp_path / "run/metrics.jsonl", process, log)  # step 0 is validated
        while '"step": 1' not in (tmp_path / "run/metrics.jsonl").read_text():  # and the next one begins
            time.sleep(0.01)
        children = psutil.Process(process.pid).children()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 3 and "stopped: " in log.read_text()
        assert len(children) == 3 and not [each for each in children if each.is_running()]
    assert 1 <= int((tmp_path / "run/latest_checkpointed_iteration.txt").read_text()) < 200
