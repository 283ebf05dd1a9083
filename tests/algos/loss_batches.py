"""Inputs of the policy losses over a ragged batch, and the cases that the losses are tested in."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from ragged_batches import RaggedBatch
from slow_losses import Row
from torch import Tensor

from verl.config import load_config
from verl.trainer.ppo import core_algos as algos

ACTOR_CONFIG: dict[str, Any] = {}


class Block(dict[str, Any]):
    """A block of the configuration, for losses that read attributes and slow loops that read keys."""

    __getattr__ = dict.__getitem__


def actor_config(**overrides: Any) -> Block:
    """The actor block's defaults, with some settings replaced ("policy_loss.x" as policy_loss__x)."""
    if not ACTOR_CONFIG:
        block = load_config([]).actor_rollout_ref.actor
        ACTOR_CONFIG.update(block, policy_loss=dict(block.policy_loss))
    config = Block(ACTOR_CONFIG | {"policy_loss": Block(ACTOR_CONFIG["policy_loss"])})
    for name, value in overrides.items():
        block, _, key = name.rpartition("__")
        (config[block] if block else config)[key] = value
    return config


# name of the case -> (loss_mode, settings that differ from the defaults)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vanilla": ("vanilla", {}),
    "vanilla, clip-higher": ("vanilla", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4}),
    "vanilla, dual clip": ("vanilla", {"clip_ratio_c": 1.5}),
    "gspo": ("gspo", {"clip_ratio_high": 0.5}),
    "geo_mean": ("geo_mean", {"clip_ratio": 0.4}),
    "sapo": ("sapo", {"tau_neg": 1.5}),
    "cispo": ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 2.0}),
    "aipo": ("aipo", {"policy_loss__aipo_max_ratio": 2.0}),
    "ipo": ("ipo", {}),
    "ipo, squared": ("ipo", {"policy_loss__ipo_eps": 0.1, "policy_loss__ipo_kl_tau": 0.1}),
    "dppo_tv": ("dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.2}),
    "dppo_tv, bounded": ("dppo_tv", {"clip_ratio_c": 2.0}),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 5.0}),
    "dro": ("dro", {}),
    "dro_sequence": ("dro_sequence", {}),
    "gpg": ("gpg", {}),
    "importance_sampling": ("importance_sampling", {}),
    "clip_cov": ("clip_cov", {}),
    "kl_cov": ("kl_cov", {}),
    "sft": ("sft", {}),
    "distillation": ("distillation", {}),
}


@dataclass(frozen=True)
class LossBatch:
    """What a policy loss gets, [N, R] each; `weights` may be None."""

    mask: Tensor
    log_prob: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor | None
    teacher: Tensor
    selection: Tensor

    @classmethod
    def of(cls, batch: RaggedBatch, dtype: torch.dtype = torch.float64, weighted: bool = True) -> LossBatch:
        """Random inputs; groups whose scores are all equal have advantages 0."""
        advantages = batch.randn("advantages")
        for i, uid in enumerate(batch.uids):
            scores = {float(batch.scores[j]) for j in range(batch.num_rows) if batch.uids[j] == uid}
            if len(scores) == 1 and i % 2:
                advantages[i] = 0.0
        weights = 0.3 + batch.rand("weights") if weighted else None
        return cls(
            batch.response_mask,
            (batch.log_probs("new") - 1e-3).to(dtype),
            (batch.log_probs("old") - 1e-3).to(dtype),
            advantages.to(dtype),
            None if weights is None else weights.to(dtype),
            batch.log_probs("teacher").to(dtype),
            batch.rand("chosen") < 0.3,
        )

    def each(self, change) -> LossBatch:
        """The same with every tensor but the mask changed."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "mask"}
        return replace(self, **{n: x if x is None else change(x) for n, x in changed.items()})

    def rows(self, rows: list[int]) -> LossBatch:
        return replace(self.each(lambda x: x[rows]), mask=self.mask[rows])

    def slow_rows(self) -> list[Row]:
        rows = []
        for i in range(len(self.mask)):
            places = self.mask[i].nonzero().flatten().tolist()
            ones = torch.ones_like(self.log_prob) if self.weights is None else self.weights
            x, old, advantages, weights, teacher = (
                [float(values[i, t]) for t in places]
                for values in (self.log_prob, self.old, self.advantages, ones, self.teacher)
            )
            chosen = [bool(self.selection[i, t]) for t in places]
            rows.append(Row(x, x, old, advantages, weights, teacher, chosen))
        return rows

    def loss(
        self, case: str, mode: str = "token-mean", denominator: algos.LossDenominator | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """(loss, metrics, gradient [N, R] of log_prob)."""
        loss_mode, settings = CASES[case]
        log_prob = self.log_prob.clone().requires_grad_()
        loss, metrics = algos.policy_loss(
            loss_mode,
            algos.LossInputs(
                log_prob=log_prob,
                old_log_prob=self.old,
                advantages=self.advantages,
                response_mask=self.mask,
                loss_agg_mode=mode,
                config=actor_config(**settings),
                denominator=denominator or algos.LossDenominator.of(self.mask),
                rollout_is_weights=self.weights,
                teacher_log_prob=self.teacher,
                selection=self.selection,
            ),
        )
        loss.backward()
        return loss.detach(), metrics, log_prob.grad
