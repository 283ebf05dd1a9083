"""Runs whose rollouts have a process of their own, with each engine: ahead, and through its death."""

import importlib.util
import os
import signal

import pytest
from small_runs import arguments, metrics

from verl.config import replace_values
from verl.planning import placement
from verl.single_controller.base import Worker
from verl.trainer.main_ppo import run
from verl.trainer.ppo.stream import RolloutStream

MISSING = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
ENGINES = ["native", pytest.param("vllm", marks=[pytest.mark.vllm, MISSING])]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def settings(engine, max_staleness, **more):
    return {
        "actor_rollout_ref__rollout__name": engine,
        "actor_rollout_ref__rollout__placement": "apart",
        "actor_rollout_ref__rollout__max_num_seqs": 64,
        "actor_rollout_ref__actor__optim__lr": 1e-5,
        "trainer__backend": "ray",
        "trainer__async_training__max_staleness": max_staleness,
        "trainer__val_before_train": "false",
        "data__val_data_num": 4,
        **more,
    }


@pytest.fixture
def in_one_process(monkeypatch):
    """The process that samples is a thread of this one, without Ray."""
    decide = placement.decide_machine_settings

    def decide_on_local(config):
        return replace_values(decide(config), {"trainer.backend": "local"})

    monkeypatch.setattr(placement, "decide_machine_settings", decide_on_local)
    monkeypatch.setattr(placement, "needs_ray", lambda config: False)
    # What trains would end the process group of vLLM, which ends it itself.
    monkeypatch.setattr(Worker, "close", lambda worker: None)


@pytest.mark.parametrize(("max_staleness", "transfer"), [(1, "ray"), (2, "collective")])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.usefixtures("in_one_process")
def test_ahead_with_updates_in_flight_the_trainer_agrees_with_what_was_sampled(
    engine, max_staleness, transfer, world, url, tmp_path
):
    more = {"algorithm__rollout_correction__rollout_is": "token", "trainer__total_training_steps": 5}
    more["trainer__save_freq"] = -1
    more["actor_rollout_ref__rollout__weight_transfer"] = transfer
    line = arguments(world, url, tmp_path / "run", **settings(engine, max_staleness, **more))
    assert run(line) == 0
    rows = [row for row in metrics(tmp_path / "run") if "actor/pg_loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert 1 <= max(row["rollout/staleness/max"] for row in rows) <= max_staleness
    # One step of this size moves a log-prob by about 0.01.
    assert rows[0]["rollout_corr/log_prob_diff_max"] < 1e-3
    assert all(row["rollout_corr/log_prob_diff_max"] < 0.3 for row in rows)
    assert all(row["async/sync_bytes"] > 0 for row in rows)


@pytest.mark.ray
@pytest.mark.parametrize("engine", ENGINES)
def test_a_sampler_killed_in_a_generation_and_in_an_update_is_named_and_the_run_goes_on(
    engine, world, url, tmp_path, monkeypatch, capsys
):
    killed = []
    pids = []
    receive = RolloutStream._receive
    send_weights = RolloutStream.send_weights

    def kill(stream, moment):
        killed.append(moment)
        pids.append(stream.workers.owner._rank_places[0].pid)
        os.kill(pids[-1], signal.SIGKILL)

    def receive_from_a_killed_one(stream):
        if stream.version >= 1 and "generation" not in killed and stream.running:
            kill(stream, "generation")
        receive(stream)

    def send_to_a_killed_one(stream, version, *rest, **more):
        send_weights(stream, version, *rest, **more)
        if version == 3 and "update" not in killed:
            kill(stream, "update")

    monkeypatch.setattr(RolloutStream, "_receive", receive_from_a_killed_one)
    monkeypatch.setattr(RolloutStream, "send_weights", send_to_a_killed_one)
    more = {"algorithm__rollout_correction__bypass_mode": "true", "trainer__total_training_steps": 4}
    line = arguments(world, url, tmp_path / "run", **settings(engine, 1, trainer__max_restarts=3, **more))
    assert run(line) == 0
    assert killed == ["generation", "update"]
    rows = [row for row in metrics(tmp_path / "run") if "actor/pg_loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    printed = "".join(capsys.readouterr())
    for pid in pids:
        assert f", pid {pid}) was killed by SIGKILL" in printed, printed
