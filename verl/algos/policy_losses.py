"""Policy losses by name, and what they have in common.

    LossInputs --policy_loss(name)--> scalar, metrics

A loss of ours is a formula for each token, registered with `token_loss`, which adds what is the same for all
losses: where the mask is 0 nothing has any influence, rollout weights multiply the losses, and `agg_loss`
reduces them to one number.

You register a loss of your own with `register_policy_loss`, or name it by its import path. Its parameters are
named after the fields of `LossInputs` that it needs, and it returns the loss of its rows and a dictionary of
metrics. Each of these numbers is a sum divided by counts of the whole mini-batch (`denominator`), so that
those of the micro-batches add up to those of the mini-batch.

In all losses r = pi(y_t) / pi_old(y_t) = exp(log_prob - old_log_prob), A is the advantage, and sg[x] is x
without gradient. Log-ratios are limited to [-20, 20] before they are exponentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.algos.aggregation import LOG_RATIO_LIMIT, LossDenominator, agg_loss
from verl.algos.registry import Registry, call_with, config_value, named_inputs

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
PolicyLossFn = Callable[..., LossAndMetrics]
POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("actor_rollout_ref.actor.policy_loss.loss_mode")


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The inputs of a policy loss: the rows of a micro-batch. B rows, R response tokens.

    Attributes:
        log_prob: [B, R] float32 with gradient, of the sampled tokens under the policy.
        response_mask: [B, R], 1 where the policy sampled the token. Nothing else has any influence.
        loss_agg_mode: how per-token losses become one number, see `agg_loss`.
        config: the `actor_rollout_ref.actor` block.
        denominator: counts of the whole mini-batch. None stands for those of this very mask.
        old_log_prob: [B, R] of the policy before the update. It is computed for losses that require it. Other
            losses get it if it is available.
        advantages: [B, R].
        rollout_is_weights: [B, R] detached importance weights of `algorithm.rollout_correction`, if it is on.
        rollout_log_prob: [B, R], the rollout engine's own.
        teacher_log_prob: [B, R], for distillation.
        selection: [B, R] bool, tokens that the loss chose out of the whole mini-batch (`clip_cov`, `kl_cov`).
    """

    log_prob: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: Any
    denominator: LossDenominator | None = None
    old_log_prob: Tensor | None = None
    advantages: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    rollout_log_prob: Tensor | None = None
    teacher_log_prob: Tensor | None = None
    selection: Tensor | None = None


SelectFn = Callable[[Tensor, Tensor, Tensor, Tensor, Any, int], Tensor]
"""A function that chooses tokens out of all rows of a mini-batch, of all ranks.

It maps (log_prob, old_log_prob, advantages, response_mask, config, seed) to a bool tensor [N, R] that is
False where nothing was sampled. The tensors are [N, R] on one device, and config is the actor block. The same
seed gives the same answer, whatever the order of the rows.
"""


class LossTraits(NamedTuple):
    """The properties of a loss that are declared beside its function.

    Attributes:
        needs: the fields of `LossInputs` that the loss requires.
        select: the function that makes the `selection` that the loss asks for.
        vanishes_with_advantage: whether a row whose advantages are all 0 has loss 0 and no gradient, so that
            its backward pass can be left out.
        reads: those settings of the actor block that some losses read and others don't ("policy_loss.x").
        meant_for: the aggregation of its paper, where it is part of the method.
    """

    needs: frozenset[str]
    select: SelectFn | None = None
    vanishes_with_advantage: bool = False
    reads: tuple[str, ...] = ()
    meant_for: str | None = None


_TRAITS: dict[PolicyLossFn, LossTraits] = {}
_GLOBAL_BATCH_KEYS = {"dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor"}


def global_batch_info(config: Any) -> dict[str, Any]:
    """Return the keywords for `agg_loss` in `config.global_batch_info`, which verl's actor fills in.

    The actor block of this project has no such field; then there are none. Raises ValueError if a name is not
    one of `agg_loss`.
    """
    info = dict(config_value(config, "global_batch_info", "policy loss", None) or {})
    unknown = set(info) - _GLOBAL_BATCH_KEYS
    if unknown:
        raise ValueError(
            f"config.global_batch_info: found {sorted(unknown)}, expected {sorted(_GLOBAL_BATCH_KEYS)}."
        )
    return info


def register_policy_loss(
    name: str, select: SelectFn | None = None, vanishes_with_advantage: bool = False
) -> Callable[[PolicyLossFn], PolicyLossFn]:
    """Register a policy loss under a name, for `actor.policy_loss.loss_mode`; use it as a decorator.

    For the arguments see `LossTraits`.
    """

    def decorate(fn: PolicyLossFn) -> PolicyLossFn:
        needs = frozenset(named_inputs(fn, required_only=True))
        _TRAITS[fn] = LossTraits(needs, select, vanishes_with_advantage)
        return POLICY_LOSS_REGISTRY.register(name)(fn)

    return decorate


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return the policy loss registered under a name, or found at an import path `package.module:function`.

    Raises ValueError if there is none.
    """
    return POLICY_LOSS_REGISTRY.find(name)


def loss_traits(loss_mode: str) -> LossTraits:
    """Return the declared properties of the named loss.

    For a loss that is named by its import path, they are derived from its parameters.
    """
    fn = get_policy_loss_fn(loss_mode)
    return _TRAITS.get(fn) or LossTraits(frozenset(named_inputs(fn, required_only=True)))


def policy_loss_inputs(loss_mode: str) -> set[str]:
    """Return the fields of `LossInputs` that the loss and its `select` function require.

    These are the inputs that must be computed.
    """
    traits = loss_traits(loss_mode)
    return set(traits.needs) | ({"old_log_prob", "advantages"} if traits.select else set())


def policy_loss(loss_mode: str, inputs: LossInputs) -> LossAndMetrics:
    """Compute (loss, metrics) of the named loss with the fields of the inputs that it names as parameters.

    Raises ValueError if no loss has the name, or if the loss needs an input that is None.
    """
    loss, metrics = call_with(get_policy_loss_fn(loss_mode), inputs, f"Policy loss {loss_mode!r}")
    return loss, metrics


class TokenLosses(NamedTuple):
    """The losses and metrics of each token.

    Attributes:
        losses: [B, R].
        metrics: name -> [B, R]. The token mean is reported as `actor/<name>`.
    """

    losses: Tensor
    metrics: dict[str, Tensor]


def token_loss(
    name: str,
    select: SelectFn | None = None,
    vanishes_with_advantage: bool = False,
    reads: tuple[str, ...] = (),
    meant_for: str | None = None,
    is_weighted: bool = True,
) -> Callable[[Callable[..., TokenLosses]], PolicyLossFn]:
    """Make a policy loss of a formula for each token, and register it; use it as a decorator.

    The formula's parameters are named after the fields of `LossInputs` that it needs. All of them are 0 where
    nothing was sampled. The resulting loss can be called as verl's losses are: without a `denominator` it
    takes the counts of the mini-batch from `config.global_batch_info`, and if there is no `selection` either,
    it chooses the tokens out of its own rows, by torch's random state. The default of `loss_agg_mode` is
    `meant_for`.

    Args:
        name: the name to register.
        select: see `LossTraits`, also for the next three arguments.
        vanishes_with_advantage: see there.
        reads: see there.
        meant_for: see there.
        is_weighted: whether the losses are multiplied by the rollout weights. If not, the formula applies
            them.
    """

    def decorate(formula: Callable[..., TokenLosses]) -> PolicyLossFn:
        def loss(
            old_log_prob: Tensor | None = None,
            log_prob: Tensor | None = None,
            advantages: Tensor | None = None,
            response_mask: Tensor | None = None,
            loss_agg_mode: str = meant_for or "token-mean",
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
            denominator: LossDenominator | None = None,
            teacher_log_prob: Tensor | None = None,
            selection: Tensor | None = None,
        ) -> LossAndMetrics:
            assert log_prob is not None and response_mask is not None
            mask = response_mask.bool()
            tensors = (log_prob, old_log_prob, advantages, rollout_is_weights, teacher_log_prob)
            log_prob, old_log_prob, advantages, rollout_is_weights, teacher_log_prob = (
                None if x is None else x.masked_fill(~mask, 0.0) for x in tensors
            )
            assert log_prob is not None
            if select is not None and selection is None and denominator is None:
                assert old_log_prob is not None and advantages is not None
                seed = int(torch.randint(2**31, ()))
                selection = select(log_prob, old_log_prob, advantages, mask, config, seed)
            inputs = LossInputs(
                log_prob=log_prob,
                response_mask=mask,
                loss_agg_mode=loss_agg_mode,
                config=config,
                denominator=denominator,
                old_log_prob=old_log_prob,
                advantages=advantages,
                rollout_is_weights=rollout_is_weights,
                teacher_log_prob=teacher_log_prob,
                selection=None if selection is None else selection & mask,
            )
            losses, per_token = call_with(formula, inputs, f"Policy loss {name!r}")
            if is_weighted and rollout_is_weights is not None:
                losses = losses * rollout_is_weights
            metrics = {
                f"actor/{key}": agg_loss(
                    x.detach().to(losses.dtype), mask, "token-mean", denominator=denominator
                )
                for key, x in per_token.items()
            }
            if denominator is not None:
                return agg_loss(losses, mask, loss_agg_mode, denominator=denominator), metrics
            return agg_loss(losses, mask, loss_agg_mode, **global_batch_info(config)), metrics

        loss.__name__ = formula.__name__
        loss.__doc__ = formula.__doc__
        loss.__module__ = formula.__module__
        needs = named_inputs(formula, required_only=True) & {field.name for field in fields(LossInputs)}
        _TRAITS[loss] = LossTraits(frozenset(needs), select, vanishes_with_advantage, reads, meant_for)
        return POLICY_LOSS_REGISTRY.register(name)(loss)

    return decorate


def clip_range(config: Any) -> tuple[float, float]:
    """Return (low, high) of the actor block; where one of them is null, clip_ratio replaces it."""
    low = config.clip_ratio_low
    high = config.clip_ratio_high
    default = config.clip_ratio
    return default if low is None else low, default if high is None else high


CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")  # what `clip_range` reads


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    """Limit a log-ratio to [-20, 20], so that its exponential is finite; beyond that it has no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
