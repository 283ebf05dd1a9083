"""Rollouts in processes of their own: the same run as with the engine in the trainer's process."""

import os
import signal

import pytest
from small_runs import arguments, metrics

from verl.single_controller.base.errors import WorkerDiedError
from verl.trainer.config import load_config, validate
from verl.trainer.main_ppo import build_trainer, run

SAME = ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean", "train/score")


@pytest.mark.slow
@pytest.mark.ray
def test_rollouts_apart_are_those_of_a_colocated_engine_also_after_a_checkpoint_was_loaded(
    world, url, tmp_path
):
    from verl.single_controller.ray import init_ray

    def line(name: str, *more: str) -> list[str]:
        return [*arguments(world, url, tmp_path / name), *more]

    assert run(line("together")) == 0
    config = load_config(
        line(
            "apart",
            "trainer.rollout_pool.n_gpus_per_node=1",
            "trainer.backend=ray",
            "trainer.max_ckpt_to_keep=null",
        )
    )
    validate(config)
    with init_ray(num_cpus=2, log_to_driver=False):
        trainer = build_trainer(config)
        try:
            trainer.init_workers()
            assert trainer.rollout_wg.world_size == 1
            assert trainer.rollout_wg is not trainer.actor_rollout_wg
            last = trainer.fit()
            trainer.resume_folder = tmp_path / "apart" / "global_step_1"
            again = trainer.fit()  # the rollout processes have the weights of step 2: these must go

            trainer.rollout_wg.forget_weights()  # so they are sent again, to a process that has gone
            processes = trainer.rollout_wg.rollout.owner
            os.kill(processes._rank_places[0].pid, signal.SIGKILL)
            with pytest.raises(WorkerDiedError, match=f"rank 0 of worker group '{processes.name}' died"):
                trainer.rollout_wg.generate_sequences(None)
        finally:
            trainer.shutdown()

    together = metrics(tmp_path / "together")
    for row, expected in zip(metrics(tmp_path / "apart"), together, strict=True):
        for name in set(SAME) & expected.keys():
            assert row[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    assert last["em_after_by_hops"] == again["em_after_by_hops"]
