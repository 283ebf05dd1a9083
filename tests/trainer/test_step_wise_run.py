"""A run whose update has turns as rows goes like the same run with trajectories as rows."""

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

ACTOR = "actor_rollout_ref__actor__"
SETTINGS = {
    "algorithm__turn_credit": 0.3,  # else all turns of a trajectory have one advantage
    "actor_rollout_ref__rollout__temperature": 0.6,  # some answers are right
    f"{ACTOR}ppo_mini_batch_size": 8,
    f"{ACTOR}use_kl_loss": "true",
    f"{ACTOR}optim__lr": 1e-3,
    "trainer__total_training_steps": 3,
    "trainer__save_freq": -1,
    "trainer__val_before_train": "false",
    "data__val_data_num": 8,
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"algorithm__rollout_correction__bypass_mode": "true"}])
def test_a_step_wise_run_has_the_metrics_of_one_with_whole_trajectories(world, url, tmp_path, settings):
    def figures(step_wise: str) -> list[dict[str, float]]:
        line = arguments(world, url, tmp_path / step_wise, **SETTINGS, **settings)
        assert run([*line, f"actor_rollout_ref.rollout.step_wise={step_wise}"]) == 0
        return metrics(tmp_path / step_wise)

    def comparable(row: dict[str, float]) -> dict[str, float]:
        varies = ("timing", "perf/", "retrieval/", "rollout/")
        return {name: x for name, x in row.items() if isinstance(x, float) and not name.startswith(varies)}

    turns = figures("true")
    trajectories = figures("false")
    assert (
        len(turns) == len(trajectories) and max(row.get("env/number_of_actions/max", 0) for row in turns) > 1
    )
    for row, expected in zip(turns, trajectories, strict=True):
        assert comparable(row) == pytest.approx(comparable(expected), rel=1e-4, abs=1e-4)
    moved = [row["actor/grad_norm"] for row in turns if "actor/grad_norm" in row]
    assert len(moved) == 3 and min(moved) > 0
