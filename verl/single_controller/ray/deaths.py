"""Deaths of processes in words: who died, on which node, and of what.

Ray knows that a process is gone. It knows the reason only if its memory monitor killed the process or the
node is lost. If a signal killed the process, Ray only sees the connection break. Whether the kernel killed it
for want of memory follows from the kernel's count of such kills on that node.
"""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray.session import last_lines_seen

_SECONDS_FOR_LAST_LINES = 1.0  # how long what a process wrote takes to reach the driver
_SECONDS_TO_ASK_A_NODE = 20.0
_LONGEST_LINE = 300
_LONGEST_ERROR = 600
# What Ray says of a process that ended without a word, and of one that its memory monitor has killed.
_CONNECTION_BROKE = re.compile(r"connection error code 2|End of file", re.IGNORECASE)
_RAN_OUT_OF_MEMORY = re.compile(r"running low on memory|OUT_OF_MEMORY|memory monitor", re.IGNORECASE)
# What Ray and Python write about a signal that is a mistake of the program.
_CRASH = re.compile(r"\bSIG(SEGV|ABRT|BUS|FPE|ILL)\b|Fatal Python error")


@dataclass(frozen=True)
class ProcessPlace:
    """The place of a process of the run.

    Attributes:
        pid: number of the process on its node.
        host: name of the node.
        address: IP address of the node.
        node: id of the node in Ray.
        oom_kills: processes that the kernel of the node had killed for want of memory when this one began.
        port: port of the process's store, in which ranks meet; 0 if it has none.
    """

    pid: int
    host: str
    address: str
    node: str
    oom_kills: int = 0
    port: int = 0

    @classmethod
    def here(cls, port: int = 0) -> ProcessPlace:
        """Return the place of this process."""
        address = ray.util.get_node_ip_address()
        node = ray.get_runtime_context().get_node_id()
        return cls(os.getpid(), socket.gethostname(), address, node, num_oom_kills(), port)

    def __str__(self) -> str:
        return f"node {self.host} ({self.address}, pid {self.pid})"


def num_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed for want of memory; 0 if it does not say."""
    table = Path("/proc/vmstat")
    if not table.exists():
        return 0
    counts = dict(line.split(" ", 1) for line in table.read_text().splitlines())
    return int(counts.get("oom_kill", 0))


def describe_death(
    who: str, place: ProcessPlace | None, method: str, error: BaseException, shows_lines: bool = True
) -> str:
    """Describe a dead process in a line, with its last lines below.

    Args:
        who: the process, in words.
        place: where it lived; None if it died before it could say.
        method: the method that was called.
        error: Ray's error.
        shows_lines: whether its last lines stand below.
    """
    if place is None:
        return f"{who} died during {method}: {in_one_line(error)}"
    time.sleep(_SECONDS_FOR_LAST_LINES)
    lines = last_lines_seen(place.address, place.pid)
    head = f"{who} on {place} {_cause(place, method, error, lines)}"
    if not lines or not shows_lines:
        return head
    return "\n".join([f"{head} Its last lines:", *(f"    | {line[:_LONGEST_LINE]}" for line in lines)])


def _cause(place: ProcessPlace, method: str, error: BaseException, lines: list[str]) -> str:
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    node = nodes.get(place.node, {"Alive": False})
    if not node["Alive"]:
        reason = node.get("DeathReasonMessage") or "Ray says it is dead"
        return f"died during {method}: its node is lost ({reason})."
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or _RAN_OUT_OF_MEMORY.search(text):
        return f"was killed during {method}, out of memory: {in_one_line(error)}"
    if not _CONNECTION_BROKE.search(text):
        return f"died during {method}: {in_one_line(error)}"
    crashes = [line for line in lines if _CRASH.search(line)]
    if crashes:
        return f"crashed during {method}: {crashes[0][:_LONGEST_LINE]}."
    num_killed = _oom_kills_since(place)
    if num_killed > 0:
        return (
            f"was killed during {method}, out of memory: since it began the kernel of its node has killed "
            f"{num_killed} processes for want of memory."
        )
    return f"was killed by SIGKILL during {method}, or ended itself without a word."


def _oom_kills_since(place: ProcessPlace) -> int:
    """Return how many processes the kernel of a place's node has killed since the process began."""
    if place.node == ray.get_runtime_context().get_node_id():
        return num_oom_kills() - place.oom_kills
    pinned = NodeAffinitySchedulingStrategy(place.node, soft=False)
    task = ray.remote(num_oom_kills).options(num_cpus=0, max_retries=0, scheduling_strategy=pinned).remote()
    try:
        return ray.get(task, timeout=_SECONDS_TO_ASK_A_NODE) - place.oom_kills
    except ray.exceptions.RayError:  # the node is busy or was lost just now: the cause stays open
        return 0


def in_one_line(error: BaseException) -> str:
    """Return what an error says, without the ids and addresses that stand before Ray's reason."""
    text = " ".join(str(error).split()).split(" If the process was killed by the kernel")[0]
    return re.sub(r"^The actor died.*?(?=The actor (?:is dead|died) because)", "", text)[:_LONGEST_ERROR]
