"""The optimizer and the learning-rate schedule, from an `optim` block of the configuration."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from verl.workers.engine.muon import MuonWithAdamW, adamw_state


def build_optimizer(
    parameters: Iterable[nn.Parameter], optim: Mapping[str, Any], matrices: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101), or Muon with AdamW, as `optim.name` says.

    Its state exists from the start (zeros), so that a checkpoint written before the first step is a whole
    one.

    Args:
        parameters: those without requires_grad are left out.
        optim: `name`, `lr`, `betas`, `weight_decay`; for muon `momentum` and `adamw_lr` too.
        matrices: those of `parameters` that Muon is for, see `hidden_matrices`; AdamW takes them too.
    """
    if optim["name"] not in ("adamw", "muon"):
        raise ValueError(f"optim.name: found {optim['name']!r}, expected adamw or muon.")
    trained = [p for p in parameters if p.requires_grad]
    lr, betas, decay = optim["lr"], (optim["betas"][0], optim["betas"][1]), optim["weight_decay"]
    if optim["name"] == "muon":
        chosen = {id(p) for p in matrices}
        return MuonWithAdamW(
            [p for p in trained if id(p) in chosen],
            [p for p in trained if id(p) not in chosen],
            lr=lr,
            adamw_lr=lr if optim["adamw_lr"] is None else optim["adamw_lr"],
            momentum=optim["momentum"],
            betas=betas,
            weight_decay=decay,
        )
    optimizer = adamw(trained, optim)
    for p in trained:
        optimizer.state[p] = adamw_state(p)
    return optimizer


def adamw(parameters: Iterable[nn.Parameter], optim: Mapping[str, Any]) -> torch.optim.AdamW:
    """AdamW of an `optim` block, without any state yet."""
    lr, betas, decay = optim["lr"], (optim["betas"][0], optim["betas"][1]), optim["weight_decay"]
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, weight_decay=decay, fused=True)


def lr_factor(step: int, num_warmup: int, num_total: int, style: str, min_ratio: float) -> float:
    """Share of the peak learning rate in update number `step` (from 0).

    Linear warm-up: (step + 1) / num_warmup, so that the peak is reached in update num_warmup and no update is
    wasted on 0. After it: `constant` 1; `linear` and `cosine` go from 1 to min_ratio at num_total.
    """
    if step < num_warmup:
        return (step + 1) / num_warmup
    if style == "constant":
        return 1.0
    progress = min(1.0, (step - num_warmup) / max(1, num_total - num_warmup))
    remaining = 1.0 - progress if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_ratio + (1.0 - min_ratio) * remaining


def resume_schedule(scheduler: LambdaLR, state: Mapping[str, Any]) -> None:
    """Goes to the step of another schedule's `state_dict`, with the learning rates of this one."""
    scheduler.load_state_dict({**state, "base_lrs": scheduler.base_lrs})
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = rates  # what get_last_lr says


def build_scheduler(optimizer: torch.optim.Optimizer, optim: Mapping[str, Any]) -> LambdaLR:
    """The schedule of the block: `warmup_style`, `lr_warmup_steps` or `_ratio`, `min_lr_ratio`,
    `total_training_steps`.

    One step of the schedule is one training step (one call of update_actor or update_critic), not one
    mini-batch.
    """
    style, total = optim["warmup_style"], optim["total_training_steps"]
    warmup = optim["lr_warmup_steps"]
    if style not in ("constant", "linear", "cosine"):
        raise ValueError(f"optim.warmup_style: found {style!r}, expected constant, linear or cosine.")
    by_ratio = warmup is None or warmup < 0
    if total <= 0 and (style != "constant" or (by_ratio and optim["lr_warmup_steps_ratio"] > 0)):
        raise ValueError(
            f"optim.total_training_steps: found {total}, expected the length of the run in steps, which "
            "lr_warmup_steps_ratio and the linear and cosine schedules are shares of."
        )
    num_warmup = (
        int(optim["lr_warmup_steps_ratio"] * total) if by_ratio and total > 0 else max(0, warmup or 0)
    )
    min_ratio = optim["min_lr_ratio"] or 0.0
    factor = partial(lr_factor, num_warmup=num_warmup, num_total=total, style=style, min_ratio=min_ratio)
    return LambdaLR(optimizer, factor)
