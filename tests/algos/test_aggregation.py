"""Every aggregation against plain loops, its gradient, and that the shares of any split add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches
from slow_losses import aggregate

from verl.config import Config
from verl.config.keys import settable
from verl.trainer.ppo import core_algos as algos

thorough = settings(deadline=None, derandomize=True, max_examples=12)


def sampled(values, mask):
    return [
        [float(v) for v, kept in zip(*pair, strict=True) if kept] for pair in zip(values, mask, strict=True)
    ]


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
@thorough
@given(batch=ragged_batches(), scale=st.sampled_from([None, 5.0]))
def test_value_and_gradient_equal_loops_over_the_sampled_tokens(mode, batch, scale):
    losses = batch.randn("losses").double().requires_grad_()
    mask = batch.response_mask
    denominator = algos.LossDenominator.of(mask, batch.uids, scale)
    loss = algos.agg_loss(batch.with_garbage(losses), mask, mode, denominator=denominator)
    loss.backward()
    width = scale or batch.width
    rows = sampled(losses.detach(), mask)
    assert loss.item() == pytest.approx(aggregate(rows, batch.uids, mode, width), abs=1e-12)
    for i in range(batch.num_rows):
        for t, place in enumerate(mask[i].nonzero().flatten().tolist()):
            ones = [[float((j, s) == (i, t)) for s in range(len(row))] for j, row in enumerate(rows)]
            wanted = aggregate(ones, batch.uids, mode, width)
            assert losses.grad[i, place].item() == pytest.approx(wanted, abs=1e-12)
    assert not losses.grad[mask == 0].any()


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
@thorough
@given(batch=ragged_batches(), num_ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_shares_of_ranks_add_up_when_each_knows_its_own_rows_and_the_summed_counts(
    mode, batch, num_ranks, seed
):
    losses = batch.randn("losses").double()
    mask = batch.response_mask
    whole = algos.agg_loss(losses, mask, mode, denominator=algos.LossDenominator.of(mask, batch.uids))
    tokens, rows = algos.prompt_counts(mask, batch.uids)
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(seed))
    ranks = [order[rank::num_ranks] for rank in range(num_ranks)]
    of_ranks = [algos.denominator_counts(mask[own], rows[own]) for own in ranks]
    counts = [sum(count) for count in zip(*of_ranks, strict=True)]
    total = 0.0
    for own in ranks:
        of_rank = algos.LossDenominator.from_counts(counts, tokens_of_prompt=tokens[own])
        for i in range(len(own)):  # micro-batches of one row
            of_row = of_rank.of_rows([i])
            loss = algos.agg_loss(losses[own][[i]], mask[own][[i]], mode, denominator=of_row)
            total += float(loss)
    assert total == pytest.approx(float(whole), abs=1e-12)


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
def test_a_mini_batch_without_a_sampled_token_has_loss_0(mode):
    losses = torch.full((2, 3), float("nan"), requires_grad=True)
    mask = torch.zeros(2, 3)
    loss = algos.agg_loss(losses, mask, mode, denominator=algos.LossDenominator.of(mask, ["a", "b"]))
    loss.backward()
    assert loss == 0 and not losses.grad.any()


def test_the_configuration_can_name_every_aggregation():
    key = settable(Config)["actor_rollout_ref.actor.loss_agg_mode"]
    assert key.choices == algos.LOSS_AGG_MODES
