"""Who died, where, of what, and its last words: the text of a WorkerDiedError.

    rank starts -> RankPlace (process, node, logs) ---> driver keeps it
    rank dies   -> Ray's error + RankPlace -> node there: its logs and its OOM kills are read on the node
                                              node gone:  the lines that had come to the driver

Ray says that a process is gone, seldom why. A fatal signal that a process sees (SIGSEGV, SIGABRT, ...) stands
in its log; a kill for want of memory is counted by the kernel, or said by Ray; what leaves no trace at all is
SIGKILL from outside, or os._exit.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray.environment import import_path
from verl.single_controller.ray.session import LINES_KEPT, last_lines_seen

_SECONDS_FOR_LOGS = 15.0
_LONGEST_LINE = 300
_BYTES_READ = 64_000
_FATAL = re.compile(r"Fatal Python error: ([^\n]+)|\*\*\* (SIG[A-Z]+) received")
_MARKS = (":actor_name:", ":job_id:", ":task_name:")  # of Ray's, by which its log monitor tells tasks apart
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


@dataclass(frozen=True)
class RankPlace:
    """Where a rank lives.

    Attributes:
        pid, host, address: its process, its node's name and IP address.
        node: Ray's id of the node.
        logs: files with its standard output and standard error, on that node.
        oom_kills: the node's count of kernel OOM kills when the rank started; -1 if it has none.
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
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            address=ray.util.get_node_ip_address(),
            node=ray.get_runtime_context().get_node_id(),
            logs=tuple(dict.fromkeys(os.readlink(f"/proc/self/fd/{stream}") for stream in (1, 2))),
            oom_kills=count_oom_kills(),
        )

    def __str__(self) -> str:
        return f"node {self.host}, {self.address}, pid {self.pid}"


@dataclass(frozen=True)
class Remains:
    """What a node knows of a process that died there: the end of each log, and kernel OOM kills up to now."""

    lines: list[str]
    oom_kills: int


def count_oom_kills() -> int:
    """Processes that this machine's kernel killed for want of memory since it started; -1 if unknown."""
    for line in _read_text("/proc/vmstat").splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return -1


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def read_remains(logs: tuple[str, ...]) -> Remains:
    """Reads them on the machine where it is called. The log of standard error comes last."""
    lines: list[str] = []
    for path in logs:
        lines += _last_lines(path)
    return Remains(lines, count_oom_kills())


def _last_lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.path.getsize(path) - _BYTES_READ))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(_MARKS)]
    return lines[-LINES_KEPT:]


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
    head = f"{who} died during {method} ({place}):"
    lost = _why_node_is_lost(place.node)
    remains = None if lost else _fetch_remains(place)
    if remains is None:
        lost = lost or _why_node_is_lost(place.node)  # it may have taken Ray a while to notice
        head += f" its node is lost ({lost}); its log stays there" if lost else f" {_first_sentences(error)}"
        seen = last_lines_seen(place.address, place.pid)
        return "\n".join([f"{head}. Its last lines that came here:", *_quoted(seen)]) if seen else head
    cause = cause_of_death(error, remains.lines, remains.oom_kills - place.oom_kills)
    head += f" {cause}."
    if not remains.lines:
        return f"{head} It left nothing in its log ({place.logs[-1]})"
    return "\n".join([f"{head} Its last lines ({place.logs[-1]}):", *_quoted(remains.lines)])


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
    for found in _FATAL.finditer("\n".join(last_lines)):
        name = found.group(2) or found.group(1)
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


def _fetch_remains(place: RankPlace) -> Remains | None:
    """From the node, by a task that runs there; None if it does not answer."""
    if place.node == ray.get_runtime_context().get_node_id():
        return read_remains(place.logs)
    task = ray.remote(read_remains).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
        runtime_env={"env_vars": {"PYTHONPATH": import_path()}},
    )
    try:
        remains: Remains = ray.get(task.remote(place.logs), timeout=_SECONDS_FOR_LOGS)
    except RayError:  # the node goes too, or has no room for one more process
        return None
    return remains


def _quoted(lines: list[str]) -> list[str]:
    return [f"    | {line[:_LONGEST_LINE]}" for line in lines[-LINES_KEPT:]]


def _first_sentences(error: BaseException) -> str:
    """Ray's explanation without its addresses and guesses."""
    text = " ".join(str(error).split())
    text = re.sub(r"^The actor died unexpectedly.*?(?=The actor (?:is dead|died) because)", "", text)
    return text.split(" Some common causes")[0][:400]
