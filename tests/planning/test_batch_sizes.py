"""Batch sizes shrink to the rows of a run, so that runs on few rows need no other settings."""

import pytest
from quick_config import config_with

from verl.config import load_sft_config, replace_values
from verl.planning.batch_sizes import fit_batch_sizes, fit_sft_batch_size
from verl.planning.config_validation import validate

SIZES = ["data.train_batch_size=512", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_batches_are_no_larger_than_the_rows_and_mini_batches_than_a_step(estimator):
    line = [*SIZES, "critic.ppo_mini_batch_size=256", "actor_rollout_ref.rollout.n_agent=5"]
    config, notes = fit_batch_sizes(config_with(*line, f"algorithm.adv_estimator={estimator}"), 10)
    assert config.data.train_batch_size == 10
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 50
    assert config.critic.ppo_mini_batch_size == (50 if estimator == "gae" else 256)
    assert notes[0] == "data.train_batch_size is 10, not 512: there are 10 training rows"
    assert notes[1].endswith("ppo_mini_batch_size is 50, not 256: a step has 50 trajectories")
    assert len(notes) == (3 if estimator == "gae" else 2)
    assert fit_batch_sizes(config, 10) == (config, [])


def test_answers_of_the_engine_are_counted():
    config = config_with(*SIZES, "actor_rollout_ref.rollout.n_agent=1", "actor_rollout_ref.rollout.n=4")
    assert fit_batch_sizes(config, 10)[0].actor_rollout_ref.actor.ppo_mini_batch_size == 10


def test_a_mini_batch_larger_than_a_step_is_no_mistake():
    line = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=256"]
    config = config_with(*line, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n_agent=4")
    without_files = {"trainer.dry_run": True, "actor_rollout_ref.model.path": "Qwen/Qwen2.5-3B"}
    validate(replace_values(config, without_files))
    fitted, notes = fit_batch_sizes(config, 1000)
    assert fitted.actor_rollout_ref.actor.ppo_mini_batch_size == 16 and len(notes) == 1


def test_supervised_batches_are_no_larger_than_the_rows():
    config = load_sft_config(["data.train_batch_size=16"])
    fitted, notes = fit_sft_batch_size(config, 7)
    assert fitted.data.train_batch_size == 7 and len(notes) == 1
    assert fit_sft_batch_size(config, 16) == (config, [])
