"""Which tokens Clip-Cov and KL-Cov choose out of a mini-batch, wherever its rows stand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import LossBatch, actor_config
from ragged_batches import ragged_batches
from slow_losses import candidates_of_clip_cov, covariances

from verl.trainer.ppo import core_algos as algos

LOSSES = ("clip_cov", "kl_cov")
thorough = settings(deadline=None, derandomize=True, max_examples=12)
CONFIG = actor_config(
    policy_loss__clip_cov_ratio=0.2,
    policy_loss__clip_cov_lb=0.1,
    policy_loss__clip_cov_ub=2.0,
    policy_loss__kl_cov_ratio=0.2,
)


def select(loss_mode, inputs, seed=0, config=CONFIG):
    return algos.loss_traits(loss_mode).select(
        inputs.log_prob, inputs.old, inputs.advantages, inputs.mask, config, seed
    )


def places(selection, mask):
    """(row, number of the sampled token) of what was selected."""
    numbers = mask.cumsum(dim=1) - 1
    return {(i, int(numbers[i, t])) for i, t in selection.nonzero().tolist()}


@thorough
@given(batch=ragged_batches(), seed=st.integers(0, 9))
def test_clip_cov_draws_its_share_from_the_tokens_within_the_bounds(batch, seed):
    inputs = LossBatch.of(batch)
    chosen = places(select("clip_cov", inputs, seed), inputs.mask)
    candidates = candidates_of_clip_cov(inputs.slow_rows(), CONFIG)
    share = max(1, int(0.2 * int(inputs.mask.sum()) + 1e-9))
    assert chosen <= candidates and len(chosen) == min(share, len(candidates))


@thorough
@given(batch=ragged_batches())
def test_kl_cov_takes_the_tokens_with_the_greatest_covariance(batch):
    inputs = LossBatch.of(batch)
    chosen = places(select("kl_cov", inputs), inputs.mask)
    all_covariances = sorted((covariance for covariance, _ in covariances(inputs.slow_rows())), reverse=True)
    share = max(1, int(0.2 * len(all_covariances) + 1e-9))
    found = sorted((c for c, place in covariances(inputs.slow_rows()) if place in chosen), reverse=True)
    assert found == pytest.approx(all_covariances[:share], abs=1e-12)  # two tokens may have the same


@pytest.mark.parametrize("loss_mode", LOSSES)
@thorough
@given(batch=ragged_batches(), order_seed=st.integers(0, 99), padding=st.integers(0, 3))
def test_rule_5_the_order_of_the_rows_and_what_stands_under_the_mask_have_no_influence(
    loss_mode, batch, order_seed, padding
):
    inputs = LossBatch.of(batch, torch.float32)
    wanted = select(loss_mode, inputs, seed=3)
    assert not wanted[inputs.mask == 0].any()
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(order_seed)).tolist()
    moved = inputs.each(lambda x: x if x.dtype == torch.bool else batch.with_garbage(x)).rows(order)

    def wider(x):
        return torch.nn.functional.pad(x, (0, padding))

    found = select(
        loss_mode, LossBatch(wider(moved.mask), *(wider(getattr(moved, name)) for name in FIELDS)), 3
    )
    assert torch.equal(found, wider(wanted[order]))


FIELDS = ("log_prob", "old", "advantages", "weights", "teacher", "selection")


@pytest.mark.parametrize("loss_mode", LOSSES)
def test_of_a_few_tokens_one_is_chosen_and_of_none_none(loss_mode):
    config = actor_config(policy_loss__clip_cov_lb=-9.0, policy_loss__clip_cov_ub=9.0)
    log_prob = torch.tensor([[-1.0, -2.0, -3.0]])
    mask = torch.ones(1, 3)
    inputs = LossBatch(mask, log_prob, log_prob, log_prob, None, log_prob, mask.bool())
    assert int(select(loss_mode, inputs, config=config).sum()) == 1
    nothing = LossBatch(mask * 0, log_prob, log_prob, log_prob, None, log_prob, mask.bool())
    assert not select(loss_mode, nothing, config=config).any()
