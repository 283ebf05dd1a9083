"""Whole PPO runs on Megatron and on FSDP2: the same numbers, and each goes on from the other's checkpoint."""

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

PPO = {
    "algorithm__adv_estimator": "gae",
    "critic__optim__lr": 1e-4,
    "actor_rollout_ref__actor__use_kl_loss": True,
    "actor_rollout_ref__ref__reset_every": 1,
    "trainer__seed": 3,
    "trainer__val_before_train": False,
}
MEGATRON = ["--config-name", "ppo_megatron_trainer"]


@pytest.mark.slow
@pytest.mark.megatron
def test_rule_5_a_run_on_megatron_goes_as_on_fsdp_and_one_goes_on_where_the_other_stopped(
    world, url, tmp_path
):
    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run(arguments(world, url, whole, **PPO, trainer__total_training_steps=3)) == 0
    for steps, kind in ((1, []), (2, MEGATRON), (3, [])):
        line = arguments(world, url, parts, **PPO, trainer__total_training_steps=steps)
        assert run([*kind, *line]) == 0
    for expected, found in zip(steps_of(whole), steps_of(parts), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


def steps_of(folder):
    """The updates' figures of each step."""
    return [
        {name: value for name, value in row.items() if name.startswith(("actor/", "critic/"))}
        for row in metrics(folder)
        if "actor/kl_loss" in row
    ]
