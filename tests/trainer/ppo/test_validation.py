"""Measuring: every question once in each mode, through the function that training generates with."""

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.validation import ValidationReport, validate

QUESTIONS = 7


class Questions:
    """Row i asks for the answer `answer i`; one hop for even rows, two for odd ones."""

    def __len__(self):
        return QUESTIONS

    def __getitem__(self, i):
        return {
            "raw_prompt_ids": [i, i],
            "data_source": "nq",
            "reward_model": {"ground_truth": {"target": [f"answer {i}"]}},
            "extra_info": {"hops": 1 + i % 2, "gold_titles": [f"title {i}"]},
            "index": i,
        }


class Generation:
    """Stands where `generate_sequences` does and keeps what it was asked."""

    def __init__(self):
        self.asked: list[DataProto] = []

    def __call__(self, gen_batch):
        self.asked.append(gen_batch)
        ids = gen_batch.non_tensor_batch["raw_prompt_ids"]
        rows = len(ids)
        ones = torch.ones(rows, 2, dtype=torch.long)
        record = {
            "turns": [{"action": "search", "query": "title 0", "documents": [{"contents": "answer 0"}]}],
            "num_searches": 1,
            "prompt_text": f"Question: {len(self.asked)}",
            "policy_text": "<answer> yes </answer>",
            "finish_reason": "answer",
        }
        tensors = {
            "prompts": torch.tensor(ids.tolist()),
            "responses": ones,
            "response_mask": ones,
            "attention_mask": torch.ones(rows, 4, dtype=torch.long),
        }
        columns = gen_batch.non_tensor_batch | {"trajectory": [record] * rows}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def score(batch, return_dict):
    """Row 0 is right."""
    right = [float(index == 0) for index in batch.non_tensor_batch["index"]]
    scores = dict.fromkeys(("em", "f1", "score"), right)
    return {"reward_tensor": torch.tensor([[0.0, value] for value in right]), **scores}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
def test_rule_11_greedy_validation_is_greedy_and_covers_every_row(batch_size):
    generate = Generation()
    report = validate(generate, score, Questions(), ["greedy"], batch_size, seed=0)
    assert all(batch.meta_info["do_sample"] is False for batch in generate.asked)
    asked = [ids[0] for batch in generate.asked for ids in batch.non_tensor_batch["raw_prompt_ids"]]
    assert asked == list(range(QUESTIONS))
    assert len(report.rows["greedy"]) == QUESTIONS
    assert report.summary()["greedy"]["em"] == pytest.approx(1 / QUESTIONS)
    assert report.metrics()["val/greedy/f1"] == pytest.approx(1 / QUESTIONS)


def test_sampled_validation_draws_the_same_each_time_it_is_asked():
    seeds = []
    for _ in range(2):
        generate = Generation()
        validate(generate, score, Questions(), ["sampled"], 4, seed=5)
        plain = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        assert all(plain.items() <= batch.meta_info.items() for batch in generate.asked)
        seeds.append(np.concatenate([batch.tensors["sampling_seeds"].numpy() for batch in generate.asked]))
    assert np.array_equal(*seeds) and len(set(seeds[0])) == QUESTIONS


def test_figures_are_told_apart_by_hops_and_queries():
    report = validate(Generation(), score, Questions(), ["greedy", "sampled"], None, seed=0)
    metrics = report.metrics()
    assert metrics["val/test_score/nq"] == pytest.approx(1 / 7)
    assert metrics["val/greedy/em/hops_1"] == pytest.approx(1 / 4) and metrics["val/greedy/em/hops_2"] == 0
    assert metrics["val/greedy/first_query_right"] == pytest.approx(1 / 7)
    assert metrics["val/sampled/documents_hold_answer"] == pytest.approx(1 / 7)
    report.extra = ValidationReport(rows={"greedy": report.rows["greedy"][:1]})
    assert report.metrics()["val_extra/greedy/em"] == 1.0
    assert report.summary()["extra"]["greedy"]["num_questions"] == 1
    lines = report.lines()
    asked = [(line["questions"], line["mode"], line["em"]) for line in lines if line["em"]]
    assert {(line["question"], line["answer"]) for line in lines} == {("1", "yes"), ("2", "yes")}
    assert asked == [("val", "greedy", 1.0), ("val", "sampled", 1.0), ("extra", "greedy", 1.0)]
    assert len(lines) == 2 * QUESTIONS + 1


def test_a_question_whose_environment_failed_is_no_zero():
    generation = Generation()

    def generate(gen_batch):
        batch = generation(gen_batch)
        for i in range(1, len(batch)):
            batch.non_tensor_batch["trajectory"][i] = {
                **batch.non_tensor_batch["trajectory"][i],
                "finish_reason": "env_failed",
            }
        return batch

    report = validate(generate, score, Questions(), ["greedy"], None, 7)
    assert report.metrics()["val/test_score/nq"] == 1.0
