"""Chunked log-probabilities against the whole logits tensor in float64."""

from contextlib import nullcontext

import pytest
import torch

from verl.packing import linear_logprob
from verl.packing.linear_logprob import linear_log_prob

L = 11
D = 8
V = 37


def naive(hidden, weight, labels, temperature):
    log_p = (hidden @ weight.t() / temperature).log_softmax(-1)
    p = log_p.exp()
    return log_p.gather(1, labels[:, None])[:, 0], -(p * log_p).sum(-1), p.square().sum(-1)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(L, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (L,), generator=generator)
    upstream = torch.randn(2, L, generator=generator, dtype=torch.float64)
    return hidden, weight, labels, upstream


def gradients(function, problem, dtype, use):
    """Values and gradients of upstream[0] * log_prob + upstream[1] * entropy; `use` picks the terms."""
    hidden, weight, labels, upstream = problem
    hidden, weight = (x.detach().clone().to(dtype).requires_grad_() for x in (hidden, weight))
    outputs = function(hidden, weight, labels)
    terms = [(out.double() * up).sum() for out, up in zip(outputs[:2], upstream, strict=True)]
    sum(term for term, used in zip(terms, use, strict=True) if used).backward()
    return [*outputs, hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)])
def test_values_and_gradients_equal_the_full_logits_ones(problem, chunk_rows, temperature, use):
    expected = gradients(lambda *x: naive(*x, temperature), problem, torch.float64, use)
    actual = gradients(
        lambda *x: linear_log_prob(*x, temperature, with_sum_pi_squared=True, chunk_rows=chunk_rows),
        problem,
        torch.float32,
        use,
    )
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)])
def test_the_arithmetic_that_is_compiled_on_cuda_gives_the_same(problem, chunk_rows, use, monkeypatch):
    monkeypatch.setattr(linear_logprob, "_compiled", lambda function: function)
    expected = gradients(lambda *x: naive(*x, 0.7), problem, torch.float64, use)
    actual = gradients(
        lambda *x: linear_log_prob(*x, 0.7, with_sum_pi_squared=True, chunk_rows=chunk_rows, compiles=True),
        problem,
        torch.float32,
        use,
    )
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_compiled_arithmetic_gives_the_log_probs_and_gradients_of_plain_one():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator)
    weight = torch.randn(50, 16, generator=generator)
    labels = torch.randint(50, (40,), generator=generator)
    results = []
    for compiles in (False, True):
        leaf = hidden.clone().requires_grad_()
        log_probs, entropy, _ = linear_log_prob(leaf, weight, labels, chunk_rows=16, compiles=compiles)
        (log_probs.sum() + entropy.sum()).backward()
        results.append((log_probs, entropy, leaf.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_a_frozen_head_changes_no_gradient_and_costs_none(problem, monkeypatch):
    hidden, weight, labels, _ = (x.float() if x.is_floating_point() else x for x in problem)
    hidden_gradients = []
    made = []
    zeros_like = torch.zeros_like
    for trained in (True, False):
        leaf = hidden.clone().requires_grad_()
        head = weight.clone().requires_grad_(trained)
        log_probs, entropy, _ = linear_log_prob(leaf, head, labels, chunk_rows=4)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros_like", lambda x, **kw: made.append(x.shape) or zeros_like(x, **kw))
            (log_probs + entropy).sum().backward()
        hidden_gradients.append(leaf.grad)
        assert made == [weight.shape]  # by the first pass alone
    assert torch.equal(*hidden_gradients)


def test_chunks_do_not_change_the_values(problem):
    hidden, weight, labels, _ = (x.float() if x.is_floating_point() else x for x in problem)
    whole = linear_log_prob(hidden, weight, labels, chunk_rows=L)
    parts = linear_log_prob(hidden, weight, labels, chunk_rows=3)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-6, atol=1e-6)
    assert whole[0].dtype == whole[1].dtype == torch.float32


def test_the_sum_of_squared_probabilities_has_no_gradient_and_is_zero_unless_asked_for(problem):
    hidden, weight, labels, _ = (x.float() if x.is_floating_point() else x for x in problem)
    weight.requires_grad_()
    *_, without = linear_log_prob(hidden, weight, labels)
    *_, asked_for = linear_log_prob(hidden, weight, labels, with_entropy=False, with_sum_pi_squared=True)
    assert without.abs().max() == 0 < asked_for.min() and not asked_for.requires_grad


def test_bf16_inputs_are_within_bf16_of_float64(problem):
    expected = gradients(lambda *x: naive(*x, 1.0), problem, torch.float64, (True, True))
    actual = gradients(
        lambda *x: linear_log_prob(*x, with_sum_pi_squared=True, chunk_rows=4),
        problem,
        torch.bfloat16,
        (True, True),
    )
    assert actual[0].dtype == torch.float32 and actual[3].dtype == torch.bfloat16
    for got, want in zip(actual, expected, strict=True):
        assert (got.double() - want).norm() < 0.03 * want.norm()


def test_logits_never_exceed_one_chunk(problem, monkeypatch):
    sizes = []
    original = linear_logprob._logits

    def spy(hidden, weight, temperature):
        sizes.append(len(hidden))
        return original(hidden, weight, temperature)

    monkeypatch.setattr(linear_logprob, "_logits", spy)
    gradients(lambda *x: linear_log_prob(*x, chunk_rows=4), problem, torch.float32, (True, True))
    assert sizes == [4, 4, 3] * 2  # forward, and once more in the backward pass
    with pytest.raises(ValueError, match="temperature must be positive"):
        linear_log_prob(torch.zeros(1, D), torch.zeros(V, D), torch.zeros(1, dtype=torch.long), 0.0)


@pytest.mark.parametrize(("device", "rows"), [("cpu", 128), ("meta", 2048)])
def test_an_accelerator_takes_2048_rows_of_a_large_vocabulary_at_once(device, rows, monkeypatch):
    """The head's gradient, of its size in float32, is read and written once for each chunk."""
    taken = []
    real = linear_logprob._logits
    monkeypatch.setattr(linear_logprob, "_logits", lambda *x: taken.append(len(x[0])) or real(*x))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: False)  # `meta` has none
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    hidden, weight = (torch.zeros(size, 2, device=device, requires_grad=True) for size in (5000, 70000))
    labels = torch.zeros(5000, dtype=torch.int64, device=device)
    log_probs, _, _ = linear_log_prob(hidden[: 2 * rows + 1], weight, labels[: 2 * rows + 1])
    log_probs.sum().backward()
    assert taken == [rows, rows, 1] * 2 and weight.grad.shape == weight.shape
