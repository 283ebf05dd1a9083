"""What crosses between judge and prisoner, how tests arrive, and which outputs are equal."""

from __future__ import annotations

import array
import base64
import collections
import contextlib
import datetime
import json
import math
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.code_server.answers import MAX_TEST_BYTES, decode_tests, same_output
from verl.code_server.plain import modules_if_plain
from verl.code_server.wire import NotPlain, Torn, decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.decimals(allow_nan=False)
    | st.fractions()
)
KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.binary())
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=30,
)


@given(VALUES)
def test_a_plain_value_arrives_equal_and_with_its_types(value):
    arrived = decode(encode(value))
    assert arrived == value
    assert repr(arrived) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


def test_not_a_number_and_half_a_surrogate_pair_arrive():
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode("\ud800")) == "\ud800"


class Always(int):
    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize("value", [Always(3), [Always(3)], {"a": object()}, iter([]), lambda: 0, Always])
def test_an_object_of_an_own_class_never_crosses(value):
    with pytest.raises(NotPlain):
        encode(value)


Pair = collections.namedtuple("Pair", "x y")
Stack = type("Stack", (list,), {"push": list.append})


@pytest.mark.parametrize(
    "value",
    [datetime.date(2020, 2, 29), datetime.datetime(2020, 1, 1, 5), datetime.timedelta(1), datetime.time(3),
     slice(1, 2), ..., int, collections.Counter("aab"), collections.OrderedDict(a=1), array.array("i", [1]),
     collections.defaultdict(list, a=[1]), collections.deque([1], 5), Pair(1, [2]), list(range(200)),
     [1 << 70] * 200, [True] * 200],
    ids=str,
)  # fmt: skip
def test_what_tests_compare_with_arrives_as_it_was(value):
    arrived = decode(encode(value))
    assert arrived == value
    assert repr(arrived) == repr(value)


def test_a_subclass_without_operators_crosses_as_its_plain_type():
    arrived = decode(encode(Stack([1])))
    assert arrived == [1]
    assert type(arrived) is list


@given(st.text() | st.recursive(st.integers() | st.text(), st.lists).map(json.dumps))
def test_hostile_text_is_torn_or_plain_data_and_nothing_else(text):
    with contextlib.suppress(Torn):
        decode(text)


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[", '["m","eval","1"]', '["i","zz"]', "1e5", "NaN", "1" * 5000,
     "[" * 10**5,
     '["d",1]', '["s",["l"]]', '["h"]', '["h","x"]', '["q",1]', "[[]]", '["m","ndarray",["l"],"O"]'],
)  # fmt: skip
def test_what_is_no_message_is_torn(text):
    with pytest.raises(Torn):
        decode(text)


def pack(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_tests_arrive_in_each_form_of_open_instruct():
    tests = [{"input": "1\n", "output": "2\n"}]
    assert decode_tests(tests) == decode_tests(json.dumps(tests)) == decode_tests(pack(tests)) == tests
    assert decode_tests(None) == decode_tests("") == decode_tests([]) == []


class Evil:
    def __reduce__(self):
        return print, ("a pickle ran code",)


@pytest.mark.parametrize(
    "tests",
    [pack([Evil()]), pack(["x" * (MAX_TEST_BYTES + 1)]), pack({"no": "list"}), "no base64!", "{}", 5,
     base64.b64encode(zlib.compress(b"\x80\x04j\xff\xff\xff\x7f.")).decode()],
    ids=["code", "bomb", "no list", "text", "object", "number", "memo"],
)  # fmt: skip
def test_tests_that_are_no_plain_list_are_refused(tests, capsys):
    with pytest.raises(ValueError, match="tests"):
        decode_tests(tests)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [("1 2\n3\n", " 1 2 \n3", True), ("1.0 2", "1 2.00", True), ("1\n\n2", "1\n2", False), ("", "", True),
     ("a", "b", False), ("1e400", "1e400 ", True), ("NaN", "NaN", True),
     ("nan 1", "nan 1.0", False), ("1 2", "12", False)],
)  # fmt: skip
def test_outputs_are_compared_by_lines_then_by_decimals(output, expected, same):
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    "program",
    ["import os", "from typing import get_overloads", "from string import Formatter", "import random",
     "x = __builtins__", "def __getattr__(n): pass", "f.x = 1", "print(g.gi_frame)", "class C: pass",
     "type('C', (), {})", "open('x')", "'{0.__class__}'.format(1)", "str.format('{0.x}', 1)",
     "'x'.encode('idna')",
     "import sys\nsys.modules", "import sys\nm = sys", "import sys\nsys.stdin.x", "from . import math",
     "from math import *", "def f():\n  yield 1", "with f(): pass", "eval('1')", "getattr(f, 'x')", "del f.x",
     "def f():\n  import os", "import math as m\nm.x", "import math\nmath = 1", "(" * 999, "1 +"],
)  # fmt: skip
def test_a_program_that_might_leave_something_shares_no_process(program):
    assert modules_if_plain(program) is None


def test_a_program_of_plain_data_leaves_nothing():
    assert modules_if_plain(
        "import sys, math\nfrom typing import List, Optional\nfrom collections import deque\n"
        "input = sys.stdin.readline\ndef f(a: List[int], b: Optional[str] = None) -> int:\n"
        "  q = deque(a)\n  return max(q.popleft() for _ in a) + math.gcd(4, 6)\n"
        "if __name__ == '__main__':\n  print('{:.2f}'.format(f(list(map(int, input().split())))), end='')"
    )
