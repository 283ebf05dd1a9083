"""Shows that a run on two nodes survives the loss of one: named in time, and on to its end by itself.

    python scripts/check_node_loss.py [--seed N] [--steps N] [--seconds-away 20] [--compare] [key=value ...]

Two "nodes" are made on this machine (network namespaces, as root): a Ray cluster over them by
`scripts/ray_node.sh`, a retrieval server on the first, and `train_grpo.sh` on the microworld with one
training process on each. At a random moment of the run the second node's cable is pulled. Checked are: the
loss is named within 60 seconds (rank, node, cause); after the cable is back the node joins again and the run
goes on from its last checkpoint; it ends with status 0, each step once. With `--compare` an undisturbed run
goes first, and all numbers of the two must be equal, bit by bit (times and `ROUNDED` left out). Exit status 0
means that all of it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cluster")]
from namespace_nodes import NamespaceNode, NamespaceNodes, NodeProcess, missing  # noqa: E402

from scripts.check_resume import TIMES, compare  # noqa: E402

SECONDS_TO_NAME = 60.0
# The engine's log-probs are rounded (1e-6) by which trajectories it happens to generate together.
ROUNDED = ("rollout_corr/",)
_PORT_OF_RAY, _PORT_OF_SEARCH = 6379, 8000
_OBJECT_STORE = "--object-store-memory=200000000"


class TwoNodes:
    """Two nodes with a Ray cluster and a retrieval server, while the `with` block runs.

    Args:
        folder: for everything that is written; all nodes see it.
        corpus: what the server serves, a jsonl file inside of `folder`.
        variables: more environment variables for the Ray nodes.
    """

    def __init__(self, folder: Path, corpus: Path, variables: dict[str, str] | None = None) -> None:
        self.folder, self.corpus = folder, corpus
        self.namespaces = NamespaceNodes(2, folder)
        self.started: list[NodeProcess] = []
        self.variables: dict[str, str | None] = {
            "VIRTUAL_ENV": sys.prefix,  # this Python as it is: nothing is installed
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_ADDRESS": None,
            **(variables or {}),
        }

    def __enter__(self) -> TwoNodes:
        self.namespaces.__enter__()
        try:
            self._start()
        except BaseException:
            self.namespaces.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """The training ends before the nodes it runs on, those before their network."""
        try:
            for process in reversed(self.started):
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        finally:
            self.namespaces.stop()

    @property
    def head(self) -> NamespaceNode:
        return self.namespaces[0]

    @property
    def worker(self) -> NamespaceNode:
        return self.namespaces[1]

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:{_PORT_OF_RAY}"

    @property
    def url(self) -> str:
        return f"http://{self.head.address}:{_PORT_OF_SEARCH}/retrieve"

    def start(self, node: NamespaceNode, command: list[str | Path], **variables: str) -> NodeProcess:
        """Starts a command on a node; it is ended with the block."""
        self.started.append(node.start(command, {**self.variables, **variables}))
        return self.started[-1]

    def start_training(self, command: list[str | Path], **variables: str) -> NodeProcess:
        """Starts a run's driver on the head's node."""
        return self.start(
            self.head, command, RAY_ADDRESS=self.ray_address, RETRIEVER_URL=self.url, **variables
        )

    def _start(self) -> None:
        server = self.start(
            self.head,
            ["bash", "retrieval_launch.sh", "--corpus_path", self.corpus, "--host", self.head.address]
            + ["--port", str(_PORT_OF_SEARCH)],
        )
        node = ["bash", "scripts/ray_node.sh"]
        own = ["--num-cpus=1", _OBJECT_STORE]
        head = self.start(self.head, [*node, "head", "--address", self.head.address, *own])
        worker = self.start(
            self.worker, [*node, "worker", "--head", self.ray_address, "--address", self.worker.address, *own]
        )
        for process, sign in (
            (head, "Ray runtime started"),
            (worker, "Ray runtime started"),
            (server, "retrieval server on"),
        ):
            wait_until(lambda process=process, sign=sign: sign in process.output(), process, 300)


def wait_until(condition: Callable[[], object], process: NodeProcess, timeout_seconds: float) -> float:
    """Until `condition` holds; returns the seconds it took. It is an error when the process ends before."""
    started = time.monotonic()
    while not condition():
        if process.poll() is not None:
            raise RuntimeError(f"ended with status {process.returncode}; its log ends:\n{end_of(process)}")
        if time.monotonic() - started > timeout_seconds:
            raise RuntimeError(f"not within {timeout_seconds:.0f} s; the log ends:\n{end_of(process)}")
        time.sleep(0.05)
    return time.monotonic() - started


def end_of(process: NodeProcess) -> str:
    return process.output()[-5000:]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's `metrics.jsonl` so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def done_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in metrics_of(run_dir) if line["step"]]


def lose_a_node(nodes: TwoNodes, process: NodeProcess, seconds_away: float) -> str:
    """Pulls the second node's cable until its loss was named and `seconds_away` have passed.

    Returns:
        The line that named it.
    """
    before = len(process.output())
    nodes.worker.cut_off()
    started = time.monotonic()
    sign = "its node is lost"
    seconds = wait_until(lambda: sign in process.output()[before:], process, SECONDS_TO_NAME)
    print(f"named {seconds:.1f} s after the cable was pulled", flush=True)
    time.sleep(max(0.0, seconds_away - seconds))
    nodes.worker.reconnect()
    print(f"the cable is back after {time.monotonic() - started:.1f} s", flush=True)
    return next(line for line in process.output()[before:].splitlines() if sign in line)


def check(holds: bool, what: str, process: NodeProcess | None = None) -> None:
    if not holds:
        sys.exit(f"FAILED: {what}" + (f"; the log ends:\n{end_of(process)}" if process else ""))
    print(f"ok: {what}", flush=True)


def train(nodes: TwoNodes, world: Path, run_dir: Path, options: argparse.Namespace) -> NodeProcess:
    """The documented command on the driver's node."""
    settings = [
        f"trainer.default_local_dir={run_dir}",
        f"trainer.total_training_steps={options.steps}",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.save_freq=2",
        "trainer.max_restarts=3",
        "trainer.progress=plain",
    ]
    return nodes.start_training(
        ["bash", "train_grpo.sh", *settings, *options.overrides],
        DATA_DIR=str(world),
        EXPERIMENT_NAME="node-loss",
        SEED=str(options.seed),
    )


def check_run(nodes: TwoNodes, world: Path, folder: Path, options: argparse.Namespace) -> None:
    """One run that loses a node at a random moment."""
    run_dir = folder / "disturbed"
    process = train(nodes, world, run_dir, options)
    moments = random.Random(options.cut_seed)
    step = moments.randrange(2, max(3, options.steps - 1))
    wait_until(lambda: step in done_steps(run_dir), process, 600)
    delay = moments.uniform(0.0, metrics_of(run_dir)[-1]["timing_s/step"])
    time.sleep(delay)
    print(f"pulling the cable {delay:.1f} s after the end of step {step}", flush=True)
    line = lose_a_node(nodes, process, options.seconds_away)
    print(f"  {line}")
    parts = ("rank ", nodes.worker.name, nodes.worker.address, "pid ")
    check(all(part in line for part in parts), "the loss was named in time, with rank, node and process")
    status = process.wait(600)
    for line in process.output().splitlines():
        if line.startswith(("restart ", "the Ray cluster lacks", "resumed from")):
            print(f"  {line}")
    check(status == 0, "the run went on by itself to its end", process)
    records = [json.loads(line) for line in (run_dir / "restarts.jsonl").read_text().splitlines()]
    steps = done_steps(run_dir)
    check(steps == list(range(1, options.steps + 1)), f"{len(steps)} steps, each once")
    check(len(records) == 1, f"one restart, from step {records[0]['from_step']}")


@contextlib.contextmanager
def two_nodes_and_a_world(seed: int) -> Iterator[tuple[TwoNodes, Path, Path]]:
    """(nodes, the world's folder, a folder for runs)."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        world = folder / "world"
        command = [sys.executable, "-m", "data_prep.microworld", "--seed", str(seed), "--out", str(world)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        with TwoNodes(folder, world / "corpus.jsonl") as nodes:
            yield nodes, world, folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of world and run")
    parser.add_argument("--cut-seed", type=int, help="seed of the moment of the loss; default: random")
    parser.add_argument("--steps", type=int, default=10, help="training steps")
    parser.add_argument(
        "--seconds-away", type=float, default=20.0, help="how long the node is cut off, at least"
    )
    parser.add_argument("--compare", action="store_true", help="with an undisturbed run, number by number")
    options, options.overrides = parser.parse_known_args()
    if unknown := [text for text in options.overrides if "=" not in text]:
        parser.error(f"expected key=value, found {' '.join(unknown)}")
    if (why := missing()) is not None:
        sys.exit(why)
    if options.cut_seed is None:
        options.cut_seed = random.SystemRandom().randrange(10**6)
    print(f"cut seed {options.cut_seed}", flush=True)
    with two_nodes_and_a_world(options.seed) as (nodes, world, folder):
        if options.compare:
            process = train(nodes, world, folder / "undisturbed", options)
            check(process.wait(1200) == 0, "undisturbed run", process)
        check_run(nodes, world, folder, options)
        if options.compare:
            differing = compare(folder / "undisturbed", folder / "disturbed", (*TIMES, *ROUNDED))
            check(differing == 0, "all numbers are those of the undisturbed run")


if __name__ == "__main__":
    main()
