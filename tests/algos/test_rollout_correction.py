"""Rollout correction: weights and rejection of every kind against float64 loops, and what the batch holds
afterwards."""

from types import SimpleNamespace

import pytest
import slow_corrections as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.algos.rollout_correction import check_correction
from verl.protocol import DataProto
from verl.trainer.ppo import core_algos as algos

some_examples = settings(deadline=None, derandomize=True, max_examples=25)
few_examples = settings(some_examples, max_examples=10)  # for each of 12 corrections
levels = pytest.mark.parametrize("level", ["token", "sequence"])
bounds = pytest.mark.parametrize("level", ["token", "geometric", "sequence"])


class Block(dict):
    """The `rollout_correction` block, with some settings replaced by `|`."""

    __getattr__ = dict.__getitem__

    def __or__(self, other):
        return Block(super().__or__(other))


OFF = Block(
    {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
        "rollout_rs_threshold_lower": None,
        "bypass_mode": False,
    }
)


def log_probs_of(batch, distance=0.6):
    """(trainer's, rollout engine's) [N, R] float32"""
    rollout = batch.log_probs("rollout")
    return rollout + distance * batch.randn("distance"), rollout


def as_lists(*tensors):
    return [x.double().tolist() for x in tensors]


def close(actual, expected):
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-7)


def named(figures):
    return {
        f"rollout_corr/{name}": pytest.approx(value, rel=1e-6, abs=1e-9) for name, value in figures.items()
    }


@levels
@some_examples
@given(batch=ragged_batches(), threshold=st.sampled_from([1.0, 1.2, 2.0, 5.0]))
def test_weights_and_their_figures_equal_a_float64_loop(level, batch, threshold):
    mask = batch.response_mask
    weights, metrics = algos.importance_weights(*log_probs_of(batch), mask, level, threshold)
    lists = as_lists(*log_probs_of(batch), mask)
    close(weights, slow.weights(*lists, level, threshold))
    assert weights.dtype == torch.float32 and not weights.requires_grad
    assert metrics == (named(slow.weight_figures(*lists, level, threshold)) if mask.any() else {})


@bounds
@some_examples
@given(
    batch=ragged_batches(),
    threshold=st.sampled_from([1.05, 1.5, 3.0]),
    lower=st.sampled_from([None, 0.0, 0.5, 0.99]),
)
def test_rejection_equals_a_float64_loop(level, batch, threshold, lower):
    mask = batch.response_mask
    rejected, metrics = algos.rejection_mask(*log_probs_of(batch), mask, level, threshold, lower)
    expected = slow.rejected(*as_lists(*log_probs_of(batch), mask), level, threshold, lower)
    assert rejected.tolist() == expected
    if not mask.any():
        assert metrics == {}
        return
    rows = [row for row, kept in zip(expected, mask.tolist(), strict=True) if any(kept)]
    share = {"rollout_rs_masked_fraction": slow.token_mean(expected, mask.tolist())}
    assert metrics == named(share | {"rollout_rs_seq_masked_fraction": slow.mean(map(any, rows))})


@pytest.mark.parametrize("rollout_is", [None, "token", "sequence"])
@pytest.mark.parametrize("rollout_rs", [None, "token", "geometric", "sequence"])
@few_examples
@given(batch=ragged_batches(), normalize=st.booleans())
def test_rule_3_nothing_under_the_mask_reaches_any_correction(rollout_is, rollout_rs, batch, normalize):
    config = OFF | {"rollout_is": rollout_is, "rollout_rs": rollout_rs, "rollout_rs_threshold": 1.3}
    config["rollout_is_batch_normalize"] = normalize
    runs = []
    for soil in (lambda x: x, batch.with_garbage):
        data = data_of(batch, soil)
        metrics = algos.apply_rollout_correction(data, config)
        algos.mask_rejected_tokens(data)
        runs.append((metrics, data))
    assert runs[0][0] == runs[1][0]
    for name in ("rollout_is_weights", "response_mask", "sampled_mask"):
        assert (name in runs[0][1].tensors) == (name in runs[1][1].tensors)
        if name in runs[0][1].tensors:
            assert torch.equal(runs[0][1].tensors[name], runs[1][1].tensors[name])


def data_of(batch, soil=lambda x: x):
    old, rollout = log_probs_of(batch)
    tensors = {"old_log_probs": soil(old), "rollout_log_probs": soil(rollout)}
    tensors |= {
        "response_mask": batch.response_mask.clone(),
        "responses": torch.ones_like(batch.response_mask),
    }
    return DataProto.from_dict(tensors, {"uid": batch.uids})


@some_examples
@given(batch=ragged_batches())
def test_with_both_remedies_the_weights_mean_is_1_over_what_is_not_rejected(batch):
    data = data_of(batch)
    config = OFF | {"rollout_is": "token", "rollout_is_batch_normalize": True}
    config |= {"rollout_rs": "token", "rollout_rs_threshold": 1.5}
    algos.apply_rollout_correction(data, config)
    algos.mask_rejected_tokens(data)
    kept = data.tensors["response_mask"].bool()
    if kept.any():
        assert data.tensors["rollout_is_weights"][kept].mean().item() == pytest.approx(1, rel=1e-5)


@some_examples
@given(batch=ragged_batches())
def test_a_rejected_token_leaves_the_mask_after_the_advantages_and_what_was_sampled_is_kept(batch):
    data = data_of(batch)
    sampled = batch.response_mask
    config = OFF | {"rollout_rs": "token", "rollout_rs_threshold": 1.3}
    algos.apply_rollout_correction(data, config)
    assert torch.equal(data.tensors["response_mask"], sampled)  # advantages still see every sampled token
    rejected = data.tensors["rejected_mask"]
    algos.mask_rejected_tokens(data)
    assert "rejected_mask" not in data.tensors
    assert torch.equal(data.tensors["sampled_mask"], sampled)
    assert torch.equal(data.tensors["response_mask"], sampled * ~rejected)
    assert data.tensors["response_mask"].dtype == sampled.dtype
    algos.mask_rejected_tokens(data)  # nothing is left to take out
    assert torch.equal(data.tensors["sampled_mask"], sampled)


def test_stale_tokens_leave_the_mask_with_those_that_are_rejected():
    stale = torch.tensor([[True, True, False], [False, False, False]])
    data = two_rows(stale_mask=stale)
    algos.mask_rejected_tokens(data)
    assert data.tensors["response_mask"].tolist() == [[0, 0, 1], [1, 0, 1]]
    assert data.tensors["sampled_mask"].tolist() == [[1, 1, 1], [1, 0, 1]]
    assert "stale_mask" not in data.tensors

    data = two_rows(stale_mask=stale)
    algos.apply_rollout_correction(data, OFF | {"rollout_rs": "token", "rollout_rs_threshold": 2.5})
    algos.mask_rejected_tokens(data)
    assert data.tensors["response_mask"].tolist() == [[0, 0, 1], [0, 0, 1]]
    assert data.tensors["response_mask"].dtype == torch.int64


def two_rows(**columns):
    """Row 0 agrees; row 1 has one token 3 times as likely and one 2 times less likely with the trainer."""
    d = torch.tensor([[0.0, 0.0, 0.0], [1.0986123, 0.0, -0.6931472]])
    tensors = {
        "rollout_log_probs": torch.full((2, 3), -1.0),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
    }
    tensors |= {"responses": torch.ones(2, 3, dtype=torch.int64), "old_log_probs": d - 1.0} | columns
    return DataProto.from_dict(tensors, {"uid": ["a", "b"]})


@pytest.mark.parametrize(
    ("settings_", "weights", "mask"),
    [
        ({}, None, [[1, 1, 1], [1, 0, 1]]),
        ({"rollout_is": "token"}, [[1, 1, 1], [2, 0, 0.5]], [[1, 1, 1], [1, 0, 1]]),
        ({"rollout_is": "sequence"}, [[1, 1, 1], [1.5, 0, 1.5]], [[1, 1, 1], [1, 0, 1]]),
        (
            {"rollout_is": "token", "rollout_is_batch_normalize": True},
            [[1 / 1.1, 1 / 1.1, 1 / 1.1], [2 / 1.1, 0, 0.5 / 1.1]],
            [[1, 1, 1], [1, 0, 1]],
        ),
        (
            {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
            [[0.8, 0.8, 0.8], [1.2, 0, 1.2]],
            [[1, 1, 1], [1, 0, 1]],
        ),
        ({"rollout_rs": "token", "rollout_rs_threshold": 2.5}, None, [[1, 1, 1], [0, 0, 1]]),
        (
            {"rollout_rs": "token", "rollout_rs_threshold": 4.0, "rollout_rs_threshold_lower": 0.6},
            None,
            [[1, 1, 1], [1, 0, 0]],
        ),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.2}, None, [[1, 1, 1], [0, 0, 0]]),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.3}, None, [[1, 1, 1], [1, 0, 1]]),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 1.4}, None, [[1, 1, 1], [0, 0, 0]]),
    ],
)
def test_worked_example(settings_, weights, mask):
    data = two_rows()
    algos.apply_rollout_correction(data, OFF | settings_)
    algos.mask_rejected_tokens(data)
    assert ("rollout_is_weights" in data.tensors) == (weights is not None)
    if weights is not None:
        torch.testing.assert_close(
            data.tensors["rollout_is_weights"], torch.tensor(weights), rtol=1e-6, atol=0
        )
    assert data.tensors["response_mask"].tolist() == mask


def test_bypass_mode_takes_the_engines_log_probs_as_the_old_ones():
    data = two_rows()
    del data.tensors["old_log_probs"]
    assert algos.apply_rollout_correction(data, OFF | {"bypass_mode": True}) == {}
    assert torch.equal(data.tensors["old_log_probs"], data.tensors["rollout_log_probs"])


# ---- exact expectations: every trajectory of two tokens over 3 words, weighted by the engine's probability


def two_token_log_probs(seed):
    """(logits [4, 3], log-probs [9, 2] of every trajectory); the second token depends on the first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()
    first = logits[0].log_softmax(-1)
    second = logits[1:].log_softmax(-1)
    return logits, torch.stack([first.repeat_interleave(3), second.flatten()], dim=1)


def expected_gradient(level, threshold, engine, logits, log_probs, scores):
    """The mean over what the engine samples of the weighted REINFORCE gradient, exactly."""
    mask = torch.ones(9, 2)
    weights, _ = algos.importance_weights(log_probs.detach(), engine, mask, level, threshold)
    losses = weights.double() * scores.unsqueeze(1) * log_probs
    mean = (engine.sum(dim=1).exp() * losses.sum(dim=1)).sum()
    return torch.autograd.grad(mean, logits, retain_graph=True)[0]


def test_whole_row_weights_give_the_policys_own_gradient_and_token_weights_come_near_to_it():
    logits, log_probs = two_token_log_probs(1)
    engine = (log_probs + 0.3 * two_token_log_probs(2)[1]).detach()
    engine[:, 0] -= engine[::3, 0].logsumexp(0)
    engine[:, 1] -= engine[:, 1].view(3, 3).logsumexp(1).repeat_interleave(3)
    scores = torch.randn(9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    mean_score = (log_probs.sum(dim=1).exp() * scores).sum()
    true = torch.autograd.grad(mean_score, logits, retain_graph=True)[0]
    unweighted = engine.sum(dim=1).exp() @ (scores.unsqueeze(1) * log_probs).sum(dim=1)
    uncorrected = torch.autograd.grad(unweighted, logits, retain_graph=True)[0]

    def distance(level, threshold):
        found = expected_gradient(level, threshold, engine, logits, log_probs, scores)
        return float((found - true).norm() / true.norm())

    assert distance("sequence", 1e6) < 1e-6
    assert distance("sequence", 1.05) > 1e-3  # the price of truncation
    assert 1e-3 < distance("token", 1e6) < float((uncorrected - true).norm() / true.norm())


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
@pytest.mark.parametrize(
    "on",
    [{"rollout_is": "token"}, {"rollout_rs": "token", "rollout_rs_threshold": 2.0}, {"bypass_mode": True}],
)
def test_a_truncated_distribution_is_not_compared_with_a_whole_one(name, on):
    """With top_p=0.5 nearly all tokens of a sharp policy would look as if the engine had overrated them."""
    plain = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    cut = plain | {name: {"top_p": 0.5, "top_k": 20, "min_p": 0.1}[name]}
    check_correction(OFF | on, SimpleNamespace(**plain))
    check_correction(OFF, SimpleNamespace(**cut))
    with pytest.raises(ValueError, match=f"Found actor_rollout_ref.rollout.{name}=.* truncated"):
        check_correction(OFF | on, SimpleNamespace(**cut))


def test_every_name_of_a_rejection_has_its_own_threshold_and_each_must_keep_a_token():
    """Ratios of trainer to engine of row 1: 3 and 1/2, with k2 of .60 and .24."""
    rows = two_rows().tensors
    arguments = (rows["old_log_probs"], rows["rollout_log_probs"], rows["response_mask"])
    for names, thresholds, kept in (
        ("token_k1,token_k2", "0.1_10,0.5", [0, 0, 1]),
        ("token_k2,token_k1", "0.5,0.1_10", [0, 0, 1]),
        ("token_k1,token_k2", "0.1_1.5,0.5", [0, 0, 0]),
        ("token_k1,token_k2", "0.1_10,9", [1, 0, 1]),
    ):
        rejected, _ = algos.rejection_mask(*arguments, names, thresholds)
        assert (rows["response_mask"] * ~rejected).tolist() == [[1, 1, 1], kept]
