"""This project's update as a contender of scripts/bench_update.py: DataParallelPPOActor.update_policy."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.update_task import UpdateTask, run_contender  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.trainer.config.loading import load_config  # noqa: E402
from verl.workers.actor.dp_actor import DataParallelPPOActor  # noqa: E402
from verl.workers.engine.engine import TrainEngine  # noqa: E402
from verl.workers.engine.loading import load_policy  # noqa: E402
from verl.workers.engine.micro_batches import MicroBatchLimits  # noqa: E402
from verl.workers.engine.precision import Precision  # noqa: E402


class OurStep:
    """`accumulate` is all of update_policy but the optimizer's step, which `apply` makes."""

    def __init__(self, task: UpdateTask, batch: dict[str, Tensor]) -> None:
        num_rows, cpu = len(batch["input_ids"]), torch.device("cpu")
        block = load_config(
            [
                f"actor_rollout_ref.model.path={task.model}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={num_rows}",
                f"actor_rollout_ref.actor.ppo_micro_batch_size={num_rows}",
                f"actor_rollout_ref.actor.optim.lr={task.learning_rate}",
                f"actor_rollout_ref.actor.grad_clip={task.grad_clip}",
                "actor_rollout_ref.actor.entropy_coeff=0",
            ]
        ).actor_rollout_ref
        fsdp = block.actor.fsdp_config
        precision = Precision.from_config(fsdp, cpu)
        policy = load_policy(block.model, precision.model)
        self.model = policy.model
        self.engine = TrainEngine(policy, precision, fsdp, cpu, 1, block.actor.optim, task.grad_clip)
        limits = MicroBatchLimits.from_config(block.actor, "actor", "ppo", cpu, packed=True)
        self.actor = DataParallelPPOActor(block.actor, self.engine, limits, block.rollout.temperature)
        self.data = as_data(batch)
        self.processed_tokens = int(batch["attention_mask"].sum())
        self._optimizer_step = self.engine.step
        self.engine.step = lambda discard=False: (1.0, not discard)  # type: ignore[method-assign]
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)

    def accumulate(self) -> float:
        return self.actor.update_policy(self.data)["actor/pg_loss"]

    def apply(self) -> None:
        self._optimizer_step()


def as_data(batch: dict[str, Tensor]) -> DataProto:
    """The benchmark's trajectories as the actor takes them: all but the first token are the response."""
    attention, mask = batch["attention_mask"], batch["response_mask"][:, 1:]
    return DataProto.from_dict(
        {
            "input_ids": batch["input_ids"],
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": mask,
            "advantages": batch["advantages"][:, None] * mask,
        }
    )


if __name__ == "__main__":
    run_contender(OurStep)
