"""A run in processes over a folder: each of them is killed once, and it ends as an undisturbed one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors.torch import load_file
from small_runs import ROOT, arguments, metrics
from test_weight_transfer_run import CLOCK

DIED = ("train_worker-0", "inference-0", "driver")


def run(world, url, folder, kills, log):
    line = arguments(
        world,
        url,
        folder,
        actor_rollout_ref__rollout__name="native",
        actor_rollout_ref__rollout__placement="apart",
        actor_rollout_ref__rollout__weight_transfer="delta",
        algorithm__rollout_correction__bypass_mode="true",
        trainer__async_training__max_staleness=1,
        trainer__async_training__repeatable="true",
        trainer__max_restarts=9,
        trainer__total_training_steps=5,
    )
    command = [sys.executable, "-m", "verl.rl", *line]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)
    try:
        for step, place in enumerate(kills, 1):
            while not (folder / f"global_step_{step}").exists():
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            os.kill(json.loads((folder / f"processes/{place}.json").read_text())["pid"], signal.SIGKILL)
        assert process.wait(240) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    rows = {row["step"]: {k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in metrics(folder)}
    weights = load_file(folder / "global_step_5/actor/huggingface/model.safetensors")
    return rows, weights, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_whoever_is_killed_the_run_ends_as_the_undisturbed_one(world, url, tmp_path):
    expected, weights, _ = run(world, url, tmp_path / "calm", (), tmp_path / "calm.log")
    found, others, told = run(world, url, tmp_path / "killed", DIED, tmp_path / "killed.log")
    for place in ("train_worker-0", "inference-0", "orchestrator"):
        assert f"{place} (pid " in told and "was killed by SIGKILL: it is started again" in told
    for row in (*expected.values(), *found.values()):
        row.pop("trainer/num_restarts", None)
    assert len(expected) >= 5 and found == expected
    assert all((others[name] == tensor).all() for name, tensor in weights.items())
    assert not list((tmp_path / "killed/processes").glob("session-*"))
