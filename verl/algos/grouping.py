"""Scores of rows and statistics over groups of rows, in float64: what group-relative advantages are made of.

Rows whose scores are equal get their very score as the group's mean, so that their advantage is exactly 0 (a
plain float sum would leave some 1e-8, which a division by a vanishing spread blows up).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def outcome_scores(token_level_rewards: Tensor, mask: Tensor) -> Tensor:
    """[N] float64: the sum of each row's rewards [N, R] over its sampled tokens (mask [N, R] bool)."""
    return token_level_rewards.masked_fill(~mask, 0.0).double().sum(dim=-1)


def spread(row_advantages: Tensor, mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gives every sampled token of a row the row's advantage, [N, R]; the returns are the same numbers."""
    advantages = row_advantages.to(dtype).unsqueeze(-1).expand(mask.shape).masked_fill(~mask, 0.0)
    return advantages, advantages.clone()


@dataclass(frozen=True)
class Groups:
    """Which rows are compared with each other, and sums over them.

    Every method takes values [N] and gives each row its group's figure, [N] float64. Rows that are not
    `taken` count nowhere, whatever their value is (NaN too).

    Attributes:
        ids: [N] int64, the number of each row's group.
        taken: [N] bool.
    """

    ids: Tensor
    taken: Tensor

    @classmethod
    def of(cls, index: Iterable[Hashable], taken: Tensor) -> Groups:
        """Groups the rows whose entry of `index` (the uid) is the same object or an equal one.

        Raises:
            ValueError: `index` has not one entry for each row.
        """
        numbers: dict[Hashable, int] = {}
        keys = index.tolist() if isinstance(index, Tensor) else index
        ids = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(ids) != len(taken):
            raise ValueError(
                f"index must name the group of each of the {len(taken)} rows, found {len(ids)} entries."
            )
        return cls(torch.tensor(ids, dtype=torch.int64, device=taken.device), taken)

    def sum(self, x: Tensor) -> Tensor:
        kept = torch.where(self.taken, x.double(), 0.0)
        return kept.new_zeros(self._num_groups()).index_add(0, self.ids, kept)[self.ids]

    def count(self) -> Tensor:
        return self.sum(torch.ones_like(self.ids))

    def max(self, x: Tensor) -> Tensor:
        """The largest taken value; -inf in a group without one."""
        kept = torch.where(self.taken, x.double(), -torch.inf)
        lowest = kept.new_full((self._num_groups(),), -torch.inf)
        return lowest.scatter_reduce(0, self.ids, kept, "amax")[self.ids]

    def mean(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """The (weighted) mean; equal values give that very value. 0 where the weights add up to 0."""
        weights = torch.ones_like(x, dtype=torch.float64) if weights is None else weights.double()
        total = self.sum(weights)
        top = torch.where(total > 0, self.max(x), 0.0)
        return torch.where(total > 0, top + self.sum(weights * (x - top)) / total.clamp(min=1e-300), 0.0)

    def std(self, x: Tensor) -> Tensor:
        """The unbiased standard deviation; 1 where the group has one row."""
        count = self.count()
        variance = self.sum((x - self.mean(x)).square()) / (count - 1).clamp(min=1)
        return torch.where(count > 1, variance.sqrt(), 1.0)

    def centred(self, x: Tensor) -> Tensor:
        """x minus its group's mean. A row that is alone has nothing to be compared with: its x stays."""
        return x - torch.where(self.count() > 1, self.mean(x), 0.0)

    def _num_groups(self) -> int:
        return int(self.ids.max()) + 1 if len(self.ids) else 0
