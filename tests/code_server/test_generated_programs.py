"""The code server judges each test of 500 honest programs, of some twenty kinds, as plain Python does."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_server_process import OURS, ask, running
from generated_programs import KINDS, cases

from verl.code_server.walls import landlock_abi

SEED = 31
NUM_CASES = 500
LIMIT = 6.0  # seconds
# Each test runs in a process of its own with the program before it, as plain Python runs a file.
PLAIN_PYTHON = """
import json, os, sys
verdicts = []
for program, tests in json.load(sys.stdin):
    verdicts.append([])
    for test in tests:
        child = os.fork()
        if child == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            try:
                exec(compile(program + test, "<both>", "exec"), {"__name__": "__main__"})
            except BaseException:
                os._exit(1)
            os._exit(0)
        verdicts[-1].append(os.waitpid(child, 0)[1] == 0)
print(json.dumps(verdicts))
"""


def verdicts_of_plain_python(made: list[tuple[str, str, list[str]]]) -> list[list[bool]]:
    command = [sys.executable, "-I", "-c", PLAIN_PYTHON]
    rows = json.dumps([[program, tests] for _, program, tests in made])
    done = subprocess.run(command, input=rows, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_the_programs_of_a_seed_pass_and_fail_tests():
    made = cases(SEED, 2 * len(KINDS))
    assert made == cases(SEED, 2 * len(KINDS))
    verdicts = [verdict for of_case in verdicts_of_plain_python(made) for verdict in of_case]
    assert 0.1 < verdicts.count(False) / len(verdicts) < 0.4


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("sandbox", ["namespaces", "landlock"])
def test_each_test_of_an_honest_program_has_plain_pythons_verdict(sandbox):
    if sandbox == "landlock" and landlock_abi() < 6:
        pytest.skip(f"Landlock of version 6 is needed; this kernel has {landlock_abi()}")
    made = cases(SEED, NUM_CASES)
    wanted = verdicts_of_plain_python(made)
    with running([*OURS, "--sandbox", sandbox]) as (client, _), ThreadPoolExecutor(2) as pool:
        replies = list(pool.map(lambda case: ask(client, case[1], case[2], LIMIT), made))
    wrong = []
    for (name, program, tests), verdicts, reply in zip(made, wanted, replies, strict=True):
        for test, verdict, outcome in zip(tests, verdicts, reply["outcomes"], strict=True):
            is_same = (
                outcome == "passed" if verdict else outcome not in ("passed", "opaque_value", "judge_failed")
            )
            wrong += [] if is_same else [(name, program, test, verdict, outcome)]
    assert wrong == []
