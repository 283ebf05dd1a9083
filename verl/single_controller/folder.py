"""FolderWorkerGroup: each rank is a process that somebody else starts; calls go through a folder.

    driver.json                  the driver beats here each second, with the session that it leads
    train_worker-0.json          as does the process of each rank, with the session that it serves
    SESSION/train_worker-0/      call-7: method and arguments; reply-7: the result, or the error

Calls and replies are written aside with a checksum and then renamed; who reads one deletes it. A session is
the life of one set of worker groups. A driver that begins, or begins again, opens a new one, and processes
that find another session than theirs begin anew: they execute their own program again, so that nothing of
the old session is left in them. A process of any group that is gone, has begun anew or does not beat for
`SILENT_SECONDS` raises WorkerDiedError, as in the Ray backend.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from torch.distributed import TCPStore

from verl.single_controller.base.decorator import Call
from verl.single_controller.base.worker_group import (
    PEER_GONE,
    ClassWithInitArgs,
    ConnectionLostError,
    ResourcePool,
    WorkerDiedError,
    WorkerFailedError,
    WorkerGroup,
    create_colocated_worker_cls,
    materialize,
    run_method,
)
from verl.utils.announcing import gc_paused
from verl.utils.json_files import write_text_atomically

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0  # without a beat: longer than a process is expected to hold Python's lock
SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
SECONDS_TO_WAIT_SILENTLY = 20.0  # for processes that begin
SECONDS_TO_CLOSE = 10.0
PATIENCE_SECONDS = 1800.0  # of a process that hears of no driver
CARRIED = (
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HF_HUB_OFFLINE",
)  # from the driver's environment
ENVIRONMENT = dict(os.environ)  # before a driver has told anything
# Name, and space of process numbers: containers may share a name.
MACHINE = [socket.gethostname(), os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""]


def put(path: Path, payload: bytes) -> None:
    """Write a message, whole or not at all."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(zlib.crc32(payload).to_bytes(4, "big") + payload)
    os.replace(aside, path)


def take(path: Path) -> Any:
    """Read and delete a file that `put` has written.

    Raises OSError if it is damaged, and FileNotFoundError if there is none.
    """
    data = memoryview(path.read_bytes())
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise OSError(f"{path} is damaged: its checksum is another one")
    with gc_paused():
        content = pickle.loads(data[4:])
    path.unlink()
    return content


def pause(waited: float) -> None:
    """Between two looks for a file: the longer nothing came, the longer."""
    time.sleep(min(0.05, 0.002 + waited / 50))


class Beat:
    """Writes what `about` holds to a file each second, from a thread, until `end`."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        self._count = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def write(self, **news: Any) -> None:
        with self._lock:
            self.about |= news
            self._count += 1
            write_text_atomically(self.path, json.dumps(self.about | {"beat": self._count}))

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):  # a disk that is full for a moment: the next beat tells as much
                self.write()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()


class Pulse:
    """What another process tells by its beat. silent: seconds since the last one, by this process's clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about = dict[str, Any]()
        self.has_moved = False
        self._since = time.monotonic()
        self.look()
        self.has_moved = False  # what lies there from before is no beat

    def look(self) -> dict[str, Any]:
        try:
            about = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.about
        if about != self.about:
            self.about = about
            self.has_moved = True
            self._since = time.monotonic()
        return self.about

    @property
    def silent(self) -> float:
        return time.monotonic() - self._since

    @property
    def is_over(self) -> bool:
        """Whether a driver has said that the run is."""
        return self.has_moved and bool(self.about.get("over"))


def _locked(path: Path) -> TextIO:
    """Return a file that this process alone holds until it closes it.

    Raises ValueError if another process holds it.
    """
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"Found another process that holds {path}; expected one alone.") from None
    return file


class FolderSession(ExitStack):
    """The driver's part of a folder, from the run's start to its end. ValueError: another driver has it."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.number = ""
        self.groups = list[FolderWorkerGroup]()
        self.checked = time.monotonic()
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)  # calls hold the run's settings, keys of servers too
        self.enter_context(_locked(root / "driver.lock"))
        self._beat = Beat(root / "driver.json", {"session": None, "over": None, "pid": os.getpid()})
        self.callback(self._end)

    def renew(self) -> FolderSession:
        """Begin a new session. Processes that serve an earlier one start again."""
        for old in self.root.glob("session-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.number = f"session-{uuid.uuid4().hex[:12]}"
        self.groups = []
        (self.root / self.number).mkdir()
        self._beat.write(session=self.number)
        return self

    def check_alive(self, method: str) -> None:
        """WorkerDiedError: a process of any group is gone. It looks a few times a second."""
        if time.monotonic() - self.checked > 0.2:
            self.checked = time.monotonic()
            for group in self.groups:
                group.check_alive(method)

    def _end(self) -> None:
        """All processes may end."""
        with suppress(OSError):  # an error of the run says more
            self._beat.write(session=None, over=True)
        self._beat.end()
        if self.number:
            shutil.rmtree(self.root / self.number, ignore_errors=True)


class FolderResourcePool(ResourcePool):
    """Processes that are known by a name, with their number: `train_worker-0`."""

    def __init__(self, process_on_nodes: Sequence[int], name: str, session: FolderSession) -> None:
        super().__init__(process_on_nodes)
        self.name = name
        self.session = session
        self.timeout_seconds = 600.0  # they may be jobs of a cluster's queue


@dataclass(eq=False)
class RankReply:
    """The answer to a call of a rank, as soon as it is there: value, error and its traceback."""

    rank: int
    path: Path
    answer: tuple[Any, Exception | None, str] | None = None

    def look(self) -> bool:
        """WorkerDiedError: it can't be read."""
        try:
            self.answer = self.answer or take(self.path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise WorkerDiedError(f"the reply of rank {self.rank} is lost: {error}") from error
        return True


class FolderWorkerGroup(WorkerGroup):
    """The processes of a pool. ValueError: one does not come, or those on several machines can't meet."""

    def __init__(self, pool: FolderResourcePool, cls_with_init: ClassWithInitArgs) -> None:
        super().__init__(pool.world_size, cls_with_init.cls, pool.name)
        self._session = pool.session
        self._is_over = False
        self._folder = pool.session.root / pool.session.number
        self._pulses = [Pulse(pool.session.root / f"{pool.name}-{i}.json") for i in range(pool.world_size)]
        self._numbers = [0] * pool.world_size
        self._lock = threading.Lock()
        self._wait_for_all(pool.timeout_seconds)
        self._session.groups.append(self)
        address = str(self._pulses[0].about["address"])
        machines = {pulse.about["machine"][0] for pulse in self._pulses}
        if len(machines) > 1 and address.startswith("127."):
            raise ValueError(
                f"Found ranks of {self.name} on {', '.join(sorted(machines))}, and rank 0 at {address}; "
                "expected --address ADDRESS of it, at which the others reach its machine"
            )
        roles = cls_with_init.args[0]  # the class that is made of them has no name to be found by
        carried = {name: os.environ[name] for name in CARRIED if name in os.environ}
        places = pool.variables(address, self._pulses[0].about["port"])
        told: list[Call] = [((roles, each | carried), {}) for each in places]
        self._values(self._start("make_worker", told), "__init__")

    def _wait_for_all(self, seconds: float) -> None:
        began = time.monotonic()
        said_at = SECONDS_TO_WAIT_SILENTLY
        while missing := [rank for rank, pulse in enumerate(self._pulses) if not self._is_served(pulse)]:
            names = ", ".join(f"{self.name}-{rank}" for rank in missing)
            waited = time.monotonic() - began
            if waited > seconds:
                raise ValueError(
                    f"Found no process {names} after {seconds:g} s at {self._session.root}; expected for "
                    f"each: python -m verl.{self.name} @ run.yaml --rank RANK"
                )
            if waited > said_at:
                said_at = seconds
                print(f"waiting up to {seconds:g} s for {names} at {self._session.root}", flush=True)
            self._session.check_alive("the start of others")
            time.sleep(0.05)
        self._lives = [pulse.about["life"] for pulse in self._pulses]

    def _is_served(self, pulse: Pulse) -> bool:
        session = pulse.look().get("session")
        return pulse.has_moved and session == self._session.number

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        if self._is_over:
            raise RuntimeError(f"worker group {self.name!r} was shut down; {method} cannot run")
        payloads = [pickle.dumps((method, materialize(call)), protocol=5) for call in calls]
        replies = []
        with self._lock:  # all ranks get calls in one order, also from the thread that writes checkpoints
            for rank, payload in enumerate(payloads):
                box = self._folder / f"{self.name}-{rank}"
                number = self._numbers[rank]
                box.mkdir(exist_ok=True)
                put(box / f"call-{number}", payload)
                self._numbers[rank] += 1
                replies.append(RankReply(rank, box / f"reply-{number}"))
        return replies

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return partial(self._values, method=method)

    def _values(self, replies: list[RankReply], method: str) -> list[Any]:
        """Return what the ranks have answered. A death is raised before an error that it may have caused."""
        began = time.monotonic()
        until = float("inf")
        while sum(reply.look() for reply in replies) < len(replies):
            errors = [str(each.answer[1]) for each in replies if each.answer and each.answer[1] is not None]
            if errors:
                patience = SILENT_SECONDS if any(map(PEER_GONE.search, errors)) else SECONDS_FOR_OTHER_RANKS
                until = min(until, time.monotonic() + patience)
            if self._is_over:
                raise WorkerDiedError(f"{self.name} was shut down during {method}")
            if time.monotonic() > until:
                break
            self._session.check_alive(method)
            pause(time.monotonic() - began)
        values = []
        for reply in replies:
            value, error, trace = reply.answer or (None, None, "")
            values.append(value)
            if error is not None:
                who = f"rank {reply.rank} of worker group {self.name!r}"
                failed = WorkerFailedError(f"{who} failed in {method}:\n{trace}")
                if self.world_size > 1 and PEER_GONE.search(str(error)):
                    lost = f"{who} lost its connection to another rank during {method}: {error}"
                    raise ConnectionLostError(lost) from failed
                raise error from failed
        return values

    def check_alive(self, method: str) -> None:
        """WorkerDiedError: a rank is gone."""
        for rank, pulse in enumerate(self._pulses):
            about = pulse.look()
            why = ""
            if about["life"] != self._lives[rank] or about["session"] != self._session.number:
                why = "it has begun anew"
            elif about["machine"] == MACHINE and not psutil.pid_exists(about["pid"]):
                why = "its process is gone"
            elif pulse.silent > SILENT_SECONDS:
                why = f"nothing was heard of it for {SILENT_SECONDS:g} s"
            if why and not self._is_over:
                place = f"node {about['machine'][0]}, {about['address']}, pid {about['pid']}"
                raise WorkerDiedError(f"{self.name}-{rank} died during {method} ({place}): {why}")

    def shutdown(self) -> None:
        """Its processes wait for the next session, or end with the run."""
        self._is_over = True


class FolderRank:
    """What a driver can call: `make_worker`, then the worker's methods."""

    worker: Any = None

    def make_worker(self, roles: dict[str, ClassWithInitArgs], variables: dict[str, str]) -> None:
        os.environ.update(variables)
        if "OMP_NUM_THREADS" in variables:  # this process has read it already
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        self.worker = create_colocated_worker_cls(roles)()

    def answer(self, method: str, call: Call) -> bytes:
        """Pickled (result, error, its traceback), where one of the first two is None."""
        target: Any = self.worker or self
        try:
            return pickle.dumps((run_method(target, method, call), None, ""), protocol=5)
        except (Exception, SystemExit) as error:  # whatever a method may raise; raised again by the driver
            trace = traceback.format_exc()
            plain = RuntimeError(f"{type(error).__name__}: {error}")
            try:
                payload = pickle.dumps((None, error if isinstance(error, Exception) else plain, trace))
                pickle.loads(payload)
            except Exception:
                payload = pickle.dumps((None, plain, trace))
            return payload


def serve(root: Path, name: str, address: str, parent: int = 0, patience: float = PATIENCE_SECONDS) -> int:
    """Run the driver's calls in their order, as the process of a rank (name: `train_worker-0`). Return 0 when
    the run is over, or ends the process with 3: nothing was heard of a driver for `patience` seconds, or the
    process `parent` has gone. address: of this machine, for other ranks. ValueError: the name is taken.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a cluster sends it to all; it is for the driver
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{name}.lock"):
        driver = Pulse(root / "driver.json")
        rank = FolderRank()
        number = 0
        since = time.monotonic()
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # all ranks meet in rank 0's
        about = {"pid": os.getpid(), "life": uuid.uuid4().hex, "machine": MACHINE, "address": address}
        beat = Beat(root / f"{name}.json", about | {"port": store.port, "session": None})
        watch = partial(_watch, driver, beat, parent, patience)
        threading.Thread(target=watch, name="driver's beat", daemon=True).start()
        while not driver.is_over:
            box = root / str(beat.about["session"]) / name
            try:
                method, call = take(box / f"call-{number}")
            except FileNotFoundError:
                pause(time.monotonic() - since)
                continue
            payload = rank.answer(method, call)
            with suppress(FileNotFoundError):  # the session is over: `_watch` will see it
                put(box / f"reply-{number}", payload)
            number = number + 1
            since = time.monotonic()
        if rank.worker is not None:
            rank.worker.close()
        beat.end()
    return 0


def _watch(driver: Pulse, beat: Beat, parent: int, patience: float) -> None:
    """Serve the first session of the driver that it finds. Execute this program again as soon as the driver
    leads another one, and ends it with the run: a call that waits for another rank may never end.
    """
    while True:
        told = driver.look().get("session")
        served = beat.about["session"]
        if driver.is_over:
            time.sleep(SECONDS_TO_CLOSE)
            os._exit(0)
        if driver.silent > patience:
            silence = f"nothing was heard of a driver at {driver.path} for {patience:g} s"
            print(f"error: {silence}", file=sys.stderr)
            os._exit(3)
        if parent and os.getppid() != parent:
            os._exit(3)
        if driver.has_moved and told and not served:
            with suppress(OSError):  # the next beat tells it
                beat.write(session=told)
        elif served and told != served:
            sys.stdout.flush()
            sys.stderr.flush()
            for number in map(int, os.listdir("/proc/self/fd") if sys.platform == "linux" else ()):
                with suppress(OSError):
                    os.set_inheritable(number, number < 3)  # connections and locks of this session are closed
            os.execve(sys.executable, sys.orig_argv, ENVIRONMENT)
        time.sleep(0.1)
