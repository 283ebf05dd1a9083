"""Prompts in three pools by how often the policy solves them.

    measured solve rate of a row -> easy | normal | hard -> shares of each in the next prompts

A question that is always or never solved teaches a group-relative estimator nothing. Asked rarely, it costs
little, and it changes its pool when the policy changes (as in prime-rl). A row that was never asked is
normal.

Within a pool the rows that were asked least often come first, in the order of `PromptSampler`'s epochs. With
all rows in one pool the order is that of `PromptSampler`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from verl.config.prompt_selection import PoolsConfig
from verl.data.rl_dataset import PromptSampler

POOLS = ("easy", "normal", "hard")
EASY, NORMAL, HARD = range(3)


class DifficultyPools(PromptSampler):
    """A `PromptSampler` that draws from pools.

    Args:
        config: which rows are easy and hard, by their solve rate, and their shares of the prompts that are
            drawn.
        sampling: the arguments of `PromptSampler`.

    Attributes:
        draws: [num_rows] int64, how often each row was drawn.
        solve_rates: [num_rows] float64, mean score of the row's last group; NaN where none was measured.
    """

    def __init__(self, config: PoolsConfig, *sampling: Any) -> None:
        super().__init__(*sampling)
        self.config = config
        self.draws = np.zeros(self.num_rows, np.int64)
        self.solve_rates = np.full(self.num_rows, np.nan)
        # draw number -> rank of each row in that epoch's order
        self._places = lru_cache(8)(lambda level: np.argsort(self.order_of(level)))

    def history(self) -> dict[str, np.ndarray]:
        return super().history() | {"draws": self.draws.copy(), "solve_rates": self.solve_rates.copy()}

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        super().load_history(history)
        self.draws = history["draws"].copy()
        self.solve_rates = history["solve_rates"].copy()

    def pools(self) -> np.ndarray:
        """Return the pool of each row, [num_rows] int64: 0 easy, 1 normal, 2 hard."""
        pools = np.full(self.num_rows, NORMAL)
        pools[self.solve_rates >= self.config.easy_threshold] = EASY  # NaN is neither easy nor hard
        pools[self.solve_rates <= self.config.hard_threshold] = HARD
        return pools

    def _draw(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` row numbers, none of which is in `asked`.

        If the easy or the hard pool has too few rows, the normal pool fills the gap. If that has too few rows
        too, the hard pool fills the gap, then the easy one.
        """
        pools = self.pools()
        is_available = np.ones(self.num_rows, dtype=bool)
        is_available[list(self.retired | asked)] = False
        members = [np.flatnonzero((pools == pool) & is_available) for pool in (EASY, NORMAL, HARD)]
        easy = min(int(count * self.config.easy_share + 0.5), len(members[EASY]))
        hard = min(int(count * self.config.hard_share + 0.5), len(members[HARD]), count - easy)
        normal = min(count - easy - hard, len(members[NORMAL]))
        shortfall = count - easy - hard - normal
        more_hard = min(shortfall, len(members[HARD]) - hard)
        pool_counts = (easy + shortfall - more_hard, normal, hard + more_hard)
        chosen = np.concatenate([self._first(rows, n) for rows, n in zip(members, pool_counts, strict=True)])
        chosen = self._first(chosen, count)  # mixes the pools, so that no mini-batch is of one pool
        self.draws[chosen] += 1
        self.position += count
        return chosen.tolist()

    def _first(self, rows: np.ndarray, count: int) -> np.ndarray:
        """Return `count` of `rows`: those drawn least often, in the order of their next draw's epoch."""
        chosen: list[np.ndarray] = [rows[:0]]
        for level in np.unique(self.draws[rows]).tolist() if count else []:
            rows_of_level = rows[self.draws[rows] == level]
            chosen.append(rows_of_level[np.argsort(self._places(level)[rows_of_level])])
            if sum(map(len, chosen)) >= count:
                break
        return np.concatenate(chosen)[:count]

    def record(
        self, rows: Sequence[int], scores: Sequence[float], still_informative: Collection[int] = ()
    ) -> None:
        """Record the mean score of the group of each row; if a row occurs twice, its last score counts."""
        super().record(rows, scores, still_informative)
        for row, rate in zip(rows, scores, strict=True):
            self.solve_rates[row] = rate

    def metrics(self) -> dict[str, float]:
        """Return the shares of the pools.

        `pools/easy`, `pools/normal` and `pools/hard` are shares of the measured rows, `pools/measured` is the
        share of the measured rows among all rows.
        """
        measured = ~np.isnan(self.solve_rates)
        pools = self.pools()[measured]
        total = max(int(measured.sum()), 1)
        shares = {f"pools/{name}": float((pools == pool).sum() / total) for pool, name in enumerate(POOLS)}
        return super().metrics() | shares | {"pools/measured": float(measured.mean())}
