"""Rollout correction, straight-through KL and the adaptive entropy weight, in runs whose engine computes in
bfloat16 and whose trainer does not."""

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

ACTOR = "actor_rollout_ref__actor__"
CORRECTION = "algorithm__rollout_correction__"
QUICK = {
    "actor_rollout_ref__rollout__dtype": "bfloat16",
    f"{ACTOR}ppo_mini_batch_size": 8,
    "data__val_data_num": 4,
    "trainer__val_before_train": "false",
    "trainer__test_freq": -1,
}


def figures(world, url, folder, **settings):
    """What was recorded of the training steps."""
    assert run(arguments(world, url, folder, **QUICK, **settings)) == 0
    return [row for row in metrics(folder) if "actor/lr" in row]


@pytest.mark.slow
def test_weights_and_rejection_act_and_the_entropy_weight_survives_a_restart(world, url, tmp_path):
    settings = {
        f"{CORRECTION}rollout_is": "token",
        f"{CORRECTION}rollout_is_batch_normalize": "true",
        f"{CORRECTION}rollout_rs": "token",
        f"{CORRECTION}rollout_rs_threshold": 1.02,
        f"{ACTOR}use_kl_loss": "true",
        f"{ACTOR}kl_loss_type": "k3+",
        f"{ACTOR}entropy_ctrl__target_entropy": 50.0,
    }
    rows = figures(world, url, tmp_path, **settings, trainer__total_training_steps=1)
    rows = figures(world, url, tmp_path, **settings)
    assert [row["actor/entropy_coeff"] for row in rows] == pytest.approx([0.001, 0.002])
    for row in rows:
        assert 0 < row["rollout_corr/k3_kl"] < 0.01
        assert 0 < row["rollout_corr/rollout_rs_masked_fraction"] < 0.9
        assert row["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(1, abs=0.05)
        assert row["rollout_corr/rollout_is_max"] > 1.02  # of all that was sampled
        assert {"actor/ref_kl", "groups/effective_share", "response/repeated_ngrams"} <= set(row)
        assert row["timing_s/old_log_prob"] > 0
