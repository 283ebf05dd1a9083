"""Per-turn (step-wise) credit for multi-turn trajectories: a reward for a turn reaches that turn's tokens.

MT-GRPO and MT-PPO (Zeng et al. 2025, arXiv:2505.11821). A search agent's turn is what it sampled between two
observations. `turn_ids` [N, R] int64 says which turn (0, 1, ..) each sampled token belongs to (-1 elsewhere);
`turn_rewards` [N, T] holds the reward of turn k in column k, and NaN where a turn has none of its own (the
answer, whose reward is the outcome; turns that were not taken). A useful one for searching: 1 if this search
is the first whose documents hold the answer, 0 for every other search; so nothing is won by asking again.

    turn_ids       0 0 0 -1 -1 1 1 -1 2 2      three turns, observations between them
    turn_rewards   [0., 1., nan]               the second search found it; the answer has the outcome alone

How they combine with an estimator, with `turn_credit` (0: off) as their weight:

- row-wise estimators (grpo, rloo, ...): A_t = A_outcome + turn_credit * A_turn(k of t), with A_turn as
  `turn_advantages` defines it;
- token-wise ones (gae, reinforce_plus_plus, optimal token baselines): turn_credit * reward is added to the
  reward of the turn's last sampled token, and the estimator credits the tokens before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor

from verl.trainer.ppo.algos.group_statistics import Groups


def _checked(turn_ids: Tensor, turn_rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(turn of each token [N, R], -1 where nothing was sampled; turn_rewards). ValueError if they misfit."""
    if turn_ids.shape != mask.shape or turn_rewards.dim() != 2 or len(turn_rewards) != len(mask):
        raise ValueError(
            f"turn_ids must be {list(mask.shape)} as response_mask, and turn_rewards [{len(mask)}, turns]; "
            f"found {list(turn_ids.shape)} and {list(turn_rewards.shape)}."
        )
    turns = turn_ids.masked_fill(~mask, -1)
    if mask.any() and int(turns[mask].min()) < 0:
        raise ValueError("turn_ids holds -1 on a sampled token; number the turns of each row from 0.")
    if mask.any() and int(turns.max()) >= turn_rewards.shape[1]:
        raise ValueError(
            f"turn_ids goes up to {int(turns.max())}, but turn_rewards has {turn_rewards.shape[1]} columns; "
            "it needs one for each turn (NaN: no reward of its own)."
        )
    return turns, turn_rewards


def _has_tokens(turns: Tensor, num_turns: int) -> Tensor:
    """[N, T] bool: whether the row sampled a token in the turn."""
    present = turns.new_zeros(len(turns), num_turns + 1)
    return present.scatter(1, turns + 1, 1)[:, 1:].bool()


def add_turn_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor, turn_rewards: Tensor, weight: float
) -> Tensor:
    """[N, R]: the rewards with `weight` * the turn's reward added on the last sampled token of each turn.

    NaN, and the rewards of turns without a sampled token, add nothing.
    """
    mask = response_mask.bool()
    turns, turn_rewards = _checked(turn_ids, turn_rewards, mask)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = columns.new_full((len(mask), turn_rewards.shape[1] + 1), -1)
    last = last.scatter_reduce(1, turns + 1, columns, "amax")[:, 1:]
    takes = (last >= 0) & ~turn_rewards.isnan()
    added = torch.where(takes, weight * turn_rewards, 0.0).to(token_level_rewards.dtype)
    rewards = token_level_rewards.masked_fill(~mask, 0.0)
    return rewards.scatter_add(1, last.clamp(min=0), added)


def turn_advantages(
    response_mask: Tensor,
    turn_ids: Tensor,
    turn_rewards: Tensor,
    index: Iterable[Hashable],
    normalise: bool = True,
    epsilon: float = 1e-6,
) -> Tensor:
    """[N, R] float64: how much better each turn did than the same turn of the others of its group.

    The return of turn k is the sum of the rewards of turns k, k+1, .. of its row. Among the rows of a uid
    whose turn k has a reward: A_turn = (return - mean) / (std + epsilon), without the division unless
    `normalise`. 0 where the turn has no reward, and where no other row's turn k has one.

    Zeng et al. have two turns, of which the first has a reward; for more of them this sums up what is to
    come, as GTPO does (Ding et al. 2025, arXiv:2511.14846; here undiscounted).
    """
    mask = response_mask.bool()
    turns, turn_rewards = _checked(turn_ids, turn_rewards, mask)
    num_turns = turn_rewards.shape[1]
    rewarded = _has_tokens(turns, num_turns) & ~turn_rewards.isnan()
    kept = torch.where(rewarded, turn_rewards.double(), 0.0)
    returns = kept.flip(1).cumsum(1).flip(1)

    rows = Groups.of(index, mask.any(dim=-1))
    turn_numbers = torch.arange(num_turns, device=mask.device)
    same_turn = Groups((rows.ids.unsqueeze(1) * num_turns + turn_numbers).flatten(), rewarded.flatten())
    flat = returns.flatten()
    advantages = flat - same_turn.mean(flat)
    if normalise:
        advantages = advantages / (same_turn.std(flat) + epsilon)
    by_turn = torch.where(same_turn.taken, advantages, 0.0).view(len(mask), num_turns)
    no_turn = by_turn.new_zeros(len(mask), 1)
    return torch.cat([no_turn, by_turn], dim=1).gather(1, turns + 1)
