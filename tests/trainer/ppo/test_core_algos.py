"""Losses and KL against slow float64 loops written from the formulas, and their masking."""

import math
import statistics

import pytest
import torch

from verl.trainer.ppo import core_algos as algos

N, R = 7, 13


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


@pytest.fixture
def mask(generator):
    """Runs of sampled tokens and observations; row 2 sampled nothing, row 3 one token."""
    mask = (torch.rand(N, R, generator=generator) < 0.6).long()
    mask[2], mask[3] = 0, 0
    mask[3, 4] = 1
    return mask


def randn(generator, *shape):
    return torch.randn(*(shape or (N, R)), generator=generator)


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


def test_unknown_names_are_errors_that_list_the_known_ones():
    assert algos.get_policy_loss_fn("vanilla") is algos.compute_policy_loss_vanilla
    with pytest.raises(ValueError, match="'ppo', expected one of vanilla"):
        algos.get_policy_loss_fn("ppo")


def loop_agg(losses, mask, mode):
    rows = [
        [x for x, k in zip(*pair, strict=True) if k]
        for pair in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    rows = [row for row in rows if row]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    return sum(statistics.fmean(row) for row in rows) / len(rows)


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
def test_agg_loss_of_parts_adds_up_to_the_whole(generator, mask, mode):
    losses = randn(generator)
    whole = algos.agg_loss(losses, mask, mode)
    assert_close(whole, loop_agg(losses, mask, mode))
    denominator = algos.LossDenominator.of(mask)
    parts = [algos.agg_loss(losses[i : i + 3], mask[i : i + 3], mode, denominator) for i in range(0, N, 3)]
    torch.testing.assert_close(sum(parts), whole)
    with pytest.raises(ValueError, match="loss_agg_mode: found 'mean'"):
        algos.agg_loss(losses, mask, "mean")


@pytest.mark.parametrize("mode", algos.LOSS_AGG_MODES)
@pytest.mark.parametrize(("low", "high", "c"), [(None, None, None), (0.1, 0.3, None), (None, None, 1.5)])
def test_policy_loss_equals_a_float64_loop(generator, mask, mode, low, high, c):
    old, advantages = randn(generator), randn(generator)
    new = old + 0.6 * randn(generator)
    loss, clip_fraction, kl, dual_fraction = algos.compute_policy_loss(
        old, new, advantages, mask, 0.2, low, high, c, mode
    )
    losses, clipped, dual = (torch.zeros(N, R, dtype=torch.float64) for _ in range(3))
    for i in range(N):
        for t in range(R):
            advantage, ratio = advantages[i, t].item(), math.exp(new[i, t].item() - old[i, t].item())
            bounded = min(max(ratio, 1 - (low or 0.2)), 1 + (high or 0.2))
            value = max(-advantage * ratio, -advantage * bounded)
            clipped[i, t] = -advantage * bounded > -advantage * ratio
            if c and advantage < 0:
                dual[i, t] = value > -advantage * c
                value = min(value, -advantage * c)
            losses[i, t] = value
    assert_close(loss, loop_agg(losses, mask, mode))
    assert_close(clip_fraction, loop_agg(clipped, mask, "token-mean"))
    assert_close(dual_fraction, loop_agg(dual, mask, "token-mean"))
    assert_close(kl, loop_agg(old.double() - new.double(), mask, "token-mean"))
    assert (dual_fraction > 0) == (c is not None)


def test_policy_loss_is_finite_and_has_finite_gradient_for_any_log_ratio():
    old = torch.tensor([[0.0, -500.0, 0.0, -2.0]])
    new = torch.tensor([[-500.0, 0.0, -0.1, -1.0]], requires_grad=True)
    loss, *_ = algos.compute_policy_loss(old, new, -torch.ones(1, 4), torch.ones(1, 4))
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all() and new.grad[0, 2:].abs().min() > 0


def test_rule_3_masked_entries_have_no_influence_on_losses_and_gradients(generator, mask):
    inputs = [randn(generator) for _ in range(4)]
    noise = torch.where(mask.bool(), 0.0, torch.tensor(float("inf")))

    def run(offset):
        log_prob = inputs[0].clone().requires_grad_()
        old, advantages, values = (x + offset for x in inputs[1:])
        policy = algos.compute_policy_loss(old, log_prob, advantages, mask, clip_ratio_c=3.0)[0]
        value = algos.compute_value_loss(log_prob, advantages, values, mask, 0.5)[0]
        entropy = algos.compute_entropy_loss(log_prob + offset, mask)
        loss = policy + value + entropy
        loss.backward()
        return loss.detach(), log_prob.grad

    (clean_loss, clean_grad), (dirty_loss, dirty_grad) = run(torch.zeros(N, R)), run(noise)
    assert torch.equal(clean_loss, dirty_loss) and torch.equal(clean_grad, dirty_grad)
    assert clean_grad[mask.bool()].abs().min() > 0 and clean_grad[~mask.bool()].abs().max() == 0


def test_value_loss_equals_a_float64_loop(generator, mask):
    vpreds, returns, values = randn(generator), randn(generator), randn(generator)
    loss, clip_fraction = algos.compute_value_loss(vpreds, returns, values, mask, 0.5)
    losses, clipped = (torch.zeros(N, R, dtype=torch.float64) for _ in range(2))
    for i in range(N):
        for t in range(R):
            v, target, old = (x[i, t].item() for x in (vpreds, returns, values))
            bounded = min(max(v, old - 0.5), old + 0.5)
            losses[i, t] = 0.5 * max((v - target) ** 2, (bounded - target) ** 2)
            clipped[i, t] = (bounded - target) ** 2 > (v - target) ** 2
    assert_close(loss, loop_agg(losses, mask, "token-mean"))
    assert_close(clip_fraction, loop_agg(clipped, mask, "token-mean"))


def test_kl_estimators_match_their_formulas_and_k1_k3_are_unbiased():
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(40, generator=generator).mul(0.5).log_softmax(-1) for _ in range(2))
    probs, d = policy.exp(), policy - reference
    exact = (probs * d).sum()
    for name in ("kl", "k1", "low_var_kl", "k3"):
        torch.testing.assert_close((probs * algos.kl_penalty(policy, reference, name)).sum(), exact)
    assert torch.equal(algos.kl_penalty(policy, reference, "abs"), d.abs())
    for name in ("mse", "k2"):
        torch.testing.assert_close(algos.kl_penalty(policy, reference, name), d**2 / 2)
    assert algos.kl_penalty(policy, reference, "k3").min() >= 0
    far = algos.kl_penalty(torch.tensor([-900.0, 900.0]), torch.zeros(2), "k3")
    assert torch.equal(far, torch.tensor([10.0, 10.0]))
    with pytest.raises(ValueError, match="'full', expected one of kl, k1"):
        algos.kl_penalty(policy, reference, "full")


def test_adaptive_kl_moves_towards_the_target_and_survives_a_restart():
    controller = algos.get_kl_controller(
        {"type": "adaptive", "kl_coef": 0.1, "target_kl": 2.0, "horizon": 100}
    )
    controller.update(current_kl=9.0, n_steps=10)
    assert controller.value == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    controller.update(current_kl=1.9, n_steps=10)
    assert controller.value == pytest.approx(0.102 * (1 - 0.05 * 10 / 100))
    again = algos.get_kl_controller({"type": "adaptive", "kl_coef": 0.1, "target_kl": 2.0, "horizon": 100})
    again.load_state_dict(controller.state_dict())
    assert again.value == controller.value
    fixed = algos.get_kl_controller({"type": "fixed", "kl_coef": 0.3})
    fixed.update(100.0, 100)
    assert fixed.value == 0.3
    with pytest.raises(ValueError, match="needs kl_ctrl.target_kl"):
        algos.get_kl_controller({"type": "adaptive", "kl_coef": 0.1})
    with pytest.raises(ValueError, match="found 'none'"):
        algos.get_kl_controller({"type": "none", "kl_coef": 0.1})


class Batch:
    """As much of a DataProto as apply_kl_penalty touches."""

    def __init__(self, **tensors):
        self.batch = tensors


def test_kl_in_the_reward_is_taken_from_sampled_tokens_only(generator, mask):
    scores, old, ref = randn(generator) * mask, randn(generator), randn(generator)
    noise = torch.where(mask.bool(), 0.0, torch.tensor(float("nan")))
    data = Batch(token_level_scores=scores, old_log_probs=old, ref_log_prob=ref + noise, response_mask=mask)
    controller = algos.AdaptiveKLController(0.5, target_kl=0.1, horizon=50)
    metrics = algos.apply_kl_penalty(data, controller, "mse")
    kl = (old.double() - ref.double()) ** 2 / 2
    assert_close(data.batch["token_level_rewards"], scores.double() - 0.5 * kl * mask)
    assert metrics["critic/kl"] == pytest.approx(loop_agg(kl, mask, "seq-mean-token-mean"), rel=1e-5)
    assert metrics["critic/kl_coeff"] == 0.5
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * (N - 1) / 50))
