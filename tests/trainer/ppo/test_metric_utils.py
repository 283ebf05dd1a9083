"""Figures of a step: those of collapse against plain loops, all of them on a worked example."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.protocol import DataProto
from verl.trainer.ppo.metric_utils import (
    Timer,
    effective_group_share,
    repeated_ngrams,
    step_metrics,
)

some_examples = settings(deadline=None, derandomize=True, max_examples=50)


def rows_of(width, cell):
    """1 to 5 rows of `width` cells."""
    return st.lists(st.lists(cell, min_size=width, max_size=width), min_size=1, max_size=5)


few_words_mostly_sampled = rows_of(14, st.tuples(st.integers(0, 1), st.sampled_from([True] * 7 + [False])))


@some_examples
@given(rows=few_words_mostly_sampled, length=st.integers(2, 4))
def test_repeated_ngrams_equal_a_plain_loop_and_never_reach_over_an_observation(rows, length):
    repeated = total = 0
    for row in rows:
        seen = set()
        for start in range(len(row) - length + 1):
            words = row[start : start + length]
            if all(kept for _, kept in words):
                ngram = tuple(token for token, _ in words)
                total += 1
                repeated += ngram in seen
                seen.add(ngram)
    tokens, mask = torch.tensor(rows).unbind(-1)
    mask = mask.bool()
    assert repeated_ngrams(tokens, mask, length) == pytest.approx(repeated / total if total else 0.0)
    assert repeated_ngrams(tokens.masked_fill(~mask, 99), mask, length) == repeated_ngrams(
        tokens, mask, length
    )


@some_examples
@given(
    rows=rows_of(3, st.sampled_from([-1.0, 0.0, 0.0, 0.0, None])),
    groups=st.lists(st.integers(0, 2), min_size=5),
)
def test_the_effective_group_share_equals_a_plain_loop_and_sees_sampled_tokens_only(rows, groups):
    uids = [f"step1/nq/{group}" for group in groups[: len(rows)]]
    teaching = {uid for uid, row in zip(uids, rows, strict=True) if any(row)}
    mask = torch.tensor([[x is not None for x in row] for row in rows])
    advantages = torch.tensor([[float("nan") if x is None else x for x in row] for row in rows])
    assert effective_group_share(advantages, mask, uids) == len(teaching) / len(set(uids))


def step_batch(**columns):
    """A group of two rows: a prompt, then [sampled, observation, sampled] and [sampled, padding, padding]."""
    mask = torch.tensor([[1, 0, 1], [1, 0, 0]])
    tensors = {
        "responses": torch.tensor([[5, 6, 7], [5, 0, 0]]),
        "response_mask": mask,
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        "advantages": torch.tensor([[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
        "returns": torch.tensor([[0.5, 0.0, 0.5], [-0.5, 0.0, 0.0]]),
    }
    return DataProto.from_dict(tensors | columns, {"uid": ["a", "a"]})


def test_lengths_and_returns_are_those_of_sampled_tokens():
    timer = Timer()
    timer.seconds |= {"gen": 2.0, "update_actor": 0.5}
    metrics = step_metrics(step_batch(), timer, use_critic=False)
    expected = {
        "response_length/mean": 1.5,
        "response_length/max": 2,
        "prompt_length/mean": 1.5,
        "state_tokens/total": 1,
        "state_tokens/coverage": 0.25,
        "critic/score/mean": 0.5,
        "critic/returns/mean": pytest.approx(0.5 / 3),
        "groups/effective_share": 1.0,
        "response/repeated_ngrams": 0.0,
        "perf/trained_tokens": 7,
    }
    assert {name: metrics[name] for name in expected} == expected


def test_tokens_that_were_rejected_since_still_count_as_sampled():
    rejected = step_batch(
        response_mask=torch.zeros(2, 3, dtype=torch.int64), sampled_mask=step_batch().tensors["response_mask"]
    )
    timer = Timer()
    assert step_metrics(rejected, timer, False) == step_metrics(step_batch(), timer, False)
