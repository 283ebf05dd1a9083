"""The rule that says which groups a batch should not wait for any longer.

    trajectory started, ended (row, time) -> StragglerWatch -> rows of groups that are late

A group is all rows of one prompt. It is late when at most half of it (or its only member) is unfinished, and
each unfinished member has been under way for more than `factor` times the batch's median time. The median is
known when half of the batch has ended, because whatever is unfinished by then took longer. Times come from
the caller, in seconds or in engine steps. The watch itself has no clock, so with steps its decisions are
repeatable.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Hashable, Sequence


class StragglerWatch:
    """The groups and times of one batch. In a run of several processes each process watches its own rows."""

    def __init__(self, factor: float, groups: Sequence[Hashable]) -> None:
        """Create a watch on which no row has started.

        Args:
            factor: A row is late after this many times the median time.
            groups: The group of each row. Call `leave_out` for a row that was finished before the batch
                starts.
        """
        self.factor = factor
        self._groups = list(groups)
        self._sizes = Counter(groups)
        self._unfinished: dict[Hashable, set[int]] = {}
        for row, group in enumerate(groups):
            self._unfinished.setdefault(group, set()).add(row)
        self._started: dict[int, float] = {}
        self._times: list[float] = []  # how long each ended row took, sorted
        self._num_rows = len(self._groups)

    def leave_out(self, row: int) -> None:
        """Leave out a row that was finished in an earlier step.

        It is a member of its group, but not of this batch.
        """
        self._num_rows -= 1
        self._leave(row)

    def start(self, row: int, now: float) -> None:
        """Note that the row's first token was sampled. A second call for the row has no effect."""
        self._started.setdefault(row, now)

    def has_started(self, row: int) -> bool:
        return row in self._started

    def exclude_from_times(self, rows: Sequence[int]) -> None:
        """Note that these rows will end without counting among the times."""
        for row in rows:
            del self._started[row]

    def end(self, row: int, now: float) -> None:
        """Note that the row is over, whether it has started or not."""
        if row in self._started:
            insort(self._times, now - self._started[row])
        self._leave(row)

    def late(self, now: float) -> list[list[int]]:
        """Return the unfinished rows of each late group, in ascending order."""
        return [sorted(rows) for rows, due in self._due() if due < now]

    def next_due(self) -> float | None:
        """Return when the next group will be late if nothing ends before.

        Returns None while that is not known.
        """
        return min((due for _, due in self._due()), default=None)

    def _due(self) -> list[tuple[set[int], float]]:
        half = -(-self._num_rows // 2)
        if len(self._times) < half or not half:
            return []
        limit = self.factor * self._times[half - 1]
        return [
            (rows, limit + max(self._started[row] for row in rows))
            for group, rows in self._unfinished.items()
            if 0 < len(rows) <= max(1, self._sizes[group] // 2) and rows <= self._started.keys()
        ]

    def _leave(self, row: int) -> None:
        self._unfinished[self._groups[row]].discard(row)
