"""Policy losses by name: their registry, what each asks for, and what they are made of.

    log_prob, old_log_prob, advantages, response_mask, ... --loss--> scalar, metrics

A registered loss names as parameters what it needs out of those of `policy_loss`. It returns the loss of its
rows and a dictionary of metrics; each of these numbers is a sum divided by `denominator`, so the numbers of
the micro-batches add up to those of the mini-batch. A loss that chooses tokens out of a whole mini-batch
registers a function that does so (`select`); what it chose comes back as `selection`.

The losses themselves: `clipped_losses`, `importance_losses`, `covariance_losses`, `supervised_losses`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LOG_RATIO_LIMIT, LossDenominator, agg_loss
from verl.trainer.ppo.algos.registry import Registry, call_with

PolicyLossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]
POLICY_LOSSES: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


class SelectFn(Protocol):
    """Chooses tokens out of all rows of a mini-batch, of all ranks.

    Arguments are [N, R] on one device, `config` the actor block. The answer is bool [N, R], False where
    nothing was sampled; it is the same for the same seed, in whatever order the rows stand.
    """

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: Mapping[str, Any],
        seed: int,
    ) -> Tensor: ...


class _Traits(NamedTuple):
    select: SelectFn | None = None
    vanishes_with_advantage: bool = False


_TRAITS: dict[PolicyLossFn, _Traits] = {}


def register_policy_loss(
    name: str, select: SelectFn | None = None, vanishes_with_advantage: bool = False
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Decorator: gives a name to a policy loss, for `actor.policy_loss.loss_mode`.

    Args:
        select: makes the `selection` that the loss asks for.
        vanishes_with_advantage: a row whose advantages are all 0 has loss 0 and no gradient, so that its
            backward pass can be left out.
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        _TRAITS[fn] = _Traits(select, vanishes_with_advantage)
        return POLICY_LOSSES.register(name)(fn)

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The policy loss registered under a name, or at an import path `package.module:function`."""
    return POLICY_LOSSES.get(name)


def get_selection_fn(loss_mode: str) -> SelectFn | None:
    """What makes the `selection` of a loss; None for a loss that looks at each row alone."""
    return _TRAITS.get(get_policy_loss_fn(loss_mode), _Traits()).select


def vanishes_with_advantage(loss_mode: str) -> bool:
    """Whether a row whose advantages are all 0 has no part in the loss. False for what nobody said it of."""
    return _TRAITS.get(get_policy_loss_fn(loss_mode), _Traits()).vanishes_with_advantage


def policy_loss_inputs(loss_mode: str) -> set[str]:
    """Names of those arguments of `policy_loss` that the loss can't do without: what must be computed. A
    loss with a `select` function can't do without what that one takes.
    """
    parameters = inspect.signature(get_policy_loss_fn(loss_mode)).parameters.values()
    named = {
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return named if get_selection_fn(loss_mode) is None else named | {"old_log_prob", "advantages"}


def policy_loss(
    loss_mode: str,
    *,
    log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Mapping[str, Any],
    denominator: LossDenominator,
    old_log_prob: Tensor | None = None,
    advantages: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    rollout_log_prob: Tensor | None = None,
    teacher_log_prob: Tensor | None = None,
    selection: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(loss, metrics) of the named loss, called with those arguments that it asks for.

    Args:
        log_prob, old_log_prob, advantages: [B, R] float32; response_mask: [B, R], 1 where the policy sampled.
            old_log_prob is computed for losses that can't do without it (no default value); others get it
            where it is there.
        config: the `actor_rollout_ref.actor` block. denominator: counts of the whole mini-batch.
        rollout_is_weights: [B, R] detached importance weights of `algorithm.rollout_correction`, if it is on.
        rollout_log_prob: [B, R], the rollout engine's own. teacher_log_prob: [B, R], for distillation.
        selection: [B, R] bool, tokens that the loss chose out of the whole mini-batch (`clip_cov`, `kl_cov`).

    Raises:
        ValueError: no loss has the name, or the loss needs an argument that is None.
    """
    available = {
        "old_log_prob": old_log_prob,
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "loss_agg_mode": loss_agg_mode,
        "config": config,
        "denominator": denominator,
        "rollout_is_weights": rollout_is_weights,
        "rollout_log_prob": rollout_log_prob,
        "teacher_log_prob": teacher_log_prob,
        "selection": selection,
    }
    loss, metrics = call_with(get_policy_loss_fn(loss_mode), available, f"Policy loss {loss_mode!r}")
    return loss, metrics


def clip_range(config: Mapping[str, Any]) -> tuple[float, float]:
    """(low, high) of the actor block: clip_ratio, where clip_ratio_low or clip_ratio_high is null."""
    low, high, both = config["clip_ratio_low"], config["clip_ratio_high"], config["clip_ratio"]
    return both if low is None else low, both if high is None else high


def limited(log_ratio: Tensor) -> Tensor:
    """Within [-20, 20], so that its exponential is finite; beyond that it has no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def loss_and_metrics(
    losses: Tensor,
    mask: Tensor,
    loss_agg_mode: str,
    denominator: LossDenominator | None,
    rollout_is_weights: Tensor | None = None,
    **token_metrics: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token losses, times their weights, reduced to the loss; and `actor/<name>`: token means of what is
    given by name, all [B, R].
    """
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights.masked_fill(~mask, 0.0)
    metrics = {
        f"actor/{name}": agg_loss(values.detach().to(losses.dtype), mask, "token-mean", denominator)
        for name, values in token_metrics.items()
    }
    return agg_loss(losses, mask, loss_agg_mode, denominator), metrics
