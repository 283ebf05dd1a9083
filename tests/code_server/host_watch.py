"""What a program may not change or reach on the machine: HostWatch looks before and after."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[2]
NOBODY = 65534
SET_CHILD_SUBREAPER = 36  # prctl: processes that lose their parent become children of this one
OPEN_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/dev/mqueue", "/etc", "/root", "/usr/lib", "/")
SETTINGS = ("kernel/hostname", "kernel/core_pattern", "vm/overcommit_memory", "kernel/randomize_va_space")


class HostWatch:
    """Baits in `folder`, and what the machine looks like; effects() names every difference.

    Baits: a folder that anybody may write to, a file of answers that anybody may read, two processes (of this
    user and of nobody), listeners (TCP, UDP, UNIX with a path and without). A random token marks names that
    attacks make. Make it before the server starts, ask effects() after its end: no child of it may be left.
    """

    def __init__(self, folder: Path, answers: str) -> None:
        self.token = secrets.token_hex(8)
        self.folder = folder / "open"
        self.folder.mkdir()
        for each in (self.folder, *self.folder.parents):
            if each.is_relative_to("/tmp") and each != Path("/tmp") and each.stat().st_uid == os.getuid():
                each.chmod(0o777 if each == self.folder else each.stat().st_mode | 0o755)
        self.answers = self.folder / "answers.json"
        self.answers.write_text(answers)
        self.answers.chmod(0o666)
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        users = [os.getuid()] + ([NOBODY] if os.getuid() == 0 else [])
        self.victims = [subprocess.Popen(["sleep", "100000"], user=user) for user in users]
        self.listeners = [socket.socket(), socket.socket(type=socket.SOCK_DGRAM)]
        self.listeners += [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self.listeners[0].bind(("127.0.0.1", 0))
        self.port = self.listeners[0].getsockname()[1]
        self.listeners[1].bind(("127.0.0.1", self.port))
        self.listeners[2].bind(f"\0{self.token}")
        self.listeners[3].bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        for listener in self.listeners:
            if listener.type == socket.SOCK_STREAM:
                listener.listen(100)
            listener.setblocking(False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.free_port = free.getsockname()[1]
        self.children = {child.pid for child in psutil.Process().children(recursive=True)}
        modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        self.modules = [Path(name) for name in modules if name]
        self.before = self.state()

    def values(self, server_pid: int) -> dict[str, str]:
        """What stands for the @NAMES@ of the attacks."""
        return {
            "TOKEN": self.token,
            "DIR": str(self.folder),
            "ANSWERS": str(self.answers),
            "REPO": str(REPO),
            "PORT": str(self.port),
            "FREE": str(self.free_port),
            "PID": str(server_pid),
            "VICTIM": str(self.victims[-1].pid),
        }

    def state(self) -> dict[str, Any]:
        """Files and settings that must stay as they are, by name."""
        found: dict[str, Any] = {
            "environment": {**os.environ, "PYTEST_CURRENT_TEST": ""},
            "folder": os.getcwd(),
        }
        for name in SETTINGS:
            found[name] = Path("/proc/sys", name).read_text()
        found["mounts"] = Path("/proc/self/mounts").read_text()
        found["ipc"] = [Path("/proc/sysvipc", name).read_text().count("\n") for name in ("shm", "sem", "msg")]
        files = [self.folder, *self.folder.rglob("*"), Path("/etc/passwd"), Path("/etc/shadow"), Path.home()]
        files += [path for path in (REPO / "verl" / "code_server").rglob("*") if path.suffix != ".pyc"]
        files += [
            Path(place) for place in sys.path if Path(place).is_dir() and Path(place) != Path(os.getcwd())
        ]
        files += self.modules
        for path in files:
            with contextlib.suppress(OSError):
                entry = path.lstat()
                found[str(path)] = [entry.st_mode, entry.st_uid, entry.st_ino]
                if path != Path.home():
                    found[str(path)] += [entry.st_mtime_ns]
                if path.is_relative_to(
                    self.folder
                ):  # elsewhere others may link, as perf does to what it sees
                    found[str(path)] += [entry.st_ctime_ns, entry.st_nlink]
        for place in (*OPEN_PLACES, str(Path.home()), str(REPO), *sys.path):
            with contextlib.suppress(OSError):
                found.update({f"{place}/{name}": "new" for name in os.listdir(place) if self.token in name})
        return found

    def effects(self) -> list[str]:
        """Everything that is not as it was: empty when all walls held."""
        after = self.state()
        found = [
            f"changed: {n}" for n in self.before.keys() | after.keys() if self.before.get(n) != after.get(n)
        ]
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.pid not in self.children and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"left behind: process {child.pid} {child.name()} {child.cmdline()}")
        for victim in self.victims:
            if victim.poll() is not None or psutil.Process(victim.pid).status() == psutil.STATUS_STOPPED:
                found.append(f"signalled: a process that had nothing to do with it, {victim.returncode}")
        for listener in self.listeners:
            with contextlib.suppress(BlockingIOError):
                heard = listener.accept() if listener.type == socket.SOCK_STREAM else listener.recv(100)
                found.append(f"reached: {listener.family.name} {listener.type.name} {heard!r}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.free_port), 0.2):
            found.append(f"listens: somebody at port {self.free_port}")
        return found

    def close(self) -> None:
        for victim in self.victims:
            victim.send_signal(signal.SIGCONT)
            victim.kill()
            victim.wait()
        for listener in self.listeners:
            listener.close()
