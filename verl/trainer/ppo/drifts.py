"""A test of whether a figure of a run has left its own best level, and since which step.

    value --Level.best--> best smoothed level so far --shortfall--> Drift: a CUSUM (Page, Biometrika 1954)

A drift adds up how much worse the value is than its level, less a slack that a healthy run may take. It has
gone too far when the sum reaches a limit. One bad step counts for a quarter of the limit at most. A sum that
falls back to 0 ends the drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = 5.0  # steps over which a value is smoothed, by exponential weights
# A share is smoothed over more steps if these do not have so many samples: the best of many small means would
# be chance.
_SAMPLES = 100.0
_FEWEST_SAMPLES = 30.0  # samples that the best level of a share needs
# How much of its distance from the smoothed value a best level loses in a step: "recent" is 100 steps.
_FORGET = 0.01
_CONFIDENCE = 2.0  # standard errors by which a best level is below (above) the smoothed value that it was
_FEWEST_STEPS = 4  # steps that a drift takes at least
_STEPS_BEFORE = 5  # most steps in which a value counts as off its level before its drift began to add up


@dataclass
class Level:
    """The smoothed value of a figure, and the best one of the recent past, where higher is better.

    Attributes:
        weight: sum of the weights of the samples; those of a step are worth less in the next one.
        total: sum of weight times value.
        best: the best level; None while too few values are known.
    """

    weight: float = 0.0
    total: float = 0.0
    best: float | None = None

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    def add_share(self, value: float, samples: float) -> None:
        """Take a step's mean of `samples` values from 0 to 1."""
        self._add(value, samples, max(_STEPS, _SAMPLES / samples))
        if self.weight >= _FEWEST_SAMPLES:
            self._raise_best(lower_bound(self.mean, self.weight))

    def add_mean(self, value: float, samples: float, deviation: float) -> None:
        """Take a step's mean of `samples` values whose standard deviation is `deviation`."""
        self._add(value, samples, _STEPS)
        self._raise_best(self.mean - _CONFIDENCE * deviation / math.sqrt(self.weight))

    def _add(self, value: float, samples: float, steps: float) -> None:
        keep = 1 - 1 / steps
        self.weight = keep * self.weight + samples
        self.total = keep * self.total + samples * value

    def _raise_best(self, bound: float) -> None:
        if self.best is None or self.best < bound:
            self.best = bound

    def forget(self) -> None:
        """Move the best level nearer to the smoothed value; call this in steps without a drift."""
        if self.best is not None and self.best > self.mean:
            self.best -= _FORGET * (self.best - self.mean)


@dataclass
class Drift:
    """A sum of shortfalls.

    Attributes:
        total: the sum, from 0 to the limit.
        left: the step at which the value left its level; None while it has not.
    """

    total: float = 0.0
    left: int | None = None

    def add(self, step: int, is_off: bool, shortfall: float, limit: float) -> None:
        """Take a step.

        Args:
            step: number of the step.
            is_off: whether the value is noticeably worse than its level; this decides about `left` alone.
            shortfall: how much worse it is than its level less the slack; below 0 if it is not.
            limit: the sum at which the drift has gone too far.
        """
        largest = limit / _FEWEST_STEPS
        shortfall = min(max(shortfall, -largest), largest)
        if self.total == 0.0:
            if not (is_off or shortfall > 0):
                self.left = None
            elif self.left is None:
                self.left = step
            else:
                self.left = max(self.left, step - _STEPS_BEFORE)
        self.total = min(max(self.total + shortfall, 0.0), limit)


def lower_bound(share: float, samples: float) -> float:
    """Return the lower end of Wilson's interval of a share among `samples` (JASA 1927)."""
    square = _CONFIDENCE**2 / samples
    share = min(max(share, 0.0), 1.0)
    middle = share + square / 2
    half_width = math.sqrt(share * (1 - share) * square + square**2 / 4)
    return max((middle - half_width) / (1 + square), 0.0)


def halved_evidence(value: float, level: float, samples: float) -> float:
    """Return how much likelier a step is at a quarter of a share's level than at the level, in nats.

    The two are equally likely where the share is about half of its level. By Lorden (1971) a sum of these
    with limit h is reached by chance once in exp(h) steps or less often.

    Args:
        value: the share in the step, from 0 to 1.
        level: the share that it had, above 0.
        samples: independent samples of which `value` is the mean.
    """
    level = min(level, 0.999)
    lower = level / 4
    solved = math.log(lower / level)
    failed = math.log((1 - lower) / (1 - level))
    return samples * (value * solved + (1 - value) * failed)
