"""Estimators that ask for different things, each through two whole steps on a small world."""

import math

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

TWO_REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    searched = float("<search>" in solution_str)
    return {"score": searched, "short": float(len(solution_str) < 60), "searched": searched}
"""
KL_IN_REWARD = {"algorithm__kl_ctrl__kl_coef": 0.01}
CASES = {
    "gae": KL_IN_REWARD,
    "grpo": KL_IN_REWARD,
    "reinforce_plus_plus": KL_IN_REWARD,
    "remax": KL_IN_REWARD,
    "gpg": {"actor_rollout_ref__actor__policy_loss__loss_mode": "gpg"},  # nothing reads old log-probs
    "gdpo": {"algorithm__gdpo_reward_keys": "[short,searched]"},
    "rae": KL_IN_REWARD,
    "tir_optimal_token_baseline": KL_IN_REWARD,
}


@pytest.mark.slow
@pytest.mark.parametrize("estimator", CASES)
def test_two_steps_with_several_mini_batches(world, url, tmp_path, estimator):
    (tmp_path / "reward.py").write_text(TWO_REWARDS)
    line = arguments(
        world,
        url,
        tmp_path / "run",
        algorithm__adv_estimator=estimator,
        custom_reward_function__path=tmp_path / "reward.py",
        data__train_batch_size=2,
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
        critic__ppo_mini_batch_size=4,
        max_turns=1,
        trainer__val_before_train="false",
        trainer__save_freq=-1,
        data__val_data_num=1,
        **CASES[estimator],
    )
    assert run(line) == 0
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/pg_loss"])
        assert ("critic/vf_loss" in row) == (estimator == "gae")
        assert ("critic/kl" in row) == ("algorithm__kl_ctrl__kl_coef" in CASES[estimator])
        assert ("remax/baseline" in row) == (estimator == "remax")
        has_ratio = estimator != "gpg"
        assert ("timing_s/old_log_prob" in row) == ("actor/ratio/max" in row) == has_ratio
    if "critic/kl" in rows[0]:
        assert rows[0]["critic/kl"] == pytest.approx(0, abs=1e-4)  # the policy still is the reference
