"""FolderWorkerGroup: each rank is a process that somebody else starts; calls go through a folder.

    driver.json                  the driver beats here each second, with the session that it leads
    train_worker-0.json          as does the process of each rank, with the session that it serves
    SESSION/train_worker-0/      call-7: method and arguments; reply-7: the result, or the error

Each file is written aside with a checksum and then renamed; who reads a call or a reply deletes it. A session
is the life of one set of worker groups. A driver that begins, or begins again, opens a new one, and processes
that find another session than theirs begin anew: they execute their own program again, so that nothing of the
old session is left in them. A process that is gone, has begun anew or does not beat for `SILENT_SECONDS`
raises WorkerDiedError, as in the Ray backend. All of it needs no network but what torch.distributed needs.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import socket
import sys
import threading
import time
import traceback
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import TCPStore

from verl.single_controller.base.decorator import Call
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    ResourcePool,
    WorkerDiedError,
    WorkerFailedError,
    WorkerGroup,
    create_colocated_worker_cls,
    materialize,
    run_method,
)
from verl.utils.records.files import write_text_atomically

BEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0  # without a beat: longer than a process holds Python's lock
SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
SECONDS_TO_WAIT_SILENTLY = 20.0  # for processes that begin
SECONDS_TO_CLOSE = 10.0
POLL_SECONDS = 0.002
DRIVER = "driver"
CARRIED = ("OMP_NUM_THREADS", "CUDA_DEVICE_MAX_CONNECTIONS")  # from the driver's environment


def this_machine() -> list[str]:
    """Name, and space of process numbers: containers may share a name."""
    return [socket.gethostname(), os.readlink("/proc/self/ns/pid") if sys.platform == "linux" else ""]


def put(path: Path, content: Any) -> None:
    """Writes any picklable content, whole or not at all."""
    payload = pickle.dumps(content, protocol=5)
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(zlib.crc32(payload).to_bytes(4, "big") + payload)
    os.replace(aside, path)


def take(path: Path) -> Any:
    """Reads what `put` has written, and deletes it. FileNotFoundError: it is not there. OSError: damaged."""
    data = memoryview(path.read_bytes())
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise OSError(f"{path} is damaged: its checksum is another one")
    path.unlink()
    return pickle.loads(data[4:])


class Beat:
    """Writes what `about` holds to a file each second, from a thread, until `end`."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about, self._count = path, about, 0
        self._lock, self._ended = threading.Lock(), threading.Event()
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
        self.path, self.about, self.has_moved = path, dict[str, Any](), False
        self._since = time.monotonic()
        self.look()
        self.has_moved = False  # what lies there from before is no beat

    def look(self) -> dict[str, Any]:
        try:
            about = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.about
        if about != self.about:
            self.about, self.has_moved, self._since = about, True, time.monotonic()
        return self.about

    @property
    def silent(self) -> float:
        return time.monotonic() - self._since


# ------------------------------------------------------------------------------------------------ the driver


class FolderSession:
    """The driver's part of a folder, from the run's start to its end. ValueError: another driver has it."""

    def __init__(self, root: Path) -> None:
        self.root, self.number = root, ""
        root.mkdir(parents=True, exist_ok=True)
        root.chmod(0o700)  # calls hold the run's settings, keys of servers too
        self._place = ExitStack()
        self._place.enter_context(_the_only(root / f"{DRIVER}.lock"))
        self._beat = Beat(root / f"{DRIVER}.json", {"session": None, "over": None, "pid": os.getpid()})

    def renew(self) -> FolderSession:
        """A new session: processes that serve an earlier one begin anew."""
        for old in self.root.glob("session-*"):
            shutil.rmtree(old, ignore_errors=True)
        self.number = f"session-{uuid.uuid4().hex[:12]}"
        (self.root / self.number).mkdir()
        self._beat.write(session=self.number)
        return self

    def __enter__(self) -> FolderSession:
        return self

    def __exit__(self, *_: object) -> None:
        """All processes may end."""
        self._beat.write(session=None, over=True)
        self._beat.end()
        shutil.rmtree(self.root / self.number, ignore_errors=True)
        self._place.close()


class FolderResourcePool(ResourcePool):
    """Processes that are known by a name, with their number: `train_worker-0`."""

    def __init__(self, process_on_nodes: Sequence[int], name: str, session: FolderSession) -> None:
        super().__init__(process_on_nodes)
        self.name, self.session = name, session
        self.timeout_seconds = 600.0  # they may be jobs of a cluster's queue


@dataclass(eq=False)
class RankReply:
    """The answer to call `number` of a rank, as soon as it is there."""

    rank: int
    path: Path
    is_there: bool = False
    value: Any = None
    error: Exception | None = None
    trace: str = ""

    def look(self) -> bool:
        if not self.is_there:
            with suppress(FileNotFoundError):
                self.value, self.error, self.trace = take(self.path)
                self.is_there = True
        return self.is_there


class FolderWorkerGroup(WorkerGroup):
    """The processes of a pool. ValueError: one of them did not come within the pool's timeout."""

    def __init__(self, pool: FolderResourcePool, cls_with_init: ClassWithInitArgs) -> None:
        super().__init__(pool.world_size, cls_with_init.cls, pool.name)
        self._session, self._is_over = pool.session, False
        self._folder = pool.session.root / pool.session.number
        self._pulses = [Pulse(pool.session.root / f"{pool.name}-{i}.json") for i in range(pool.world_size)]
        self._lives = [""] * pool.world_size
        self._numbers = [0] * pool.world_size
        self._lock = threading.Lock()
        self._wait_for_all(pool.timeout_seconds)
        (port,) = self._values([self._call(0, "start_store", ((), {}))], "its start")
        replies = []
        for rank, (node, local_rank) in enumerate(pool.places):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(pool.world_size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(pool.process_on_nodes[node]),
                "MASTER_ADDR": str(self._pulses[0].about["address"]),
                "MASTER_PORT": str(port),
            } | {name: os.environ[name] for name in CARRIED if name in os.environ}
            roles = cls_with_init.args[0]  # the class that is made of them has no name to be found by
            replies.append(self._call(rank, "make_worker", ((roles, variables), {})))
        self._values(replies, "__init__")

    def _wait_for_all(self, seconds: float) -> None:
        began, missing, is_told = time.monotonic(), list(range(self.world_size)), False
        while missing:
            for rank in list(missing):
                pulse, about = self._pulses[rank], self._pulses[rank].look()
                if pulse.has_moved and about.get("session") == self._session.number:
                    self._lives[rank] = about["life"]
                    missing.remove(rank)
            waited, names = time.monotonic() - began, ", ".join(f"{self.name}-{rank}" for rank in missing)
            if missing and waited > seconds:
                raise ValueError(
                    f"Found no process {names} after {seconds:g} s at {self._session.root}; expected it to "
                    f"run: python -m verl.{self.name} @ run.yaml --rank {missing[0]}"
                )
            if missing and waited > SECONDS_TO_WAIT_SILENTLY and not is_told:
                is_told = True
                print(f"waiting up to {seconds:g} s for {names} at {self._session.root}", flush=True)
            time.sleep(0.05)

    def _call(self, rank: int, method: str, call: Call) -> RankReply:
        box = self._folder / f"{self.name}-{rank}"
        with self._lock:  # a checkpoint is written from a thread of its own
            number, self._numbers[rank] = self._numbers[rank], self._numbers[rank] + 1
        box.mkdir(exist_ok=True)
        put(box / f"call-{number}", (method, materialize(call)))
        return RankReply(rank, box / f"reply-{number}")

    def _start(self, method: str, calls: list[Call]) -> list[Any]:
        if self._is_over:
            raise RuntimeError(f"worker group {self.name!r} was shut down; {method} cannot run")
        return [self._call(rank, method, call) for rank, call in enumerate(calls)]

    def _resolver(self, method: str) -> Callable[[list[Any]], list[Any]]:
        return partial(self._values, method=method)

    def _values(self, replies: list[RankReply], method: str) -> list[Any]:
        """What the ranks have answered. A death is raised before an error that it may have caused."""
        until, checked = float("inf"), time.monotonic()
        while sum(reply.look() for reply in replies) < len(replies):
            if any(reply.error for reply in replies):
                until = min(until, time.monotonic() + SECONDS_FOR_OTHER_RANKS)
            if time.monotonic() > until:
                break
            if time.monotonic() - checked > 0.2:
                checked = time.monotonic()
                for rank in range(self.world_size):
                    self._check_alive(rank, method)
            time.sleep(POLL_SECONDS)
        for reply in replies:
            if reply.error is not None:
                who = f"rank {reply.rank} of worker group {self.name!r}"
                raise reply.error from WorkerFailedError(f"{who} failed in {method}:\n{reply.trace}")
        return [reply.value for reply in replies]

    def _check_alive(self, rank: int, method: str) -> None:
        pulse, about = self._pulses[rank], self._pulses[rank].look()
        why = ""
        if self._is_over:
            why = "the run has ended it"
        elif about["life"] != self._lives[rank] or about["session"] != self._session.number:
            why = "it has begun anew"
        elif about["machine"] == this_machine() and not psutil.pid_exists(about["pid"]):
            why = "its process is gone"
        elif pulse.silent > SILENT_SECONDS:
            why = f"nothing was heard of it for {SILENT_SECONDS:g} s"
        if why:
            place = f"node {about['machine'][0]}, {about['address']}, pid {about['pid']}"
            raise WorkerDiedError(f"{self.name}-{rank} died during {method} ({place}): {why}")

    def shutdown(self) -> None:
        """Its processes wait for the next session, or end with the run."""
        self._is_over = True


# ------------------------------------------------------------------------------------------ process of a rank


class FolderRank:
    """What a driver can call: `start_store`, `make_worker`, then the worker's methods."""

    def start_store(self) -> int:
        """Starts the store in which all ranks meet, on a port that the system picks; returns the port."""
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        return self._store.port

    def make_worker(self, roles: dict[str, ClassWithInitArgs], variables: dict[str, str]) -> None:
        os.environ.update(variables)
        if "OMP_NUM_THREADS" in variables:  # this process has read it already
            torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
        self.worker = create_colocated_worker_cls(roles)()

    def answer(self, method: str, call: Call) -> tuple[Any, Exception | None, str]:
        target: Any = self if method in ("start_store", "make_worker") else self.worker
        try:
            return run_method(target, method, call), None, ""
        except Exception as error:  # whatever a worker's method may raise; raised again by the driver
            return None, _picklable(error), traceback.format_exc()


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _the_only(path: Path) -> Iterator[None]:
    """ValueError: another process has the place."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"Found another process that holds {path}; expected one alone.") from None
        yield


def serve(root: Path, name: str, address: str, patience: float) -> int:
    """The process of a rank: runs the driver's calls in their order, until the run is over. Returns the exit
    status: 3 if nothing was heard of a driver for `patience` seconds.

    name: of the pool, and rank: `train_worker-0`. address: of this machine, for other ranks. ValueError:
    another process serves as it.
    """
    root.mkdir(parents=True, exist_ok=True)
    about = {"pid": os.getpid(), "machine": this_machine(), "address": address, "session": None}
    with _the_only(root / f"{name}.lock"):
        driver, rank = Pulse(root / f"{DRIVER}.json"), FolderRank()
        beat = Beat(root / f"{name}.json", about | {"life": uuid.uuid4().hex})
        session: str | None = None
        while session is None:
            told = driver.look()
            session = told.get("session") if driver.has_moved else None
            if driver.has_moved and told.get("over"):
                return 0
            if driver.silent > patience:
                return _nobody_leads(root, patience)
            time.sleep(0.05)
        threading.Thread(target=_watch, args=(driver, session), name="driver's beat", daemon=True).start()
        beat.write(session=session)
        box, number = root / session / name, 0
        while not driver.about.get("over"):
            if driver.silent > patience:
                return _nobody_leads(root, patience)
            try:
                method, call = take(box / f"call-{number}")
            except FileNotFoundError:
                time.sleep(POLL_SECONDS)
                continue
            answer = rank.answer(method, call)
            with suppress(FileNotFoundError):  # the session is over: `_watch` will see it
                put(box / f"reply-{number}", answer)
            number += 1
        if hasattr(rank, "worker"):
            rank.worker.close()
        beat.end()
    return 0


def _nobody_leads(root: Path, patience: float) -> int:
    print(f"error: nothing was heard of a driver at {root} for {patience:g} s", file=sys.stderr)
    return 3


def _watch(driver: Pulse, session: str) -> None:
    """Executes this program again as soon as the driver leads another session; ends it with the run."""
    while True:
        told = driver.look()
        if told.get("over"):  # a call that waits for another rank may never end
            time.sleep(SECONDS_TO_CLOSE)
            os._exit(0)
        if told.get("session") != session:
            sys.stdout.flush()
            sys.stderr.flush()
            os.closerange(3, 65536)  # connections and locks of this session
            os.execv(sys.executable, sys.orig_argv)
        time.sleep(0.2)
