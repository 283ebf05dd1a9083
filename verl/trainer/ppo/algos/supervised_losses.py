"""Losses that learn from a text or a teacher instead of a reward: cross-entropy on the sampled tokens (sft),
reverse KL to a teacher (distillation), cross-entropy on observations (echo, an extra term).
"""

from __future__ import annotations

from torch import Tensor

from verl.trainer.ppo.algos.aggregation import LossDenominator, agg_loss
from verl.trainer.ppo.algos.policy_losses import limited, loss_and_metrics, register_policy_loss


@register_policy_loss("sft")
def compute_policy_loss_sft(
    log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy: loss = -log pi on every token of response_mask, whatever its advantage (nats).

    `actor/nll` is the same as a token mean, in every loss_agg_mode.
    """
    mask = response_mask.bool()
    losses = -log_prob.masked_fill(~mask, 0.0)
    return loss_and_metrics(losses, mask, loss_agg_mode, denominator, nll=losses)


@register_policy_loss("distillation")
def compute_policy_loss_distillation(
    old_log_prob: Tensor,
    log_prob: Tensor,
    teacher_log_prob: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    rollout_is_weights: Tensor | None = None,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """On-policy distillation: the reverse KL(pi || teacher) on the policy's own samples (Agarwal et al. 2023,
    arXiv:2306.13649; Gu et al. 2023, arXiv:2306.08543).

    d = log pi - log teacher of the sampled token; loss = r sg[d]: importance sampling with the advantage -d.
    sg: no gradient; r = pi / pi_old. Its value is an unbiased estimate of each
    token's KL in nats (k1), and its gradient r d grad log pi an unbiased one of the gradient of that KL,
    because sum pi d grad log pi = grad sum pi d (sum grad pi is 0). The estimators that are often put into a
    loss are not: the derivative of k1 itself is grad log pi, whose mean is 0, that of k3 is the gradient of
    KL(teacher || pi). What a token does to the tokens after it is left out, as usual (discount 0).

    `actor/distillation_kl` is the token mean of d. There is no reward in this loss: advantages are not read.
    """
    mask = response_mask.bool()
    log_prob = log_prob.masked_fill(~mask, 0.0)
    log_ratio = limited(log_prob - old_log_prob.masked_fill(~mask, 0.0))
    difference = log_prob.detach() - teacher_log_prob.masked_fill(~mask, 0.0)
    return loss_and_metrics(
        difference * log_ratio.exp(),
        mask,
        loss_agg_mode,
        denominator,
        rollout_is_weights,
        distillation_kl=difference,
        ppo_kl=-log_ratio,
    )


def echo_loss(
    log_prob: Tensor,
    observation_mask: Tensor,
    denominator: LossDenominator | None = None,
    loss_agg_mode: str = "token-mean",
) -> Tensor:
    """Cross-entropy on the tokens of observations: the policy learns to foresee what its actions bring
    (`echo` in prime-rl). A term of its own beside the policy loss, weighted by `actor.echo_coeff`.

    log_prob [B, R]: the policy's log-probs of the observations' tokens; observation_mask [B, R]: 1 on these.
    `denominator` counts the observation tokens of the whole mini-batch (by default this very mask's), not the
    sampled ones. Returns the scalar share of the mini-batch's mean, in nats.
    """
    mask = observation_mask.bool()
    return agg_loss(-log_prob.masked_fill(~mask, 0.0), mask, loss_agg_mode, denominator)
