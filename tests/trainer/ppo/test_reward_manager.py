"""Scores land on the last sampled token and are read from what the policy wrote."""

import asyncio
import functools
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from verl.checkpoints.run_state import RunStopped
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.scoring import RewardManager, apply_search_cost, score_answers
from verl.utils.reward_score import qa_em_format
from verl.verifiers import Sample, Verdict
from verl.verifiers.text import TextVerifier

BASE_MODEL = Path(__file__).resolve().parents[3] / "data_prep" / "base_model"
# the same id: padding must not be found by it
EOS = 0
PAD = 0


class ByteTokenizer:
    """One token per byte, id 0 is both end of sequence and padding, id 256 is a special tag token."""

    all_special_ids = [EOS, 256]

    def convert_ids_to_tokens(self, token: int) -> str:
        return {EOS: "<|end|>", 256: "</answer>"}[token]

    def batch_decode(self, rows, clean_up_tokenization_spaces: bool) -> list[str]:
        assert not clean_up_tokenization_spaces
        return [b"".join(b"</answer>" if i == 256 else bytes([i]) for i in row).decode() for row in rows]


def batch(rows: list[list[tuple[list[int] | str, int]]], **columns) -> DataProto:
    """Rows of (text or ids, 1 if the policy sampled it); the prompt holds an answer that must not count."""
    prompt = list(b"such as <answer>Beijing</answer>")
    ids = []
    masks = []
    for row in rows:
        parts = [(list(part.encode()) if isinstance(part, str) else part, sampled) for part, sampled in row]
        ids.append([i for part, _ in parts for i in part])
        masks.append([sampled for part, sampled in parts for _ in part])
    width = max(1, *(len(row) for row in ids))
    responses = torch.tensor([row + [PAD] * (width - len(row)) for row in ids])
    response_mask = torch.tensor([mask + [0] * (width - len(mask)) for mask in masks])
    real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids])
    prompts = torch.tensor([prompt] * len(rows))
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses.long(),
            "response_mask": response_mask.long(),
            "attention_mask": torch.cat([torch.ones_like(prompts), real], 1),
        },
        non_tensors={
            "data_source": ["nq"] * len(rows),
            "reward_model": [{"style": "rule", "ground_truth": {"target": np.array(["Beijing"])}}]
            * len(rows),
            "extra_info": [{"index": i} for i in range(len(rows))],
            **columns,
        },
    )


def test_rule_6_the_reward_sits_on_the_last_sampled_token():
    data = batch(
        [
            [("<answer>Beijing</answer>", 1), ([EOS], 1)],
            [("<answer>Beijing</answer>", 1), ("observed", 0)],
            [("<answer>Paris</answer>", 1)],
        ]
    )
    scores = RewardManager(ByteTokenizer())(data)
    assert scores.shape == data.batch["responses"].shape and scores.dtype == torch.float32
    assert scores.sum(-1).tolist() == [1.0, 1.0, 0.0]
    assert scores[0].nonzero().item() == len("<answer>Beijing</answer>")
    assert scores[1].nonzero().item() == len("<answer>Beijing</answer>") - 1


def test_rule_8_an_answer_is_read_from_what_the_policy_wrote():
    data = batch(
        [
            [("I do not know", 1)],
            [
                ("<search>x</search>", 1),
                ("<information><answer>Beijing</answer></information>", 0),
                ("hm", 1),
            ],
            [("<answer>", 0), ("Beijing</answer>", 1)],
        ]
    )
    result = RewardManager(ByteTokenizer())(data, return_dict=True)
    assert result["reward_tensor"].abs().sum() == 0
    assert result["answer"] == [None, None, None]


def test_an_answer_stands_in_one_turn_as_in_the_agent_loop():
    seen = ("<information>Doc 1</information>", 0)
    data = batch(
        [
            [("<search>x</search><answer>Bei", 1), seen, ("jing</answer>", 1)],
            [("<answer> Paris", 1), seen, ("<answer>Beijing</answer> <answer>", 1)],
        ]
    )
    result = RewardManager(ByteTokenizer())(data, return_dict=True)
    assert result["answer"] == [None, "Beijing"] and result["score"] == [0.0, 1.0]


def test_rows_without_a_sampled_token_score_nothing():
    data = batch([[], [("observed <answer>Beijing</answer>", 0)], [("<answer>Beijing</answer>", 1)]])
    result = RewardManager(ByteTokenizer())(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.0, 0.0, 1.0]
    assert result["em"] == result["score"] == [0.0, 0.0, 1.0]


def test_rule_2_padding_is_not_found_by_its_id():
    data = batch([[("<answer>Bei", 1), ([EOS], 1), ("jing</answer>", 1), ([EOS], 1)]])
    assert RewardManager(ByteTokenizer())(data).sum() == 1.0


class CountingTokenizer(ByteTokenizer):
    """A byte tokenizer that records what it decodes."""

    def __init__(self) -> None:
        self.decoded: list[str] = []

    def batch_decode(self, rows, clean_up_tokenization_spaces: bool) -> list[str]:
        texts = super().batch_decode(rows, clean_up_tokenization_spaces)
        self.decoded += texts
        return texts


def test_exact_match_decodes_what_the_policy_wrote_and_equal_texts_once():
    row = [("<search>x</search>", 1), ("observed", 0), ([], 1), ("<answer>Beijing</answer>", 1), ([EOS], 1)]
    tokenizer = CountingTokenizer()
    assert RewardManager(tokenizer)(batch([row] * 3)).sum() == 3.0
    assert tokenizer.decoded == ["<search>x</search>", "<answer>Beijing</answer>"]


def test_a_users_function_gets_every_run_as_text_and_equal_texts_are_decoded_once():
    row = [("<search>x</search>", 1), ("observed", 0), ("<answer>Beijing</answer>", 1)]
    tokenizer = CountingTokenizer()
    seen = []

    def reward(extra_info, **_):
        seen.append([tuple(segment) for segment in extra_info["segments"]])
        return 1.0

    RewardManager(tokenizer, compute_score=reward)(batch([row] * 2))
    assert seen == [[(text, bool(sampled)) for text, sampled in row]] * 2
    assert tokenizer.decoded == [text for text, _ in row]


def test_texts_are_those_of_the_tokenizers_own_decoding():
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    text = "<search>Größe, who 's\n</search><answer>東京  x</answer>"
    ids = [*tokenizer.encode(text), tokenizer.eos_token_id, *tokenizer.encode(" and so on .")]
    data = batch([[(ids, 1)]])
    (segments,) = RewardManager(tokenizer).segments(data)
    without_eos = [i for i in ids if i != tokenizer.eos_token_id]
    assert segments[0].text == tokenizer.decode(without_eos, clean_up_tokenization_spaces=False)


def test_texts_of_no_token_are_empty_wherever_they_stand():
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    empty = np.array([], dtype=np.int64)
    silent = np.array([tokenizer.eos_token_id])
    word = np.array(tokenizer.encode(" river"))
    text = tokenizer.decode(word)
    manager = RewardManager(tokenizer)
    assert manager._texts([empty, word, silent, empty, word]) == ["", text, "", "", text]
    assert manager._texts([empty]) == [""]


def test_the_format_reward_sees_observations():
    turn = ("<think>t</think><search>q</search>", 1)
    end = ("<think>t</think><answer>Paris</answer>", 1)
    data = batch(
        [
            [turn, ("\n\n<information>Beijing</information>\n\n", 0), end],
            [turn, ("\n\n<information>Rome</information>\n\n", 0), end],
        ]
    )
    scores = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.1}
    reward = functools.partial(qa_em_format.compute_score_em, **scores)
    result = RewardManager(ByteTokenizer(), compute_score=reward)(data, return_dict=True)
    assert result["score"] == pytest.approx([0.3, 0.2])
    assert result["em"] == [0.0, 0.0]


def test_a_users_function_gets_the_four_arguments_and_may_return_more():
    calls = []

    def reward(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, extra_info["index"], extra_info["segments"]))
        return {"score": 0.25, "length": len(solution_str)}

    data = batch([[("ab", 1), ("seen", 0), ("c", 1)], []])
    result = RewardManager(ByteTokenizer(), compute_score=reward)(data, return_dict=True)
    assert calls == [("nq", "ab\nc", 0, [("ab", True), ("seen", False), ("c", True)])]
    assert result["score"] == [0.25, 0.0] and result["length"] == [4, None]


def test_examples_are_printed_per_data_source(capsys):
    data = batch([[("one", 1)], [("two", 1)], [("three", 1)]], data_source=["nq", "nq", "popqa"])
    RewardManager(ByteTokenizer(), num_examine=1)(data)
    text = capsys.readouterr().out
    assert "one" in text and "three" in text and "two" not in text


def test_a_search_costs_a_share_of_a_reward_and_nothing_of_a_failure():
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0], [-0.5, 0.0], [0.0, 1.0]])
    paid = apply_search_cost(scores, [1, 3, 3, 2, 20], 0.1)
    assert torch.allclose(paid, torch.tensor([[0.0, 0.9], [0.0, 0.7], [0.0, 0.0], [-0.5, 0.0], [0.0, 0.0]]))
    assert torch.equal(apply_search_cost(scores, [1, 3, 3, 2, 20], 0.0), scores)


def verified(**row) -> dict:
    return {"style": "rule", "ground_truth": {"verifiers": [row], "target": None}}


def test_rows_that_name_verifiers_are_scored_by_them_and_the_others_as_ever():
    data = batch(
        [[("so it is 7", 1), ("8", 0)], [("<answer>Beijing</answer>", 1)], []],
        reward_model=[
            verified(name="gsm8k", label="7", weight=2.0),
            {"ground_truth": {"target": ["Beijing"]}},
            verified(name="gsm8k", label="7"),
        ],
    )
    result = RewardManager(ByteTokenizer())(data, return_dict=True)
    assert result["score"] == [2.0, 1.0, 0.0] and result["em"] == [0.0, 1.0, 0.0]
    assert result["reward_tensor"][0].nonzero().item() == len("so it is 7") - 1
    assert [each["name"] for each in result["verdicts"][0]] == ["gsm8k"] and result["verdicts"][1] is None


def test_a_verifier_sees_the_prompt_the_sampled_text_and_its_length(monkeypatch):
    seen = []
    monkeypatch.setattr(TextVerifier, "verify", lambda self, sample: seen.append(sample) or Verdict(1.0))
    data = batch([[("ab", 1), ("seen", 0), ("c", 1)]], reward_model=[verified(name="gsm8k", label="7")])
    RewardManager(ByteTokenizer())(data)
    assert seen == [Sample("ab\nc", "7", "such as <answer>Beijing</answer>", 3, {"index": 0})]


def reward_batch(count: int) -> DataProto:
    records = object_array([{"finish_reason": "answer", "num_searches": 0} for _ in range(count)])
    data = batch([[("text", 1)] for _ in range(count)])
    data.tensors["rollout_log_probs"] = torch.full(data.tensors["responses"].shape, -1.0)
    data.non_tensor_batch["trajectory"] = records
    return data


def test_a_row_without_a_verdict_leaves_the_batch_before_its_tokens_are_counted():
    data = reward_batch(3)
    answers = score_answers(
        data,
        RewardManager(
            ByteTokenizer(), compute_score=lambda **row: [0.5, None, 1][row["extra_info"]["index"]]
        ),
    )
    assert answers["score"] == [0.5, None, 1.0]
    assert data.tensors["num_sampled"].tolist() == [4, 0, 4]
    assert data.tensors["outcome"].tolist() == [0.5, 0.0, 1.0]
    assert data.tensors["rollout_log_probs"].sum(-1).tolist() == [-4.0, 0.0, -4.0]
    reasons = [record["finish_reason"] for record in data.non_tensor_batch["trajectory"]]
    assert reasons == ["answer", "unverified", "answer"]


def test_too_many_rows_without_a_verdict_stop_the_run():
    manager = RewardManager(
        ByteTokenizer(), compute_score=lambda **row: None if row["extra_info"]["index"] else 1
    )
    with pytest.raises(RunStopped, match=r"2 of 3 .* not be verified by the reward function .*=0.5"):
        manager(reward_batch(3))
    assert manager(reward_batch(2)).sum() == 1.0


def test_a_reward_function_may_be_a_coroutine_or_take_all_rows_at_once():
    async def waiting(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0.2)
        return {"score": extra_info["index"], "length": len(solution_str)}

    def batched(data_sources, solution_strs, ground_truths, extra_infos):
        return [
            None if info["index"] == 1 else len(text)
            for text, info in zip(solution_strs, extra_infos, strict=True)
        ]

    started = time.perf_counter()
    result = RewardManager(ByteTokenizer(), compute_score=waiting)(reward_batch(9), return_dict=True)
    assert result["score"] == list(range(9)) and time.perf_counter() - started < 1
    result = RewardManager(ByteTokenizer(), compute_score=batched)(reward_batch(3), return_dict=True)
    assert result["score"] == [4.0, None, 4.0]
    with pytest.raises(RunStopped, match=r"test_reward_manager.py, line \d+, in short: ValueError: no rows"):

        def short(data_sources, solution_strs, ground_truths, extra_infos):
            raise ValueError("no rows")

        RewardManager(ByteTokenizer(), compute_score=short)(reward_batch(3))


def test_exact_match_and_f1_stand_beside_any_reward():
    rows = batch([[("<answer>in Beijing</answer>", 1)], [("<answer>Beijing</answer>", 1)], [("none", 1)]])
    scores = RewardManager(ByteTokenizer(), compute_score=lambda **_: 0.25)(rows, return_dict=True)
    assert scores["score"] == [0.25] * 3 and scores["em"] == [0.0, 1.0, 0.0]
    assert scores["f1"] == [pytest.approx(2 / 3), 1.0, 0.0]
    score_answers(rows, RewardManager(ByteTokenizer()))
    assert rows.non_tensor_batch["f1"].tolist() == scores["f1"]
