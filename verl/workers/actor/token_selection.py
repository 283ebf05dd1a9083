"""Tokens that a loss chooses out of a whole mini-batch (`clip_cov`, `kl_cov`).

    rows of this rank --no-gradient pass--> log-probs --gather over ranks--> all rows --select--> own rows

Only losses that are registered with such a function pay for the pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.trainer.ppo.algos.policy_losses import SelectFn
from verl.workers.engine.base import Engine


def select_over_ranks(
    select: SelectFn,
    engine: Engine,
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Mapping[str, Any],
    seed: int,
) -> Tensor:
    """What `select` chooses out of the mini-batch's rows of all ranks; all ranks call it together.

    Args:
        log_prob, old_log_prob, advantages, response_mask: this rank's rows [B, R]; B and R are the same on
            every rank. config: the `actor` block. seed: the same on every rank.

    Returns:
        bool [B, R] on CPU: this rank's rows.
    """
    mask = response_mask.bool()
    numbers = [x.float().masked_fill(~mask, 0.0) for x in (log_prob, old_log_prob, advantages)]
    columns = torch.stack([*numbers, mask.float()]).to(engine.device)
    num_rows, first = len(mask), engine.data.rank * len(mask)
    columns = torch.cat(engine.gather(columns), dim=1)
    log_prob, old_log_prob, advantages, mask = columns
    chosen = select(log_prob, old_log_prob, advantages, mask.bool(), config, seed)
    return chosen[first : first + num_rows].cpu()
