"""This project's training step as a contender of scripts/bench_grpo_step.py: the real trainer, in process."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.bench.grpo_step_task import GROUP, GrpoTask, Steps, task_of_command_line
from verl.trainer.config import parse_arguments, validate
from verl.trainer.main_ppo import build_trainer, place
from verl.trainer.ppo.run_state import RunStopped


def overrides(task: GrpoTask, run_folder: str) -> list[str]:
    """The quickstart's settings, without what TRL does not do (search cost, entropy bonus, lr schedule)."""
    rows = task.prompts_per_step * GROUP
    return [
        f"data.train_files={task.folder}/train.parquet",
        f"data.val_files={task.folder}/test.parquet",
        f"actor_rollout_ref.model.path={task.model}",
        f"retriever.url={task.url}",
        f"trainer.default_local_dir={run_folder}",
        f"trainer.seed={task.seed}",
        f"trainer.total_training_steps={task.num_steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.num_trajectories_logged=0",
        "trainer.progress=plain",
        "algorithm.adv_estimator=grpo",
        "algorithm.kl_ctrl.kl_coef=0",
        "data.shuffle_train_dataloader=false",
        f"data.train_batch_size={task.prompts_per_step}",
        f"data.max_start_length={task.max_start_length}",
        f"data.max_prompt_length={task.max_prompt_length}",
        f"data.max_response_length={task.max_response_length}",
        f"data.max_obs_length={task.max_obs_length}",
        f"actor_rollout_ref.rollout.n_agent={GROUP}",
        f"actor_rollout_ref.rollout.temperature={task.temperature}",
        f"actor_rollout_ref.rollout.max_num_seqs={rows}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={rows}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size={rows}",
        "actor_rollout_ref.actor.entropy_coeff=0",
        f"actor_rollout_ref.actor.optim.lr={task.lr}",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        f"retriever.topk={task.topk}",
        f"max_turns={task.max_turns}",
    ]


def main(task: GrpoTask) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = parse_arguments(overrides(task, f"{folder}/run"))
        validate(config)
        place(config)
        trainer = build_trainer(config)
        steps = Steps(task)
        log_step = trainer.recorder.log_step

        def note_step(state: Any, metrics: dict[str, float], batch: Any, *others: Any) -> None:
            log_step(state, metrics, batch, *others)
            lengths = batch.tensors["prompt_length"] + batch.tensors["response_length"]
            tokens = lengths.sum() / len(batch)
            em = float(np.mean(batch.non_tensor_batch["em"].astype(float)))
            steps.add(em, metrics["response_length/mean"], float(tokens))
            if steps.is_over:
                trainer.actor_rollout_wg.save_hf(f"{folder}/final")
                raise RunStopped("the time is over")

        trainer.recorder.log_step = note_step  # type: ignore[method-assign]
        try:
            trainer.init_workers()
            steps.start()
            trainer.fit()
        except RunStopped:
            shutil.copytree(f"{folder}/final", Path(task.final_model), dirs_exist_ok=True)
        finally:
            trainer.shutdown()


if __name__ == "__main__":
    main(task_of_command_line())
