"""The actor's loss of one mini-batch, put together from the configuration.

    policy loss (policy_loss.loss_mode) - entropy_coeff * entropy + kl_loss_coef * KL + echo_coeff * echo

Each term is a sum over tokens divided by counts of the mini-batch over all ranks. The policy loss, the KL and
the entropy are of the tokens that the policy sampled; echo, the cross-entropy of the observations, is of
tokens that it read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.aggregation import PROMPT_MEAN
from verl.trainer.ppo.algos.policy_losses import SelectFn
from verl.trainer.ppo.core_algos import (
    LossDenominator,
    agg_loss,
    compute_entropy_loss,
    compute_kl_loss,
    echo_loss,
    get_selection_fn,
    policy_loss,
    vanishes_with_advantage,
)
from verl.utils.packing import PackedMicroBatch
from verl.workers.actor.token_selection import select_over_ranks
from verl.workers.engine.base import Engine, Outputs, Share
from verl.workers.engine.micro_batches import EXTRA_LOSS_KEY, MicroBatchLimits, micro_batches
from verl.workers.engine.update_loop import MiniBatch


def uses_kl_loss(config: Mapping[str, Any]) -> bool:
    """Whether a KL to the reference is in the loss. config: the `actor` block."""
    return bool(config["use_kl_loss"]) and config["kl_loss_coef"] > 0


def loss_columns(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(columns that the loss of this `actor` block needs, those that it takes where they are).

    All are [N, R], but for prompt_tokens and prompt_rows [N]: sampled tokens, and rows with one, of all rows
    of the mini-batch with the row's uid.
    """
    needed = ["advantages"]
    if uses_kl_loss(config):
        needed.append("ref_log_prob")
    if config["echo_coeff"]:
        needed.append("observation_mask")
    if config["loss_agg_mode"] == PROMPT_MEAN:
        needed += ["prompt_tokens", "prompt_rows"]
    optional = ["old_log_probs", "rollout_log_probs", "rollout_is_weights", "teacher_log_prob"]
    return needed, optional


def rows_without_gradient(
    config: Mapping[str, Any], entropy_coeff: float, batch: Mapping[str, Tensor], rows: list[int]
) -> list[int]:
    """Those of the rows that no term of the loss pulls at: all advantages exactly 0 (a group whose members
    scored the same), a policy loss that vanishes with them, and no other term.
    """
    vanishes = vanishes_with_advantage(config["policy_loss"]["loss_mode"])
    if not vanishes or entropy_coeff or uses_kl_loss(config) or config["echo_coeff"]:
        return []
    mask = batch["response_mask"][rows].bool()
    pulled = (batch["advantages"][rows].masked_fill(~mask, 0.0) != 0).any(dim=1)
    return [row for row, is_idle in zip(rows, (mask.any(dim=1) & ~pulled).tolist(), strict=True) if is_idle]


@dataclass
class PolicyObjective:
    """See the top of the file. An `Objective` of the update loop.

    config: the `actor` block. temperature: the one that was sampled with. batch: this rank's columns, [N, R]
    where they are per token. on_policy: the weights are those of old_log_probs, so that the ratio is 1, and
    old_log_probs are not read. (If it is False and they are missing, the loss must do without.) limits, seed:
    for a loss that chooses tokens out of the mini-batch, see `token_selection.py`. first_log_probs: [N, R],
    is filled with this pass's log-probs, if given.
    """

    config: Mapping[str, Any]
    engine: Engine
    temperature: float
    batch: Mapping[str, Tensor]
    mini_batch: MiniBatch
    on_policy: bool
    entropy_coeff: float
    idle_rows: list[int]
    limits: MicroBatchLimits
    seed: int
    first_log_probs: Tensor | None = None

    def __post_init__(self) -> None:
        select = get_selection_fn(self.config["policy_loss"]["loss_mode"])
        self.selection = None if select is None else self._selected(select)
        extra = self.batch.get(EXTRA_LOSS_KEY)
        if extra is not None:
            count = self.engine.reduce([float(extra[self.mini_batch.rows].sum())], "sum")[0]
            self.echo_denominator = LossDenominator(max(count, 1.0), 1.0)

    @property
    def asked(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "with_entropy": True}

    def share(self, part: PackedMicroBatch, outputs: Outputs) -> Share:
        """The micro-batch's share of the loss and of the metrics."""
        log_prob, entropy = part.unpack(outputs[0]), part.unpack(outputs[1])
        if self.first_log_probs is not None and len(part.cells):
            self.first_log_probs[part.rows] = log_prob.detach().cpu()
        old_log_prob = self._old_log_prob(part, log_prob)
        loss, figures = policy_loss(
            self.config["policy_loss"]["loss_mode"],
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=self._rows("advantages", part),
            response_mask=part.mask,
            loss_agg_mode=self.config["loss_agg_mode"],
            config=self.config,
            denominator=self.mini_batch.denominator.of_rows(part.rows),
            rollout_is_weights=self._rows_if_there("rollout_is_weights", part),
            rollout_log_prob=self._rows_if_there("rollout_log_probs", part),
            teacher_log_prob=self._rows_if_there("teacher_log_prob", part),
            selection=None if self.selection is None else self.selection[part.rows].to(part.mask.device),
        )
        figures = {**figures, "actor/pg_loss": loss}
        for name, weight, term in self._other_terms(part, log_prob, entropy):
            figures[name] = term
            loss = loss + weight * term if weight else loss
        if old_log_prob is not None:
            figures |= _ratio_extremes(log_prob.detach() - old_log_prob, part.mask)
        return Share(loss, {name: figure.detach() for name, figure in figures.items()})

    def token_values(self, part: PackedMicroBatch, outputs: Outputs) -> dict[str, Tensor]:
        """Per token [B, R], 0 where it takes part in nothing."""
        log_prob = part.unpack(outputs[0])
        columns = {
            "advantage": "advantages",
            "old log-prob": "old_log_probs",
            "reference log-prob": "ref_log_prob",
            "teacher log-prob": "teacher_log_prob",
            "rollout weight": "rollout_is_weights",
        }
        values = {name: self._rows(key, part) for name, key in columns.items() if key in self.batch}
        values["log-prob"] = log_prob
        old_log_prob = self._old_log_prob(part, log_prob)
        if old_log_prob is not None:
            values["ratio"] = (log_prob - old_log_prob).exp()
        return {
            name: value.masked_fill(~(part.mask | part.extra_mask if name == "log-prob" else part.mask), 0.0)
            for name, value in values.items()
        }

    def _selected(self, select: SelectFn) -> Tensor:
        """[N, R] bool: what the loss chooses out of the mini-batch's rows of all ranks."""
        batch, rows = self.batch, self.mini_batch.rows
        log_prob = torch.zeros(batch["response_mask"].shape)
        parts = micro_batches(batch, rows, self.engine, self.limits)[1]
        for part, outputs in self.engine.infer(parts, **self.asked):
            if len(part.cells):  # else the pass is for other replicas, and the row is any
                log_prob[part.rows] = part.unpack(outputs[0]).cpu()
        old_log_prob = log_prob if self.on_policy else batch["old_log_probs"]
        selection = torch.zeros(log_prob.shape, dtype=torch.bool)
        selection[rows] = select_over_ranks(
            select,
            self.engine,
            log_prob[rows],
            old_log_prob[rows],
            batch["advantages"][rows],
            batch["response_mask"][rows],
            self.config,
            self.seed,
        )
        return selection

    def _other_terms(
        self, part: PackedMicroBatch, log_prob: Tensor, entropy: Tensor
    ) -> list[tuple[str, float, Tensor]]:
        """(name of the metric, weight in the loss, the term), what is only a metric with weight 0."""
        config, mask, mode = self.config, part.mask, self.config["loss_agg_mode"]
        denominator = self.mini_batch.denominator.of_rows(part.rows)
        entropy = entropy if self.entropy_coeff else entropy.detach()
        mean_entropy = agg_loss(entropy.detach(), mask, "token-mean", denominator)
        entropy_loss = compute_entropy_loss(entropy, mask, mode, denominator)
        terms = [
            ("actor/entropy", 0.0, mean_entropy),
            ("actor/entropy_loss", -self.entropy_coeff, entropy_loss),
        ]
        if uses_kl_loss(config):
            reference = self._rows("ref_log_prob", part)
            kl_loss = compute_kl_loss(log_prob, reference, mask, config["kl_loss_type"], mode, denominator)
            terms.append(("actor/kl_loss", config["kl_loss_coef"], kl_loss))
            kl = compute_kl_loss(
                log_prob.detach(), reference, mask, config["kl_loss_type"], "token-mean", denominator
            )
            terms.append(("actor/ref_kl", 0.0, kl))
        if config["echo_coeff"]:
            echo = echo_loss(log_prob, part.extra_mask, self.echo_denominator)
            terms.append(("actor/echo_loss", config["echo_coeff"], echo))
        return terms

    def _old_log_prob(self, part: PackedMicroBatch, log_prob: Tensor) -> Tensor | None:
        return log_prob.detach() if self.on_policy else self._rows_if_there("old_log_probs", part)

    def _rows(self, key: str, part: PackedMicroBatch) -> Tensor:
        return self.batch[key][part.rows].to(self.engine.device)

    def _rows_if_there(self, key: str, part: PackedMicroBatch) -> Tensor | None:
        return self._rows(key, part) if key in self.batch else None


def _ratio_extremes(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {
        "actor/ratio/min": log_ratio.masked_fill(~mask, torch.inf).min().exp(),
        "actor/ratio/max": log_ratio.masked_fill(~mask, -torch.inf).max().exp(),
    }
