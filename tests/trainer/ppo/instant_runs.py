"""Whole runs of the real trainer in this process, with workers that answer at once and can be saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
from transformers import AutoTokenizer

from search_r1.llm_agent.generation import env_metrics
from verl.agent.codec import to_tensors
from verl.agent.trajectory import Trajectory, Turn
from verl.config import load_config, replace_values
from verl.data.mixture import training_rows
from verl.planning.placement import ResourcePoolManager, Role
from verl.protocol import DataProto
from verl.records import recorder
from verl.single_controller.base import ClassWithInitArgs, Dispatch, Worker, register
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.scoring import RewardManager

MODEL = Path(__file__).parents[3] / "data_prep" / "base_model"
WORDS = "The lake lies north of the old town and was first named by people who came from the coast. "
SEARCH = "<think> I need to look this up. </think> <search> who named the lake north of the town </search>"
ANSWERS = ("<answer> Bergen </answer>", "<answer> Oslo </answer>")  # wrong, right
PROMPT_TOKENS = 100
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


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def numbers(data: DataProto, value: float) -> Any:
    """For each token one that depends on it alone, [N, R]."""
    mask = data.tensors["response_mask"]
    tokens = data.tensors["input_ids"][:, -mask.shape[1] :]
    return (tokens % 97 / 970 + value).float() * mask


class Policy(SavedWorker, Worker):
    """Answers at once, with a prompt, two searches with their documents, and an answer, drawn from the row's
    seed; a trajectory has at most `width` tokens. Keeps what the updates got. After `answered` generations
    every search fails; None: never.
    """

    updates: ClassVar[list[DataProto]] = []
    asked: ClassVar[list[list[str]]] = []
    answered: ClassVar[int | None] = None

    def __init__(self, width: int) -> None:
        super().__init__()
        self._register_dispatch_collect_info("rollout", self.rank, True)
        self.width = width
        tokenizer = AutoTokenizer.from_pretrained(str(MODEL), model_max_length=1_000_000)
        self.pad = tokenizer.pad_token_id
        self.search = ids(tokenizer, SEARCH)
        self.text = ids(tokenizer, WORDS * 200)
        self.answers = [(text, ids(tokenizer, text)) for text in ANSWERS]

    @register()
    def init_model(self) -> None:
        pass

    @register()
    def start_rollout(self, num_rows: int, training_bytes: int) -> None:
        pass

    @register()
    def sync_weights(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        asked = prompts.non_tensor_batch["raw_prompt_ids"]
        seeds = prompts.tensors["sampling_seeds"].tolist()
        Policy.asked.append([str(prompt) for prompt in asked])
        made = [self._trajectory(row, asked[row], seed) for row, seed in enumerate(seeds)]
        tensors = to_tensors(made, PROMPT_TOKENS, self.width - PROMPT_TOKENS, self.pad)
        records = [trajectory.record(WORDS) for trajectory in made]
        if Policy.answered is not None and len(Policy.asked) > Policy.answered:
            for record in records:
                record["finish_reason"] = "search_failed"
            tensors["response_mask"][:] = 0
        return DataProto.from_dict(tensors, {"trajectory": records}, {"metrics": {"rollout/seconds": 0.0}})

    def _trajectory(self, row: int, prompt_ids: list[int], seed: int) -> Trajectory:
        draws = np.random.default_rng(abs(seed))
        made = Trajectory(row, prompt_ids, seed, version_first=0, version_last=0, finish_reason="answer")
        length = int(draws.integers(2 * self.width // 3, self.width + 1))
        room = length - len(prompt_ids) - 2 * len(self.search) - len(self.answers[1][1]) - 8
        for size in (room // 2, room - room // 2):
            start, end = made.add_sampled(self.search, [-0.5] * len(self.search))
            documents = [{"contents": f"{WORDS * 6}{seed} {size} {i}", "score": 1.0} for i in range(3)]
            details = {"query": "who named the lake", "documents": documents}
            made.turns.append(Turn("search", SEARCH, start, end, details=details))
            begin = int(draws.integers(1000))
            made.add_observation(self.text[begin : begin + size])
        text, answer = self.answers[int(draws.random() < 0.5)]
        start, end = made.add_sampled(answer, [-0.1] * len(answer))
        made.turns.append(Turn("answer", text, start, end, details={"query": None, "documents": None}))
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": numbers(data, -0.5)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_prob": numbers(data, -0.6)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        Policy.updates.append(data)
        metrics = {"actor/pg_loss": float(data.tensors["advantages"].mean())}
        return DataProto(meta_info={"metrics": metrics, "skipped_update": ""})


class Critic(SavedWorker, Worker):
    """The critic to it."""

    updates: ClassVar[list[DataProto]] = []

    @register()
    def init_model(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        mask = data.tensors["response_mask"]
        return DataProto.from_dict({"values": data.tensors["input_ids"][:, -mask.shape[1] :] % 31 / 31})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        Critic.updates.append(data)
        metrics = {"critic/vf_loss": float(data.tensors["returns"].mean())}
        return DataProto(meta_info={"metrics": metrics, "skipped_update": ""})


def instant_trainer(
    folder: Path,
    *settings: str,
    algorithm: str = "grpo",
    rows: int = 32,
    tokens: int = 220,
    reads_files: bool = False,
) -> RayPPOTrainer:
    """A trainer of `rows` trajectories a step, of up to `tokens` each, over 8 times as many questions as a
    step takes. reads_files: over those of data.mixture.
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
    files = folder.parent / "questions.parquet"
    if not files.exists():
        files.write_bytes(b"questions")
    here = {"trainer.device": "cpu", "trainer.backend": "local"}
    config = replace_values(config, {**here, "data.train_files": str(files)})
    pools = ResourcePoolManager({"all": [1]}, dict.fromkeys(Role, "all"), "local", use_gpu=False)
    pools.create_resource_pool()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    text = ids(tokenizer, WORDS * 200)
    dataset: Any = [
        {
            "raw_prompt_ids": text[i * 7 % 500 :][:PROMPT_TOKENS],
            "index": i,
            "data_source": "nq",
            "reward_model": {"ground_truth": {"target": ["Oslo"]}},
            "extra_info": {"question": "Who named the lake?"},
        }
        for i in range(rows)
    ]
    role = Role.ActorRolloutRef if config.algorithm.kl_ctrl.kl_coef > 0 else Role.ActorRollout
    Policy.updates = []
    Policy.asked = []
    Policy.answered = None
    Critic.updates = []
    return RayPPOTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={
            role: lambda _: ClassWithInitArgs(Policy, width=tokens),
            Role.Critic: lambda _: ClassWithInitArgs(Critic),
        },
        resource_pool_manager=pools,
        reward_fn=RewardManager(tokenizer),
        val_reward_fn=RewardManager(tokenizer),
        trajectory_metrics=env_metrics,
        train_dataset=training_rows(config, tokenizer) if reads_files else dataset,
        val_dataset=dataset[:2],
    )


def run(trainer: RayPPOTrainer) -> dict[str, Any]:
    """From the start to the end of a run; no picture of the metrics, which takes most of the time."""
    try:
        trainer.init_workers()
        with patch.object(recorder, "draw_curves"):
            return trainer.fit()
    finally:
        trainer.shutdown()


def documented_metrics() -> str:
    """A pattern of all names in docs/metrics.md; one without a slash goes on like the first of its line."""
    patterns = []
    for line in (Path(__file__).parents[3] / "docs" / "metrics.md").read_text().splitlines():
        names = re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else []
        for name in names:
            name = name if "/" in name else f"{names[0].rpartition('/')[0]}/{name}"
            pattern = re.sub(r"<\w+>", ".+", re.escape(name).replace(r"\.\.", ".*"))
            patterns.append(re.sub(r"\\{(.*?)\\}", lambda part: f"({part[1].replace(',', '|')})", pattern))
    return "|".join(patterns)
