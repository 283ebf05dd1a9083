"""The code server against programs that cheat or do harm: no pass, no effect, no delay for the others."""

from __future__ import annotations

import base64
import gc
import json
import pickle
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest
from attack_corpus import Attack, draw_numbers, read_attacks
from code_server_process import OURS, ask, running
from host_watch import HostWatch

pytestmark = [pytest.mark.slow, pytest.mark.alone]
NUMBERS = draw_numbers(time.time_ns())
HONEST = "def f(n): return sum(i * i for i in range(n))"


class Server(NamedTuple):
    client: httpx.Client
    pid: int
    host: HostWatch


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A warm server of each kind of wall; when its tests are done, the machine must be as it was."""
    host = HostWatch(tmp_path_factory.mktemp("host"), json.dumps(NUMBERS))
    secrets = {"CODE_TOKEN": host.token, "ANSWERS": json.dumps(NUMBERS)}
    log = tmp_path_factory.mktemp("log") / "server.log"
    try:
        command = [*OURS, "--sandbox", request.param, "--workers", "6"]  # most programs wait for their limit
        with running(command, secrets, log=log) as (client, pid):
            assert client.get("/health").json()["sandbox"] == request.param
            yield Server(client, pid, host)
        assert host.effects() == []
        assert host.token not in log.read_text(errors="replace")
    except AssertionError:
        if "NoWalls" in log.read_text(errors="replace"):
            pytest.skip(f"this machine can't build the walls of {request.param}")
        raise
    finally:
        host.close()


# These pass in plain Python as well, by what the test itself hands to the program or takes from it.
WEAK_TESTS = ("attributes_of_a_callback", "globals_of_an_object_of_the_test", "module_under_a_false_name")


def passes(server: Server, attack: Attack, limit: float) -> list[str]:
    """What the attack achieved: tests that passed, and replies that are none."""
    found = []
    for tests in attack.requests:
        try:
            reply = ask(server.client, attack.program, tests, limit, attack.stdio)
        except (AssertionError, httpx.HTTPError) as error:
            found.append(f"{attack.name}: {error!r}")
            continue
        if (
            len(reply["results"]) != len(tests)
            or len(reply["runtimes"]) != len(tests)
            or any(reply["results"])
        ):
            found.append(f"{attack.name}: {reply} for {tests}")
        if any(runtime != -1.0 for runtime in reply["runtimes"]):
            found.append(f"{attack.name}: a runtime without a pass {reply}")
    return found


def run_all(server: Server, kind: str, limit: float) -> list[str]:
    attacks = read_attacks(kind, NUMBERS, server.host.values(server.pid))
    with ThreadPoolExecutor(8) as pool:
        found = [
            line
            for lines in pool.map(lambda attack: passes(server, attack, limit), attacks)
            for line in lines
        ]
    assert ask(server.client, HONEST, ["assert f(4) == 14"])["results"] == [1]
    return found


def test_an_honest_program_that_knows_the_numbers_passes_all_the_tests_that_cheats_get(server):
    [usual] = [
        a for a in read_attacks("cheats", NUMBERS, server.host.values(1)) if a.name == "equal_to_everything"
    ]
    reply = ask(server.client, f"f = {NUMBERS}.__getitem__", usual.requests[0])
    assert reply["results"] == [1] * 9, reply
    reply = ask(server.client, f"def f(n): return {NUMBERS}[n]", usual.requests[0])
    assert reply["results"] == [1] * 9, reply


def test_no_cheat_passes(server):
    found = [line for line in run_all(server, "cheats", limit=0.5) if not line.startswith(WEAK_TESTS)]
    assert found == []


def test_no_hostile_program_has_an_effect(server):
    assert run_all(server, "hostile", limit=0.4) == []
    assert [effect for effect in server.host.effects() if "left behind" not in effect] == []


def test_bad_requests_are_refused_or_fail_and_never_run_anything_in_the_server(server):
    effect = str(server.host.folder / f"effect_{server.host.token}")

    class Harm:
        def __reduce__(self) -> tuple:
            return open, (effect, "w")

    def packed(data: bytes) -> str:
        return base64.b64encode(zlib.compress(data)).decode()

    tests: list[object] = [
        packed(pickle.dumps(Harm())), packed(pickle.dumps([Harm()])), packed(b"\0" * 2**29),
        packed(b"cos\nsystem\n(S'touch " + effect.encode() + b"'\ntR."), packed(b"(" * 10**6 + b"."),
        "!" * 99, packed(b"].q\0" + b"h\0h\0e" * 200 + b"."),
        packed(pickle.dumps(["assert f(1) == 0"]) * 2)[:-8], "[" * 10**5,
        packed(b"\x80\x04" + b"\x8d" + b"\xff" * 7 + b"\x7f."), 5, {"a": 1}, [[]], [None], [{}],
        "[1e999]", "\ud800", ["assert f(1)\0"], ["\ud800"], ["(" * 10**5], ["-" * 10**6 + "1"], [""],
        ["assert False"], ["1 / 0"], ["import os; os._exit(0)"], ["raise SystemExit(0)"],
        ["while True: pass"], ["f = 1; assert f == 2"], ["def test():\n  assert False\ntest()"],
        ["import sys; sys.exit()"], ["import os; os.kill(os.getpid(), 9)"],
    ]  # fmt: skip
    programs: list[object] = [
        None, 5, "\0", "\ud800", "(" * 10**5, "-" * 10**6 + "1", "x" * 2**26, "1 if 1 else " * 10**5,
        "x = " + "[" * 90 + "]" * 90 + ".a" * 10**5, "lambda:" * 10**5, "\xff\xfe", "#coding: x\nf=1",
        "f = 1" * 10**6,
    ]  # fmt: skip
    bodies = [{"program": HONEST, "tests": each} for each in tests]
    bodies += [{"program": each, "tests": ["assert f(1) == 5"]} for each in programs]
    for limit in (0, -1, "NaN", "1e999", None, [], 1e300, "x", True, -1e-300):
        bodies.append({"program": HONEST, "tests": ["assert f(1) == 5"], "max_execution_time": limit})
    refused: list[object] = []

    def post(body: dict) -> None:
        for path in ("/test_program", "/test_program_stdio"):
            text = json.dumps({"max_execution_time": 0.3, **body})
            reply = server.client.post(path, content=text, headers={"Content-Type": "application/json"})
            passed = (
                reply.status_code == 200
                and any(reply.json()["results"])
                and body["tests"] not in ([""], ["f = 1"])
            )
            if reply.status_code not in (200, 413, 422) or passed:
                refused.append((path, text[:300], reply.status_code, reply.text[:300]))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(post, bodies))
    assert refused == []
    headers = {"Content-Type": "application/json"}
    raws = [b"", b"{", b"[]", b"\xff", b"null", b"[" * 10**5, b'{"program": NaN}']
    for raw in (*raws, b'{"program":"","tests":[],"x":1e999}'):
        assert server.client.post("/test_program", content=raw, headers=headers).status_code in (
            200,
            413,
            422,
        ), raw
    assert ask(server.client, HONEST, ["assert f(4) == 14"])["results"] == [1]
    assert [e for e in server.host.effects() if "left behind" not in e] == []


@pytest.mark.parametrize("sandbox", ["namespaces", "landlock"])
def test_programs_beside_bombs_are_answered_within_their_limit_and_100_ms(sandbox):
    values = dict.fromkeys(("TOKEN", "DIR", "ANSWERS", "REPO", "PORT", "FREE", "PID", "VICTIM"), "1")
    names = ("fork_bomb", "memory_bomb", "memory_bomb_of_many", "fork_bomb_of_sessions")
    bombs = [attack for attack in read_attacks("hostile", NUMBERS, values) if attack.name in names]
    ended = threading.Event()
    limit = 0.4

    def bomb(client: httpx.Client, attack: Attack) -> None:
        while not ended.is_set():
            ask(client, attack.program, attack.requests[0], 1.0)

    def measure(client: httpx.Client, program: str, passed: int) -> list[float]:
        seconds = []
        for _ in range(25):
            start = time.perf_counter()
            reply = ask(client, program, ["assert f(4) == 14"], limit)
            seconds.append(time.perf_counter() - start)
            assert reply["results"] == [passed], reply
        return sorted(seconds)

    # a place for each: what waits in the queue is not what is measured here
    command = [*OURS, "--sandbox", sandbox, "--workers", str(len(bombs) + 2)]
    gc.collect()
    gc.freeze()  # a collection of all that pytest holds would stop this client for .3 s
    with running(command) as (client, _), ThreadPoolExecutor(len(bombs) + 2) as pool:
        bombing = [pool.submit(bomb, client, attack) for attack in bombs]
        time.sleep(0.5)
        try:
            honest = pool.submit(measure, client, HONEST, 1)
            endless = pool.submit(measure, client, "def f(n):\n    while True: pass", 0)
            slowest = [honest.result()[-1], endless.result()[-1]]
        finally:
            ended.set()
        for future in bombing:
            future.result()
    gc.unfreeze()
    assert max(slowest) <= limit + 0.1, slowest


def planted(host: HostWatch) -> Iterator[tuple[str, str]]:
    """Does what a program might do, one after the other: (what was done, a word of its report)."""
    (host.folder / "x").touch()
    yield "a new file", "changed"
    host.answers.write_text("0")
    yield "a changed file", "answers.json"
    mark = Path("/tmp") / f"effect_{host.token}"
    mark.touch()
    yield "a file in /tmp", str(mark)
    mark.unlink()
    script = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.fork() or time.sleep(20)"
    subprocess.run([sys.executable, "-S", "-c", script], timeout=10)
    yield "a daemon that lost its parent", "left behind"
    for child in psutil.Process().children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and script in child.cmdline():
            child.kill()
            child.wait(10)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{host.port}", timeout=0.1, trust_env=False)
    yield "a connection", "reached"
    host.victims[-1].send_signal(19)
    time.sleep(0.05)
    yield "a stopped process", "signalled"


def test_the_watch_sees_each_planted_effect(tmp_path):
    host = HostWatch(tmp_path, "{}")
    try:
        assert host.effects() == []
        for done, word in planted(host):
            assert any(word in effect for effect in host.effects()), (done, host.effects())
    finally:
        host.close()
