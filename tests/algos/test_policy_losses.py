"""Every policy loss against its slow float64 twin, values and gradients, and the rules that hold for all of
them, over random ragged multi-turn batches.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import CASES, LossBatch, actor_config
from ragged_batches import ragged_batches
from slow_losses import SLOW_LOSSES, aggregate, derivatives

from verl.config import Config
from verl.config.keys import settable
from verl.trainer.ppo import core_algos as algos

WITHOUT_ADVANTAGE = {"sft", "distillation"}
POLICY_GRADIENTS = [case for case in CASES if case not in WITHOUT_ADVANTAGE]
SCALE = 7.0
thorough = settings(deadline=None, derandomize=True, max_examples=8)
quick = settings(deadline=None, derandomize=True, max_examples=5)


def whole(inputs, batch):
    return algos.LossDenominator.of(inputs.mask, batch.uids, SCALE)


def a_mode(batch):
    """One aggregation of the six; another one in most examples."""
    return algos.LOSS_AGG_MODES[batch.seed % len(algos.LOSS_AGG_MODES)]


def test_every_loss_that_the_configuration_can_name_is_tested():
    names = {
        name
        for name, fn in ((n, algos.get_policy_loss_fn(n)) for n in algos.POLICY_LOSS_REGISTRY)
        if fn.__module__.startswith("verl.")
    }
    key = settable(Config)["actor_rollout_ref.actor.policy_loss.loss_mode"]
    assert set(key.choices) == names
    assert {loss_mode for loss_mode, _ in CASES.values()} == names == set(SLOW_LOSSES)


@pytest.mark.parametrize("case", CASES)
@thorough
@given(batch=ragged_batches(), weighted=st.booleans())
def test_loss_metrics_and_gradient_equal_loops_written_from_the_formula(case, batch, weighted):
    loss_mode, overrides = CASES[case]
    config = actor_config(**overrides)
    slow = SLOW_LOSSES[loss_mode]
    inputs = LossBatch.of(batch, weighted=weighted)
    rows = inputs.slow_rows()
    tokens = [slow(row, config) for row in rows]
    slopes = [derivatives(slow, row, config) for row in rows]
    for mode in algos.LOSS_AGG_MODES:
        loss, metrics, gradient = inputs.loss(case, mode, whole(inputs, batch))

        def aggregated(values, mode=mode):
            return aggregate(values, batch.uids, mode, SCALE)

        assert loss.item() == pytest.approx(
            aggregated([[t["loss"] for t in row] for row in tokens]), abs=1e-10
        )
        for i in range(len(rows)):
            places = inputs.mask[i].nonzero().flatten().tolist()
            for t, place in enumerate(places):
                wanted = aggregated([slopes[i][t] if j == i else [0.0] * len(r) for j, r in enumerate(rows)])
                assert gradient[i, place].item() == pytest.approx(wanted, rel=1e-6, abs=1e-8)
        assert not gradient[inputs.mask == 0].any()
    if any(tokens):
        names = {name for row in tokens for token in row for name in token} - {"loss"}
        assert set(metrics) == {f"actor/{name}" for name in names}
        for name in names:
            wanted = aggregate(
                [[token[name] for token in row] for row in tokens], batch.uids, "token-mean", 1
            )
            assert metrics[f"actor/{name}"].item() == pytest.approx(wanted, abs=1e-10)


@pytest.mark.parametrize("case", CASES)
@quick
@given(batch=ragged_batches(), garbage=st.sampled_from([float("nan"), float("inf"), -1e30]))
def test_rule_3_masked_entries_have_no_influence(case, batch, garbage):
    clean = LossBatch.of(batch, torch.float32)
    dirty = clean.each(
        lambda x: x | (batch.response_mask == 0) if x.dtype == torch.bool else batch.with_garbage(x, garbage)
    )
    mode = a_mode(batch)
    with torch.autograd.set_detect_anomaly(True):  # no NaN in between either
        (loss, metrics, gradient), (dirty_loss, dirty_metrics, dirty_gradient) = (
            inputs.loss(case, mode, whole(inputs, batch)) for inputs in (clean, dirty)
        )
    assert torch.equal(loss, dirty_loss) and torch.equal(gradient, dirty_gradient)
    assert all(torch.equal(metrics[name], dirty_metrics[name]) for name in metrics)
    assert torch.equal(gradient[clean.mask == 0], torch.zeros(int((clean.mask == 0).sum())))


@pytest.mark.parametrize("case", CASES)
@quick
@given(batch=ragged_batches(), cuts=st.lists(st.integers(0, 8), max_size=3), order_seed=st.integers(0, 99))
def test_rule_5_shares_of_any_split_add_up_to_the_whole(case, batch, cuts, order_seed):
    order = torch.randperm(batch.num_rows, generator=torch.Generator().manual_seed(order_seed)).tolist()
    ends = [0, *sorted(min(cut, len(order)) for cut in cuts), len(order)]
    parts = [order[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    mode = a_mode(batch)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        inputs = LossBatch.of(batch, dtype)
        denominator = whole(inputs, batch)
        loss, metrics, gradient = inputs.loss(case, mode, denominator)
        shares = [inputs.rows(part).loss(case, mode, denominator.of_rows(part)) for part in parts]
        size = max(1.0, float(sum(share[0].abs() for share in shares)))
        assert abs(float(sum(share[0] for share in shares) - loss)) <= tolerance * size
        for name in metrics:
            assert abs(float(sum(share[1][name] for share in shares) - metrics[name])) <= 10 * tolerance
        gathered = torch.zeros_like(gradient)
        for part, share in zip(parts, shares, strict=True):
            gathered[part] = share[2]
        torch.testing.assert_close(gathered, gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", POLICY_GRADIENTS)
@quick
@given(batch=ragged_batches())
def test_where_the_ratio_is_1_the_gradient_is_that_of_minus_advantage_times_log_prob(case, batch):
    inputs = LossBatch.of(batch, weighted=False)
    row_advantages = inputs.advantages[:, :1].expand_as(inputs.advantages)
    inputs = replace(
        inputs,
        old=inputs.log_prob,
        advantages=row_advantages if case == "geo_mean" else inputs.advantages,
        selection=inputs.selection if case == "kl_cov" else torch.zeros_like(inputs.selection),
    )
    mode = a_mode(batch)
    denominator = whole(inputs, batch)
    log_prob = inputs.log_prob.clone().requires_grad_()
    algos.agg_loss(-inputs.advantages * log_prob, inputs.mask, mode, denominator=denominator).backward()
    _, metrics, gradient = inputs.loss(case, mode, denominator)
    torch.testing.assert_close(gradient, log_prob.grad, rtol=1e-12, atol=1e-12)
    assert metrics["actor/ppo_kl"] == 0 and not metrics.get("actor/pg_clipfrac", 0)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_finite_for_any_log_ratio(case):
    far = torch.tensor([-5e3, -100.0, -21.0, -1e-30, 0.0])
    log_prob, old = (x.flatten().unsqueeze(0) for x in torch.meshgrid(far, far, indexing="ij"))
    for sign in (1.0, -1.0):
        inputs = LossBatch(
            torch.ones_like(log_prob), log_prob, old, torch.full_like(old, sign), None, old, old < -50
        )
        for each_alone in (inputs, replace(inputs.each(lambda x: x.T), mask=inputs.mask.T)):
            loss, metrics, gradient = each_alone.loss(case)
            assert loss.isfinite() and gradient.isfinite().all()
            assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("case", CASES)
@quick
@given(batch=ragged_batches())
def test_rows_without_advantage_have_no_part_in_the_losses_that_say_so(case, batch):
    inputs = LossBatch.of(batch)
    idle = list(range(0, batch.num_rows, 2))
    advantages = inputs.advantages.clone()
    advantages[idle] = 0.0
    inputs = replace(inputs, advantages=advantages, selection=torch.ones_like(inputs.selection))
    denominator = whole(inputs, batch)
    loss, _, gradient = inputs.rows(idle).loss(case, "token-mean", denominator)
    if algos.loss_traits(CASES[case][0]).vanishes_with_advantage:
        assert loss == 0 and not gradient.any()
    elif inputs.mask[idle].any() and case != "ipo":
        assert gradient.any()


@pytest.mark.parametrize(
    ("case", "missing", "name"),
    [
        ("vanilla", "old", "old_log_prob"),
        ("clip_cov", "selection", "selection"),
        ("distillation", "teacher", "teacher_log_prob"),
    ],
)
def test_what_a_loss_needs_must_be_there(case, missing, name):
    ones = torch.ones(1, 2)
    inputs = LossBatch(ones, -ones, -ones, ones, None, -ones, ones.bool())
    with pytest.raises(ValueError, match=f"Policy loss '{case}' needs {name}"):
        replace(inputs, **{missing: None}).loss(case)


def test_unknown_names_are_errors_that_list_the_known_ones():
    assert algos.get_policy_loss_fn("vanilla") is algos.compute_policy_loss_vanilla
    with pytest.raises(ValueError, match="'ppo', expected one of vanilla"):
        algos.get_policy_loss_fn("ppo")


def test_the_four_scalars_of_ppo_are_those_of_the_registered_loss():
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = (torch.randn(3, 5, generator=generator) for _ in range(3))
    mask = torch.rand(3, 5, generator=generator) < 0.7
    loss, clip_fraction, ppo_kl, dual_fraction = algos.compute_policy_loss(
        old, new, advantages, mask, 0.2, clip_ratio_c=1.5
    )
    inputs = LossBatch(mask, new, old, advantages, None, old, mask)
    registered, metrics, _ = inputs.loss("vanilla, dual clip")
    assert torch.equal(loss, registered)
    for value, name in (
        (clip_fraction, "pg_clipfrac"),
        (ppo_kl, "ppo_kl"),
        (dual_fraction, "pg_clipfrac_lower"),
    ):
        assert torch.equal(value, metrics[f"actor/{name}"]) and value != 0
    with pytest.raises(ValueError, match="clip_ratio_c: found 1.0, expected a number greater than 1"):
        algos.compute_policy_loss(old, new, advantages, mask, 0.2, clip_ratio_c=1.0)


def test_a_users_own_loss_is_taken_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_own_losses.py").write_text(
        "def squares(log_prob, response_mask, denominator):\n"
        "    return log_prob.square().sum() / denominator.num_tokens, {'actor/mine': log_prob.sum()}\n"
        "def by_keyword(log_prob, *, teacher_log_prob, old_log_prob=None, **rest):\n"
        "    raise NotImplementedError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    path = "my_own_losses:squares"
    mask = torch.ones(2, 2)
    log_prob = torch.full((2, 2), -3.0)
    loss, metrics = algos.policy_loss(
        path,
        algos.LossInputs(
            log_prob=log_prob,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config={},
            denominator=algos.LossDenominator.of(mask),
        ),
    )
    assert loss == 9 and metrics == {"actor/mine": torch.tensor(-12.0)}
    assert algos.policy_loss_inputs(path) == {"log_prob", "response_mask", "denominator"}
    assert algos.policy_loss_inputs("my_own_losses:by_keyword") == {"log_prob", "teacher_log_prob"}
    assert algos.loss_traits(path).select is None and not algos.loss_traits(path).vanishes_with_advantage
