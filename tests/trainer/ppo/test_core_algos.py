"""Advantages, losses and KL against slow float64 loops written from the formulas, and their masking."""

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


def loop_gae(rewards, values, mask, gamma, lam):
    """A and A + V of one row, over the list of its sampled tokens only."""
    steps = [t for t in range(len(mask)) if mask[t]]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    carried = 0.0
    for i in reversed(range(len(steps))):
        t = steps[i]
        next_value = values[steps[i + 1]] if i + 1 < len(steps) else 0.0
        carried = rewards[t] + gamma * next_value - values[t] + gamma * lam * carried
        advantages[t], returns[t] = carried, carried + values[t]
    return advantages, returns


def loop_whiten(rows, mask):
    flat = [x for row, m in zip(rows, mask.tolist(), strict=True) for x, k in zip(row, m, strict=True) if k]
    mean, variance = statistics.fmean(flat), statistics.variance(flat)
    return [
        [(x - mean) / math.sqrt(variance + 1e-8) if k else 0.0 for x, k in zip(row, m, strict=True)]
        for row, m in zip(rows, mask.tolist(), strict=True)
    ]


def assert_close(actual, expected, tolerance=2e-5):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_gae_steps_over_observations_as_a_float64_loop_does(generator, mask, gamma, lam):
    rewards, values = randn(generator), randn(generator)
    advantages, returns = algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    rows = [loop_gae(*(x[i].tolist() for x in (rewards, values, mask)), gamma, lam) for i in range(N)]
    assert_close(advantages, loop_whiten([row[0] for row in rows], mask))
    assert_close(returns, [row[1] for row in rows])


def test_gae_of_a_trajectory_is_the_same_with_and_without_an_observation_in_the_middle(generator):
    rewards, values = randn(generator, 2, 6), randn(generator, 2, 6)
    short = algos.compute_gae_advantage_return(rewards, values, torch.ones(2, 6), 0.9, 0.8)

    def widen(x, fill):
        return torch.cat([x[:, :3], torch.full((2, 4), fill), x[:, 3:]], dim=1)

    wide_mask = widen(torch.ones(2, 6), 0.0)
    wide = algos.compute_gae_advantage_return(widen(rewards, 5.0), widen(values, -7.0), wide_mask, 0.9, 0.8)
    for got, want in zip(wide, short, strict=True):
        assert torch.equal(got[wide_mask.bool()].view(2, 6), want)


def test_whitening_one_token_or_none_is_finite():
    one = torch.tensor([[1, 0, 0]])
    for mask in (one, one * 0):
        advantages, _ = algos.compute_gae_advantage_return(torch.ones(1, 3), torch.ones(1, 3), mask, 1.0, 1.0)
        assert torch.equal(advantages, torch.zeros(1, 3))


UIDS = ["a", "b", "a", "b", "a", "c", "b"]


def loop_groups(rewards, mask):
    """Scores of rows, and for each row the scores of its group (rows that sampled something)."""
    scores = [
        sum(r for r, k in zip(*pair, strict=True) if k)
        for pair in zip(rewards.tolist(), mask.tolist(), strict=True)
    ]
    live = [bool(m.any()) for m in mask]
    members = [[j for j in range(N) if UIDS[j] == UIDS[i] and live[j]] for i in range(N)]
    return scores, members


@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_normalises_within_the_rows_of_a_uid_as_a_float64_loop_does(generator, mask, by_std):
    rewards = randn(generator)
    advantages, returns = algos.compute_grpo_outcome_advantage(
        rewards, mask, UIDS, norm_adv_by_std_in_grpo=by_std
    )
    scores, members = loop_groups(rewards, mask)
    expected = torch.zeros(N, R, dtype=torch.float64)
    for i in range(N):
        group = [scores[j] for j in members[i]]
        mean, std = (statistics.fmean(group), statistics.stdev(group)) if len(group) > 1 else (0.0, 1.0)
        expected[i] = (scores[i] - mean) / ((std + 1e-6) if by_std else 1.0) * mask[i]
    assert_close(advantages, expected)
    assert torch.equal(advantages, returns)


def test_rule_7_groups_are_keyed_by_uid_wherever_their_rows_stand(generator, mask):
    rewards, order = randn(generator), [5, 3, 0, 6, 2, 4, 1]
    for name in ("grpo", "rloo"):
        straight, _ = algos.compute_advantage(name, rewards, mask, index=UIDS)
        shuffled, _ = algos.compute_advantage(
            name, rewards[order], mask[order], index=[UIDS[i] for i in order]
        )
        torch.testing.assert_close(shuffled, straight[order])
        apart, _ = algos.compute_advantage(name, rewards, mask, index=["a", "b", "d", "b", "d", "c", "e"])
        assert not torch.allclose(apart, straight)


def test_a_group_of_one_keeps_its_score(mask):
    rewards = torch.zeros(N, R)
    rewards[:, 4], mask[:, 4] = 3.0, 1
    for name in ("grpo", "rloo"):
        advantages, _ = algos.compute_advantage(name, rewards, mask, index=list(range(N)))
        torch.testing.assert_close(advantages, 3.0 * mask, rtol=1e-5, atol=0)


def test_rloo_subtracts_the_mean_of_the_others(generator, mask):
    rewards = randn(generator)
    advantages, _ = algos.compute_rloo_outcome_advantage(rewards, mask, UIDS)
    scores, members = loop_groups(rewards, mask)
    expected = torch.zeros(N, R, dtype=torch.float64)
    for i in range(N):
        others = [scores[j] for j in members[i] if j != i]
        expected[i] = (scores[i] - (statistics.fmean(others) if others else 0.0)) * mask[i]
    assert_close(advantages, expected)


def test_reinforce_plus_plus_discounts_over_sampled_tokens_only(generator, mask):
    rewards, gamma = randn(generator), 0.9
    advantages, returns = algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    rows = []
    for reward, kept in zip(rewards.tolist(), mask.tolist(), strict=True):
        running, row = 0.0, [0.0] * R
        for t in reversed([t for t in range(R) if kept[t]]):
            running = reward[t] + gamma * running
            row[t] = running
        rows.append(row)
    assert_close(returns, rows)
    assert_close(advantages, loop_whiten(rows, mask))


@pytest.mark.parametrize("name", ["gae", "grpo", "rloo", "reinforce_plus_plus"])
def test_rule_3_masked_entries_have_no_influence_on_advantages(generator, mask, name):
    rewards, values = randn(generator), randn(generator)
    noise = torch.where(mask.bool(), 0.0, torch.tensor(float("nan")))
    clean = algos.compute_advantage(name, rewards, mask, values=values, index=UIDS, gamma=0.9, lam=0.9)
    dirty = algos.compute_advantage(
        name, rewards + noise, mask, values=values + noise, index=UIDS, gamma=0.9, lam=0.9
    )
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got, want)
        assert torch.equal(got[~mask.bool()], torch.zeros(int((mask == 0).sum())))


def test_unknown_names_are_errors_that_list_the_known_ones(mask):
    with pytest.raises(ValueError, match="'ppo', expected one of .*gae"):
        algos.get_adv_estimator_fn("ppo")
    with pytest.raises(ValueError, match="needs values"):
        algos.compute_advantage("gae", mask.float(), mask)
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
