"""Which programs leave nothing behind, and that what they get hold of is their own or can't be changed."""

from __future__ import annotations

import importlib
import types
import warnings
from typing import Any

import pytest

from verl.code_server.plain import FREE, HIDDEN, modules_if_plain


@pytest.mark.parametrize(
    "program",
    ["import os", "from typing import get_overloads", "from string import Formatter", "x = __builtins__",
     "def __getattr__(n): pass", "print(g.gi_frame)", "type('C', (), {})", "open('x')",
     "'{0.__class__}'.format(1)", "str.format('{0.x}', 1)", "'x'.encode('idna')",
     "s = 'x'.encode\ns('idna')", "import sys\nsys.modules", "import sys\nm = sys",
     "import sys\nsys.stdout = 1", "from . import math", "from os import *",
     "from typing import *\noverload(f)", "eval('1')", "getattr(f, 'x')", "def f():\n  import os",
     "import math as m\nm.x", "import math\nmath = 1", "(" * 999, "1 +",
     "from collections import Counter\nCounter.m = 1", "from collections import Counter\nx = [Counter]",
     "from collections import Counter as C\nf(C)", "import heapq\nheapq.m = 1",
     "import heapq\nf(heapq.merge)", "from typing import List\nList._name = 1",
     "from typing import Callable\nCallable[[int], int].m = 1",
     "from typing import Union\nfrom collections import Counter\nf(Union[Counter])",
     "from collections import Counter\nclass A(Counter): pass", "from enum import Enum\nEnum('A', {})",
     "from collections import Counter\ndef f(x: a[Counter]): pass", "import re\nre.I.m = 1",
     "from collections import Counter\ndef f(x: a | Counter): pass", "f(type(x))", "y = x.__class__",
     "from collections import Counter\ndef f(x: (y := Counter)): pass", "type(x) == E()",
     "type(type(x))('C', (), {})", "from collections import Counter\nmatch x:\n  case Counter(): pass",
     "class A(metaclass=M): pass", "from dataclasses import field\nfield().default.m = 1", "C.mro()",
     "class A(type): pass",
     "from functools import lru_cache\nlru_cache(f).cache_info()._field_defaults['m'] = 1",
     "C.register(int)", "from typing import Optional\nOptional[int]._getitem.m = 1",
     "match e:\n  case A(gi_frame=f): pass", "class A:\n  def __del__(s): pass",
     "class A:\n  def __getattr__(s, n): pass", "s = super", "x.__init__",
     "class A:\n  def __init_subclass__(c): pass", "class A:\n  __class__ = int", "x.__dict__",
     "f.__globals__", "class A:\n  __match_args__ = ('gi_frame',)",
     "from datetime import datetime\ndatetime.strptime(a, b)", "import operator\noperator.attrgetter('x')",
     "async def f(): pass", "E._member_map_", "x.__class__ = C"],
)  # fmt: skip
def test_a_program_that_might_leave_something_shares_no_process(program):
    assert modules_if_plain(program) is None


SOLUTION = """
import collections, heapq, random, re, sys
from abc import ABC, abstractmethod
from collections import Counter, namedtuple
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Callable, Dict, List, NamedTuple, Optional
Graph = Dict[str, List[Counter]]
class Node(ABC):
    def __init__(self, key: int, next: Optional["Node"] = None):
        super().__init__()
        self.key, self.next, self._done = key, next, False
    def __eq__(self, other): return type(self) is type(other) and self.key == other.key
    def __repr__(self): return f"{self.__class__.__name__}({self.key})"
@dataclass(order=True)
class Solution:
    tags: list = field(default_factory=list)
    def solve(self, a: List[int], key: Callable[[int], Counter] = None) -> Dict[str, Counter]:
        @lru_cache(maxsize=None)
        def fib(n: int) -> int:
            nonlocal best
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        best, seen = 0, collections.Counter(a)
        heapq.heapify(heap := [Node(x) for x in a])
        heap[0].next = None
        random.seed(1); re.findall(r"a", "A"); del seen[1]
        match a:
            case [x, *_] if isinstance(x, (int, float)) or type(x) in (int, float): yield x
            case {"k": Node(key=1)}: yield from [1]
        return sys.stdin.buffer.read().split()
"""


def test_usual_classes_and_modules_leave_nothing():
    assert modules_if_plain(SOLUTION)
    assert modules_if_plain(
        "import sys, math\nfrom typing import *\nfrom collections import *\n"
        "input = sys.stdin.readline\ndef f(a: List[int], b: Optional[str] = None) -> int:\n"
        "  q = deque(a)\n  return max(q.popleft() for _ in Counter(a)) + math.gcd(4, 6)\n"
        "if __name__ == '__main__':\n  print('{:.2f}'.format(f(list(map(int, input().split())))), end='')"
    ) == ["collections", "math", "sys", "typing"]


IN_HAND = """
from abc import *; from collections import *; from contextlib import *; from dataclasses import *
from enum import Enum, IntEnum; from functools import *; from typing import *
import array, datetime, decimal, fractions, io, itertools, json, operator, random, re
T = TypeVar("T")
class A(ABC): pass
class E(Enum): X = 1
class I(IntEnum): X = 1
class N(NamedTuple): x: int
P = namedtuple("P", "x")
@dataclass
class D: x: int = field(default=1)
def gen(): yield 1
@lru_cache
def cached(x): return x
@total_ordering
class K:
    p, q = property(lambda self: 1), cached_property(lambda self: 1)
    __lt__ = __eq__ = lambda self, other: True
objects = [
    A, A(), E, E.X, I, I.X, N, N(1), P, P(1), D, D(), gen, gen(), cached, K, K(), field(), T, List[int],
    Dict[str, int], Optional[int], Tuple[int, ...], Counter(), Counter("ab").items(), OrderedDict(), deque(),
    defaultdict(int), fractions.Fraction(1, 2), decimal.Decimal(1), decimal.localcontext(),
    datetime.datetime.now(), datetime.date.today(), datetime.timedelta(1), datetime.timezone.utc,
    random.Random(1), random.randint, re.compile("a"), re.match("a", "a"), io.TextIOWrapper(io.BytesIO()),
    itertools.count(), partial(int), cmp_to_key(int), cached_property(gen), property(gen), staticmethod(gen),
    super(K, K()), super(K, K), ValueError(1), json.JSONDecodeError("", "", 0), AttributeError("x", obj=[]),
    NewType("Q", int), suppress(KeyError), operator.itemgetter(1), lru_cache(None), dataclass(),
    cached.cache_info(), gen().close, K.p, 1, 1.0, "", b"", (), None, print, int, zip(), object(),
]
"""


def takes_attributes(value: Any) -> bool:
    if isinstance(value, types.ModuleType | types.FrameType | types.CodeType | list | dict | set | bytearray):
        return True
    try:
        value.left_behind = 1
    except (AttributeError, TypeError):
        return False
    del value.left_behind
    return True


def shared_ways(one: Any, other: Any, path: str, depth: int) -> list[str]:
    """Ways by attributes from objects of two programs to one that takes attributes: it is Python's then."""
    found = [path] if one is other and takes_attributes(one) else []
    if depth and type(one) is type(other) and not isinstance(one, str | int | float | bytes):
        for name in dir(one):
            if name in HIDDEN or (name[0] == "_" and name[-1] == "_"):
                continue
            try:
                parts = getattr(one, name), getattr(other, name)
            except Exception:  # a property that has no value
                continue
            found += shared_ways(*parts, f"{path}.{name}", depth - 1)
    return found


def test_no_attribute_leads_from_what_a_program_has_in_hand_to_what_it_could_change():
    files = {("sys", "stdin"), ("sys", "stdout"), ("sys", "stderr")}  # new ones for each test
    names = FREE - files - {("__future__", "annotations")}
    free = [getattr(importlib.import_module(module), name) for module, name in names]
    hands = []
    for _ in range(2):
        namespace: dict[str, Any] = {"__name__": __name__}
        exec(IN_HAND, namespace)
        hands.append([*namespace["objects"], *free])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [
            way for pair in zip(*hands, strict=True) for way in shared_ways(*pair, repr(pair[0]), 3)
        ] == []
