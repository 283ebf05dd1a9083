"""docs/walk.md is true: a step of the simplest run passes each of its files."""

import re
import sys
import threading

import pytest
from small_runs import ROOT, arguments

from verl.trainer import main_ppo
from verl.trainer.ppo.collection import TrajectoryCollector
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


@pytest.mark.slow
def test_a_step_passes_the_files_of_the_walk(world, url, tmp_path, monkeypatch):
    walk = (ROOT / "docs/walk.md").read_text()
    expected = set(re.findall(r"^\| \d+ \|[^|]*\| `([^`]+)` \|", walk, re.MULTILINE))
    passed: set[str] = set()
    begin = TrajectoryCollector.begin
    end = RayPPOTrainer._finish_step
    is_on = []

    def begin_step(self, *arguments_):
        is_on.append(True)
        return begin(self, *arguments_)

    def finish_step(self, *arguments_):
        is_on.clear()
        return end(self, *arguments_)

    def note(frame, event, _):
        if is_on and event == "call":
            passed.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    monkeypatch.setattr(TrajectoryCollector, "begin", begin_step)
    monkeypatch.setattr(RayPPOTrainer, "_finish_step", finish_step)
    settings = {"trainer__total_training_steps": 1, "trainer__val_before_train": "false"}
    settings["actor_rollout_ref__actor__max_step_kl"] = 0.01  # as train_grpo.sh sets it
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert main_ppo.run(arguments(world, url, tmp_path / "run", **settings)) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert expected - passed == set()
