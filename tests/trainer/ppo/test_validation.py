"""Measuring: every question once in each mode, through the function that training generates with."""

import numpy as np
import pytest
import torch

from verl.checkpoints.run_state import RunState
from verl.config.mixture import HeldOut
from verl.protocol import DataProto
from verl.records.console import validation_lines
from verl.records.figures import UNKNOWN_REWARD_REASONS
from verl.trainer.ppo.held_out import HeldOutSets
from verl.trainer.ppo.validation import ValidationReport, run_summary, validate

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


def failing(reason, num_judged):
    """Generation in which all trajectories but the first `num_judged` end for a reason of failure."""
    generation = Generation()

    def generate(gen_batch):
        batch = generation(gen_batch)
        for i in range(num_judged, len(batch)):
            record = {**batch.non_tensor_batch["trajectory"][i], "finish_reason": reason}
            batch.non_tensor_batch["trajectory"][i] = record
        return batch

    return generate


@pytest.mark.parametrize("reason", UNKNOWN_REWARD_REASONS)
def test_a_question_that_failed_is_no_zero_and_is_counted(reason):
    report = validate(failing(reason, 1), score, Questions(), ["greedy"], None, 7)
    metrics = report.metrics()
    assert metrics["val/test_score/nq"] == metrics["val/greedy/em"] == metrics["val/greedy/f1"] == 1.0
    assert metrics["val/greedy/unverified"] == 6.0
    assert metrics["val/greedy/search_failed"] == (6.0 if reason == "search_failed" else 0.0)
    figures = report.summary()["greedy"]
    assert (figures["em"], figures["num_questions"], figures["num_unverified"]) == (1.0, 7, 6)
    state = RunState(validation={"before": report.summary(), "after": report.summary()})
    summary = run_summary(state, 1.0, 0)
    assert summary["em_after"] == 1.0 and summary["num_val_questions"] == 7
    assert summary["num_unverified_before"] == summary["num_unverified_after"] == 6
    (line,) = validation_lines(report.summary(), metrics)
    assert line == "greedy EM 1.000, searches 1.00; 6 of 7 questions failed and are left out"
    assert [row["em"] for row in report.lines()] == [1.0]


@pytest.mark.parametrize("reason", UNKNOWN_REWARD_REASONS)
def test_a_validation_agrees_with_an_evaluation_of_the_same_rollouts(reason):
    figures = validate(failing(reason, 3), score, Questions(), ["greedy"], None, 7).summary()["greedy"]
    held_out = HeldOut(files="x.parquet", name="x", every=1, rollouts=1, temperature=0.0)
    sets = HeldOutSets([(held_out, Questions())], score, None, seed=7)
    evaluated, _ = sets.measure(failing(reason, 3), step=1, last=True)
    assert figures["em"] == evaluated["eval/x/em"] == pytest.approx(1 / 3)
    assert figures["num_unverified"] == evaluated["eval/x/unverified"] == 4


def test_of_questions_that_all_failed_no_figure_is_known():
    report = validate(failing("search_failed", 0), score, Questions(), ["greedy"], None, 7)
    figures = report.summary()["greedy"]
    assert figures["em"] is figures["f1"] is figures["searches"] is None
    assert (figures["num_questions"], figures["num_unverified"]) == (7, 7)
    metrics = report.metrics()
    assert metrics == {"val/greedy/search_failed": 7.0, "val/greedy/unverified": 7.0}
    (line,) = validation_lines(report.summary(), metrics)
    assert line == "greedy: no question could be judged; 7 of 7 questions failed and are left out"
    assert run_summary(RunState(validation={"after": report.summary()}), 1.0, 0)["em_after"] is None
    held_out = HeldOut(files="x.parquet", name="x", every=1, rollouts=2, temperature=0.0)
    sets = HeldOutSets([(held_out, Questions())], score, None, seed=7)
    evaluated, _ = sets.measure(failing("search_failed", 0), step=1, last=True)
    assert evaluated == {"eval/x/unverified": 14.0, "eval/x/truncated": 0.0}
