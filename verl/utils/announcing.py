"""What a program does while it starts: long work is said on the terminal, and imports are not held up."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

atexit.register(gc.freeze)  # at the end: to look for garbage among what was imported takes a second
# seconds; of what is faster than the first nothing is said
FIRST_AFTER = 3.0
EVERY = 10.0


@contextmanager
def announced(what: str, file: TextIO | None = None) -> Iterator[None]:
    """Prints "loading the model ...", "loading the model: 13 s so far", "loading the model: done after 15 s";
    to standard output unless to a file.
    """
    begun = time.monotonic()
    ended = threading.Event()

    def remind() -> None:
        line = f"{what} ..."
        pause = FIRST_AFTER
        while not ended.wait(pause):
            print(line, file=file, flush=True)
            pause = EVERY
            line = f"{what}: {time.monotonic() - begun + pause:.0f} s so far"

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
    if (seconds := time.monotonic() - begun) > FIRST_AFTER:
        print(f"{what}: done after {seconds:.0f} s", file=file, flush=True)


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports: what they make stays. To look for garbage among it, a hundred times, takes a quarter of a
    program's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
