"""From a reward function's answer to the scores that are trained on."""

import pytest
import torch
from quick_config import config_with
from selection_batches import batch_of, record, turn

from verl.trainer.ppo.scoring import score

OVERLONG = "reward_model.overlong_buffer"
LENGTHS = ["data.max_prompt_length=40", "data.max_response_length=20", "max_turns=1"]


def scored(batch, scores: list[float], *settings: str):
    """The batch, scored by a reward function that gives these scores and a `style`, and its figures."""

    def reward_fn(data, return_dict: bool):
        tensor = torch.zeros(data.tensors["response_mask"].shape)
        for row, value in enumerate(scores):
            if value:  # else there may be no token
                tensor[row, int(data.tensors["response_mask"][row].nonzero()[-1])] = value
        named = dict.fromkeys(("score", "em", "f1"), scores)
        return {"reward_tensor": tensor, **named, "style": [0.5] * len(scores)}

    score(batch, reward_fn, config_with(*LENGTHS, *settings))
    return batch.meta_info.get("metrics", {})


def test_scores_stand_as_they_are_with_what_was_returned_beside_them():
    batch = batch_of("ab", [3, 2])
    assert scored(batch, [1.0, 0.5]) == {}
    assert batch.tensors["token_level_scores"].tolist() == [[0, 0, 1], [0, 0.5, 0]]
    assert batch.non_tensor_batch["reward_extra"][1] == {"score": 0.5, "em": 0.5, "f1": 0.5, "style": 0.5}


def test_the_search_cost_is_a_share_of_the_score_and_the_overlong_penalty_comes_after_it():
    records = [record("length", [turn(0, 3)]), record("answer", [turn(0, 3)])]
    for entry in records:
        entry["num_searches"] = 2
    batch = batch_of("ab", [3, 3], records)
    settings = [f"{OVERLONG}.enable=true", f"{OVERLONG}.len=10", f"{OVERLONG}.penalty_factor=0.5"]
    metrics = scored(batch, [1.0, 1.0], "reward_model.search_cost=0.1", *settings)
    assert batch.tensors["token_level_scores"][:, -1].tolist() == pytest.approx([0.8 - 0.5, 0.8])
    assert metrics == {"filter/overlong_penalty": -0.25}
    assert batch.non_tensor_batch["reward_extra"][0]["score"] == 1.0


def test_without_searches_the_only_turn_is_the_last_one():
    batch = batch_of("a", [15], [record("eos", [turn(0, 15)])])
    scored(batch, [1.0], f"{OVERLONG}.enable=true", f"{OVERLONG}.len=10", "do_search=false")
    assert batch.tensors["token_level_scores"][0, -1] == pytest.approx(0.5)  # 5 of 20 tokens are left
    batch = batch_of("a", [15], [record("eos", [turn(0, 15)])])
    scored(batch, [1.0], f"{OVERLONG}.enable=true", f"{OVERLONG}.len=10")
    assert batch.tensors["token_level_scores"][0, -1] == 1.0  # a search could have come: 23 of 40 are left
