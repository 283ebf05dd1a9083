from __future__ import annotations

import json
import time

import pytest

from verl.code_server.client import Results
from verl.environments import lcb, make
from verl.environments.lcb import PRELUDE, function_test, with_prelude
from verl.utils.errors import CouldNotVerify

STDIN = [{"testtype": "stdin", "input": f"{n}\n", "output": f"{n * n}\n"} for n in (3, -2, 10)]
FUNCTIONAL = [
    {"testtype": "functional", "input": given, "output": output, "metadata": {"func_name": "order"}}
    for given, output in (("[3, 1, 2]\n1", "[1, 2, 3]"), ("[5, 5]\n2", "[5, 5]"))
]


def make_env(tests, **config):
    return make("lcb", env_config=config, extras={"reward_spec": {"ground_truth": json.dumps(tests)}})


def score(program, tests, **config):
    output = make_env(tests, **config).step(f"I think.\n```python\n{program}\n```\nDone.")
    assert output["done"] and output["observations"] == []
    return output["reward"]


def test_the_last_block_counts_and_none_is_zero(monkeypatch):
    asked = []
    monkeypatch.setattr(
        lcb.CodeClient, "test", lambda _, program, *_rest: Results(asked.append(program) or [0], [])
    )
    assert make_env(STDIN).step("```python\na\n```\n```\nb\n```")["metadata"] == {"parsed_code": "b"}
    assert [program.splitlines()[-1] for program in asked] == ["b"]
    expected = {"observations": [], "reward": 0.0, "done": True, "metadata": {"parsed_code": None}}
    assert make_env(STDIN).step("print(9)") == expected


def test_imports_of_the_future_stay_first_and_free_classes_can_be_derived_from():
    program = with_prelude("from __future__ import annotations\nimport math\nx = np.zeros(3)")
    assert program.startswith("from __future__ import annotations\n") and "import numpy as np" in program
    assert "import numpy" not in with_prelude("x = 1") and "pandas" not in with_prelude("x = 1")
    compile(program, "program", "exec")
    own = "class LRU(OrderedDict):\n    __init__ = lambda self: OrderedDict.__init__(self)\nLRU()"
    exec(PRELUDE + own + "\nassert Counter is collections.Counter", {})


def test_a_functional_test_is_an_assert_on_plain_values():
    test = {"input": '"a\\nb"\n{"k": null}', "output": "true", "metadata": {"func_name": "f"}}
    assert function_test(test, in_class=True).startswith("found = Solution().f('a\\nb', {'k': None})\n")
    for value in ((1, 2), [1, 2]):
        text = function_test({"input": "1", "output": "[1, 2]", "metadata": {"func_name": "f"}}, False)
        exec(text, {"f": lambda _, value=value: value})


DAMAGED = [
    5,
    {"input": "1"},
    {"input": "1", "output": 1},
    {"testtype": "functional", "input": "1", "output": "2"},
    {"testtype": "functional", "input": "1", "output": "2", "metadata": {"func_name": None}},
]


@pytest.mark.parametrize("test", DAMAGED)
def test_a_test_that_can_not_be_run_is_refused_before_it_scores_zero(test):
    with pytest.raises(ValueError, match="in an lcb row; expected texts as input and output"):
        make_env([test, *STDIN])


@pytest.mark.slow
def test_programs_may_print_or_be_called_with_numpy_and_free_imports():
    main = "import sys\nif __name__ == '__main__':\n    n = int(sys.stdin.read())\n    print(n * n, end='')"
    assert score(main, STDIN) == 1 and score("print(9)", STDIN) == 0
    order = "def order(values, times):\n    return Counter(values) and np.sort(np.array(values)).tolist()"
    assert score(order, FUNCTIONAL) == 1 and score("def order(values, times):\n    return 1", FUNCTIONAL) == 0


FRAME = """
import sys
def answer():
    frame = sys._getframe()
    while frame is not None:
        for name in ("gt_out", "expected", "output", "want"):
            if name in frame.f_locals:
                return frame.f_locals[name]
        frame = frame.f_back
"""
EQUAL = """
class Equal(list):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "program, tests",
    [
        (FRAME + "print(answer())", STDIN),
        (FRAME + "def order(values, times):\n    return answer()", FUNCTIONAL),
        (EQUAL + "def order(values, times):\n    return Equal()", FUNCTIONAL),
        (EQUAL + "class Solution:\n    def order(self, values, times):\n        return Equal()", FUNCTIONAL),
        ("def order(values, times):\n    import os\n    os._exit(0)", FUNCTIONAL),
        ("import sys\nsys.exit(0)", STDIN),
        ("__builtins__.isinstance = lambda *a: True\ndef order(values, times):\n return 1", FUNCTIONAL),
    ],
    ids=["frame-stdin", "frame", "equal", "equal-method", "exit-function", "exit", "builtins"],
)
def test_cheats_earn_nothing(program, tests):
    try:
        assert score(program, tests) == 0
    except CouldNotVerify:  # an object that says that it equals the answer is no verdict
        assert "__eq__" in program


@pytest.mark.slow
def test_a_program_that_hangs_is_wrong_before_all_its_tests_have_hung(monkeypatch):
    monkeypatch.setattr(lcb, "BATCH_SECONDS", 1.0)
    started = time.monotonic()
    assert score("while True: pass", STDIN * 10, seconds=0.5) == 0
    assert time.monotonic() - started < 7.5
    assert score("n = int(input())\nprint(n * n)", STDIN * 3, seconds=0.5) == 1


def test_no_server_is_no_verdict():
    env = make_env(STDIN, code_api_url="http://127.0.0.1:9")
    env.client.queue_seconds = -100.0
    with pytest.raises(CouldNotVerify):
        env.step("```\nprint(1)\n```")


def test_mistakes_of_the_user_are_told():
    for ground_truth in ("[]", "{}", "no JSON"):
        with pytest.raises(ValueError, match="JSON"):
            make("lcb", extras={"reward_spec": {"ground_truth": ground_truth}})
