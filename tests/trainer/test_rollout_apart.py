"""Rollouts in processes of their own: the same run as with the engine in the trainer's process."""

import json

import pytest
from small_runs import arguments, metrics

from verl.trainer.main_ppo import run

SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean", "train/score")


@pytest.mark.slow
@pytest.mark.ray
def test_rollouts_apart_are_those_of_a_colocated_engine_also_after_a_resumed_checkpoint(
    world, url, tmp_path
):
    from verl.single_controller.ray import init_ray

    def line(name: str, *more: str) -> list[str]:
        return [*arguments(world, url, tmp_path / name, trainer__total_training_steps=3), *more]

    assert run(line("together")) == 0
    apart = line("apart", "trainer.rollout_pool.n_gpus_per_node=1")
    with init_ray(num_cpus=2, log_to_driver=False):
        assert run([*apart, "trainer.total_training_steps=2"]) == 0
        assert run(apart) == 0  # goes on from step 2

    together = metrics(tmp_path / "together")
    for row, expected in zip(metrics(tmp_path / "apart"), together, strict=True):
        for name in SAME:
            if name in expected:
                assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("together", "apart")]
    assert summaries[0]["em_after_by_hops"] == summaries[1]["em_after_by_hops"]
