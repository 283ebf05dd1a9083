"""Training with vLLM as the rollout engine, in the trainer's process and in one of its own.

That the same seeds give the same tokens in both is seen in tests/workers/test_rollout_worker.py.
"""

import importlib.util

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (scripts/test_vllm.sh installs it)",
    ),
]


def train(world, url, run_dir, placement, num_steps):
    line = arguments(
        world,
        url,
        run_dir,
        actor_rollout_ref__rollout__name="vllm",
        actor_rollout_ref__rollout__placement=placement,
        actor_rollout_ref__rollout__max_num_seqs=16,
        actor_rollout_ref__rollout__max_num_batched_tokens=1024,
        actor_rollout_ref__actor__optim__lr=1e-3,
        trainer__total_training_steps=num_steps,
        trainer__val_before_train="false",
        trainer__test_freq=-1,
        trainer__save_freq=-1,
        data__val_data_num=2,
    )
    assert run(line) == 0
    return metrics(run_dir)


def test_what_was_sampled_in_two_steps_colocated_and_one_apart_agrees_with_the_trainer(world, url, tmp_path):
    first, second = train(world, url, tmp_path / "colocated", "colocated", 2)
    (apart,) = train(world, url, tmp_path / "apart", "apart", 1)
    for row in (first, second, apart):
        assert row["rollout_corr/log_prob_diff_max"] < 1e-3  # in the second step: of the updated weights
        assert row["actor/grad_norm"] > 0 and row["actor/num_skipped_updates"] == 0
