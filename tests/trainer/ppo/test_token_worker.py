"""A step is the same bit for bit wherever its columns over tokens lie, and the driver needs none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ray import cloudpickle
from storing_group import StoringGroup, has_token_columns

from scripts.bench.instant_workers import InstantCritic, InstantPolicy
from scripts.bench_controller import MODEL, Phases, StepTrainer, build, make_config
from verl.protocol import DataProto
from verl.single_controller.base import ClassWithInitArgs, Dispatch, register
from verl.trainer.ppo.token_worker import TokenWorker
from verl.utils.reward_score import load_reward_function
from verl.workers.reward_manager import RewardManager

ROWS, TOKENS = 32, 220
CORRECTION = "algorithm.rollout_correction"
SETTINGS = {
    "grpo": ["grpo"],
    "a critic and KL in the reward": ["ppo"],
    "rejected tokens and weights": [
        "grpo",
        f"{CORRECTION}.rollout_rs=token",
        f"{CORRECTION}.rollout_rs_threshold=1.02",
        f"{CORRECTION}.rollout_is=token",
    ],
    "bypass": ["grpo", f"{CORRECTION}.bypass_mode=true"],
    "filtered groups, several rounds": [
        "grpo",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.refill=true",
    ],
    "greedy baselines": ["grpo", "algorithm.adv_estimator=remax"],
    "credit for turns": ["grpo", "algorithm.turn_credit=0.5"],
    "a running baseline": ["grpo", "algorithm.adv_estimator=rae"],
    "prompt-mean and observations": [
        "grpo",
        "actor_rollout_ref.actor.loss_agg_mode=prompt-mean",
        "actor_rollout_ref.actor.echo_coeff=0.1",
    ],
    "overlong penalty": [
        "grpo",
        "reward_model.overlong_buffer.enable=true",
        "reward_model.overlong_buffer.len=100",
    ],
}


class NotedPolicy(InstantPolicy):
    """Keeps the rows that the update got. Log-probs depend on the tokens alone."""

    updates: ClassVar[list[DataProto]] = []

    def _numbers(self, data: DataProto, value: float) -> torch.Tensor:
        mask = data.tensors["response_mask"]
        return (data.tensors["responses"] % 97 / 970 + value).float() * mask

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        NotedPolicy.updates.append(data)
        return super().update_actor(data)


class NotedCritic(InstantCritic):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": data.tensors["responses"] % 31 / 31})


def two_steps(folder: Path, columns_stay: bool, settings: list[str]) -> tuple[list[Any], list[DataProto]]:
    """(metrics of each step, rows of each rank's update), with two ranks."""
    NotedPolicy.updates.clear()
    config = make_config(ROWS, TOKENS, settings[0], str(folder), *settings[1:])
    trainer: StepTrainer = build(config, "local", ROWS, TOKENS, processes=1)
    policy = ClassWithInitArgs(NotedPolicy, model=MODEL, width=TOKENS)
    trainer.actor_rollout_wg = trainer.rollout_wg = StoringGroup(policy, 2, columns_stay)
    trainer.critic_wg = StoringGroup(ClassWithInitArgs(NotedCritic), 2, columns_stay)
    tokens = ClassWithInitArgs(
        TokenWorker, config, trainer.tokenizer, trainer.reward_fn, trainer.val_reward_fn
    )
    trainer.__dict__["tokens"] = StoringGroup(tokens, 1, columns_stay)
    found: list[Any] = []
    log_step = trainer.recorder.log_step

    def noting(state: Any, metrics: Any, batch: DataProto, records: Any, *more: Any) -> None:
        assert has_token_columns(batch) is not columns_stay
        found.append(
            ({k: v for k, v in metrics.items() if "timing" not in k and "per_second" not in k}, records)
        )
        log_step(state, metrics, batch, records, *more)

    trainer.recorder.log_step = noting  # type: ignore[method-assign]
    trainer.recorder.start(trainer.state, None)
    try:
        for _ in range(2):
            trainer.one_step(Phases())
    finally:
        trainer.shutdown()
    return found, list(NotedPolicy.updates)


@pytest.mark.parametrize("name", SETTINGS)
def test_rule_5_a_step_is_the_same_wherever_its_columns_lie(name, tmp_path):
    (here, updates), (stored, updates_stored) = (
        two_steps(tmp_path / str(stays), stays, SETTINGS[name]) for stays in (False, True)
    )
    assert stored == here
    assert len(updates) == len(updates_stored) == 4
    for one, other in zip(updates, updates_stored, strict=True):
        assert set(one.tensors.keys()) == set(other.tensors.keys())
        for column, tensor in one.tensors.items():
            assert torch.equal(tensor, other.tensors[column]), column
        assert one.meta_info == other.meta_info


@pytest.mark.slow
def test_functions_that_the_driver_alone_knows_work_in_a_process_of_their_own(tmp_path):
    """A reward function from a file, and what a user's script has registered."""
    file = tmp_path / "my_reward.py"
    file.write_text(
        "import threading\n"
        "LOCK, BONUS = threading.Lock(), 0.25  # of which no pickle can be made\n"
        "def half(text):\n    return len(text) * 0.0 + 0.5\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    with LOCK:\n        return half(solution_str) + BONUS\n"
    )
    reward = RewardManager(
        _tokenizer(), compute_score=load_reward_function({"path": str(file), "name": "score"})
    )
    config = make_config(8, TOKENS, "grpo", str(tmp_path), "algorithm.adv_estimator=grpo")
    item = ClassWithInitArgs(
        TokenWorker,
        config,
        None,
        reward,
        reward,
        {"mine": lambda x: x},
        {"my source": lambda text, truth: 1.0},
    )
    (tmp_path / "item.pkl").write_bytes(cloudpickle.dumps(item))
    code = (
        "import sys, pickle; worker = pickle.load(open(sys.argv[1], 'rb'))()\n"
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATORS\n"
        "from verl.utils.reward_score import REWARD_FUNCTIONS\n"
        "assert 'mine' in ADV_ESTIMATORS and REWARD_FUNCTIONS['my source']('', '') == 1.0\n"
        "print(worker.reward_fn.compute_score('s', 'text', None, None))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "item.pkl")], capture_output=True, text=True, check=False
    )
    assert ran.stdout.strip() == "0.75", ran.stderr


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(MODEL))
