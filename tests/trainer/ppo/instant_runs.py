"""Whole runs of the real trainer in this process, with workers that answer at once and can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from instant_workers import InstantCritic, InstantPolicy, prompt_rows
from transformers import AutoTokenizer

from search_r1.llm_agent.trajectory import env_metrics
from verl.config import load_config
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Dispatch, register
from verl.trainer.placement import ResourcePoolManager, Role
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.reward_manager import RewardManager

MODEL = Path(__file__).parents[3] / "data_prep" / "base_model"
GROUP = 8
ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.kl_ctrl.kl_coef=0.001"],
}


class SavedWorker:
    """Checkpoints of nothing."""

    @register()
    def save_checkpoint(self, path: str, background: bool) -> None:
        Path(path).mkdir()

    @register()
    def checkpoint_is_written(self, wait: bool) -> bool:
        return True

    @register()
    def load_checkpoint(self, path: str) -> None:
        assert Path(path).is_dir()


class Policy(SavedWorker, InstantPolicy):
    """Keeps what the updates got. After `answered` generations every search fails; None: never.

    Log-probs depend on the tokens alone.
    """

    updates: ClassVar[list[DataProto]] = []
    asked: ClassVar[list[list[str]]] = []
    answered: ClassVar[int | None] = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        Policy.asked.append([str(ids) for ids in prompts.non_tensor_batch["raw_prompt_ids"]])
        made = super().generate_sequences(prompts)
        if Policy.answered is not None and len(Policy.asked) > Policy.answered:
            for record in made.non_tensor_batch["trajectory"]:
                record["finish_reason"] = "search_failed"
            made.tensors["response_mask"][:] = 0
        return made

    def _numbers(self, data: DataProto, value: float) -> Any:
        mask = data.tensors["response_mask"]
        tokens = data.tensors["input_ids"][:, -mask.shape[1] :]
        return (tokens % 97 / 970 + value).float() * mask

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        Policy.updates.append(data)
        return super().update_actor(data)


class Critic(SavedWorker, InstantCritic):
    updates: ClassVar[list[DataProto]] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        mask = data.tensors["response_mask"]
        return DataProto.from_dict({"values": data.tensors["input_ids"][:, -mask.shape[1] :] % 31 / 31})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        Critic.updates.append(data)
        return super().update_critic(data)


def instant_trainer(
    folder: Path, *settings: str, algorithm: str = "grpo", rows: int = 32, tokens: int = 220
) -> RayPPOTrainer:
    """A trainer of `rows` trajectories a step, of up to `tokens` each, over 8 times as many questions as a
    step takes.
    """
    config = load_config(
        [
            f"actor_rollout_ref.model.path={MODEL}",
            f"data.train_batch_size={rows // GROUP}",
            f"actor_rollout_ref.rollout.n_agent={GROUP}",
            f"data.max_prompt_length={tokens}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={rows // 4}",
            f"critic.ppo_mini_batch_size={rows // 4}",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[]",
            "trainer.val_only=false",
            "trainer.val_before_train=false",
            "trainer.critic_warmup=0",
            "trainer.total_training_steps=1",
            *ALGORITHMS[algorithm],
            "data.val_batch_size=2",
            "trainer.val_modes=[greedy]",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "retriever.max_failed_share=0.5",
            *settings,
        ]
    )
    config.trainer.device = "cpu"
    files = folder.parent / "questions.parquet"
    if not files.exists():
        files.write_bytes(b"questions")
    config.data.train_files = str(files)
    config.trainer.backend = "local"
    pools = ResourcePoolManager({"all": [1]}, dict.fromkeys(Role, "all"), "local", use_gpu=False)
    pools.create_resource_pool()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    dataset: Any = prompt_rows(MODEL, rows)
    role = Role.ActorRolloutRef if config.algorithm.kl_ctrl.kl_coef > 0 else Role.ActorRollout
    Policy.updates, Policy.asked, Policy.answered, Critic.updates = [], [], None, []
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={
            role: ClassWithInitArgs(Policy, model=MODEL, width=tokens),
            Role.Critic: ClassWithInitArgs(Critic),
        },
        resource_pool_manager=pools,
        reward_fn=RewardManager(tokenizer),
        val_reward_fn=RewardManager(tokenizer),
        trajectory_metrics=env_metrics,
        train_dataset=dataset,
        val_dataset=dataset[:2],
    )


def run(trainer: RayPPOTrainer) -> dict[str, Any]:
    """From the start to the end of a run."""
    try:
        trainer.init_workers()
        return trainer.fit()
    finally:
        trainer.shutdown()
