"""A process that ends with the one that started it, its own children included.

A trainer that is killed can't end the servers that it started. So it starts this file (standard library only)
in a session of its own, with a pipe as standard input. The guard starts the command and waits:

    trainer --pipe--> guard --> command --> the command's children       (guard and below: one process group)

If something comes through the pipe, if it closes, or if the parent changes, the trainer is done or gone. Then
SIGTERM, and after it SIGKILL, ends the group. If the command ends by itself, the rest of its group is ended
too, and the last line of its output says how it ended.

    python process_guard.py GRACE_SECONDS COMMAND [ARGUMENT ...]
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

_POLL_SECONDS = 0.2


def main() -> None:
    grace = float(sys.argv[1])
    command = sys.argv[2:]
    parent = os.getppid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the guard sends it to the group, to which it belongs
    while child.poll() is None and os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
        if readable:  # something came through the pipe, or it was closed
            break
    if child.poll() is None:
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 4)
    else:
        ending = f"exit code {child.returncode}" if child.returncode >= 0 else f"signal {-child.returncode}"
        print(f"{command[0]} ended with {ending}", flush=True)
    os.killpg(0, signal.SIGKILL)  # ends every process that is left, and this one


if __name__ == "__main__":
    main()
