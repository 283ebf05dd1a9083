"""Several "nodes" on one Linux machine: network, mount, process and host-name namespaces.

    with NamespaceNodes(["alpha", "beta"], tmp_path) as nodes:
        server = nodes["alpha"].start([sys.executable, "-m", "http.server", "--bind", "10.77.0.1"])
        nodes["beta"].run(["curl", "http://alpha:8000"])
        nodes["alpha"].cut_off()      # as if its cable was pulled: its processes go on, nobody reaches them
        nodes["alpha"].reconnect()

Each node has its own address (10.77.0.1, 10.77.0.2, ...), loopback, host name, /etc/hosts with the names of
all, /tmp, /dev/shm and process ids; the file system is otherwise one, as a cluster's shared one. A switch (a
bridge in a namespace of its own) joins them; nothing leads to the machine's own network, so ports that are in
use there don't matter and nothing gets out.

A node lives as long as its first process, which ends when the pipe to us closes: leaving the `with` block, an
exception and even a SIGKILL of the test process all end every process of every node, and the kernel removes
the namespaces. Needs root: `missing()` says why it can't be done here.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
NETWORK = "10.77.0"
_NODE_FLAGS = ["--net", "--mount", "--uts", "--pid"]
# The first process of a node: sets the node up, says so, and waits for the end of its standard input. With
# SIGCHLD ignored the kernel buries the orphans that become its children.
_NODE_SETUP = """
set -e
name=$1 hosts=$2 tmp=$3 shm=$4
shift 4
hostname "$name"
mount --bind "$hosts" /etc/hosts
mount -t tmpfs -o size="$shm" tmpfs /dev/shm
for shared in "$@"; do
    mkdir -p "$tmp/${shared#/tmp/}"
    mount --bind "$shared" "$tmp/${shared#/tmp/}"
done
mount --rbind "$tmp" /tmp
ip link set lo up
trap "" CHLD
echo ready
exec cat >/dev/null
"""


_SWITCH_SETUP = """
set -e
ip link add bridge0 type bridge
ip link set bridge0 up
echo ready
exec cat >/dev/null
"""


@functools.cache
def missing() -> str | None:
    """Why nodes can't be made on this machine; None if they can. Tried, not guessed."""
    if not sys.platform.startswith("linux"):
        return "namespaces as nodes need Linux"
    if os.geteuid() != 0:
        return "namespaces as nodes need root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"namespaces as nodes need the program {program} (packages iproute2 and util-linux)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with NamespaceNodes(["probe"], Path(folder)):
                return None
        except (RuntimeError, subprocess.CalledProcessError) as error:
            return f"namespaces as nodes can't be made here: {error}"


class NodeProcess(subprocess.Popen):
    """A command on a node: `nsenter`, which ends with its child's status. Signals go to that child."""

    log: Path

    def send_signal(self, sig: int) -> None:
        """Send a signal to the command (not to the processes that it has started)."""
        deadline = time.monotonic() + 10
        while self.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                if children := psutil.Process(self.pid).children():
                    children[0].send_signal(sig)
                    return
            time.sleep(0.005)  # nsenter has not got there yet

    def output(self) -> str:
        """What the command has written so far."""
        return self.log.read_text(errors="replace")


class NamespaceNode:
    """One node. Made by `NamespaceNodes`."""

    def __init__(self, name: str, address: str, folder: Path, switch: int, pid: int) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self.pid = pid
        self._switch = switch
        self._count = itertools.count(1)

    def enter(self, command: Sequence[str | Path], cwd: str | Path = REPOSITORY) -> list[str]:
        """The command line that runs `command` on this node, in the folder `cwd`."""
        return enter_command(self.pid, command, cwd)

    def start(
        self,
        command: Sequence[str | Path],
        env: dict[str, str | None] | None = None,
        cwd: str | Path = REPOSITORY,
    ) -> NodeProcess:
        """Start a command. It is ended with the node, or by its handle. `env` comes on top of this process's
        environment; None takes a variable away."""
        log = self.folder / f"{next(self._count)}-{Path(command[0]).name}.log"
        with log.open("wb") as file:
            process = NodeProcess(
                self.enter(command, cwd),
                env=changed_environment(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        process.log = log
        return process

    def run(
        self,
        command: Sequence[str | Path],
        env: dict[str, str | None] | None = None,
        cwd: str | Path = REPOSITORY,
        timeout: float = 60,
    ) -> str:
        """Run a command to its end and return its output. RuntimeError with it if the command fails."""
        process = self.start(command, env, cwd)
        try:
            status = process.wait(timeout)
        finally:
            process.kill()
        if status != 0:
            raise RuntimeError(f"{command} on {self.name} ended with {status}:\n{process.output()}")
        return process.output()

    def cut_off(self) -> None:
        """Pull the cable: packets to and from the node are lost, its processes go on."""
        self._cable("down")

    def reconnect(self) -> None:
        """Put the cable back."""
        self._cable("up")

    def _cable(self, state: str) -> None:
        _ip(self._switch, "link", "set", f"to-{self.pid}", state)


class NamespaceNodes:
    """A group of nodes on one switch, by name or number; a `with` block that ends them all.

    `names`: host names, or a number for node1, node2, ... `folder` has their logs, /etc/hosts and /tmp
    (`folder/<name>/tmp`); all nodes see it at the same path, as everything outside of /tmp and `shared`.
    """

    def __init__(
        self, names: Sequence[str] | int, folder: Path, shared: Sequence[Path] = (), shm: str = "50%"
    ) -> None:
        self._names = [f"node{i + 1}" for i in range(names)] if isinstance(names, int) else list(names)
        self._folder = folder.resolve()
        self._shm = shm
        self._shared = [self._folder, REPOSITORY, Path(sys.prefix), *shared]
        self._holders: list[subprocess.Popen] = []
        self._nodes: dict[str, NamespaceNode] = {}

    def __enter__(self) -> NamespaceNodes:
        try:
            self._build()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __getitem__(self, which: str | int) -> NamespaceNode:
        return self._nodes[self._names[which] if isinstance(which, int) else which]

    def __iter__(self) -> Iterator[NamespaceNode]:
        return iter(self._nodes.values())

    def __len__(self) -> int:
        return len(self._nodes)

    def stop(self) -> None:
        """End every process of every node. A second call does nothing."""
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(timeout=20)
            except subprocess.TimeoutExpired:
                holder.kill()  # takes the node's first process along, and that the rest
                holder.wait()
        self._holders.clear()
        self._nodes.clear()

    def _build(self) -> None:
        addresses = {name: f"{NETWORK}.{i + 1}" for i, name in enumerate(self._names)}
        self._folder.mkdir(parents=True, exist_ok=True)
        hosts = self._folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        hosts.write_text("\n".join(lines) + "\n")
        switch = self._hold(["--net", "--pid"], _SWITCH_SETUP, [])
        for name, address in addresses.items():
            folder = self._folder / name
            (folder / "tmp").mkdir(parents=True, exist_ok=True)
            (folder / "tmp").chmod(0o1777)
            arguments = [name, str(hosts), str(folder / "tmp"), self._shm, *self._shared_below_tmp()]
            pid = self._hold([*_NODE_FLAGS, "--mount-proc"], _NODE_SETUP, arguments)
            cable = f"to-{pid}"
            _ip(switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            _ip(switch, "link", "set", cable, "master", "bridge0", "up")
            _ip(pid, "address", "add", f"{address}/24", "dev", "eth0")
            _ip(pid, "link", "set", "eth0", "up")
            self._nodes[name] = NamespaceNode(name, address, folder, switch, pid)

    def _shared_below_tmp(self) -> list[str]:
        """Folders that a /tmp of its own would hide from a node."""
        wanted = {str(path.resolve()) for path in self._shared}
        below = sorted(path for path in wanted if path.startswith("/tmp/"))
        return [path for path in below if not any(path.startswith(f"{other}/") for other in below)]

    def _hold(self, flags: list[str], script: str, arguments: list[str]) -> int:
        """Start the first process of new namespaces and return its process id, when it is ready."""
        holder = subprocess.Popen(
            ["unshare", *flags, "--fork", "--kill-child", "--", "sh", "-c", script, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a Ctrl-C is for us; we end the nodes
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        with holder.stdout, holder.stderr:
            if holder.stdout.readline() != "ready\n":
                raise RuntimeError(holder.stderr.read().strip() or f"unshare {' '.join(flags)} failed")
        (child,) = psutil.Process(holder.pid).children()
        return child.pid


def wait_until(condition: Callable[[], object], process: NodeProcess, timeout_seconds: float) -> None:
    """Wait until `condition` holds. RuntimeError if it does not in time, or if the process ends before."""
    started = time.monotonic()
    while not condition():
        late = time.monotonic() - started > timeout_seconds
        if process.poll() is not None or late:
            what = f"not within {timeout_seconds:.0f} s" if late else f"ended with {process.returncode}"
            raise RuntimeError(f"{what}; the log ends:\n{process.output()[-5000:]}")
        time.sleep(0.05)


def enter_command(pid: int, command: Sequence[str | Path], cwd: str | Path) -> list[str]:
    """The command line that runs `command` in the folder `cwd` of the node whose first process is `pid`."""
    change_folder = ["sh", "-c", 'cd "$0" && exec "$@"', str(cwd)]
    return ["nsenter", "--target", str(pid), *_NODE_FLAGS, "--", *change_folder, *map(str, command)]


def changed_environment(changes: dict[str, str | None]) -> dict[str, str]:
    """This process's environment with some variables set, or (None) taken away."""
    environment = {**os.environ, **{name: value for name, value in changes.items() if value is not None}}
    return {name: value for name, value in environment.items() if changes.get(name, "") is not None}


def _ip(pid: int, *arguments: str) -> None:
    """Run `ip` in the network namespace of a process."""
    command = ["nsenter", "--target", str(pid), "--net", "--", "ip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")
