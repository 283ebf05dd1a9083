"""The results of one call on all ranks, or the error that says most: who died, on which node, of what.

    refs of the ranks -> wait for any -> all there: their values
                                      -> an error:  wait a little for a death that explains it -> raise
    rank starts -> RankPlace (process, node, logs) ---> driver keeps it
    rank dies   -> Ray's error + RankPlace -> node there: its logs and its OOM kills are read on the node
                                              node gone:  the lines that had come to the driver

A rank that dies leaves the others in a collective that never ends. They hold nothing up here: the first rank
that is known to be gone ends the call, and the group is shut down by whoever gets the error. Ray says that a
process is gone, seldom why: a fatal signal that it sees stands in its log, a kill for want of memory is
counted by the kernel, and what leaves no trace at all is SIGKILL from outside, or os._exit.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.base.errors import ConnectionLostError, WorkerDiedError, WorkerFailedError
from verl.single_controller.ray.environment import import_path
from verl.single_controller.ray.session import LINES_KEPT, last_lines_seen

_SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
_SECONDS_TO_MISS_A_NODE = 40.0  # after an error of the network: Ray notices the loss of a node by its silence
_SECONDS_FOR_LOGS = 15.0
_LONGEST_LINE, _LONGEST_ERROR, _BYTES_READ = 300, 400, 64_000
# What gloo and NCCL say when a peer has gone.
_PEER_GONE = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|connection was likely closed"
    r"|remote process exited|connectFullMesh|ncclRemoteError|NCCL communicator was aborted|socket timeout",
    re.IGNORECASE,
)
_FATAL = re.compile(r"Fatal Python error: ([^\n]+)|\*\*\* (SIG[A-Z]+) received")
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}
_RAYS_MARKS = (":actor_name:", ":job_id:", ":task_name:")  # by which Ray's log monitor tells tasks apart


@dataclass(frozen=True)
class RankPlace:
    """Where a rank lives: its process; its node's name, IP address and id in Ray; the files with its standard
    output and standard error; the node's count of kernel OOM kills when it started (-1: not known).
    """

    pid: int
    host: str
    address: str
    node: str
    logs: tuple[str, ...]
    oom_kills: int

    @classmethod
    def here(cls) -> RankPlace:
        """That of the process that asks, an actor."""
        logs = dict.fromkeys(os.readlink(f"/proc/self/fd/{stream}") for stream in (1, 2))
        address, node = ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), socket.gethostname(), address, node, tuple(logs), count_oom_kills())


def resolve_refs(refs: list[Any], group: str, method: str, places: Sequence[RankPlace] = ()) -> list[Any]:
    """The values of one call's object references, one per rank; raises at the first error of any rank.

    Args:
        refs: of rank 0, 1, ...
        group, method: what was called.
        places: of the ranks, as far as they are known.
    """
    pending, values, errors = list(refs), {}, {}

    def wait(timeout: float | None) -> list[Any]:
        """Fetches what comes next; returns the references that are still out."""
        if (
            not ray.is_initialized()
        ):  # Ray would start again for a thread that still waits when the run is over
            raise RuntimeError("Ray has been shut down.")
        ready, still_out = ray.wait(pending, num_returns=1, timeout=timeout)
        for ref in ready:
            try:
                values[ref] = ray.get(ref)
            except Exception as error:  # whatever a worker's method may raise; raised again below
                errors[ref] = error
        return still_out

    while pending and not errors:
        pending = wait(None)
    if not errors:
        return [values[ref] for ref in refs]
    lost_peer = any(_peer_gone(error) for error in errors.values())
    end = time.monotonic() + (_SECONDS_TO_MISS_A_NODE if lost_peer else _SECONDS_FOR_OTHER_RANKS)
    while pending and not any(map(_is_death, errors.values())) and (left := end - time.monotonic()) > 0:
        pending = wait(left)
    rank = min((refs.index(ref) for ref in errors), key=lambda r: not _is_death(errors[refs[r]]))
    who = f"rank {rank} of worker group {group!r}"
    _raise_error(errors[refs[rank]], who, method, places[rank] if rank < len(places) else None)


def _is_death(error: Exception) -> bool:
    if isinstance(error, RayTaskError):  # of a future that a worker waited for
        return isinstance(error.cause, WorkerDiedError)
    return isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError | ObjectLostError)


def _peer_gone(error: Exception) -> bool:
    return isinstance(error, RayTaskError) and _PEER_GONE.search(str(error.cause)) is not None


def _raise_error(error: Exception, who: str, method: str, place: RankPlace | None) -> NoReturn:
    if _is_death(error) and not isinstance(error, RayTaskError):
        raise WorkerDiedError(describe_death(who, place, method, error)) from error
    if not isinstance(error, RayTaskError) or not isinstance(error.cause, Exception):
        raise error
    cause, failed = error.cause, WorkerFailedError(f"{who} failed in {method}:\n{error}")
    words = " ".join(str(cause).split())[:_LONGEST_ERROR]
    if isinstance(cause, WorkerDiedError):
        raise cause
    if _peer_gone(error):
        raise ConnectionLostError(
            f"{who} lost its connection to another rank during {method}, and none was seen to die: {words}"
        ) from failed
    if isinstance(cause, ObjectLostError):
        raise WorkerDiedError(
            f"{who} can't run {method}: rows that it needs lay with a process or on a node that is gone: "
            f"{words}"
        ) from error
    raise cause from failed


# ------------------------------------------------------------------------------------------- deaths


def describe_death(who: str, place: RankPlace | None, method: str, error: BaseException) -> str:
    """The lines that name a dead rank.

    Args:
        who: "rank 1 of worker group 'actor'".
        place: where it lived; None if it died before it could say.
        method: what it was asked to do.
        error: Ray's.
    """
    if place is None:
        return f"{who} died during {method}: {_first_sentences(error)}"
    head = f"{who} died during {method} (node {place.host}, {place.address}, pid {place.pid}):"
    lost = _why_node_is_lost(place.node)
    remains = None if lost else _fetch_remains(place)
    if remains is None:
        lost = lost or _why_node_is_lost(place.node)  # it may have taken Ray a while to notice
        head += f" its node is lost ({lost}); its log stays there" if lost else f" {_first_sentences(error)}"
        lines, source = last_lines_seen(place.address, place.pid), "that came here"
    else:
        lines, oom_kills = remains
        head += f" {cause_of_death(error, lines, oom_kills - place.oom_kills)}"
        source = f"({place.logs[-1]})"
        if not lines:
            return f"{head}. It left nothing in its log {source}"
    quoted = [f"    | {line[:_LONGEST_LINE]}" for line in lines[-LINES_KEPT:]]
    return "\n".join([f"{head}. Its last lines {source}:", *quoted]) if quoted else head


def cause_of_death(error: BaseException, last_lines: list[str], num_oom_kills: int) -> str:
    """Of what a process died whose node is there.

    Args:
        error: Ray's.
        last_lines: of its own logs.
        num_oom_kills: kernel OOM kills on the node since the process started.
    """
    text = str(error)
    if isinstance(error, ObjectLostError):
        return f"its result is lost: {_first_sentences(error)}"
    if isinstance(error, OutOfMemoryError) or "memory on the node" in text.lower():
        return "killed by Ray, as the node was running out of memory (RAY_memory_usage_threshold)"
    if fatal := _FATAL.search("\n".join(last_lines)):
        name = fatal.group(2) or fatal.group(1)
        signal_name = _SIGNALS.get(name, name)
        return f"killed by {signal_name}" if signal_name.startswith("SIG") else f"fatal error: {name}"
    if num_oom_kills > 0:
        return "killed by the kernel's OOM killer (SIGKILL): the node's memory was used up"
    if "receives a SIGTERM" in text:
        return "killed by SIGTERM"
    if exit_code := re.search(r"with an? exit code (\d+)", text):
        return f"it ended itself with exit code {exit_code[1]}"
    return "it ended without a word: SIGKILL from outside (kill -9), or os._exit"


def _why_node_is_lost(node_id: str) -> str | None:
    for node in ray.nodes():
        if node["NodeID"] == node_id:
            return None if node["Alive"] else node.get("DeathReasonMessage") or "Ray says it is dead"
    return "Ray does not know it any more"


def _fetch_remains(place: RankPlace) -> tuple[list[str], int] | None:
    """`read_remains` on the node; None if it does not answer."""
    task = ray.remote(read_remains).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
        runtime_env={"env_vars": {"PYTHONPATH": import_path()}},
    )
    try:
        if place.node == ray.get_runtime_context().get_node_id():
            return read_remains(place.logs)
        remains: tuple[list[str], int] = ray.get(task.remote(place.logs), timeout=_SECONDS_FOR_LOGS)
    except RayError:  # the node goes too, or has no room for one more process
        return None
    return remains


def read_remains(logs: tuple[str, ...]) -> tuple[list[str], int]:
    """(end of each log, that of standard error last; kernel OOM kills up to now) of this machine."""
    lines: list[str] = []
    for path in logs:
        try:
            with open(path, "rb") as log:
                log.seek(max(0, os.path.getsize(path) - _BYTES_READ))
                text = log.read().decode(errors="replace")
        except OSError:
            continue
        kept = [line for line in text.splitlines() if line.strip() and not line.startswith(_RAYS_MARKS)]
        lines += kept[-LINES_KEPT:]
    return lines, count_oom_kills()


def count_oom_kills() -> int:
    """Processes that this machine's kernel killed for want of memory since it started; -1 if unknown."""
    file = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", file.read_text() if file.exists() else "", re.MULTILINE)
    return int(found[1]) if found else -1


def _first_sentences(error: BaseException) -> str:
    """Ray's explanation without its addresses and guesses."""
    text = " ".join(str(error).split())
    text = re.sub(r"^The actor died unexpectedly.*?(?=The actor (?:is dead|died) because)", "", text)
    return text.split(" Some common causes")[0][:_LONGEST_ERROR]
