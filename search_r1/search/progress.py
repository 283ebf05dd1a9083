"""Progress of long work for people: a line every few seconds.

progress("bm25", 1_200_000, 21_015_324)
        -> "bm25: 1,200,000 of 21,015,324 (5.7%), 31,002 a second, 10.7 min left"
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 5.0


def progress_lines(report: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """progress(stage, done, total), which reports now and then, and when a stage ends that took long.

    The rate is of the work done in this process: what a resumed build finds done doesn't count.
    """
    current, begun, shown, done_before = "", 0.0, 0.0, 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal current, begun, shown, done_before
        now = time.monotonic()
        if stage != current:
            current, begun, shown, done_before = stage, now, now, done
        seconds = now - begun
        if now - shown < SECONDS and (done < total or seconds < SECONDS):
            return
        shown = now
        line = f"{stage}: {done:,} of {total:,} ({done / max(1, total):.1%})"
        if done > done_before:
            rate = (done - done_before) / seconds
            line += f", {rate:,.0f} a second, {(total - done) / rate / 60:.1f} min left"
        report(line)

    return progress
