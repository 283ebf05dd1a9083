"""The log of a program: how much it says, and a file of its own for all that it prints.

    VERL_LOGGING_LEVEL=debug|info|warning|error    what is logged; default: each program's own
    VERL_LOG_DIR=FOLDER                            FOLDER/<program>-<host>-<process id>.log has all of it, too

Every program calls `start_logging` first. The workers of a run on Ray have its level, and print through its
driver, so their lines are in the driver's file.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from verl.utils.text import printable

LEVEL_VARIABLE = "VERL_LOGGING_LEVEL"
FOLDER_VARIABLE = "VERL_LOG_DIR"
LEVELS = ("debug", "info", "warning", "error")
LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_KEY_FLAG = re.compile(r"--(\w*key|api\w{0,3}|serp_a\w*)")  # argparse takes the beginning of a flag, too


class CopiedStream:
    """A stream of the terminal whose text goes to a file too. In all other respects it is the stream."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._file.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def level_or(default: str) -> str:
    """Return the level that the user has chosen, or a program's default, as uvicorn takes it."""
    level = os.environ.get(LEVEL_VARIABLE, "").lower()
    return level if level in LEVELS else default


def start_logging(program: str) -> None:
    """Set the level of this process's log, and begin its file, where the variables ask for that.

    A wrong level, and a folder that can't be written to, end the program with one line and status 2.

    Args:
        program: the name in the file's name, such as "main_ppo".
    """
    level = os.environ.get(LEVEL_VARIABLE, "")
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if level and level.lower() not in LEVELS:
        end_program(f"Found {LEVEL_VARIABLE}={level}; expected one of {', '.join(LEVELS)}.")
    if folder:
        file = Path(folder).expanduser() / f"{program}-{socket.gethostname()}-{os.getpid()}.log"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            stream = file.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            end_program(
                f"Found {FOLDER_VARIABLE}={folder}, where {file} can't be written ({error.strerror})."
            )
        stream.write(f"{time.strftime('%F %T')} {shlex.join(without_keys(sys.argv))}\n")
        sys.stdout = CopiedStream(sys.stdout, stream)
        sys.stderr = CopiedStream(sys.stderr, stream)
    set_level()


def without_keys(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with "..." in the place of keys (--api_key KEY), for a log."""
    shown = []
    is_key = False
    for word in words:
        flag, _, value = word.partition("=")
        is_key_flag = _KEY_FLAG.fullmatch(flag) is not None
        if is_key:
            shown.append("...")
        elif is_key_flag and value:
            shown.append(f"{flag}=...")
        else:
            shown.append(word)
        is_key = is_key_flag and not value and not is_key
    return shown


def set_level() -> None:
    """Set the level of this process's log, if the user has chosen one. Workers of a run do this."""
    level = level_or("")
    if level:
        logging.basicConfig(format=LINE_FORMAT, level=level.upper(), force=True)


def end_program(message: str) -> NoReturn:
    """Print a mistake of the user, and end with status 2."""
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(2)
