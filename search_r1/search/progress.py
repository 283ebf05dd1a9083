"""Progress of long work for people: one line on a terminal, a line every 10 seconds in a log.

progress("bm25", 1_200_000, 21_015_324)
        -> "bm25: 1,200,000 of 21,015,324 (5.7%), 31,002 a second, 10.7 min left"
"""

from __future__ import annotations

import sys
import time

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0


class ProgressLine:
    """Called as (stage, done, total); writes to stderr now and then, and when a stage ends that took long.

    The rate is of the work done in this process: what a resumed build finds done doesn't count.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._line_is_open = False
        self._stage: str | None = None
        self._begun = self._shown = 0.0
        self._done_before = 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now, pause = time.monotonic(), TERMINAL_SECONDS if self._terminal else LOG_SECONDS
        if stage != self._stage:
            self.close()
            self._stage, self._begun, self._shown, self._done_before = stage, now, now, done
        seconds = now - self._begun
        if now - self._shown < pause and (done < total or seconds < pause):
            return
        self._shown = now
        text = f"{stage}: {done:,} of {total:,} ({done / max(1, total):.1%})"
        if done > self._done_before:
            rate = (done - self._done_before) / seconds
            text += f", {rate:,.0f} a second, {(total - done) / rate / 60:.1f} min left"
        print(
            f"\r\x1b[K{text}" if self._terminal else text,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )
        self._line_is_open = self._terminal
        if done >= total:
            self.close()

    def report(self, text: str) -> None:
        """Prints a line of its own on stderr."""
        self.close()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the line on a terminal, so that other output begins on its own."""
        if self._line_is_open:
            print(file=sys.stderr, flush=True)
        self._line_is_open = False
