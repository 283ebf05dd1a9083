"""Which programs leave nothing behind, and that what they get hold of is their own or can't be changed."""

from __future__ import annotations

import collections
import importlib
import types
import warnings
from typing import Any

import pytest

from verl.code_server.plain import ALL_NAMES, FREE_NAMES, HIDDEN, modules_if_plain


@pytest.mark.parametrize(
    "program",
    ["import os", "from typing import get_overloads", "from string import Formatter",
     "x = __builtins__", "def __getattr__(n): pass", "print(g.gi_frame)",
     "type('C', (), {})", "open('x')", "'{0.__class__}'.format(1)", "str.format('{0.x}', 1)",
     "'x'.encode('idna')", "s = 'x'.encode\ns('idna')",
     "import sys\nsys.modules", "import sys\nm = sys", "import sys\nsys.stdout = 1", "from . import math",
     "from os import *", "from typing import *\noverload(f)", "eval('1')", "getattr(f, 'x')",
     "def f():\n  import os", "import math as m\nm.x", "import math\nmath = 1", "(" * 999, "1 +",
     # an object of Python's that takes attributes, in the hand of the program
     "from collections import Counter\nCounter.m = 1", "from collections import Counter\nx = [Counter]",
     "from collections import Counter as C\nf(C)", "import heapq\nheapq.m = 1",
     "import heapq\nf(heapq.merge)",
     "from typing import List\nList._name = 1", "from typing import Callable\nCallable[[int], int].m = 1",
     "from typing import Union\nfrom collections import Counter\nf(Union[Counter])",
     "from collections import Counter\nclass A(Counter): pass", "from enum import Enum\nEnum('A', {})",
     "from collections import Counter\ndef f(x: a[Counter]): pass", "from re import I\nI.m = 1",
     "from collections import Counter\ndef f(x: a | Counter): pass", "f(type(x))", "y = x.__class__",
     "from collections import Counter\ndef f(x: (y := Counter)): pass", "type(x) == E()",
     "type(type(x))('C', (), {})",
     "from collections import Counter\nmatch x:\n  case Counter(): pass", "class A(metaclass=M): pass",
     "from dataclasses import field\nfield().default.m = 1", "C.mro()", "class A(type): pass",
     "from functools import lru_cache\nlru_cache(f).cache_info()._field_defaults['m'] = 1",
     "C.register(int)",
     "from typing import Optional\nOptional[int]._getitem.m = 1", "match e:\n  case A(gi_frame=f): pass",
     "class A:\n  def __del__(s): pass", "class A:\n  def __getattr__(s, n): pass", "s = super", "x.__init__",
     "class A:\n  def __init_subclass__(c): pass", "class A:\n  __class__ = int", "x.__dict__",
     "f.__globals__",
     "class A:\n  __match_args__ = ('gi_frame',)",
     "from datetime import datetime\ndatetime.strptime(a, b)",
     "import operator\noperator.attrgetter('x')", "async def f(): pass", "E._member_map_", "x.__class__ = C"],
)  # fmt: skip
def test_a_program_that_might_leave_something_shares_no_process(program):
    assert modules_if_plain(program) is None


SOLUTION = """
from __future__ import annotations
import collections, heapq, random, re, sys
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, total_ordering
from typing import Callable, Dict, Generic, List, NamedTuple, Optional, TypeVar
T = TypeVar("T")
Graph = Dict[str, List[Counter]]
Point = namedtuple("Point", "x y")
class Color(Enum):
    RED = 1
class Pair(NamedTuple):
    a: int = 0
class Shape(ABC, Generic[T]):
    @abstractmethod
    def area(self) -> float: ...
    @property
    def name(self) -> str: return type(self).__name__
@total_ordering
class Node(Shape[int]):
    __slots__ = ("key", "next", "_done")
    def __init__(self, key: int, next: Optional[Node] = None):
        super().__init__()
        self.key, self.next, self._done = key, next, False
    def __lt__(self, other): return self.key < other.key
    def __eq__(self, other): return type(self) is type(other) and self.key == other.key
    def __hash__(self): return hash(self.key)
    def __repr__(self): return f"{self.__class__.__name__}({self.key})"
@dataclass(order=True)
class Item:
    cost: int
    tags: list = field(default_factory=list)
class Solution:
    def solve(self, a: List[int], key: Callable[[int], Counter] = None) -> Dict[str, Counter]:
        @lru_cache(maxsize=None)
        def fib(n: int) -> int:
            nonlocal best
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        best, seen = 0, collections.Counter(a)
        heap = [Node(x) for x in a]
        heapq.heapify(heap)
        head = heap[0]
        while head and (n := head.key) > 3:
            head.next = head = None
        try: random.seed(1); re.findall(r"a", "A", re.I)
        except (ValueError, KeyError) as e: print(e.args, file=sys.stderr)
        match a:
            case [x, *_] if isinstance(x, (int, float)) or type(x) in (int, float): yield x
            case {"k": Node(key=1)}: yield from [1]
        del seen[1]
        return sys.stdin.buffer.read().decode("utf-8").split()
"""


def test_usual_classes_and_modules_leave_nothing():
    modules = [
        "abc",
        "collections",
        "dataclasses",
        "enum",
        "functools",
        "heapq",
        "random",
        "re",
        "sys",
        "typing",
    ]
    assert modules_if_plain(SOLUTION) == modules
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
class G(Generic[T]): pass
class E(Enum): X = 1
class I(IntEnum): X = 1
class N(NamedTuple): x: int
class X(Exception): pass
P = namedtuple("P", "x")
@dataclass
class D: x: int = field(default=1)
def gen(): yield 1
@lru_cache
def cached(x): return x
@contextmanager
def context(): yield
class K:
    p = property(lambda self: 1)
    q = cached_property(lambda self: 1)
@total_ordering
class O:
    def __lt__(self, other): return True
    def __eq__(self, other): return True
def error(f):
    try: f()
    except BaseException as e: return e
objects = [
    A, A(), G, G(), G[int], E, E.X, I, I.X, N, N(1), X, X(), P, P(1), D, D(), gen, gen(), cached, context,
    context(), K, K(), O, O(), field(), T, List[int], Dict[str, int], Optional[int], Tuple[int, ...],
    Counter(), Counter("ab").items(), OrderedDict(), deque(), defaultdict(int), fractions.Fraction(1, 2),
    decimal.Decimal(1), decimal.localcontext(), datetime.datetime.now(), datetime.date.today(),
    datetime.timedelta(1), datetime.timezone.utc, random.Random(1), random.randint, re.compile("a"),
    re.match("a", "a"), io.StringIO(), io.BytesIO(), io.TextIOWrapper(io.BytesIO()), itertools.count(),
    array.array("i"), partial(int), cmp_to_key(int), cached_property(gen), property(gen), staticmethod(gen),
    super(O, O()), super(O, O), error(lambda: json.loads("x")), error(lambda: 1 / 0), error(lambda: [].x),
    error(lambda: decimal.Decimal("x")), error(lambda: fractions.Fraction(1, 0)),
    error(lambda: re.compile("(")), NewType("Q", int), suppress(KeyError), operator.itemgetter(1),
    lru_cache(None), dataclass(), cached.cache_info(), gen().close, K.p, 1, 1.0, "", b"", (), None, print,
    int, zip(), object(),
]
"""


def takes_attributes(value: Any) -> bool:
    inner = types.ModuleType | types.FrameType | types.CodeType
    if isinstance(value, inner | list | dict | set | bytearray | collections.deque):
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
    names = FREE_NAMES - files - {("__future__", "annotations")}
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


def test_each_name_is_there():
    names = ALL_NAMES - {("sys", "set_int_max_str_digits")}  # not in the first Python 3.10
    assert [name for name in names if not hasattr(importlib.import_module(name[0]), name[1])] == []
