"""Workers that answer at once, with made-up trajectories of real tokens.

A trajectory is a prompt, two searches with their documents, and an answer, of the tokenizer's own text; the
draws come from the row's seed. Log-probs and values are numbers drawn from nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from search_r1.llm_agent.trajectory import Trajectory, Turn, to_tensors
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, Worker, register

WORDS = "The lake lies north of the old town and was first named by people who came from the coast. "
SEARCH = "<think> I need to look this up. </think> <search> who named the lake north of the town </search>"
RIGHT, WRONG = "<answer> Oslo </answer>", "<answer> Bergen </answer>"
GOLDEN = {"target": ["Oslo"]}
PROMPT_TOKENS = 100


class TextTokens:
    """Token ids of the pieces that trajectories are put together from."""

    def __init__(self, model: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(str(model), model_max_length=1_000_000)

        def ids(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        self.pad = tokenizer.pad_token_id
        self.search, self.right, self.wrong = ids(SEARCH), ids(RIGHT), ids(WRONG)
        self.text = ids(WORDS * 200)

    def prompt(self, number: int) -> list[int]:
        start = number * 7 % 500
        return self.text[start : start + PROMPT_TOKENS]


class InstantPolicy(Worker):
    """Stands where `ActorRolloutRefWorker` does. model: folder of the tokenizer. width: most tokens of a
    trajectory.
    """

    def __init__(self, model: Path, width: int) -> None:
        super().__init__()
        self.tokens, self.width = TextTokens(model), width

    @register()
    def init_model(self) -> None:
        pass

    @register()
    def start_rollout(self, num_rows: int) -> None:
        pass

    @register()
    def sync_weights(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        ids, seeds = prompts.non_tensor_batch["raw_prompt_ids"], prompts.tensors["sampling_seeds"].tolist()
        made = [self._trajectory(row, ids[row], seed) for row, seed in enumerate(seeds)]
        tensors = to_tensors(made, PROMPT_TOKENS, self.width - PROMPT_TOKENS, self.tokens.pad)
        records = [trajectory.record(WORDS) for trajectory in made]
        return DataProto.from_dict(tensors, {"trajectory": records}, {"metrics": {"rollout/seconds": 0.0}})

    def _trajectory(self, row: int, prompt_ids: list[int], seed: int) -> Trajectory:
        draws = np.random.default_rng(abs(seed))
        made = Trajectory(row, prompt_ids, seed, version_first=0, version_last=0, finish_reason="answer")
        length = int(draws.integers(2 * self.width // 3, self.width + 1))
        room = length - len(prompt_ids) - 2 * len(self.tokens.search) - len(self.tokens.wrong) - 8
        for part in (room // 2, room - room // 2):
            start, end = made.add_sampled(self.tokens.search, [-0.5] * len(self.tokens.search))
            documents = [{"contents": f"{WORDS * 6}{seed} {part} {i}", "score": 1.0} for i in range(3)]
            made.turns.append(Turn("search", SEARCH, "who named the lake", start, end, documents))
            begin = int(draws.integers(1000))
            made.add_observation(self.tokens.text[begin : begin + part])
        answer = self.tokens.right if draws.random() < 0.5 else self.tokens.wrong
        start, end = made.add_sampled(answer, [-0.1] * len(answer))
        made.turns.append(Turn("answer", RIGHT if answer is self.tokens.right else WRONG, None, start, end))
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": self._numbers(data, -0.5)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_prob": self._numbers(data, -0.6)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(self, data: DataProto) -> DataProto:
        metrics = {"actor/pg_loss": float(data.tensors["advantages"].mean())}
        return DataProto(meta_info={"metrics": metrics, "skipped_update": ""})

    def _numbers(self, data: DataProto, value: float) -> torch.Tensor:
        mask = data.tensors["response_mask"]
        return torch.rand(mask.shape).mul_(0.1).add_(value).mul_(mask)


class InstantCritic(Worker):
    """Stands where `CriticWorker` does."""

    @register()
    def init_model(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": torch.rand(data.tensors["response_mask"].shape)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto) -> DataProto:
        metrics = {"critic/vf_loss": float(data.tensors["returns"].mean())}
        return DataProto(meta_info={"metrics": metrics, "skipped_update": ""})


def prompt_rows(model: Path, count: int) -> list[dict[str, Any]]:
    """Rows as `RLHFDataset` gives them."""
    tokens = TextTokens(model)
    return [
        {
            "raw_prompt_ids": tokens.prompt(i),
            "index": i,
            "data_source": "nq",
            "reward_model": {"ground_truth": GOLDEN},
            "extra_info": {"question": "Who named the lake?"},
        }
        for i in range(count)
    ]
