"""What a run hands to its updates: a shuffle of each step, mini-batches of each role, a running baseline."""

import functools

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run


def record_updates(monkeypatch, worker, name):
    """Batches that the method gets: (the group of each row, counted as they come; number of mini-batches)."""
    update = getattr(worker, name)
    batches = []

    @functools.wraps(update)  # with what the decorator has noted on it
    def recorded(self, data):
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(uid, len(numbers)) for uid in data.non_tensor_batch["uid"]]
        batches.append((groups, data.meta_info["num_mini_batches"]))
        return update(self, data)

    monkeypatch.setattr(worker, name, recorded)
    return batches


@pytest.mark.slow
def test_a_run_with_a_running_baseline_goes_on_with_it(world, url, tmp_path):
    def line(folder: str, num_steps: int) -> list[str]:
        return arguments(
            world,
            url,
            tmp_path / folder,
            algorithm__adv_estimator="rae",
            trainer__val_before_train="false",
            trainer__test_freq=-1,
            trainer__total_training_steps=num_steps,
            actor_rollout_ref__rollout__temperature=0.3,  # some answers are right
            data__val_data_num=2,
        )

    for folder, num_steps in (("whole", 3), ("parts", 2), ("parts", 3)):
        assert run(line(folder, num_steps)) == 0
    whole, parts = (metrics(tmp_path / folder)[-1] for folder in ("whole", "parts"))
    names = [name for name in whole if name.startswith(("actor/", "critic/advantages/"))]
    assert names and [parts[name] for name in names] == [whole[name] for name in names]
    scores = [row["critic/score/mean"] for row in metrics(tmp_path / "whole")[:2]]
    assert max(scores) > 0  # else there is no baseline to lose
