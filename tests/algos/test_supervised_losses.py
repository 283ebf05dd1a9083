"""What distillation promises of its gradient, and the cross-entropy of observations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

VOCABULARY = 7


def distillation_gradient(logits, teacher, sampler=None):
    """Mean gradient over what is sampled from `sampler` (by default the policy): exact, by enumeration."""
    log_probs = logits.log_softmax(-1).unsqueeze(0)
    mask = torch.ones(1, VOCABULARY)
    probs = (log_probs.detach() if sampler is None else sampler.log_softmax(-1).unsqueeze(0)).exp()
    loss, _ = algos.policy_loss(
        "distillation",
        algos.LossInputs(
            log_prob=log_probs,
            teacher_log_prob=teacher.log_softmax(-1).unsqueeze(0),
            old_log_prob=probs.log(),
            response_mask=mask,
            loss_agg_mode="token-sum",
            config={},
            denominator=algos.LossDenominator.of(mask),
            rollout_is_weights=probs,  # the probability of each sample
        ),
    )
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("off_policy", [False, True])
def test_distillation_is_the_reverse_kl_and_its_gradient_on_average(off_policy):
    generator = torch.Generator().manual_seed(5)
    logits, teacher, sampler = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_probs = logits.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - teacher.log_softmax(-1))).sum()
    value, gradient = distillation_gradient(logits, teacher, sampler if off_policy else None)
    torch.testing.assert_close(value, kl.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(kl, logits)[0])


def test_distillation_has_no_gradient_where_policy_and_teacher_agree():
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(6)).requires_grad_()
    value, gradient = distillation_gradient(logits, logits.detach())
    assert value == 0 and not gradient.any()


@settings(deadline=None, derandomize=True, max_examples=12)
@given(batch=ragged_batches(), seed=st.integers(0, 99))
def test_echo_is_the_cross_entropy_of_observation_tokens_however_rows_are_split(batch, seed):
    mask = batch.rand("observed") < 0.4
    log_prob = batch.log_probs("new").double().requires_grad_()
    dirty = torch.where(mask, log_prob, float("nan"))
    loss = algos.echo_loss(dirty, mask)
    loss.backward()
    tokens = log_prob.detach()[mask].tolist()
    assert loss.item() == pytest.approx(-sum(tokens) / max(len(tokens), 1), abs=1e-12)
    torch.testing.assert_close(log_prob.grad, -mask.double() / max(len(tokens), 1))
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    denominator = algos.LossDenominator.of(mask)
    shares = [algos.echo_loss(dirty[rows], mask[rows], denominator) for rows in order.split(2)]
    assert float(sum(shares).detach()) == pytest.approx(float(loss.detach()), abs=1e-12)
