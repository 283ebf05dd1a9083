"""Prompts in three pools by how often the policy solves them, and how many of a step come from each.

    measured solve rate of a row -> easy | normal | hard -> shares of each in the next prompts

A question that is always or never solved teaches a group-relative estimator nothing; asked rarely, it costs
little, and its pool changes when the policy does (as in prime-rl). A row that was never asked is normal.
Within a pool those asked least often come first, in the order of `PromptSampler`'s epochs: with all rows in
one pool the order is that of `PromptSampler`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from verl.utils.dataset.rl_dataset import PromptSampler

POOLS = ("easy", "normal", "hard")
EASY, NORMAL, HARD = range(3)


class DifficultyPools(PromptSampler):
    """A `PromptSampler` that draws from pools.

    Args:
        config: `data.difficulty_pools`: a row is easy from a solve rate of `easy_threshold` up and hard from
            `hard_threshold` down; `easy_share`, `hard_share`: of the prompts that are drawn.
        sampling: the arguments of `PromptSampler`.

    Attributes:
        draws: [num_rows] int64, how often each row was drawn.
        solve_rates: [num_rows] float64, mean score of the row's last group; NaN where none was measured.
    """

    def __init__(self, config: Mapping[str, Any], *sampling: Any) -> None:
        super().__init__(*sampling)
        self.config = config
        self.draws = np.zeros(self.num_rows, np.int64)
        self.solve_rates = np.full(self.num_rows, np.nan)
        # draw number -> place of each row in that epoch's order
        self._places = lru_cache(8)(lambda level: np.argsort(self.order_of(level)))

    def history(self) -> dict[str, np.ndarray]:
        return super().history() | {"draws": self.draws.copy(), "solve_rates": self.solve_rates.copy()}

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        super().load_history(history)
        self.draws = history["draws"].copy()
        self.solve_rates = history["solve_rates"].copy()

    def pools(self) -> np.ndarray:
        """The pool of each row, [num_rows] int64: 0 easy, 1 normal, 2 hard."""
        pools = np.full(self.num_rows, NORMAL)
        pools[self.solve_rates >= self.config["easy_threshold"]] = EASY  # NaN is neither
        pools[self.solve_rates <= self.config["hard_threshold"]] = HARD
        return pools

    def _draw(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` row numbers, none of `asked`. What a pool lacks comes from the normal one;
        what that lacks, from the hard, then the easy one.
        """
        pools = self.pools()
        may_be_taken = np.ones(self.num_rows, dtype=bool)
        may_be_taken[list(self.retired | asked)] = False
        members = [np.flatnonzero((pools == pool) & may_be_taken) for pool in (EASY, NORMAL, HARD)]
        easy = min(int(count * self.config["easy_share"] + 0.5), len(members[EASY]))
        hard = min(int(count * self.config["hard_share"] + 0.5), len(members[HARD]), count - easy)
        normal = min(count - easy - hard, len(members[NORMAL]))
        missing = count - easy - hard - normal
        more_hard = min(missing, len(members[HARD]) - hard)
        wanted = (easy + missing - more_hard, normal, hard + more_hard)
        chosen = np.concatenate([self._first(rows, n) for rows, n in zip(members, wanted, strict=True)])
        chosen = self._first(chosen, count)  # so that no mini-batch is of one pool
        self.draws[chosen] += 1
        self.position += count
        return chosen.tolist()

    def _first(self, rows: np.ndarray, count: int) -> np.ndarray:
        """`count` of `rows`: those drawn least often, in the order of their next draw's epoch."""
        taken: list[np.ndarray] = [rows[:0]]
        for level in np.unique(self.draws[rows]).tolist() if count else []:
            same = rows[self.draws[rows] == level]
            taken.append(same[np.argsort(self._places(level)[same])])
            if sum(map(len, taken)) >= count:
                break
        return np.concatenate(taken)[:count]

    def record(self, rows: Sequence[int], scores: Sequence[float], teaching: Collection[int] = ()) -> None:
        """Note the mean score of the group of each row; of a row that is there twice, the last one."""
        super().record(rows, scores, teaching)
        for row, rate in zip(rows, scores, strict=True):
            self.solve_rates[row] = rate

    def metrics(self) -> dict[str, float]:
        """`pools/easy`, `pools/normal`, `pools/hard`: of the measured rows; `pools/measured`: of all."""
        measured = ~np.isnan(self.solve_rates)
        pools = self.pools()[measured]
        total = max(int(measured.sum()), 1)
        shares = {f"pools/{name}": float((pools == pool).sum() / total) for pool, name in enumerate(POOLS)}
        return super().metrics() | shares | {"pools/measured": float(measured.mean())}
