"""Helpers for long work: lines of progress for people, and processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable

SECONDS = 5.0

Progress = Callable[[str, int, int], None]
"""Is called now and then with (what is being done, how much is done, how much there is)."""


def progress_lines(report: Callable[[str], None]) -> Progress:
    """Return a Progress that reports now and then, and when a stage ends that took long.

    A line is like "bm25: 1,200,000 of 21,015,324 (5.7%), 31,002 a second, 10.7 min left". The rate is that of
    the work done in this process.
    """
    current = ""
    started = 0.0
    shown = 0.0
    done_before = 0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal current, started, shown, done_before
        now = time.monotonic()
        if stage != current:
            current = stage
            started = now
            shown = now
            done_before = done
        seconds = now - started
        if now - shown < SECONDS and (done < total or seconds < SECONDS):
            return
        shown = now
        line = f"{stage}: {done:,} of {total:,} ({done / max(1, total):.1%})"
        if done > done_before:
            rate = (done - done_before) / seconds
            line += f", {rate:,.0f} a second, {(total - done) / rate / 60:.1f} min left"
        report(line)

    return progress


def end_with_parent() -> None:
    """End this process at once when its parent is gone, because a parent that is killed can't tell it to."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
