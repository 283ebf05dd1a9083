"""Progress of long work for people: one line on a terminal, a line every 10 seconds in a log.

progress("bm25", 1_200_000, 21_015_324)
        -> "bm25: 1,200,000 of 21,015,324 (5.7%), 31,002 a second, 11 min left"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0
SETTLE_SECONDS = 2.0  # before this the rate says little


class ProgressLine:
    """Called as (stage, done, total); prints now and then, and at the end of a stage that took long.

    A stage that ends with "(bytes)" is shown in GB. The rate is of the work done in this process: what a
    resumed build finds done doesn't count.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._clock = clock
        self._terminal = self._stream.isatty()
        self._stage: str | None = None
        self._begun = self._shown = 0.0
        self._done_before = 0
        self._open_line = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self._clock()
        if stage != self._stage:
            self.close()
            self._stage, self._begun, self._done_before = stage, now, done
            self._shown = now - TERMINAL_SECONDS if self._terminal else now
        seconds = TERMINAL_SECONDS if self._terminal else LOG_SECONDS
        finished = done >= total
        if now - self._shown < seconds and not (finished and now - self._begun >= seconds):
            return
        self._shown = now
        self._show(self._text(done, total, now - self._begun))
        if finished:
            self.close()

    def _text(self, done: int, total: int, seconds: float) -> str:
        assert self._stage is not None
        stage, in_bytes = self._stage.removesuffix(" (bytes)"), self._stage.endswith(" (bytes)")
        share = f"{done / total:.1%}" if total else "100%"
        counts = f"{done / 1e9:.2f} of {total / 1e9:.2f} GB" if in_bytes else f"{done:,} of {total:,}"
        text = f"{stage}: {counts} ({share})"
        new = done - self._done_before
        if new > 0 and seconds >= SETTLE_SECONDS:
            rate = new / seconds
            text += f", {rate / 1e6:,.0f} MB a second" if in_bytes else f", {rate:,.0f} a second"
            text += f", {duration((total - done) / rate)} left" if done < total else f", {duration(seconds)}"
        return text

    def _show(self, text: str) -> None:
        if self._terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._open_line = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def report(self, text: str) -> None:
        """Prints a line of its own on stderr."""
        self.close()
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the line on a terminal, so that other output begins on its own."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
            self._open_line = False


def duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 20 min"."""
    minutes = round(seconds / 60)
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
