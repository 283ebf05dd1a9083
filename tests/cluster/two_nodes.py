"""Two nodes on one machine with a Ray cluster and a retrieval server, and a run on them that loses one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from namespace_nodes import NamespaceNode, NamespaceNodes, NodeProcess

HEAD = "10.77.0.1"  # the first node's address
URL = f"http://{HEAD}:8000/retrieve"
STARTED = "Ray runtime started"
ENVIRONMENT: dict[str, str | None] = {
    "VIRTUAL_ENV": sys.prefix,  # this Python as it is: nothing is installed
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "RAY_ADDRESS": None,
}


@contextlib.contextmanager
def ended_in_the_end(process: NodeProcess) -> Iterator[NodeProcess]:
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):  # then it ends with its node
            process.wait(30)


@contextlib.contextmanager
def two_nodes(folder: Path, corpus: Path, **variables: str) -> Iterator[tuple[NamespaceNode, NamespaceNode]]:
    """The head, which serves `corpus`, and a worker; both see `folder`. `variables`: of the Ray nodes."""
    with NamespaceNodes(2, folder) as nodes, contextlib.ExitStack() as processes:
        head, worker = nodes
        ray = ["bash", "scripts/ray_node.sh"]
        own = ["--num-cpus=1", "--object-store-memory=200000000"]
        server = ["bash", "retrieval_launch.sh", "--corpus_path", corpus, "--host", HEAD, "--port", "8000"]
        for node, command, sign in (
            (head, server, "retrieval server on"),
            (head, [*ray, "head", "--address", HEAD, *own], STARTED),
            (worker, [*ray, "worker", "--head", f"{HEAD}:6379", "--address", worker.address, *own], STARTED),
        ):
            started = node.start(command, {**ENVIRONMENT, **variables})
            process = processes.enter_context(ended_in_the_end(started))
            wait_until(lambda process=process, sign=sign: sign in process.output(), process, 300)
        yield head, worker


def wait_until(condition: Callable[[], object], process: NodeProcess, timeout_seconds: float) -> None:
    """Until `condition` holds. It is an error when the process ends before."""
    started = time.monotonic()
    while not condition():
        late = time.monotonic() - started > timeout_seconds
        if process.poll() is not None or late:
            what = f"not within {timeout_seconds:.0f} s" if late else f"ended with {process.returncode}"
            raise RuntimeError(f"{what}; the log ends:\n{process.output()[-5000:]}")
        time.sleep(0.05)
