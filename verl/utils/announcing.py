"""Start-up helpers: long work is announced on the terminal, and imports are not held up."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

atexit.register(gc.freeze)  # at exit a search for garbage among all imported objects would take a second
FIRST_AFTER = 3.0  # seconds; work that ends sooner is not announced
EVERY = 10.0  # seconds between two announcements


@contextmanager
def announce(task: str, file: TextIO | None = None) -> Iterator[None]:
    """Announce the work of a `with` block on the terminal, if it takes long.

    Prints "loading the model ...", "loading the model: 13 s so far", "loading the model: done after 15 s".

    Args:
        task: the work, for example "loading the model".
        file: where to print; standard output by default.
    """
    begun = time.monotonic()
    ended = threading.Event()

    def remind() -> None:
        line = f"{task} ..."
        pause = FIRST_AFTER
        while not ended.wait(pause):
            print(line, file=file, flush=True)
            pause = EVERY
            line = f"{task}: {time.monotonic() - begun + pause:.0f} s so far"

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
    if (seconds := time.monotonic() - begun) > FIRST_AFTER:
        print(f"{task}: done after {seconds:.0f} s", file=file, flush=True)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Turn the garbage collection off in a `with` block, for imports.

    The objects that imports make stay alive. Searching them for garbage a hundred times takes a quarter of a
    program's start.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
