"""Signals while a program loads."""

import signal
import subprocess
import sys

import pytest

SCRIPT = """
import signal, sys
from verl.utils.early_signals import end_on_signals
signal.signal(signal.SIGINT, signal.default_int_handler)
end_on_signals([])
try:
    signal.raise_signal(int(sys.argv[1]))
except BaseException:
    print("a library has seen it")
"""


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("SIGINT", 130, "interrupted: no step was begun\n"),
        ("SIGUSR2", 130, "interrupted: no step was begun\n"),
        ("SIGUSR1", 3, "stopped: asked to stop before the first step; the same command begins again\n"),
    ],
)
def test_a_signal_while_a_program_loads_is_a_line_and_a_status(name, status, line):
    arguments = [sys.executable, "-c", SCRIPT, str(int(getattr(signal, name)))]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout) == (status, line, "")
