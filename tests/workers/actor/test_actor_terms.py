"""Parts of the actor's loss beyond the policy loss, against plain autograd; what an update leaves behind."""

import pytest
import torch
from algorithm_cases import SPLITS, ActorFactory, full_batch
from tiny_training import assert_same_gradients, make_actor, make_batch, make_config, reference_log_probs

from verl.config import replace_values
from verl.trainer.ppo.core_algos import agg_loss
from verl.workers.actor import dp_actor
from verl.workers.actor.dp_actor import token_statistics
from verl.workers.engine.update_loop import MicroBatchLimits

ALL_ROWS = MicroBatchLimits(None, None, padded=False)


@pytest.fixture(scope="module")
def factory(model_path):
    return ActorFactory(model_path)


def reference_with_observations(model_path, batch, temperature):
    """(model, log-probs [N, R] of sampled and observed tokens) through the full logits."""
    everything = batch.select()
    tensors = everything.batch = batch.batch.clone()
    tensors["response_mask"] = batch.batch["attention_mask"][:, -tensors["response_mask"].shape[1] :]
    model, log_prob, _ = reference_log_probs(model_path, everything, temperature)
    return model, log_prob


@pytest.mark.parametrize("split", SPLITS)
def test_echo_is_the_cross_entropy_of_the_observations_beside_the_policy_loss(factory, model_path, split):
    batch = full_batch()
    settings = {"policy_loss__loss_mode": "sft", "entropy_coeff": 0.0, "echo_coeff": 0.3}
    metrics, gradient = factory.update(batch, SPLITS[split], **settings)
    model, log_prob = reference_with_observations(model_path, batch, 0.9)
    mask = batch.batch["response_mask"]
    observed = batch.batch["observation_mask"] * mask.any(dim=1, keepdim=True)
    echo = agg_loss(-log_prob, observed, "token-mean")
    (agg_loss(-log_prob, mask, "token-mean") + 0.3 * echo).backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    assert_same_gradients(gradient, expected, tolerance=2e-5)
    assert metrics["actor/echo_loss"] == pytest.approx(echo.item(), rel=1e-5)
    assert observed.sum() < batch.batch["observation_mask"].sum()  # a row that sampled nothing had some


def test_the_optimizer_steps_on_zeros_when_no_row_has_an_advantage(model_path, monkeypatch):
    """Momentum and weight decay act as if the rows had been gone through."""
    weights = []
    for skips in (True, False):
        if not skips:
            monkeypatch.setattr(dp_actor, "rows_without_gradient", lambda *_: [])
        actor = make_actor(make_config(model_path, "actor_rollout_ref.actor.entropy_coeff=0"))
        batch = make_batch()
        actor.update_policy(batch)
        before = [p.detach().clone() for p in actor.engine.module.parameters()]
        batch.batch["advantages"].zero_()
        metrics = actor.update_policy(batch)
        assert metrics["actor/grad_norm"] == metrics["actor/pg_loss"] == 0.0 and metrics["actor/entropy"] > 1
        weights.append([p.detach() for p in actor.engine.module.parameters()])
        assert not any(torch.equal(p, q) for p, q in zip(weights[-1], before, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


@pytest.mark.parametrize(
    "setting",
    [
        {"entropy_coeff": 0.01},
        {"use_kl_loss": True, "entropy_coeff": 0.0},
        {"echo_coeff": 0.1, "entropy_coeff": 0.0},
    ],
)
def test_rows_without_an_advantage_stay_in_the_backward_pass_where_another_term_reaches_them(
    factory, setting
):
    batch = full_batch()
    batch.batch["advantages"].zero_()
    assert sum(g.abs().sum() for g in factory.update(batch, **setting)[1].values()) > 0


def test_the_adaptive_weight_of_the_entropy_bonus_follows_the_entropy_and_goes_on_after_a_restart(model_path):
    control = "actor_rollout_ref.actor.entropy_ctrl"
    config = make_config(model_path, f"{control}.target_entropy=30")
    config = replace_values(config, {f"{control}.delta": 0.004, f"{control}.max_coeff": 0.02})
    actor = make_actor(config)
    weights = [actor.update_policy(make_batch())["actor/entropy_coeff"] for _ in range(2)]
    restarted = make_actor(config)
    restarted.load_state_dict(actor.state_dict())
    weights += [restarted.update_policy(make_batch())["actor/entropy_coeff"] for _ in range(2)]
    assert weights == pytest.approx([0.01, 0.014, 0.018, 0.02])  # 40 words: the entropy is at most log 40


def test_sum_pi_squared_is_of_the_distribution_that_the_token_was_drawn_from(factory, model_path):
    batch = full_batch()
    statistics = token_statistics(factory.engine, batch, ALL_ROWS, 0.9, with_sum_pi_squared=True)
    row = 0
    mask = batch.batch["response_mask"].bool()
    ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
    model, _, _ = reference_log_probs(model_path, batch[:1], 0.9)
    probabilities = (model(ids[None]).logits[0] / 0.9).softmax(-1).square().sum(-1)
    prompt = len(ids) - int(batch.batch["attention_mask"][row, -mask.shape[1] :].sum())
    expected = probabilities[prompt - 1 + mask[row].nonzero().flatten()]
    torch.testing.assert_close(statistics["sum_pi_squared"][row][mask[row]], expected, rtol=1e-4, atol=1e-6)
    assert set(statistics) == {"log_probs", "sum_pi_squared"}


@pytest.mark.parametrize(
    ("settings", "column"),
    [
        ({"echo_coeff": 0.1}, "observation_mask"),
        ({"loss_agg_mode": "prompt-mean"}, "prompt_tokens"),
        ({"use_kl_loss": True}, "ref_log_prob"),
    ],
)
def test_a_column_that_the_loss_needs_is_missed_by_name(factory, settings, column):
    batch = full_batch()
    del batch.batch[column]
    with pytest.raises(ValueError, match=f"the batch has no {column}"):
        factory.update(batch, **settings)


def test_the_metrics_that_users_know_by_name_are_there(factory):
    names = ("entropy_loss", "pg_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "kl_loss", "kl_coef", "lr")
    metrics, _ = factory.update(full_batch(), use_kl_loss=True)
    assert {f"actor/{name}" for name in names} <= set(metrics)
    assert "actor/kl_loss" not in factory.update(full_batch())[0]
