"""Advantage estimators by name, and the one call that the trainer makes.

    estimator_inputs(name)           -> what has to be computed before (values, reward_baselines, ...)
    estimate_advantages(name, inputs)  -> advantages, returns [N, R]

The estimators are defined in `group_estimators` and `token_estimators`. You register an estimator of your own
with `register_adv_est`, or name it by its import path. Its parameters are named after the fields of
`AdvantageInputs` that it needs.

Credit for turns (MT-GRPO and MT-PPO, Zeng et al. 2025, arXiv:2505.11821) gives the tokens of a turn a reward
of their own. A turn is what the policy sampled between two observations. A useful reward for searching is 1
for the first search whose documents hold the answer and 0 for every other search: searching again then wins
nothing.

    turn_ids       0 0 0 -1 -1 1 1 -1 2 2      three turns, observations between them
    turn_rewards   [0., 1., nan]               the second search found it; the answer has the outcome alone

`turn_credit` is the weight of these rewards. An estimator that is registered as `token_wise` credits each
token with the rewards that come after it. For such an estimator, turn_credit * reward is added to the reward
of the turn's last sampled token. With any other estimator, A_t = A_outcome + turn_credit * A_turn(turn of t),
see `turn_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl.algos.registry import Registry, call_with, named_inputs, plain_name

if TYPE_CHECKING:
    from verl.protocol import DataProto

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
ADV_ESTIMATOR_REGISTRY: Registry[AdvantageFn] = Registry("algorithm.adv_estimator")
_TOKEN_WISE: set[AdvantageFn] = set()
_NEEDS: dict[AdvantageFn, tuple[str, ...]] = {}


class AdvantageEstimator(str, Enum):
    """The estimators that come with the project, for `algorithm.adv_estimator`."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    GDPO = "gdpo"
    MAXRL = "maxrl"
    RAE = "rae"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


def outcome_scores(token_level_rewards: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of each row's rewards over its sampled tokens, [N] float64.

    Args:
        token_level_rewards: [N, R].
        mask: [N, R] bool, True where the policy sampled the token.
    """
    return token_level_rewards.masked_fill(~mask, 0.0).double().sum(dim=-1)


def expand_to_tokens(row_advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) [N, R] that give every sampled token of a row the row's advantage.

    The returns are the same numbers as the advantages. Both are 0 where nothing was sampled.
    """
    advantages = row_advantages.to(dtype).unsqueeze(-1).expand(mask.shape).masked_fill(~mask, 0.0)
    return advantages, advantages.clone()


@dataclass(frozen=True)
class Groups:
    """The rows that are compared with each other, and statistics over them in float64.

    If all scores of a group are equal, the group's mean is exactly that score, so that the advantages are
    exactly 0. A plain sum of floats would leave some 1e-8, which a division by a vanishing standard deviation
    blows up.

    Every method takes values [N] and returns, for each row, the figure of the row's group, [N] float64. Rows
    whose `is_counted` is False count nowhere, whatever their value is (NaN too).

    Attributes:
        ids: [N] int64, the number of each row's group.
        is_counted: [N] bool, the rows that count.
    """

    ids: Tensor
    is_counted: Tensor

    @classmethod
    def of(cls, index: Iterable[Hashable], is_counted: Tensor) -> Groups:
        """Group the rows whose entries of `index` (their uids) are the same object or equal.

        Raises ValueError if `index` does not have one entry for each row.
        """
        numbers: dict[Hashable, int] = {}
        keys = index.tolist() if isinstance(index, Tensor) else index
        ids = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(ids) != len(is_counted):
            raise ValueError(
                f"index must name the group of each of the {len(is_counted)} rows, found {len(ids)} entries."
            )
        return cls(torch.tensor(ids, dtype=torch.int64, device=is_counted.device), is_counted)

    def sum(self, x: Tensor) -> Tensor:
        values = torch.where(self.is_counted, x.double(), 0.0)
        return values.new_zeros(self._num_groups()).index_add(0, self.ids, values)[self.ids]

    def count(self) -> Tensor:
        return self.sum(torch.ones_like(self.ids))

    def max(self, x: Tensor) -> Tensor:
        """Return the largest counted value, or -inf in a group that has none."""
        values = torch.where(self.is_counted, x.double(), -torch.inf)
        lowest = values.new_full((self._num_groups(),), -torch.inf)
        return lowest.scatter_reduce(0, self.ids, values, "amax")[self.ids]

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the (weighted) mean, or 0 where the weights add up to 0.

        The mean of equal values is exactly that value.
        """
        weights = torch.ones_like(x, dtype=torch.float64) if weights is None else weights.double()
        total = self.sum(weights)
        top = torch.where(total > 0, self.max(x), 0.0)
        return torch.where(total > 0, top + self.sum(weights * (x - top)) / total.clamp(min=1e-300), 0.0)

    def std(self, x: Tensor) -> Tensor:
        """Return the unbiased standard deviation, or 1 where the group has one row."""
        count = self.count()
        variance = self.sum((x - self.mean(x)).square()) / (count - 1).clamp(min=1)
        return torch.where(count > 1, variance.sqrt(), 1.0)

    def centred(self, x: Tensor) -> Tensor:
        """Return x minus its group's mean.

        A row that is alone in its group has nothing to be compared with: its x stays as it is.
        """
        return x - torch.where(self.count() > 1, self.mean(x), 0.0)

    def _num_groups(self) -> int:
        return int(self.ids.max()) + 1 if len(self.ids) else 0


class RunningBaseline:
    """A running mean of scores for each key (a data source, or data source and role), kept over steps.

    For n new scores with a given mean, b <- decay^n * b + (1 - decay^n) * mean. This is the exponential
    moving average of n updates, in whatever order the rows stand. A new key starts at 0.

    Attributes:
        decay: the share of the old value that remains after one score, in [0, 1).
        values: the running mean of each key.
    """

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = decay
        self.values: dict[str, float] = {}

    def baselines(self, keys: Sequence[str] | np.ndarray) -> Tensor:
        """Return the running mean of each row's key, [N] float64."""
        return torch.tensor([self.values.get(str(key), 0.0) for key in keys], dtype=torch.float64)

    def update(
        self, token_level_rewards: Tensor, response_mask: Tensor, baseline_keys: Sequence[str] | np.ndarray
    ) -> None:
        """Update the running means with the scores of a step, after its advantages have been computed.

        A row's score is the sum of its rewards [N, R] over its sampled tokens. Rows without a sampled token
        don't count.
        """
        mask = response_mask.bool()
        keys = [str(key) for key in baseline_keys]
        scores = outcome_scores(token_level_rewards, mask)
        groups = Groups.of(keys, mask.any(dim=-1))
        means = groups.mean(scores).tolist()
        counts = groups.count().tolist()
        new = {}
        for key, mean, count in zip(keys, means, counts, strict=True):
            old_share = self.decay**count
            if count:
                new[key] = old_share * self.values.get(key, 0.0) + (1 - old_share) * mean
        self.values |= new

    def state_dict(self) -> dict[str, Any]:
        """Return the running means as plain JSON."""
        return {"values": dict(self.values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = {str(key): float(value) for key, value in state["values"].items()}


@dataclass(frozen=True, eq=False)
class AdvantageInputs:
    """The inputs of the estimators: all rows of a step. N trajectories, R response tokens, T turns.

    Where the mask is 0, nothing has any influence. A field that no estimator of the run reads stays None.

    Attributes:
        token_level_rewards: [N, R] float. The outcome is on the last sampled token, a KL penalty on any of
            them.
        response_mask: [N, R], 1 where the policy sampled the token.
        index: [N] uid of each row: one prompt of one step. Rows with equal uids are a group.
        values: [N, R] the critic's value of the state before each token.
        gamma: discount per sampled token.
        lam: lambda of GAE.
        norm_adv_by_std_in_grpo: whether group estimators divide by the group's standard deviation.
        reward_baselines: [N] score of the greedy answer to the row's prompt.
        reward_components: name -> [N], the rewards that the outcome is made of.
        reward_weights: name -> weight of that component; 1 for a component that is not named.
        old_log_probs: [N, R] log-probability of each sampled token under the policy before the update.
        sum_pi_squared: [N, R] sum over the vocabulary of that policy's squared probabilities.
        rollout_is_weights: [N, R] importance weights that the loss will be multiplied with.
        running_baseline: means that are kept over steps. Estimators only read it; call its `update`
            afterwards.
        baseline_keys: [N] which running mean each row belongs to (its data source, or data source/role).
        turn_ids: [N, R] int64 number of the turn, from 0, that each sampled token belongs to; -1 elsewhere.
        turn_rewards: [N, T] reward of each turn, NaN where a turn has none of its own.
        turn_credit: weight of the turn rewards; 0 leaves them out.
        config: the configuration's `algorithm` block, for an estimator of your own.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    index: Sequence[Any] | np.ndarray | None = None
    values: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True
    reward_baselines: Tensor | None = None
    reward_components: Mapping[str, Tensor] | None = None
    reward_weights: Mapping[str, float] | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    running_baseline: RunningBaseline | None = None
    baseline_keys: Sequence[str] | np.ndarray | None = None
    turn_ids: Tensor | None = None
    turn_rewards: Tensor | None = None
    turn_credit: float = 0.0
    config: Any = None


def refuse_unknown(label: str, others: Mapping[str, Any]) -> None:
    """Raise TypeError if an estimator got a keyword that no trainer passes to it.

    The fields of `AdvantageInputs` may be given to every estimator, and so may `batch` and
    `non_tensor_batch`, which verl's trainer passes.
    """
    known = {field.name for field in fields(AdvantageInputs)} | {"batch", "non_tensor_batch"}
    unknown = sorted(set(others) - known)
    if unknown:
        raise TypeError(f"{label} got an unexpected keyword argument {unknown[0]!r}")


def register_adv_est(
    name_or_enum: str | Enum, token_wise: bool = False, needs: tuple[str, ...] = ()
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Register an estimator under a name, for `algorithm.adv_estimator`; use it as a decorator.

    The function's parameters are named after the fields of `AdvantageInputs` that it needs. A function with
    `**kwargs` gets all fields that are not None. It returns (advantages, returns), both [N, R].

    Args:
        name_or_enum: the name to register, or an Enum member with it.
        token_wise: whether the estimator credits each token with the rewards that come after it, so that a
            turn's reward can be one of them.
        needs: fields of `AdvantageInputs` that must not be None although the function has a default for them.
    """

    def decorate(fn: AdvantageFn) -> AdvantageFn:
        ADV_ESTIMATOR_REGISTRY.register(name_or_enum)(fn)
        if token_wise:
            _TOKEN_WISE.add(fn)
        if needs:
            _NEEDS[fn] = needs
        return fn

    return decorate


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """Return the estimator registered under a name, or found at an import path `package.module:function`."""
    return ADV_ESTIMATOR_REGISTRY.find(name_or_enum)


def is_token_wise(name: str | Enum) -> bool:
    """Return whether the named estimator is registered as `token_wise` (see `register_adv_est`)."""
    return get_adv_estimator_fn(name) in _TOKEN_WISE


def estimator_inputs(name: str | Enum, turn_credit: float = 0.0) -> set[str]:
    """Return the fields of `AdvantageInputs` that the named estimator uses, optional ones included.

    With a `turn_credit`, the fields that credit for turns needs are included. A field that is not in the set
    need not be computed: "values" stands for a critic, "index" for groups (or for the groups in which turns
    are compared), "reward_baselines" for greedy rollouts, and so on.
    """
    fn = get_adv_estimator_fn(name)
    inputs = {field.name for field in fields(AdvantageInputs)} & named_inputs(fn)
    if turn_credit:
        inputs |= {"turn_ids", "turn_rewards"} | (set() if fn in _TOKEN_WISE else {"index"})
    return inputs - {"turn_credit"}


def estimate_advantages(adv_estimator: str | Enum, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute (advantages, returns) [N, R] with the named estimator; both are 0 where nothing was sampled.

    Raises ValueError if an input that the estimator needs is None or does not fit the others.
    """
    fn = get_adv_estimator_fn(adv_estimator)
    estimator_label = f"Estimator {plain_name(adv_estimator)!r}"
    missing = [name for name in _NEEDS.get(fn, ()) if getattr(inputs, name) is None]
    if missing:
        raise ValueError(f"{estimator_label} needs {', '.join(missing)}, which this batch does not have.")
    if not inputs.turn_credit:
        return call_with(fn, inputs, estimator_label)
    if inputs.turn_ids is None or inputs.turn_rewards is None:
        raise ValueError("Credit for turns needs turn_ids and turn_rewards, which this batch does not have.")
    mask = inputs.response_mask
    turns = (inputs.turn_ids, inputs.turn_rewards)
    credit = inputs.turn_credit
    if fn in _TOKEN_WISE:
        rewards = add_turn_rewards(inputs.token_level_rewards, mask, *turns, credit)
        return call_with(fn, replace(inputs, token_level_rewards=rewards), estimator_label)
    assert inputs.index is not None
    advantages, returns = call_with(fn, inputs, estimator_label)
    by_turn = turn_advantages(mask, *turns, inputs.index, inputs.norm_adv_by_std_in_grpo)
    return advantages + (credit * by_turn).to(advantages.dtype), returns


def add_turn_rewards(
    token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor, turn_rewards: Tensor, weight: float
) -> Tensor:
    """Return the rewards [N, R] with `weight` * the turn's reward added on each turn's last sampled token.

    NaN, and the rewards of turns without a sampled token, add nothing.
    """
    mask = response_mask.bool()
    turns = turn_ids.masked_fill(~mask, -1)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    last = columns.new_full((len(mask), turn_rewards.shape[1] + 1), -1)
    last = last.scatter_reduce(1, turns + 1, columns, "amax")[:, 1:]
    has_reward = (last >= 0) & ~turn_rewards.isnan()
    added = torch.where(has_reward, weight * turn_rewards, 0.0).to(token_level_rewards.dtype)
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
    """Compute how much better each turn did than the same turn of the others of its group, [N, R] float64.

    The return of turn k is the sum of the rewards of turns k, k+1, .. of its row. Among the rows of a uid
    whose turn k has a reward, A_turn = (return - mean) / (std + epsilon). The division is left out unless
    `normalise` is set. A_turn is 0 where the turn has no reward, and where no other row's turn k has one.

    Zeng et al. have two turns, of which the first has a reward. For more turns this function sums up the
    rewards that are still to come, as GTPO does (Ding et al. 2025, arXiv:2511.14846), but without a discount.
    """
    mask = response_mask.bool()
    turns = turn_ids.masked_fill(~mask, -1)
    num_turns = turn_rewards.shape[1]
    has_tokens = turns.new_zeros(len(turns), num_turns + 1).scatter(1, turns + 1, 1)[:, 1:].bool()
    rewarded = has_tokens & ~turn_rewards.isnan()
    rewards = torch.where(rewarded, turn_rewards.double(), 0.0)
    returns = rewards.flip(1).cumsum(1).flip(1)

    rows = Groups.of(index, mask.any(dim=-1))
    turn_numbers = torch.arange(num_turns, device=mask.device)
    same_turn = Groups((rows.ids.unsqueeze(1) * num_turns + turn_numbers).flatten(), rewarded.flatten())
    flat = returns.flatten()
    advantages = flat - same_turn.mean(flat)
    if normalise:
        advantages = advantages / (same_turn.std(flat) + epsilon)
    by_turn = torch.where(same_turn.is_counted, advantages, 0.0).view(len(mask), num_turns)
    no_turn = by_turn.new_zeros(len(mask), 1)
    return torch.cat([no_turn, by_turn], dim=1).gather(1, turns + 1)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0
) -> DataProto:
    """Draw as many rows as there are, with replacement, by a weight of their score (PF-PPO).

    The method is that of Zhang et al. 2024, arXiv:2409.06957, as verl has it. The score of a row is the sum
    of its token_level_scores over its sampled tokens. Its weight is |score|^weight_pow with `pow`; 1 for the
    greatest and the least score and 0 for all others with `max_min`; 0.4 for the greatest and 0.1 for all
    others with `max_random`. 1e-8 is added to each weight. The rows are drawn by torch's random state.

    Raises ValueError if there is no method of that name.
    """
    tensors = data.tensors
    mask = tensors.get("response_mask", torch.ones_like(tensors["token_level_scores"]))
    scores = outcome_scores(tensors["token_level_scores"], mask.bool())
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif reweight_method == "max_random":
        weights = torch.where(scores == scores.max(), 0.4, 0.1)
    else:
        raise ValueError(f"reweight_method: found {reweight_method!r}, expected pow, max_min or max_random.")
    rows = torch.multinomial(weights + 1e-8, len(scores), replacement=True)
    drawn = data.select_idxs(rows)
    for key, value in data.meta_info.items():
        if isinstance(value, list) and len(value) == len(scores):
            drawn.meta_info[key] = [value[row] for row in rows.tolist()]
    return drawn
