"""Aggregation of per-token losses to a scalar: means over the tokens that the policy sampled.

The two losses that are little more than such a mean are here too: the critic's, and echo's.

    per-token losses [B, R], mask --agg_loss, LossDenominator--> a micro-batch's share of the loss

Each share is a sum divided by counts of the whole mini-batch over all ranks, so the shares of any split of
its rows add up to the same loss and gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp(20) is 5e8: far outside of any clip range, and finite in float32
PROMPT_MEAN = "prompt-mean"
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    PROMPT_MEAN,
)


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return (x - mean) / sqrt(var + epsilon) where the mask is 1, and 0 elsewhere.

    The mean and the unbiased variance are taken over the values where the mask is 1.
    """
    mask = mask.bool()
    selected = values[mask]
    if selected.numel() == 0:
        return torch.zeros_like(values)
    variance = selected.var() if selected.numel() > 1 else selected.new_zeros(())
    return ((values - selected.mean()) * torch.rsqrt(variance + epsilon)).masked_fill(~mask, 0.0)


def denominator_counts(mask: Tensor, prompt_rows: Tensor | None = None) -> list[float]:
    """Return the counts [sampled tokens, rows with at least one, prompts] of these rows.

    Sum them over the ranks and pass the sums to `LossDenominator.from_counts`.

    Args:
        mask: [B, R], 1 where the policy sampled the token.
        prompt_rows: [B], for each row the number of non-empty rows of the whole mini-batch with the same uid.
            The rows of a prompt then count 1 together, on whatever ranks they are. Without it prompts count
            0.
    """
    mask = mask.bool()
    has_tokens = mask.any(dim=-1)
    prompts = 0.0 if prompt_rows is None else float((1.0 / prompt_rows[has_tokens].double()).sum())
    return [float(mask.sum()), float(has_tokens.sum()), prompts]


@dataclass(frozen=True, eq=False)
class LossDenominator:
    """The counts that a loss over the whole mini-batch (all micro-batches, all ranks) is divided by.

    The losses and metrics of the micro-batches, divided by these counts, add up to those of the whole
    mini-batch, however it was split.

    An actor makes the denominator from counts, and takes the rows of each micro-batch out of it:

        counts = reduce_sum_over_ranks(denominator_counts(mask, prompt_rows))
        whole = LossDenominator.from_counts(counts, scale_factor, prompt_tokens)  # rows of this rank
        agg_loss(losses[rows], mask[rows], mode, denominator=whole.of_rows(rows))

    Attributes:
        num_tokens: sampled tokens.
        num_sequences: rows with at least one sampled token. With `rollout.step_wise` a row is a turn.
        scale_factor: the constant that seq-mean-token-sum-norm divides by (`actor.loss_scale_factor`). None
            stands for the width R of the losses, that of the step's longest response (verl pads all steps to
            one width).
        num_prompts: uids with a sampled token. For prompt-mean only.
        tokens_of_prompt: [B], for each row the sampled tokens of all rows of the mini-batch with its uid. For
            prompt-mean only.
    """

    num_tokens: float
    num_sequences: float
    scale_factor: float | None = None
    num_prompts: float = 0.0
    tokens_of_prompt: Tensor | None = None

    @classmethod
    def of(
        cls, mask: Tensor, uids: Sequence[Any] | np.ndarray | None = None, scale_factor: float | None = None
    ) -> LossDenominator:
        """Count the [N, R] mask of a whole mini-batch; `uids` [N] name each row's prompt.

        The counts of an empty mini-batch give a loss of 0. Raises ValueError if there is not one uid for each
        row.
        """
        if uids is None:
            return cls.from_counts(denominator_counts(mask), scale_factor)
        if len(uids) != len(mask):
            raise ValueError(
                f"uids must name the prompt of each of the {len(mask)} rows, found {len(uids)} entries."
            )
        tokens, rows = prompt_counts(mask, uids)
        return cls.from_counts(denominator_counts(mask, rows), scale_factor, tokens)

    @classmethod
    def from_counts(
        cls,
        counts: Sequence[float],
        scale_factor: float | None = None,
        tokens_of_prompt: Tensor | None = None,
    ) -> LossDenominator:
        """Make a denominator from the `denominator_counts` that were summed over the ranks.

        Each count is at least 1. The count of prompts is a sum of fractions; it is rounded so that it is the
        same for every distribution of the rows.
        """
        tokens, sequences, prompts = (max(float(round(count)), 1.0) for count in counts)
        return cls(tokens, sequences, scale_factor, prompts, tokens_of_prompt)

    def of_rows(self, rows: Sequence[int] | Tensor) -> LossDenominator:
        """Return the same denominator for some of the rows, in the order of `rows`."""
        if self.tokens_of_prompt is None:
            return self
        index = torch.as_tensor(rows, dtype=torch.long, device=self.tokens_of_prompt.device)
        return replace(self, tokens_of_prompt=self.tokens_of_prompt[index])


def prompt_counts(mask: Tensor, uids: Sequence[Any] | np.ndarray) -> tuple[Tensor, Tensor]:
    """Count, for each row, the sampled tokens and the non-empty rows of all rows with the row's uid.

    Args:
        mask: [N, R] of one mini-batch.
        uids: [N] of the same mini-batch.

    Returns:
        (tokens, rows), both [N] int64. `rows` counts the rows with at least one sampled token.
    """
    mask = mask.bool()
    groups = np.unique(np.asarray(uids), return_inverse=True)[1].reshape(-1)
    group_of = torch.from_numpy(groups).to(mask.device)
    per_row = torch.stack([mask.sum(dim=-1), mask.any(dim=-1).long()])
    totals = torch.zeros_like(per_row).index_add(1, group_of, per_row)[:, group_of]
    return totals[0], totals[1]


def _of_global_batch(
    mask: Tensor,
    loss_agg_mode: str,
    dp_size: int,
    batch_num_tokens: float | Tensor | None,
    global_batch_size: float | Tensor | None,
    loss_scale_factor: float | None,
) -> LossDenominator:
    """Return the denominator that verl's keywords of `agg_loss` describe for these rows.

    Raises ValueError if a keyword is wrong, or if a count that several ranks need is missing.
    """
    if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
        raise ValueError(
            f"dp_size: found {dp_size!r}, expected a whole number of ranks of at least 1. A LossDenominator "
            "is given by keyword, as denominator=."
        )
    counts = [*denominator_counts(mask)]
    given = (
        ("batch_num_tokens", batch_num_tokens, loss_agg_mode == "token-mean"),
        ("global_batch_size", global_batch_size, loss_agg_mode.startswith("seq-mean")),
    )
    for position, (name, count, is_needed) in enumerate(given):
        if count is not None:
            counts[position] = float(count)
        elif is_needed and dp_size > 1:
            raise ValueError(
                f"Found dp_size={dp_size} and no {name}; expected the count of all ranks, by which "
                f"loss_agg_mode {loss_agg_mode!r} divides. Give {name}."
            )
        if counts[position] < 0:
            raise ValueError(f"{name}: found {counts[position]:g}, expected a count of at least 0.")
    return LossDenominator.from_counts(counts, loss_scale_factor)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    *,
    denominator: LossDenominator | None = None,
) -> Tensor:
    """Reduce per-token losses [B, R] to a scalar over the entries where the mask is 1.

    With T the sampled tokens of the mini-batch, N its rows that have one, P its prompts, n_i the tokens of
    row i and n_p those of all rows of prompt p:

        token-mean               sum_it l / T                       (DAPO, arXiv:2503.14476)
        token-sum                sum_it l
        seq-mean-token-sum       sum_i (sum_t l) / N
        seq-mean-token-sum-norm  sum_i (sum_t l) / (N S), S the scale factor (Dr. GRPO, arXiv:2503.20783)
        seq-mean-token-mean      sum_i (sum_t l / n_i) / N          (GRPO, arXiv:2402.03300)
        prompt-mean              sum_p (sum_{i of p, t} l / n_p) / P

    T, N, P, S and n_p come from `denominator`, by default that of this very mask. For a part of a mini-batch,
    pass the denominator of the whole mini-batch. Rows without a sampled token count nowhere.

    verl's keywords say the same for its loops, whose ranks average their gradients: `batch_num_tokens` is T
    and `global_batch_size` is N of the mini-batch over all ranks, `loss_scale_factor` is S, and the loss is
    multiplied by `dp_size`, the number of ranks. A count that the mode does not divide by has no effect.

    A row is a trajectory. With `rollout.step_wise` it is a turn (as in SkyRL), so N counts turns and n_i is
    the length of a turn. Modes without N then keep the gradient, those with sums keep its direction, and
    seq-mean-token-mean gives each turn the same weight.

    Raises:
        ValueError: the mode is unknown, prompt-mean lacks the tokens of the rows' prompts, several ranks lack
            the count of all ranks, or both a denominator and verl's keywords are given.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise ValueError(
            f"loss_agg_mode: found {loss_agg_mode!r}, expected one of {', '.join(LOSS_AGG_MODES)}."
        )
    mask = loss_mask.bool()
    of_verl = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    if denominator is None:
        denominator = _of_global_batch(mask, loss_agg_mode, *of_verl)
    elif of_verl != (1, None, None, None):
        raise ValueError(
            "Found a denominator with dp_size, batch_num_tokens, global_batch_size or loss_scale_factor; "
            "expected the one or the others, which say the same."
        )
    loss_mat = loss_mat.masked_fill(~mask, 0.0)
    return dp_size * _aggregated(loss_mat, mask, loss_agg_mode, denominator)


def _aggregated(loss_mat: Tensor, mask: Tensor, loss_agg_mode: str, denominator: LossDenominator) -> Tensor:
    """Return the loss of `agg_loss` for losses that are 0 where the mask is."""
    if loss_agg_mode == "token-sum":
        return loss_mat.sum()
    if loss_agg_mode == "token-mean":
        return loss_mat.sum() / denominator.num_tokens
    if loss_agg_mode == PROMPT_MEAN:
        tokens = denominator.tokens_of_prompt
        if tokens is None or len(tokens) != len(mask):
            raise ValueError(
                f"loss_agg_mode prompt-mean needs the prompt tokens of each of {len(mask)} rows, found "
                f"{'none' if tokens is None else len(tokens)}; make the denominator with "
                "LossDenominator.of(mask, uids), or from_counts with tokens_of_prompt and of_rows."
            )
        weights = tokens.to(loss_mat).clamp(min=1).unsqueeze(-1)
        return (loss_mat / weights).sum() / denominator.num_prompts
    if loss_agg_mode == "seq-mean-token-mean":
        loss_mat = loss_mat / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        width = mask.shape[-1] if denominator.scale_factor is None else denominator.scale_factor
        loss_mat = loss_mat / width
    return loss_mat.sum() / denominator.num_sequences


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    *,
    denominator: LossDenominator | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's clipped value loss, 0.5 * max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Args:
        vpreds: V [N, R].
        returns: R [N, R].
        values: V_old [N, R].
        response_mask: [N, R], 1 where the policy sampled the token.
        cliprange_value: c.
        loss_agg_mode: see `agg_loss`, also for the next five arguments.
        dp_size: see there.
        batch_num_tokens: see there.
        global_batch_size: see there.
        loss_scale_factor: see there.
        denominator: see there.

    Returns:
        (loss, fraction of tokens where the clipped term is larger). The fraction is of these rows' tokens, or
        with a denominator their share of that of the whole mini-batch.
    """
    mask = response_mask.bool()
    vpreds, returns, values = (x.masked_fill(~mask, 0.0) for x in (vpreds, returns, values))
    clipped_vpreds = torch.minimum(torch.maximum(vpreds, values - cliprange_value), values + cliprange_value)
    squared = (vpreds - returns).square()
    clipped_squared = (clipped_vpreds - returns).square()
    of_verl = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    worse = torch.maximum(squared, clipped_squared)
    loss = 0.5 * agg_loss(worse, mask, loss_agg_mode, *of_verl, denominator=denominator)
    is_clipped = (clipped_squared > squared).float()
    return loss, agg_loss(is_clipped, mask, "token-mean", denominator=denominator)


def echo_loss(
    log_prob: Tensor,
    observation_mask: Tensor,
    denominator: LossDenominator | None = None,
    loss_agg_mode: str = "token-mean",
) -> Tensor:
    """Compute the cross-entropy on the tokens of observations (`echo` in prime-rl).

    With it the policy learns to foresee what its actions bring. It is a term of its own beside the policy
    loss, weighted by `actor.echo_coeff`.

    Args:
        log_prob: [B, R], the policy's log-probs of the observations' tokens.
        observation_mask: [B, R], 1 on these tokens.
        denominator: counts of the observation tokens of the whole mini-batch, not of the sampled ones; by
            default those of this very mask.
        loss_agg_mode: see `agg_loss`.

    Returns:
        The scalar share of the mini-batch's mean, in nats.
    """
    mask = observation_mask.bool()
    return agg_loss(-log_prob.masked_fill(~mask, 0.0), mask, loss_agg_mode, denominator=denominator)
