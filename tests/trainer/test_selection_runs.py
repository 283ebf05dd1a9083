"""Data selection and the other parts of a step in runs of the whole program; a restart changes nothing."""

import shutil

import pytest
from small_runs import BASE_MODEL, arguments, metrics

from verl.trainer.main_ppo import run

TIMES = ("timing_", "perf/", "rollout/seconds", "rollout/tokens_per_second", "retrieval/")
QUICK = {
    "data__train_batch_size": 2,
    "data__val_data_num": 1,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
    "max_turns": 1,
    "trainer__val_before_train": "false",
}


def without_times(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith(TIMES)}


@pytest.mark.slow
def test_rule_10_with_refill_and_pools_a_killed_run_makes_the_same_next_step(world, url, tmp_path):
    line = arguments(
        world,
        url,
        tmp_path / "run",
        prompt_selection__filter_groups__enable="true",
        prompt_selection__filter_groups__max_num_gen_batches=3,
        prompt_selection__difficulty_pools__enable="true",
        prompt_selection__difficulty_pools__hard_share=0.5,
        reward_model__overlong_buffer__enable="true",
        reward_model__overlong_buffer__len=8,
        algorithm__overlong_filter="true",
        trainer__total_training_steps=3,
        **QUICK,
    )
    assert run(line) == 0
    undisturbed = metrics(tmp_path / "run")
    assert any(row["filter/num_gen_batches"] > 1 for row in undisturbed)
    assert undisturbed[-1]["pools/measured"] > undisturbed[0]["pools/measured"] > 0
    shutil.rmtree(tmp_path / "run" / "global_step_3")  # killed before it was written
    assert run(line) == 0
    resumed = metrics(tmp_path / "run")
    assert [without_times(row) for row in resumed] == [without_times(row) for row in undisturbed]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_rs": "geometric",
            "algorithm.rollout_correction.rollout_rs_threshold": 1.01,
            "actor_rollout_ref.actor.loss_agg_mode": "prompt-mean",
            "actor_rollout_ref.actor.echo_coeff": 0.01,
            "algorithm.turn_credit": 0.5,
        },
        {
            "algorithm.rollout_correction.bypass_mode": "true",
            "actor_rollout_ref.actor.use_kl_loss": "true",
            "actor_rollout_ref.ref.reset_every": 1,
            "algorithm.adv_estimator": "rae",
        },
        {
            "actor_rollout_ref.actor.policy_loss.loss_mode": "distillation",
            "actor_rollout_ref.teacher.path": BASE_MODEL,
        },
    ],
    ids=["correction", "bypass", "teacher"],
)
def test_what_a_step_can_have_besides_works_together(world, url, tmp_path, settings):
    line = arguments(world, url, tmp_path / "run", **QUICK, **settings)
    assert run(line) == 0
    rows = metrics(tmp_path / "run")
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    if "actor_rollout_ref.ref.reset_every" in settings:  # it was the policy before each first update
        assert [row["timing_s/old_log_prob"] for row in rows if "timing_s/old_log_prob" in row] == []
        assert all(row["actor/kl_loss"] < 1e-3 for row in rows)
    elif "actor_rollout_ref.teacher.path" in settings:
        assert all("timing_s/teacher" in row for row in rows)
    else:
        assert all(0.99 < row["rollout_corr/rollout_is_mean"] < 1.01 for row in rows)
        assert all("actor/echo_loss" in row for row in rows)


@pytest.mark.slow
def test_updates_that_are_skipped_again_and_again_stop_the_run_with_a_diagnosis(world, url, tmp_path, capsys):
    # The scores are finite, and the gradients of such advantages are not.
    score = "3e38 if len(solution_str) % 2 else -3e38"
    code = f"def compute_score(solution_str, **fields): return {score}\n"
    (tmp_path / "reward.py").write_text(code)
    line = arguments(
        world,
        url,
        tmp_path / "run",
        custom_reward_function__path=tmp_path / "reward.py",
        algorithm__norm_adv_by_std_in_grpo="false",
        trainer__max_skipped_updates=3,
        trainer__total_training_steps=4,
        **QUICK,
    )
    assert run(line) == 3
    error = capsys.readouterr().err
    assert "step 2: 4 updates of the actor in a row were skipped" in error, error
    assert "trainer.max_skipped_updates=3" in error and "Traceback" not in error
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2]
