"""Programming problems in LiveCodeBench's form: one turn, whose last code block must pass all tests.

The row's `reward_spec.ground_truth` is JSON text of the tests:

    [{"testtype": "stdin", "input": "3\\n", "output": "9\\n"}, ...]
    [{"testtype": "functional", "input": "[1, 2]\\n3", "output": "[1]", "metadata": {"func_name": "f"}}, ...]

The input of a functional test has one JSON value for each argument, each on a line of its own. The function
is defined at the top level of the program, or in a class `Solution`. The reward is 1 or 0. `env_config`:
{"seconds": 6, for each test}.

The program runs on the code server of `verifiers.code.api_url`. It sees inputs only. The results are compared
outside of its process.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from verl.code_server.client import CodeClient
from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, gold_answer

# The time that the tests of one request may take. A program that hangs in each test is known by then.
BATCH_SECONDS = 30.0

_BLOCK = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)
# The modules that solutions on programming sites need not import. Slow ones are imported only if the program
# names them. typing comes first because its Counter and OrderedDict are no classes to derive from: those of
# collections replace them.
_WHOLE = ("typing", "bisect", "collections", "copy", "functools", "heapq", "itertools", "random", "string")
PRELUDE = "".join(f"from {module} import *\n" for module in _WHOLE)
PRELUDE += """\
from math import atan2, ceil, comb, factorial, floor, gcd, inf, isqrt, log, log2, log10, pi, prod, sqrt
from operator import iand, itemgetter, or_, sub, xor
from os.path import commonprefix
from re import search as re_search
from time import time
import bisect, collections, copy, datetime, functools, heapq, io, itertools, math, operator, os, random, re
import string, sys
"""
_SLOW_IMPORTS = {"np.": "import numpy as np\n", "pd.": "import pandas as pd\n"}
_FUTURE = re.compile(r"^from __future__ import .*\n", re.MULTILINE)


class LCBEnv(BaseTextEnv):
    """One programming problem."""

    counts_turns = stateless = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        text = gold_answer(extras)
        self.seconds = float(config.get("seconds") or 6)
        self.client = CodeClient(config.get("code_api_url"))
        try:
            self.tests = json.loads(text)
        except (ValueError, TypeError):
            self.tests = None
        if not isinstance(self.tests, list) or not self.tests:
            raise ValueError(f"Found {text!r:.200} in an lcb row; expected JSON text of a list of tests.")
        first = self.tests[0]
        self.is_functional = isinstance(first, Mapping) and first.get("testtype") == "functional"
        for test in self.tests:
            content = test if isinstance(test, Mapping) else {}
            are_texts = all(isinstance(content.get(name), str) for name in ("input", "output"))
            metadata = content.get("metadata")
            function = metadata.get("func_name") if isinstance(metadata, Mapping) else None
            if not are_texts or (self.is_functional and not isinstance(function, str)):
                raise ValueError(
                    f"Found the test {test!r:.200} in an lcb row; expected texts as input and output, and "
                    "for functional tests the name of the function in metadata.func_name."
                )

    def step(self, action: str) -> BaseTextEnvStepOutput:
        blocks = _BLOCK.findall(action)
        code = blocks[-1].strip() if blocks else None
        reward = float(code is not None and self._passes(code))
        metadata = {"parsed_code": code}
        return {"observations": [], "reward": reward, "done": True, "metadata": metadata}

    def _passes(self, code: str) -> bool:
        program = with_prelude(code)
        in_class = "class Solution" in code
        stdio = not self.is_functional
        size = max(1, int(BATCH_SECONDS / self.seconds))
        for first in range(0, len(self.tests), size):
            tests: list[Any] = self.tests[first : first + size]
            if stdio:
                tests = [{name: test[name] for name in ("input", "output")} for test in tests]
            else:
                tests = [function_test(test, in_class) for test in tests]
            if not all(self.client.test(program, tests, stdio, self.seconds).passed):
                return False
        return True


def with_prelude(code: str) -> str:
    """Return the program with the imports that programming sites provide."""
    future = "".join(_FUTURE.findall(code))
    slow = "".join(line for name, line in _SLOW_IMPORTS.items() if name in code and line not in code)
    return f"{future}{PRELUDE}{slow}\n{_FUTURE.sub('', code)}"


def function_test(test: Mapping[str, Any], in_class: bool) -> str:
    """Return an assert that calls the program's function.

    A tuple counts as a list, because JSON has no tuples.
    """
    name = test["metadata"]["func_name"]
    arguments = ", ".join(repr(json.loads(line)) for line in test["input"].split("\n"))
    expected = json.loads(test["output"])
    return (
        f"found = {'Solution().' if in_class else ''}{name}({arguments})\n"
        f"assert (list(found) if isinstance(found, tuple) else found) == {expected!r}"
    )
