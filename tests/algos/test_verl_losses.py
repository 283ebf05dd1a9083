"""Losses, metrics and rejection under verl's names do what verl's do.

The expected numbers were written down from a run of verl 0.9.1 (the wheel on PyPI): `get_policy_loss_fn`,
`compute_policy_loss`, `compute_entropy_loss` and `AdaptiveKLController` of verl/trainer/ppo/core_algos.py,
`compute_rollout_correction_weights` and `compute_rollout_rejection_mask` of
verl/trainer/ppo/rollout_corr_helper.py, on the inputs below in float64.
"""

import pytest
import torch
from loss_batches import actor_config

from verl.trainer.ppo import core_algos as algos

OLD = torch.tensor([[-1.0, -0.7, -0.2, -2.0], [-0.5, -1.5, -0.3, -1.0]], dtype=torch.float64)
NEW = torch.tensor([[-0.8, -0.9, -0.1, -1.0], [-0.9, -0.6, -0.3, -2.5]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[2.0, -1.5, 0.5, 1.0], [1.0, 1.0, -1.0, -2.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]])
NARROW = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}

# loss -> (settings, loss, metrics without actor/ppo_kl of 0, gradient of log_prob)
VERL = {
    "dro": (
        {"policy_loss__dro_beta": 0.5},
        -0.2107142857142857,
        {},
        [-0.271428571, 0.2, 0.0, -0.071428571, -0.171428571, -0.078571429, 0.142857143, 0.178571429],
    ),
    "gspo": (
        NARROW,
        -0.09488327550195365,
        {"pg_clipfrac": 0.571428570612245},
        [0.0, 0.299059805, 0.0, 0.0, -0.111257255, -0.111257255, 0.0, 0.0],
    ),
    "kl_cov": (
        {"policy_loss__kl_cov_ratio": 0.3, "policy_loss__ppo_kl_coef": 1.0},
        -0.5595220074368774,
        {"ppo_kl": 0.5999999991428572},
        [-0.206115074, 0.175442304, 0.0, -0.388325975, -0.095760007, -0.351371873, 0.142857143, -0.079105669],
    ),
    "clip_cov": (
        NARROW
        | {"policy_loss__clip_cov_ratio": 0.9, "policy_loss__clip_cov_lb": -0.4}
        | {"policy_loss__clip_cov_ub": 0.4},
        -0.31428571428571417,
        {"pg_clipfrac": 0.2857142853061225},
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.142857143, 0.0],
    ),
    "vanilla": (
        NARROW | {"clip_ratio_c": 1.5},
        -0.23460341663123802,
        {"pg_clipfrac": 0.571428570612245, "pg_clipfrac_lower": 0.0},
        [0.0, 0.175442304, 0.0, 0.0, -0.095760007, 0.0, 0.142857143, 0.0],
    ),
    "cispo": (
        NARROW,
        -0.12075521666503929,
        {"pg_clipfrac": 0.7142857132653061},
        [-0.342857143, 0.175442304, 0.0, -0.171428571, -0.114285714, -0.171428571, 0.142857143, 0.228571429],
    ),
    "gpg": (
        {},
        -0.36428571428571427,
        {},
        [-0.285714286, 0.214285714, 0.0, -0.142857143, -0.142857143, -0.142857143, 0.142857143, 0.285714286],
    ),
    "dppo_tv": (
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "clip_ratio_c": 2.0},
        0.16460656254758171,
        {"pg_clipfrac": 0.4285714279591837, "pg_clipfrac_lower": 0.0},
        [-0.348972217, 0.175442304, 0.0, 0.0, -0.095760007, 0.0, 0.142857143, 0.0],
    ),
    "dppo_kl": (
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 2.0},
        0.16460656254758171,
        {"pg_clipfrac": 0.4285714279591837, "pg_clipfrac_lower": 0.0},
        [-0.348972217, 0.175442304, 0.0, 0.0, -0.095760007, 0.0, 0.142857143, 0.0],
    ),
}


def run(loss_mode, settings, loss_agg_mode="token-mean", advantages=ADVANTAGES):
    """(loss, metrics, gradient) with verl's call; tokens that a loss chooses are chosen beforehand."""
    config = actor_config(**settings)
    log_prob = NEW.clone().requires_grad_()
    select = algos.loss_traits(loss_mode).select
    more = {}
    if select is not None:
        more["selection"] = select(NEW, OLD, advantages, MASK, config, 0)
    loss, metrics = algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=OLD,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=MASK,
        loss_agg_mode=loss_agg_mode,
        config=config,
        **more,
    )
    loss.backward()
    return loss.item(), {name: value.item() for name, value in metrics.items()}, log_prob.grad


@pytest.mark.parametrize("loss_mode", VERL)
def test_a_loss_under_verls_name_has_verls_value_gradient_and_metrics(loss_mode):
    settings, wanted, wanted_metrics, wanted_gradient = VERL[loss_mode]
    loss, metrics, gradient = run(loss_mode, settings)
    assert loss == pytest.approx(wanted, rel=1e-9)
    torch.testing.assert_close(
        gradient.flatten(), torch.tensor(wanted_gradient, dtype=torch.float64), atol=1e-8, rtol=0
    )
    for name, value in ({"ppo_kl": 0.0} | wanted_metrics).items():
        assert metrics[f"actor/{name}"] == pytest.approx(value, abs=1e-8), name


def test_geo_mean_has_verls_loss_and_clip_fractions():
    """With one advantage a row, as the paper has it and verl supports it."""
    of_rows = torch.tensor([[1.5] * 4, [-0.5] * 4], dtype=torch.float64)
    loss, metrics, _ = run("geo_mean", {"clip_ratio": 0.4}, "seq-mean-token-mean", of_rows)
    assert loss == pytest.approx(-0.6006443261350733, rel=1e-7)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.14285714265306124)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(0.2857142853061225)


def test_where_the_rows_ratio_moved_back_dro_is_another_method_than_dro_of_whole_rows():
    """The first row's log-ratios add up to 1, the second's to -1: there the two pull the other way."""
    settings = {"policy_loss__dro_beta": 2.0}
    by_token, by_row = (run(name, settings, "token-sum")[2] for name in ("dro", "dro_sequence"))
    assert by_token[0, 0] == pytest.approx(-2.0 + 2.0 * 0.2)
    assert by_row[0, 0] == pytest.approx(-2.0 + 2.0 * 1.0)


def test_compute_policy_loss_has_verls_dual_clip_by_default_and_needs_a_clip_range():
    """advantages * 3: the dual clip at 3 would bite at ratios above 3, which are not here."""
    got = algos.compute_policy_loss(OLD, NEW, 3 * ADVANTAGES, MASK, cliprange=0.2)
    wanted = [-0.7038102498937138, 0.571428570612245, 0.0, 0.0]
    assert [x.item() for x in got] == pytest.approx(wanted, abs=1e-8)
    far = algos.compute_policy_loss(OLD - 2, NEW, -ADVANTAGES.abs(), MASK, cliprange=0.2)
    undone = algos.compute_policy_loss(OLD - 2, NEW, -ADVANTAGES.abs(), MASK, 0.2, clip_ratio_c=None)
    assert far[3] > 0 and undone[3] == 0 and far[0] < undone[0]
    with pytest.raises(ValueError, match="found cliprange=None"):
        algos.compute_policy_loss(OLD, NEW, ADVANTAGES, MASK)


def test_compute_entropy_loss_takes_logits():
    logits = [[[1.0, 2.0, 0.5], [0.0, 0.0, 0.0], [3.0, -1.0, 0.0], [1.0, 1.0, 0.0]]]
    loss = algos.compute_entropy_loss(torch.tensor(logits, requires_grad=True), MASK[:1])
    assert loss.item() == pytest.approx(1.0073095842341837, rel=1e-6) and loss.requires_grad


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        (
            "token",
            {
                "mean": 0.9905119582167288,
                "std": 0.42986097236044685,
                "max": 1.5,
                "min": 0.22313016014842982,
                "ratio_fraction_high": 0.2857142853061225,
                "ratio_fraction_low": 0.14285714265306124,
                "eff_sample_size": 0.8415118585764529,
            },
        ),
        (
            "sequence",
            {
                "mean": 0.8530739651650042,
                "std": 0.5602543800088683,
                "max": 2.718281828459045,
                "min": 0.36787944117144233,
                "ratio_fraction_high": 0.5,
                "ratio_fraction_low": 0.5,
                "eff_sample_size": 0.6986569910967187,
            },
        ),
    ],
)
def test_metrics_of_the_importance_weights_have_verls_values(level, wanted):
    _, metrics = algos.importance_weights(NEW, OLD, MASK, level, 1.5)
    named = {f"rollout_corr/rollout_is_{name}": value for name, value in wanted.items()}
    assert metrics == pytest.approx(named, rel=1e-6)


@pytest.mark.parametrize(
    ("rollout_rs", "threshold", "kept"),
    [
        ("token_k1", "0.5_2.0", [[1, 1, 0, 0], [1, 0, 1, 0]]),
        ("token_k1", "0.9_5.0", [[0, 1, 0, 0], [1, 0, 1, 1]]),
        ("token_k2", "0.1", [[1, 1, 0, 0], [1, 0, 1, 0]]),
        ("token_k3", 0.1, [[1, 1, 0, 0], [1, 0, 1, 0]]),
        ("seq_sum_k1", "0.5_5.0", [[0, 0, 0, 0], [1, 1, 1, 1]]),
        ("seq_sum_k2", "0.7", [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_sum_k3", 1.0, [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_mean_k1", "0.7_1.2", [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_mean_k2", 0.3, [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_mean_k3", 0.3, [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_max_k2", "0.5", [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("seq_max_k3", "0.72", [[1, 1, 0, 1], [0, 0, 0, 0]]),
        ("token_k1,seq_max_k3", "0.5_2.0,0.72", [[1, 1, 0, 0], [0, 0, 0, 0]]),
    ],
)
def test_rejection_under_verls_names_keeps_what_verl_keeps(rollout_rs, threshold, kept):
    rejected, metrics = algos.rejection_mask(NEW, OLD, MASK, rollout_rs, threshold)
    assert (MASK * ~rejected).tolist() == kept
    share = 1 - sum(map(sum, kept)) / 7
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("rollout_rs", "threshold", "words"),
    [
        ("token_k4", 2.0, "found 'token_k4', expected one or more of token, .*seq_max_k3"),
        ("token_k1,seq_max_k2", "1,2,3", "'1,2,3' for rollout_rs='token_k1,seq_max_k2'; expected one"),
        ("seq_max_k2", "0.5_5.0", "'0.5_5.0' for rollout_rs=seq_max_k2, expected a number above 0\\."),
        ("token", "0.5_5.0", "'0.5_5.0' for rollout_rs=token, expected a number above 0\\."),
        ("token_k1", "5.0_0.5", "expected a number above 0, or two of them, the lower one first"),
        ("token_k1", "much", "found 'much'"),
        ("seq_sum_k3", -1.0, "found '-1.0'"),
        ("token_k1", None, "found None"),
    ],
)
def test_a_rejection_that_cannot_be_is_refused_in_words(rollout_rs, threshold, words):
    with pytest.raises(ValueError, match=words):
        algos.rejection_mask(NEW, OLD, MASK, rollout_rs, threshold)
