"""SIGUSR1 ends a run after its step, with a checkpoint from which the same command goes on."""

from __future__ import annotations

import json
import os
import signal

import pytest
from small_runs import arguments, metrics

from verl.trainer import main_ppo


@pytest.fixture(autouse=True)
def handlers():
    numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.slow
def test_a_run_that_is_asked_writes_a_checkpoint_and_the_same_command_goes_on(
    world, url, tmp_path, monkeypatch, capsys
):
    run_dir = tmp_path / "run"
    command = arguments(world, url, run_dir, trainer__save_freq=-1, trainer__val_before_train="false")
    build = main_ppo.build_trainer

    def build_and_ask(*given, **named):
        os.kill(os.getpid(), signal.SIGUSR1)
        return build(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(main_ppo, "build_trainer", build_and_ask)
        assert main_ppo.run(command) == 3
    said = capsys.readouterr().err
    assert "stopped: asked to stop; the checkpoint of step 1 is written" in said
    assert (run_dir / "global_step_1").is_dir() and not (run_dir / "summary.json").exists()
    assert main_ppo.run(command) == 0
    assert [row["step"] for row in metrics(run_dir) if "actor/pg_loss" in row] == [1, 2]
    assert json.loads((run_dir / "summary.json").read_text())
