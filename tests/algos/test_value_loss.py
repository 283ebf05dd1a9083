"""PPO's clipped value loss against a float64 loop: value, gradient, clip share, masking, splits."""

import pytest
import slow_corrections as slow
import torch
from hypothesis import given, settings
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

some_examples = settings(deadline=None, derandomize=True, max_examples=25)
CLIP = 0.5


def inputs_of(batch):
    """(new values, returns, old values) [N, R] float64; some beyond the clip, on both sides."""
    old = batch.randn("old").double()
    return old + batch.randn("moved").double(), batch.randn("returns").double(), old


def run(vpreds, returns, values, mask, mode="token-mean", denominator=None):
    """(loss, clip share, gradient)"""
    vpreds = vpreds.clone().requires_grad_()
    loss, clipped = algos.compute_value_loss(
        vpreds, returns, values, mask, CLIP, mode, denominator=denominator
    )
    return loss.detach(), clipped, torch.autograd.grad(loss, vpreds)[0]


@pytest.mark.parametrize("mode", slow.AGGREGATIONS)
@some_examples
@given(batch=ragged_batches())
def test_value_loss_and_gradient_equal_a_float64_loop(mode, batch):
    mask = batch.response_mask.tolist()
    loss, clip_share, gradient = run(*inputs_of(batch), batch.response_mask, mode)
    losses, clipped, slopes = ([[0.0] * batch.width for _ in mask] for _ in range(3))
    for i, row in enumerate(zip(*(x.tolist() for x in inputs_of(batch)), strict=True)):
        for t, (v, target, old) in enumerate(zip(*row, strict=True)):
            losses[i][t], clipped[i][t] = slow.value_loss_of_token(v, target, old, CLIP)
            if mask[i][t]:
                pull = slow.slope(lambda x, y=target, o=old: slow.value_loss_of_token(x, y, o, CLIP)[0], v)
                slopes[i][t] = pull * slow.token_weight(mode, mask, i)
    assert loss.item() == pytest.approx(slow.AGGREGATIONS[mode](losses, mask), abs=1e-12)
    assert clip_share.item() == pytest.approx(slow.token_mean(clipped, mask))
    torch.testing.assert_close(gradient, torch.tensor(slopes).double(), rtol=1e-5, atol=1e-6)


@some_examples
@given(batch=ragged_batches())
def test_rule_3_nothing_under_the_mask_reaches_the_value_loss_or_its_gradient(batch):
    clean = run(*inputs_of(batch), batch.response_mask)
    dirty = run(*map(batch.with_garbage, inputs_of(batch)), batch.response_mask)
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a, b)
    assert (clean[2][batch.response_mask == 0] == 0).all()


@pytest.mark.parametrize("mode", slow.AGGREGATIONS)
@some_examples
@given(batch=ragged_batches())
def test_rule_5_the_parts_of_a_mini_batch_add_up_to_its_loss_and_gradient(mode, batch):
    denominator = algos.LossDenominator.of(batch.response_mask)
    whole = run(*inputs_of(batch), batch.response_mask, mode)
    rows = torch.arange(batch.num_rows).split(3)
    parts = [
        run(*(x[part] for x in inputs_of(batch)), batch.response_mask[part], mode, denominator)
        for part in rows
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), whole[0])
    torch.testing.assert_close(sum(part[1] for part in parts), whole[1])
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), whole[2])
