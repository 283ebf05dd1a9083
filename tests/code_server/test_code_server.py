"""The code server as the rest of the framework meets it: client, verdicts, walls, refusals."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import httpx
import pytest

from verl.code_server import client as client_module
from verl.code_server import walls
from verl.code_server.client import MALFORMED_REPLY_ERRORS, CodeClient, own_server, read_results
from verl.code_server.plain import modules_if_plain
from verl.utils.errors import CouldNotVerify

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def url():
    yield own_server().url
    own_server().close()


def ask(url: str, path: str, **body: object) -> httpx.Response:
    content = json.dumps({"max_execution_time": 2.0, "detail": True, **body})
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{url}/{path}", content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("program", "test", "outcome"),
    [
        ("def f(x): return x + 1", "assert f(1) == 2", "passed"),
        ("def f(x): return x + 1", "assert f(1) == 3", "failed"),
        (
            "class E:\n  def __eq__(s, o): return True\ndef f(x): return E()",
            "assert f(1) == 3",
            "opaque_value",
        ),
        ("def abs(x): return 0\ndef f(x): return 9", "assert abs(f(1) - 3) < 1", "failed"),
        ("def sum(a, b): return a + b", "assert sum(1, 2) == 3", "passed"),
        ("def f(x): x.sort()", "l = [2, 1]\nf(l)\nassert l == [1, 2]", "passed"),
        ("def f(x): x.clear(); return []", "l = [2, 1]\nassert f(l) == sorted(l)", "opaque_value"),
        ("def f(g): return g(2)", "assert f(lambda x: x * 2) == 4", "passed"),
        ("class P:\n  def __init__(s): s.x = 3", "assert P().x == 3", "passed"),
        ("class P:\n  def __eq__(s, o): return True", "assert P() == P()", "passed"),
        ("def f(): raise StopIteration", "assert all(map(lambda n: f(), [1]))", "opaque_value"),
        ("def f(g):\n  try: g(1)\n  except BaseException: pass", "def g(x): assert 0\nf(g)", "failed"),
        ("import os\ndef f(): os._exit(0)", "assert f() == 1", "crashed"),
        ("def f(): return 'x' * (50 << 20)", "assert f()", "passed"),
        ("def f(): return bytearray(10**10)", "assert f()", "memory"),
        ("1 +", "assert f()", "program_error"),
        ("def f(): pass", "while True: pass", "timeout"),
        ("import socket\ndef f(): socket.socket()", "f()", "error:PermissionError"),
    ],
)
def test_a_verdict_is_made_of_plain_data_outside_of_the_program(url, program, test, outcome):
    reply = ask(url, "test_program", program=program, tests=[test], max_execution_time=3.0).json()
    assert reply["outcomes"] == [outcome] and reply["results"] == [int(outcome == "passed")]
    assert (reply["runtimes"][0] >= 0) == (outcome == "passed")


def test_tests_do_not_see_each_other(url):
    program = "import os\nn = []\ndef f():\n  n.append(1)\n  open('x', 'a').write('a')\n"
    program += "  return len(n) + os.stat('x').st_size"
    assert (
        ask(url, "test_program", program=program, tests=["assert f() == 2"] * 3).json()["results"] == [1] * 3
    )


def test_a_test_leaves_nothing_to_the_tests_and_programs_after_it(url):
    forks = "import os\nif os.fork() == 0: pass\nassert f(1) == 1"
    folder = "import os\nos.mkdir('d')\nassert f(1) == 1"
    memory = "def g(): pass\nx = [0] * (35 * 10**6)\nassert f(1) == 1"
    setting = "import typing\ntyping.sys.setrecursionlimit(50)\nassert f(1) == 1"
    for tests in ([forks, "assert f(1) == 2"], [folder] * 2, [memory] * 2, [setting, "assert f(1) == 1"]) * 2:
        results = ask(url, "test_program", program="def f(x): return x", tests=tests).json()["results"]
        assert results == [1, int("2" not in tests[1])], tests


def test_after_a_test_whose_sandbox_is_ended_for_its_memory_the_next_one_runs(url):
    program = "import os, time\ndef f(n):\n  for _ in range(6 if n else 0):\n    if os.fork() == 0:\n"
    program += "      x = b'x' * (n << 20)\n      time.sleep(9)\n  time.sleep(9 if n else 0)\n  return 1"
    tests = ["assert f(150) == 1", "assert f(0) == 1"]
    reply = ask(url, "test_program", program=program, tests=tests, max_execution_time=6.0).json()
    assert reply["outcomes"] == ["memory", "passed"] and reply["seconds"] < 5


REMEMBER = {  # by what a program might keep from one test to the next
    "a list": "m = []\ndef f(x):\n  m.append(x)\n  return m[0]",
    "a default": "def f(x, m=[]):\n  m.append(x)\n  return m[0]",
    "an attribute": "def f(x):\n  f.m = getattr(f, 'm', x)\n  return f.m",
    "a method": "m = {}\ndef f(x):\n  return m.setdefault(0, x)",
    "a builtin": "def f(x):\n  return __builtins__.setdefault('m', x)",
    "a module": "import heapq\ndef f(x):\n  heapq.m = x or heapq.m\n  return heapq.m",
    "a cache": "from functools import cache\nm = [0]\n@cache\ndef g(n): return m[0]\n"
    "def f(x):\n  m[0] = x\n  return g(0)",
    "typing": "from typing import Dict\ndef f(x):\n  if x:\n    Dict[-0.0, x]\n    return x\n"
    "  return [n for n in range(99) if '-' in str(Dict[0.0, n])][0]",
    "the recursion limit": "import sys\ndef g(n):\n  try: return g(n + 1)\n"
    "  except RecursionError: return n\n"
    "def f(x):\n  n = g(0)\n  sys.setrecursionlimit(2000 + x)\n  return x or n",
    "a class": "from collections import Counter\ndef f(x):\n  Counter.m = x or Counter.m\n  return Counter.m",
    "a frame": "m = []\ng = (m for _ in [0])\ndef f(x):\n"
    "  return g.gi_frame.f_back.f_globals.setdefault('m', x) if g.gi_frame.f_back else x",
    "a format": "def f(x): return '{0.__globals__}'.format(f) if x else 0",
    "a random number": "import random\ndef f(x):\n  random.seed(x) if x else 0\n"
    "  same = random.random() == random.Random(77).random()\n  return x or 77 * same",
    "a precision": "from decimal import getcontext\ndef f(x):\n"
    "  if x: getcontext().prec = x\n  return getcontext().prec",
    "the digits of a number": "import sys\ndef f(x):\n  if x: sys.set_int_max_str_digits(0)\n"
    "  try: return x or 77 * (len(str(10 ** 5000)) > 1)\n  except ValueError: return 0",
    "an attribute of a file": "import sys\nclass A: pass\ndef f(x):\n  if x: sys.stdout.m = A\n"
    "  else:\n    try: sys.stdout.m\n    except AttributeError: return 0\n  return 77",
    "a compiled pattern": "import re\nm = []\nclass S(str):\n  def __hash__(s): return 7\n"
    "  def __eq__(s, o):\n    m.append(s[0])\n    return str(s) == str(o)\ndef f(x):\n"
    "  re.compile(S('b' if x else 'a'))\n  return x or 77 * ('b' in m)",
    "a generator's end that prints": "import sys\nm = []\ndef g(x):\n  try: yield m\n"
    "  finally:\n    print(77)\n    sys.stdout.m = x\ndef f(x):\n  i = g(x)\n  m.append(i)\n  next(i)\n"
    "  try: return x or sys.stdout.m\n  except AttributeError: return x",
    "an end that goes on": "m = []\ndef g(x):\n  try: yield m\n  finally: h(x)\ndef h(x):\n"
    "  i = g(x)\n  next(i)\n  i = [i]\n  i.append(i)\ndef f(x):\n  h(x)\n  return x",
    "an end": "m = []\ndef g(x):\n  try: yield m\n  finally: print(x)\ndef f(x):\n"
    "  i = g(x)\n  m.append(i)\n  next(i)\n  return x",
}


SHARED = {"a list", "a default", "a method", "a cache", "typing", "the recursion limit"}  # one process


@pytest.mark.parametrize("by", REMEMBER)
def test_a_test_knows_nothing_of_the_one_before_whether_they_share_a_process_or_not(url, by):
    for program in (REMEMBER[by], "import os\n" + REMEMBER[by]):
        tests = ["assert f(77) == 0", "assert f(77) == 77", "assert f(0) == 77"]
        assert ask(url, "test_program", program=program, tests=tests).json()["results"][2] == 0
        shown = program + "\nprint(f(int(input())))"
        tests = [{"input": f"{x}", "output": f"{wanted}"} for x, wanted in ((77, 0), (77, 77), (0, 77))]
        assert ask(url, "test_program_stdio", program=shown, tests=tests).json()["results"][2] == 0
    plain = modules_if_plain(REMEMBER[by]) is not None
    assert plain == (by in SHARED), "what is tested here is the shared process"


def remembering() -> dict[str, tuple[str, list[str]]]:
    """Programs of attacks/remember.txt, each with the tests that it wants to pass by what it has kept."""
    text = (Path(__file__).parent / "attacks" / "remember.txt").read_text(encoding="utf-8")
    blocks = [block.partition("\n") for block in re.split(r"^#: ", text, flags=re.M)[1:]]
    return {head: (program, BOTH_WAYS if "both ways" in head else COUNT) for head, _, program in blocks}


BOTH_WAYS = [
    'assert decode("Sy") == "xS"',
    'assert encode("xS") == "Sy"',
]  # the second asks what the first told
COUNT = ["assert f(1) == 5", "assert f(1) == 2", "assert f(1) == 3"]  # f counts the tests
REMEMBERING = remembering()


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_program_that_remembers_a_test_passes_no_other(url, name):
    program, tests = REMEMBERING[name]
    reply = ask(url, "test_program", program=program, tests=tests, max_execution_time=1.0).json()
    assert not any(reply["results"]), reply


def test_a_codec_is_there_in_each_test_of_a_program_that_shares_a_process(url):
    program = "def f(b): return str(b, 'cp037')"
    assert modules_if_plain(program) == []
    tests = ["assert f(bytes([0x51])) == 'é'"] * 3
    assert ask(url, "test_program", program=program, tests=tests).json()["results"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("program", "stdin", "output"),
    [
        ("print(repr(sys.stdin.read()))", "a\r\nb\r", "'a\\r\\nb\\r'"),
        ("print(sys.stdin.buffer.read().split()[1])", "1 2", "b'2'"),
        ("print('\\udc80', file=sys.stderr)\nprint(1)", "", "1"),
        ("print(sys.stdin.fileno(), sys.stdin.buffer.peek(1))", "a", "0 b'a'"),
        ("def f(n): return n and 1 + f(n - 1)\nprint(f(980))", "", "980"),
        ("try: sys.stdin.write('a')\nexcept OSError: print(1)", "", "1"),
        ("print(str(sys.stdin.buffer.read(), 'cp037'))", "Q", "é"),
    ],
)
def test_a_program_prints_the_same_whether_its_tests_share_a_process_or_not(url, program, stdin, output):
    for first in ("import sys", "import sys, os"):
        tests = [{"input": stdin, "output": output}] * 3
        body = {"program": f"{first}\n{program}", "tests": tests}
        assert ask(url, "test_program_stdio", **body).json()["results"] == [1, 1, 1]


MIXED = """
import sys
def f(x):
    if x == 1: return 1 // 0
    if x == 2: sys.exit()
    if x == 3: return bytes(10**10)
    if x == 4: return "x" * (1 << 20)
    if x == 5:
        while True: pass
    return sorted(sys.stdin.read().split()) and x if x > 90 else x
"""


def test_a_shared_process_gives_the_outcomes_of_separate_ones(url):
    order = [7, 1, 8, 2, 9, 3, 6, 4, 8, 5, 7, 7]
    tests = [f"assert f({x}) == {x}" for x in order]
    stdio = [{"input": f"{x}\nb a", "output": f"{x}"} for x in order]
    printed = "\nprint(f(int(input('')))); print(end='')"
    for path, given, last in (("", tests, ""), ("_stdio", stdio, printed)):
        programs = (MIXED + last, "import os\n" + MIXED + last)
        bodies = [{"program": program, "tests": given, "max_execution_time": 0.5} for program in programs]
        outcomes = [ask(url, f"test_program{path}", **body).json()["outcomes"] for body in bodies]
        assert outcomes[0] == outcomes[1] and outcomes[0].count("passed") >= 6, outcomes


def test_numpy_half_made_in_a_deep_recursion_spoils_no_later_program(url):
    bad = "import numpy\nclass P:\n  def __getitem__(s, g):\n    return 1\n"
    bad += "def f(g, n):\n  class Q:\n    def __getitem__(s, i):\n      Q.n += 1\n"
    bad += "      return g(s) if Q.n < n else g(numpy.zeros(1))\n    n = 0\n  return g(Q())"
    good = "import numpy\ndef f(x): return numpy.array(x) + 1"
    for _ in range(4):
        ask(url, "test_program", program=bad, tests=["f(lambda x: x[0], 115)"])
        test = "assert f([1, 2]).tolist() == [2, 3]"
        reply = ask(url, "test_program", program=good, tests=[test], max_execution_time=8.0).json()
        assert reply["outcomes"] == ["passed"]


def test_standard_output_is_compared_outside(url):
    pairs = [("1\n", "2"), ("2", "3.0"), ("3", "5")]
    tests = [*({"input": given, "output": wanted} for given, wanted in pairs), 7]
    reply = ask(url, "test_program_stdio", program="print(int(input()) + 1)", tests=tests).json()
    assert reply["outcomes"] == ["passed", "passed", "failed", "error:TypeError"]


def test_the_reply_is_open_instructs_unless_more_is_asked_for(url):
    body = {"program": "def f(): return 1", "tests": '["assert f() == 1"]'}
    assert set(httpx.post(f"{url}/test_program", json=body).json()) == {"results", "runtimes"}
    assert httpx.get(f"{url}/health").json()["status"] == "healthy"


@pytest.mark.parametrize(
    ("body", "status"),
    [({"program": 5, "tests": []}, 422), ({"program": "", "tests": "no list"}, 422), ({"tests": []}, 422),
     ({"program": "", "tests": [], "max_execution_time": -1}, 422),
     ({"program": "\ud800", "tests": ["f()"]}, 200),
     ({"program": "x" * (65 << 20), "tests": []}, 413)],
    ids=["program", "tests", "none", "limit", "surrogate", "large"],
)  # fmt: skip
def test_a_bad_request_is_refused_and_never_an_error_of_the_server(url, body, status):
    assert ask(url, "test_program", **body).status_code == status


def test_a_client_runs_and_tests_and_pickles(url):
    client = pickle.loads(pickle.dumps(CodeClient(url)))
    results = client.test("def f(): return 1", ["assert f() == 1", "assert f() == 2"], limit=1.0)
    assert results.passed == [1, 0] and results.seconds[0] >= 0 and results.seconds[1] == -1.0
    assert client.run("print(input() * 2)", "ab", 1.0) == ("abab\n", "passed")
    assert client.run("print(1)\n1 / 0", "", 1.0) == (
        "1\nZeroDivisionError: division by zero\n",
        "program_error",
    )


def test_a_program_can_not_take_the_room_that_all_pipes_of_a_user_share(url):
    program = "import fcntl, os\ntry:\n    print(fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20))\n"
    program += "except OSError as error:\n    print(error.errno)"
    assert CodeClient(url).run(program, "", 20.0) == ("1\n", "passed")


def test_a_server_that_is_not_there_is_could_not_verify_and_no_zero():
    client = CodeClient("http://127.0.0.1:9/test_program", queue_seconds=0.3)
    with pytest.raises(CouldNotVerify):
        client.test("def f(): pass", ["f()"], stdio=False, limit=0.1)


def test_a_server_that_dies_is_replaced():
    first = own_server()
    first.process.kill()
    first.process.wait()
    assert CodeClient(None).test("def f(): return 1", ["assert f() == 1"]).passed == [1]
    own_server().close()
    assert client_module._own is not None


@pytest.mark.parametrize(
    "reply",
    [None, [], {}, {"results": [1], "runtimes": []}, {"results": [2], "runtimes": [0.1]},
     {"results": [1, 1], "runtimes": [0, 0]},
     {"results": [1], "runtimes": [float("nan")]}, {"results": ["1"], "runtimes": [0.1]}],
)  # fmt: skip
def test_a_torn_reply_is_none(reply):
    with pytest.raises(MALFORMED_REPLY_ERRORS):
        read_results(reply, 1)


def test_without_walls_the_server_refuses_with_what_to_do(monkeypatch):
    monkeypatch.setattr(walls, "find_bubblewrap", lambda: "/bin/false")
    monkeypatch.setattr(walls, "landlock_abi", lambda: 3)
    with pytest.raises(walls.NoWalls, match="sysctl") as refusal:
        walls.choose_walls("auto", walls.Limits())
    assert "found version 3, expected 6" in str(refusal.value)
