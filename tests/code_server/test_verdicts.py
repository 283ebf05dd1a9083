"""Verdicts of the code server as plain Python's, and none that a program has made itself."""

from __future__ import annotations

import json
import random
from pathlib import Path

import httpx
import pytest

from verl.code_server.client import own_server

pytestmark = [pytest.mark.slow, pytest.mark.alone]
FOLDER = Path(__file__).parent
# Programs that look for the expected value in the frames around them find it where the test runs with them.
READERS = ("frames", "frames_force", "frames_force_raise")
RUN_INSIDE = ("class W", "import os", "from unittest")


def lines_of(name: str) -> list:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


HONEST = lines_of("honest_programs.jsonl")
CHEATS = lines_of("cheating_programs.jsonl")


@pytest.fixture(scope="module")
def url():
    yield own_server().url
    own_server().close()


def outcomes_of(url: str, program: str, tests: list[str]) -> dict:
    body = {"program": program, "tests": tests, "max_execution_time": 8.0, "detail": True}
    return httpx.post(f"{url}/test_program", json=body, timeout=200).json()


@pytest.mark.parametrize("case", HONEST, ids=range(len(HONEST)))
def test_what_plain_python_passes_is_passed_or_not_judged(url, case):
    reply = outcomes_of(url, case["program"], case["tests"])
    failed = [row for row in zip(case["tests"], reply["outcomes"], strict=True) if row[1] != "passed"]
    assert failed == []


@pytest.mark.parametrize("case", CHEATS, ids=lambda case: case["name"])
def test_no_program_passes_without_the_value(url, case):
    secret = str(random.randrange(10**8, 10**9))
    tests = [test.replace("@S@", secret) for test in lines_of("cheated_tests.jsonl")]
    reply = outcomes_of(url, case["program"], tests)
    passed = [row for row in zip(tests, reply["outcomes"], strict=True) if row[1] == "passed"]
    if case["name"] in READERS:
        passed = [row for row in passed if not row[0].startswith(RUN_INSIDE)]
    assert passed == []


def test_a_verdict_says_where_it_was_made(url):
    program = "class V:\n  def __init__(s, x): s.x = x\n  def __eq__(s, o): return s.x == o.x\n"
    program += "def f(x): return x + 1"
    reply = outcomes_of(url, program, ["assert f(1) == 2", "assert V(1) == V(1)", "assert V(1) == V(2)"])
    assert reply["outcomes"] == ["passed", "passed", "failed"]
    assert reply["judged"] == ["outside", "inside", "inside"]
