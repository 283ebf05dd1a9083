"""Random schedules: whatever runs beside a session, it samples what it samples alone; and nothing leaks."""

from __future__ import annotations

import pytest
from schedules import Schedule, check_alone


def play(first_seed: int, count: int) -> dict[str, float]:
    """Run and check `count` schedules; sums of the engines' statistics, to see what was met."""
    sums: dict[str, float] = {"tokens": 0.0}
    for seed in range(first_seed, first_seed + count):
        try:
            schedule = Schedule(seed)
            schedule.run()
            sums["tokens"] += check_alone(schedule.closed)
        except BaseException as error:
            error.add_note(f"Schedule({seed}) of tests/workers/rollout/schedules.py plays it again")
            raise
        for name, value in schedule.engine.stats().items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def test_three_hundred_random_schedules_sample_what_each_session_samples_alone() -> None:
    sums = play(0, 300)
    assert min(sums[name] for name in ("preemptions", "evictions", "prefix_hit_tokens", "tokens")) > 50


@pytest.mark.slow
def test_ten_thousand_random_schedules_sample_what_each_session_samples_alone() -> None:
    play(1_000_000, 10_000)
