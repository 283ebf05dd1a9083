"""KL estimators: value and gradient of each against float64 loops; which of them has the KL's true gradient,
by enumeration of a small policy; KL in the reward; coefficients."""

from types import SimpleNamespace

import pytest
import slow_corrections as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

some_examples = settings(deadline=None, derandomize=True, max_examples=25)
few_examples = settings(some_examples, max_examples=10)  # for each of 14 estimators
estimators = pytest.mark.parametrize("name", algos.KL_PENALTIES)


def log_probs_of(batch):
    """(policy, reference) [N, R] float64; far apart in places, where k3 is limited."""
    policy = batch.log_probs("policy").double()
    return policy, policy - 2.0 * batch.randn("distance").double()


@estimators
@few_examples
@given(batch=ragged_batches())
def test_value_and_gradient_of_every_estimator_equal_a_float64_loop(name, batch):
    policy, reference = log_probs_of(batch)
    policy.requires_grad_()
    for mode, aggregate in slow.AGGREGATIONS.items():
        loss = algos.compute_kl_loss(policy, reference, batch.response_mask, name, mode)
        (gradient,) = torch.autograd.grad(loss, policy)
        p = policy.tolist()
        q = reference.tolist()
        mask = batch.response_mask.tolist()
        values, pulls = (
            [[f(name, *pair) for pair in zip(*row, strict=True)] for row in zip(p, q, strict=True)]
            for f in (slow.kl_value, slow.kl_pull)
        )
        assert loss.item() == pytest.approx(aggregate(values, mask), rel=1e-9, abs=1e-12)
        expected = [
            [pull * slow.token_weight(mode, mask, i) if k else 0.0 for pull, k in zip(*row, strict=True)]
            for i, row in enumerate(zip(pulls, mask, strict=True))
        ]
        torch.testing.assert_close(gradient, torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)


@estimators
@few_examples
@given(batch=ragged_batches())
def test_rule_3_nothing_under_the_mask_reaches_the_kl_loss_or_its_gradient(name, batch):
    policy, reference = log_probs_of(batch)

    def run(log_prob, ref):
        log_prob = log_prob.clone().requires_grad_()
        loss = algos.compute_kl_loss(log_prob, ref, batch.response_mask, name)
        loss.backward()
        return loss.detach(), log_prob.grad

    clean = run(policy, reference)
    dirty = run(batch.with_garbage(policy), batch.with_garbage(reference))
    assert torch.equal(clean[0], dirty[0]) and torch.equal(clean[1], dirty[1])
    assert torch.equal(clean[1][batch.response_mask == 0], torch.zeros(int((batch.response_mask == 0).sum())))


@estimators
def test_every_estimator_is_finite_for_any_distance_and_its_parts_add_up(name):
    policy = torch.tensor([[-900.0, 0.0, -1.0], [-2.0, -50.0, -0.5]], requires_grad=True)
    reference = torch.tensor([[0.0, -900.0, -1.5], [-30.0, -2.0, -0.4]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    whole = algos.compute_kl_loss(policy, reference, mask, name)
    (gradient,) = torch.autograd.grad(whole, policy)
    assert whole.isfinite() and gradient.isfinite().all()
    denominator = algos.LossDenominator.of(mask)
    parts = [
        algos.compute_kl_loss(
            policy[i : i + 1], reference[i : i + 1], mask[i : i + 1], name, "token-mean", denominator
        )
        for i in range(2)
    ]
    torch.testing.assert_close(sum(parts), whole)
    torch.testing.assert_close(torch.autograd.grad(sum(parts), policy)[0], gradient)


# ---- exact expectations: every token of a small vocabulary, weighted by its probability


@pytest.fixture
def two_policies():
    """(logits of the policy, log-probs of the reference) [6] float64, near enough that k3 is not limited."""
    generator = torch.Generator().manual_seed(11)
    logits, other = (0.7 * torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(2))
    return logits.requires_grad_(), other.log_softmax(-1)


def expected_gradient(logits, reference, name):
    """The mean over the policy of the gradient of the estimator's value, exactly."""
    log_p = logits.log_softmax(-1)
    estimate = (log_p.exp().detach() * algos.kl_penalty(log_p, reference, name)).sum()
    return torch.autograd.grad(estimate, logits)[0]


def divergence_gradients(logits, log_q):
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    q = log_q.exp()
    divergences = {
        "KL(p||q)": (p * (log_p - log_q)).sum(),
        "KL(q||p)": (q * (log_q - log_p)).sum(),
        "sum |p - q|": (p - q).abs().sum(),
        "nothing": 0.0 * log_p.sum(),
    }
    return {name: torch.autograd.grad(d, logits, retain_graph=True)[0] for name, d in divergences.items()}


PULLS_BY = {"kl": "nothing", "k1": "nothing", "abs": "sum |p - q|"}
PULLS_BY |= {"mse": "KL(p||q)", "k2": "KL(p||q)", "low_var_kl": "KL(q||p)", "k3": "KL(q||p)"}


@estimators
def test_the_expected_gradient_of_each_estimator_is_that_of_the_divergence_it_is_said_to_be(
    two_policies, name
):
    gradients = divergence_gradients(*two_policies)
    said = "KL(p||q)" if name.endswith("+") else PULLS_BY[name]
    found = expected_gradient(*two_policies, name)
    for divergence, gradient in gradients.items():
        assert torch.allclose(found, gradient, rtol=1e-10, atol=1e-12) == (divergence == said)


class TwoTokenPolicy:
    """Every trajectory of two tokens over 3 words, with its probability; the second depends on the first."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()

    def log_probs(self):
        """[9, 2]: of both tokens of trajectory 3 * first + second."""
        first = self.logits[0].log_softmax(-1)
        second = self.logits[1:].log_softmax(-1)
        return torch.stack([first.repeat_interleave(3), second.flatten()], dim=1)


def test_k1_in_the_reward_pulls_by_the_whole_trajectorys_kl_and_k2_in_the_loss_by_each_tokens_alone():
    policy = TwoTokenPolicy(1)
    reference = TwoTokenPolicy(2).log_probs().detach()
    log_probs = policy.log_probs()
    p = log_probs.sum(dim=1).exp()
    mask = torch.ones(9, 2)
    whole = torch.autograd.grad(
        (p * (log_probs - reference).sum(dim=1)).sum(), policy.logits, retain_graph=True
    )
    data = Batch(
        token_level_scores=torch.zeros(9, 2),
        old_log_probs=log_probs.detach(),
        ref_log_prob=reference,
        response_mask=mask,
    )
    algos.apply_kl_penalty(data, algos.FixedKLController(0.5), "k1")
    penalty = data.batch["token_level_rewards"].sum(dim=1)
    reinforce = (p.detach() * penalty * log_probs.sum(dim=1)).sum()
    found = torch.autograd.grad(reinforce, policy.logits, retain_graph=True)
    torch.testing.assert_close(found[0], -0.5 * whole[0])

    per_token = (p.detach().unsqueeze(1) * algos.kl_penalty(log_probs, reference, "k2")).sum()
    found = torch.autograd.grad(per_token, policy.logits, retain_graph=True)[0]
    torch.testing.assert_close(found[1:], whole[0][1:])  # the last token: the same
    first_alone = policy.logits[0].log_softmax(-1)
    first_reference = reference[::3, 0]
    alone = torch.autograd.grad((first_alone.exp() * (first_alone - first_reference)).sum(), policy.logits)[0]
    torch.testing.assert_close(found[0], alone[0])
    assert not torch.allclose(found[0], whole[0][0])


# ---- KL in the reward, and coefficients


class Batch:
    """As much of a DataProto as apply_kl_penalty touches."""

    def __init__(self, **tensors):
        self.batch = tensors


@pytest.mark.parametrize("name", algos.KL_VALUES)
@few_examples
@given(batch=ragged_batches())
def test_kl_in_the_reward_equals_a_float64_loop_and_sees_sampled_tokens_only(name, batch):
    policy, reference = log_probs_of(batch)
    mask = batch.response_mask.tolist()
    runs = []
    for soil in (lambda x: x, batch.with_garbage):
        data = Batch(
            token_level_scores=batch.rewards,
            old_log_probs=soil(policy),
            ref_log_prob=soil(reference),
            response_mask=batch.response_mask,
        )
        controller = algos.AdaptiveKLController(0.5, target_kl=0.1, horizon=50)
        metrics = algos.apply_kl_penalty(data, controller, name)
        runs.append((data.batch["token_level_rewards"], metrics, controller.value))
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1:] == runs[1][1:]
    kl = [
        [slow.kl_value(name, p, q) if k else 0.0 for p, q, k in zip(*row, strict=True)]
        for row in zip(policy.tolist(), reference.tolist(), mask, strict=True)
    ]
    expected = batch.rewards.double() - 0.5 * torch.tensor(kl, dtype=torch.float64)
    torch.testing.assert_close(runs[0][0].double(), expected)
    measured = slow.mean_of_row_means(kl, mask)
    assert runs[0][1] == {"critic/kl": pytest.approx(measured), "critic/kl_coeff": 0.5}
    num_rows = sum(map(any, mask))
    assert runs[0][2] == pytest.approx(slow.kl_coefficients(0.5, 0.1, 50, [(measured, num_rows)])[-1])


def control_block(kind, target=None, horizon=None):
    return SimpleNamespace(type=kind, kl_coef=0.1, target_kl=target, horizon=horizon)


def test_more_rows_than_five_horizons_do_not_turn_the_coefficient_negative():
    """A negative coefficient would reward the distance to the reference."""
    controller = algos.AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
    controller.update(current_kl=0.0, n_steps=64)
    assert controller.value == pytest.approx(0.08)
    for _ in range(100):
        controller.update(current_kl=0.0, n_steps=10_000)
    assert controller.value > 0


@some_examples
@given(
    steps=st.lists(st.tuples(st.floats(-1, 5), st.integers(1, 64)), max_size=12),
    target=st.floats(0.01, 2),
    stop=st.integers(0, 12),
)
def test_adaptive_kl_follows_its_formula_and_survives_a_restart(steps, target, stop):
    def controller():
        return algos.get_kl_controller(control_block("adaptive", target, 1000.0))

    running = controller()
    seen = []
    for number, (measured, count) in enumerate(steps):
        if number == stop:
            saved = running.state_dict()
            running = controller()
            running.load_state_dict(saved)
        running.update(current_kl=measured, n_steps=count)
        seen.append(running.value)
    assert seen == pytest.approx(slow.kl_coefficients(0.1, target, 1000.0, steps))
