"""Honest programs of many kinds, made from a seed, each with tests that plain Python passes or fails.

    cases(seed, num_cases) -> [(kind, program, [test, ...]), ...]

About every third test is wrong on purpose. This module does not say whether a test passes: plain Python decides.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from textwrap import dedent

Case = tuple[str, list[str]]
KINDS: dict[str, Callable[[random.Random], Case]] = {}


def kind(make: Callable[[random.Random], Case]) -> Callable[[random.Random], Case]:
    KINDS[make.__name__] = make
    return make


def cases(seed: int, num_cases: int) -> list[tuple[str, str, list[str]]]:
    """Return programs of all kinds in turn; the same seed gives the same programs."""
    made = []
    names = sorted(KINDS)
    for number in range(num_cases):
        name = names[number % len(names)]
        program, tests = KINDS[name](random.Random(f"{seed} {number}"))
        made.append((name, dedent(program).strip() + "\n", [dedent(test).strip() for test in tests]))
    return made


def numbers(rng: random.Random, least: int = 3, most: int = 8) -> list[int]:
    return [rng.randint(-20, 60) for _ in range(rng.randint(least, most))]


def word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdeiou äß") for _ in range(rng.randint(3, 9))).strip() or "a"


def off(rng: random.Random) -> int:
    """Return 0, or now and then 1, which makes an expected number wrong."""
    return int(rng.random() < 0.35)


@kind
def arithmetic(rng: random.Random) -> Case:
    a = rng.randint(2, 9)
    b = rng.randint(1, 50)
    program = (
        f"def f(x, y=1, *rest, scale={a}, **more):\n    return scale * x + y + sum(rest) + sum(more.values())"
    )
    tests = [
        f"assert f({b}) == {a * b + 1 + off(rng)}",
        f"assert f({b}, 2, 3, 4) == {a * b + 9 + off(rng)}",
        f"assert f({b}, y=5, scale=1, z=10) == {b + 15 + off(rng)}",
        f"assert abs(f({b}) / 3 - {(a * b + 1) / 3 + off(rng)}) < 1e-9",
    ]
    return program, tests


@kind
def classes(rng: random.Random) -> Case:
    amounts = numbers(rng)
    program = """
        class Account:
            count = 0
            def __init__(self, owner, balance=0):
                self.owner = owner
                self.balance = balance
                Account.count += 1
            def add(self, amount):
                self.balance += amount
                return self
            @property
            def is_empty(self):
                return self.balance == 0
            @classmethod
            def named(cls, owner):
                return cls(owner)
            def __len__(self):
                return abs(self.balance)
            def __repr__(self):
                return f"Account({self.owner!r}, {self.balance})"
    """
    steps = "".join(f".add({amount})" for amount in amounts)
    total = sum(amounts)
    tests = [
        f"assert Account('a'){steps}.balance == {total + off(rng)}",
        f"account = Account.named('b'){steps}\nassert len(account) == {abs(total) + off(rng)}",
        f"account = Account('c', {total})\nassert repr(account) == \"Account('c', {total + off(rng)})\"",
        "assert Account('d').is_empty and isinstance(Account('d'), Account)",
    ]
    return program, tests


@kind
def own_operators(rng: random.Random) -> Case:
    a, b, c, d = (rng.randint(-9, 9) for _ in range(4))
    program = """
        class Vector:
            def __init__(self, x, y):
                self.x, self.y = x, y
            def __eq__(self, other):
                return isinstance(other, Vector) and (self.x, self.y) == (other.x, other.y)
            def __hash__(self):
                return hash((self.x, self.y))
            def __add__(self, other):
                return Vector(self.x + other.x, self.y + other.y)
            def __mul__(self, factor):
                return Vector(self.x * factor, self.y * factor)
            __rmul__ = __mul__
            def __lt__(self, other):
                return (self.x, self.y) < (other.x, other.y)
            def __iter__(self):
                yield self.x
                yield self.y
            def __getitem__(self, index):
                return (self.x, self.y)[index]
    """
    tests = [
        f"assert Vector({a}, {b}) + Vector({c}, {d}) == Vector({a + c + off(rng)}, {b + d})",
        f"assert 3 * Vector({a}, {b}) == Vector({3 * a}, {3 * b + off(rng)})",
        f"assert list(Vector({a}, {b})) == [{a}, {b + off(rng)}]",
        f"assert sorted([Vector({a}, {b}), Vector({c}, {d})])[0] == min(Vector({a}, {b}), Vector({c}, {d}))",
        f"assert len({{Vector({a}, {b}), Vector({a}, {b})}}) == {1 + off(rng)}",
        f"assert Vector({a}, {b})[1] == {b + off(rng)}",
    ]
    return program, tests


@kind
def dataclasses(rng: random.Random) -> Case:
    x = rng.randint(0, 9)
    y = rng.randint(0, 9)
    program = """
        from dataclasses import dataclass, field, asdict
        @dataclass(order=True)
        class Point:
            x: int
            y: int = 0
            tags: list = field(default_factory=list, compare=False)
        def shifted(point, by):
            return Point(point.x + by, point.y + by, [*point.tags, "shifted"])
    """
    tests = [
        f"assert shifted(Point({x}, {y}), 2) == Point({x + 2}, {y + 2 + off(rng)})",
        f"assert asdict(shifted(Point({x}), 1)) == {{'x': {x + 1}, 'y': {1 + off(rng)}, 'tags': ['shifted']}}",
        f"assert (Point({x}, {y}) < Point({y}, {x})) == {(x, y) < (y, x)}",
        f"assert shifted(Point({x}, {y}), 3).tags == ['shifted']",
    ]
    return program, tests


@kind
def own_exceptions(rng: random.Random) -> Case:
    limit = rng.randint(3, 20)
    value = limit + rng.randint(1, 9)
    program = f"""
        class TooMuch(ValueError):
            def __init__(self, amount):
                super().__init__(f"too much: {{amount}}")
                self.amount = amount
        def take(amount):
            if amount > {limit}:
                raise TooMuch(amount)
            if amount < 0:
                raise KeyError(amount)
            return {limit} - amount
    """
    tests = [
        f"try:\n    take({value})\n    assert False\nexcept TooMuch as error:\n    assert error.amount == {value + off(rng)}",
        f"try:\n    take({value})\nexcept ValueError as error:\n    assert 'too much: {value}' in str(error)\nelse:\n    assert False",
        "import contextlib\nwith contextlib.suppress(KeyError):\n    take(-1)\n    assert False",
        f"assert take(1) == {limit - 1 + off(rng)}",
        f"assert take({value}) == 0",
    ]
    return program, tests


@kind
def iterators(rng: random.Random) -> Case:
    values = numbers(rng)
    size = rng.randint(2, 3)
    program = """
        def chunks(values, size):
            chunk = []
            for value in values:
                chunk.append(value)
                if len(chunk) == size:
                    yield chunk
                    chunk = []
            if chunk:
                yield chunk
        class Countdown:
            def __init__(self, start):
                self.start = start
            def __iter__(self):
                return iter(range(self.start, 0, -1))
    """
    wanted = [values[i : i + size] for i in range(0, len(values), size)]
    tests = [
        f"assert list(chunks(iter({values}), {size})) == {wanted}",
        f"assert list(chunks((v for v in {values}), {size})) == {wanted[: len(wanted) - off(rng)]}",
        f"assert next(chunks({values}, {size})) == {wanted[off(rng) % len(wanted)]}",
        f"assert sum(1 for _ in chunks(range({len(values)}), {size})) == {len(wanted) + off(rng)}",
        f"assert list(Countdown({size})) == {list(range(size, 0, -1))}",
        f"assert list(map(sum, chunks({values}, {size}))) == {[sum(chunk) for chunk in wanted]}",
    ]
    return program, tests


@kind
def dates(rng: random.Random) -> Case:
    day = rng.randint(1, 28)
    days = rng.randint(1, 400)
    program = """
        from datetime import date, datetime, timedelta, timezone
        def later(start, days):
            return start + timedelta(days=days)
        def weekday(year, month, day):
            return date(year, month, day).strftime("%A")
        def parsed(text):
            return datetime.fromisoformat(text).replace(tzinfo=timezone.utc)
    """
    tests = [
        f"from datetime import date\nassert later(date(2024, 2, {day}), {days}) == date.fromordinal(date(2024, 2, {day}).toordinal() + {days + off(rng)})",
        f"import datetime\nassert later(datetime.date(2023, 1, {day}), 1) - datetime.date(2023, 1, {day}) == datetime.timedelta(days={1 + off(rng)})",
        f"from datetime import date\nassert weekday(2025, 5, {day}) == date(2025, 5, {day}).strftime('%A')",
        f"assert parsed('2024-03-{day:02d}T10:20:30').day == {day + off(rng)}",
        "from datetime import datetime, timezone\nassert parsed('2024-03-01').tzinfo is timezone.utc or parsed('2024-03-01').utcoffset().total_seconds() == 0",
    ]
    return program, tests


@kind
def counters(rng: random.Random) -> Case:
    text = "".join(rng.choice("abcd") for _ in range(rng.randint(5, 15)))
    first = text[0]
    program = """
        from collections import Counter, defaultdict, OrderedDict, deque
        def letters(text):
            return Counter(text)
        def positions(text):
            found = defaultdict(list)
            for number, letter in enumerate(text):
                found[letter].append(number)
            return found
        def in_order(text):
            return OrderedDict.fromkeys(text)
        def last(text, size):
            return deque(text, maxlen=size)
    """
    positions = {
        letter: [i for i, other in enumerate(text) if other == letter] for letter in dict.fromkeys(text)
    }
    tests = [
        f"from collections import Counter\nassert letters({text!r}) == Counter({text!r})",
        f"assert letters({text!r})[{first!r}] == {text.count(first) + off(rng)}",
        f"assert letters({text!r}).most_common(1)[0][1] == {max(map(text.count, text)) + off(rng)}",
        f"assert positions({text!r}) == {positions}",
        f"assert list(in_order({text!r})) == {list(positions)}",
        f"from collections import deque\nassert last({text!r}, 2) == deque({list(text[-2:])})",
        f"assert letters({text!r}) == {{{first!r}: {text.count(first)}}}",
    ]
    return program, tests


@kind
def named_tuples(rng: random.Random) -> Case:
    x = rng.randint(1, 9)
    y = rng.randint(1, 9)
    program = """
        from collections import namedtuple
        from typing import NamedTuple
        Pair = namedtuple("Pair", "left right", defaults=[0])
        class Range(NamedTuple):
            low: int
            high: int
            @property
            def width(self):
                return self.high - self.low
        def swapped(pair):
            return Pair(pair.right, pair.left)
    """
    tests = [
        f"assert swapped(Pair({x}, {y})) == Pair({y}, {x + off(rng)})",
        f"assert swapped(Pair({x}, {y})) == ({y}, {x})",
        f"assert Range({x}, {x + y}).width == {y + off(rng)}",
        f"low, high = Range({x}, {y})\nassert (low, high) == ({x}, {y})",
        f"assert swapped(Pair({x}))._asdict() == {{'left': {off(rng)}, 'right': {x}}}",
    ]
    return program, tests


@kind
def coroutines(rng: random.Random) -> Case:
    values = numbers(rng)
    program = """
        import asyncio
        async def double(value):
            await asyncio.sleep(0)
            return 2 * value
        async def all_doubled(values):
            return await asyncio.gather(*(double(value) for value in values))
        async def count(limit):
            for number in range(limit):
                await asyncio.sleep(0)
                yield number
    """
    doubled = [2 * value for value in values]
    tests = [
        f"import asyncio\nassert asyncio.run(double({values[0]})) == {doubled[0] + off(rng)}",
        f"import asyncio\nassert asyncio.run(all_doubled({values})) == {doubled}",
        f"import asyncio\nasync def main():\n    return [n async for n in count({len(values)})]\nassert asyncio.run(main()) == {list(range(len(values) + off(rng)))}",
    ]
    return program, tests


@kind
def captured_prints(rng: random.Random) -> Case:
    name = word(rng)
    program = """
        import sys
        def greet(name):
            print("hello", name, sep=", ", end="!\\n")
        def warn(text):
            print(text, file=sys.stderr)
            return len(text)
    """
    tests = [
        f"import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    greet({name!r})\nassert out.getvalue() == {'hello, ' + name + '!' * (1 + off(rng))!r} + chr(10)",
        f"import io, sys\nkept = sys.stdout\nsys.stdout = io.StringIO()\ntry:\n    greet({name!r})\n    text = sys.stdout.getvalue()\nfinally:\n    sys.stdout = kept\nassert text.startswith('hello')",
        f"assert warn({name!r}) == {len(name) + off(rng)}",
        f"assert greet({name!r}) is None",
    ]
    return program, tests


@kind
def standard_input(rng: random.Random) -> Case:
    values = numbers(rng)
    text = " ".join(map(str, values))
    program = """
        import sys
        def total():
            return sum(map(int, input().split()))
        def lines():
            return [line.rstrip("\\n") for line in sys.stdin]
    """
    tests = [
        f"import io, sys\nsys.stdin = io.StringIO({text!r})\nassert total() == {sum(values) + off(rng)}",
        "import io, sys\nsys.stdin = io.StringIO('a\\nb\\n')\nassert lines() == ['a', 'b']",
        f"from unittest.mock import patch\nwith patch('builtins.input', return_value={text!r}):\n    assert total() == {sum(values) + off(rng)}",
    ]
    return program, tests


@kind
def decorators(rng: random.Random) -> Case:
    n = rng.randint(5, 40)
    program = """
        import functools
        def traced(function):
            @functools.wraps(function)
            def call(*args, **kwargs):
                call.calls += 1
                return function(*args, **kwargs)
            call.calls = 0
            return call
        @functools.lru_cache(maxsize=None)
        def fib(n):
            return n if n < 2 else fib(n - 1) + fib(n - 2)
        @traced
        def add(a, b):
            "Adds."
            return a + b
        compose = lambda *fs: functools.reduce(lambda f, g: lambda x: g(f(x)), fs)
    """
    value = functools.reduce(lambda pair, _: (pair[1], sum(pair)), range(n), (0, 1))[0]
    tests = [
        f"assert fib({n}) == {value + off(rng)}",
        f"add(1, 2)\nadd(3, 4)\nassert add.calls == {2 + off(rng)}",
        "assert add.__name__ == 'add' and add.__doc__ == 'Adds.'",
        f"assert compose(lambda x: x + 1, lambda x: x * 3)({n}) == {(n + 1) * 3 + off(rng)}",
        f"assert fib.cache_info().hits >= 0 and fib({n}) == fib({n})",
    ]
    return program, tests


@kind
def exact_numbers(rng: random.Random) -> Case:
    a = rng.randint(1, 99)
    b = rng.randint(2, 19)
    program = """
        from decimal import Decimal, ROUND_HALF_UP
        from fractions import Fraction
        import math, cmath
        def price(cents):
            return (Decimal(cents) / 100).quantize(Decimal("0.01"), rounding=ROUND_HALF_UP)
        def ratio(a, b):
            return Fraction(a, b)
        def root(x):
            return cmath.sqrt(x)
        def binomial(n, k):
            return math.comb(n, k)
    """
    tests = [
        f"from decimal import Decimal\nassert price({a}) == Decimal('{a / 100:.2f}')",
        f"from fractions import Fraction\nassert ratio({a}, {b}) == Fraction({a + off(rng)}, {b})",
        f"assert ratio({a}, {b}) * {b} == {a + off(rng)}",
        "assert abs(root(-4) - 2j) < 1e-12",
        f"import math\nassert binomial({b}, 2) == math.comb({b}, {2 + off(rng)})",
        f"assert str(price({a})) == '{a / 100:.2f}'",
    ]
    return program, tests


@kind
def enums(rng: random.Random) -> Case:
    number = rng.randint(1, 3)
    program = """
        from enum import Enum, IntEnum, auto
        class Color(Enum):
            RED = 1
            GREEN = 2
            BLUE = 3
            def next(self):
                return Color(self.value % 3 + 1)
        class Level(IntEnum):
            LOW = auto()
            HIGH = auto()
    """
    tests = [
        f"assert Color({number}).next() == Color({number % 3 + 1})",
        f"assert Color({number}).next().value == {number % 3 + 1 + off(rng)}",
        "assert Level.HIGH > Level.LOW and Level.HIGH == 2",
        "assert [color.name for color in Color] == ['RED', 'GREEN', 'BLUE']",
        "assert Color['RED'] is Color.RED",
    ]
    return program, tests


@kind
def sets_and_sorting(rng: random.Random) -> Case:
    values = numbers(rng)
    others = numbers(rng)
    program = """
        import heapq, bisect, itertools
        def common(a, b):
            return set(a) & set(b)
        def ranked(words):
            return sorted(words, key=lambda word: (-len(word), word))
        def smallest(values, n):
            return heapq.nsmallest(n, values)
        def place(values, value):
            return bisect.bisect_left(sorted(values), value)
        def pairs(values):
            return set(itertools.combinations(sorted(set(values)), 2))
    """
    words = [word(rng) for _ in range(4)]
    tests = [
        f"assert common({values}, {others}) == {set(values) & set(others) or 'set()'}",
        f"assert ranked({words}) == {sorted(words, key=lambda w: (-len(w), w))}",
        f"assert smallest({values}, 2) == {sorted(values)[:2]}",
        f"assert place({values}, {values[0]}) == {sorted(values).index(values[0]) + off(rng)}",
        f"assert len(pairs({values})) == {len(set(values)) * (len(set(values)) - 1) // 2 + off(rng)}",
        f"assert isinstance(common({values}, {others}), set)",
    ]
    return program, tests


@kind
def texts(rng: random.Random) -> Case:
    name = word(rng)
    number = rng.randint(1, 999)
    program = """
        import re, json, string
        def slug(text):
            return re.sub(r"[^\\w]+", "-", text.lower()).strip("-")
        def fields(text):
            return {key: int(value) for key, value in re.findall(r"(\\w+)=(\\d+)", text)}
        def packed(value):
            return json.dumps(value, sort_keys=True, ensure_ascii=False)
        def caesar(text, by):
            letters = string.ascii_lowercase
            return text.translate(str.maketrans(letters, letters[by:] + letters[:by]))
        def unpacked(text):
            return json.loads(text)
    """
    tests = [
        f"assert fields('a={number}, b=2') == {{'a': {number + off(rng)}, 'b': 2}}",
        f"assert unpacked(packed({{'n': {number}, 'name': {name!r}}})) == {{'name': {name!r}, 'n': {number + off(rng)}}}",
        f"assert caesar(caesar({name!r}, 3), 23) == {name!r}",
        f"assert slug({'  ' + name.replace(' ', '') + ' X!'!r}) == {name.replace(' ', '').lower() + '-x' * (1 + off(rng))!r}",
        f"assert packed([{number}, None, True]) == '[{number}, null, true]'",
        f"assert ({name!r} in slug({name!r})) in (True, False)",
    ]
    return program, tests


@kind
def subclasses_of_containers(rng: random.Random) -> Case:
    values = numbers(rng)
    program = """
        class Stack(list):
            def push(self, value):
                self.append(value)
                return self
            def peek(self):
                return self[-1]
        class Settings(dict):
            def __getattr__(self, name):
                try:
                    return self[name]
                except KeyError:
                    raise AttributeError(name)
        class Celsius(float):
            def fahrenheit(self):
                return self * 9 / 5 + 32
    """
    pushes = "".join(f".push({value})" for value in values)
    tests = [
        f"assert Stack(){pushes} == {values}",
        f"assert Stack(){pushes}.peek() == {values[-1] + off(rng)}",
        f"settings = Settings(a={values[0]})\nassert settings.a == {values[0] + off(rng)}",
        "try:\n    Settings().b\n    assert False\nexcept AttributeError:\n    pass",
        "assert Celsius(100).fahrenheit() == 212",
        f"assert len(Stack({values})) == {len(values) + off(rng)}",
    ]
    return program, tests


@kind
def context_managers(rng: random.Random) -> Case:
    values = numbers(rng)
    program = """
        from contextlib import contextmanager
        log = []
        @contextmanager
        def noted(name):
            log.append("enter " + name)
            try:
                yield name.upper()
            finally:
                log.append("leave " + name)
        class Collected:
            def __enter__(self):
                self.values = []
                return self
            def __exit__(self, kind, error, trace):
                self.ended = kind is None
                return kind is ZeroDivisionError
    """
    tests = [
        "with noted('a') as name:\n    assert name == 'A'\nassert log[-2:] == ['enter a', 'leave a']",
        f"with Collected() as c:\n    c.values.extend({values})\nassert c.ended and sum(c.values) == {sum(values) + off(rng)}",
        "with Collected() as c:\n    1 / 0\nassert not c.ended",
        "with Collected() as c:\n    raise KeyError(1)",
    ]
    return program, tests


@kind
def trees_and_recursion(rng: random.Random) -> Case:
    values = list(dict.fromkeys(numbers(rng)))
    program = """
        class Node:
            def __init__(self, value, left=None, right=None):
                self.value, self.left, self.right = value, left, right
        def insert(root, value):
            if root is None:
                return Node(value)
            if value < root.value:
                root.left = insert(root.left, value)
            else:
                root.right = insert(root.right, value)
            return root
        def build(values):
            root = None
            for value in values:
                root = insert(root, value)
            return root
        def walk(root):
            return [] if root is None else walk(root.left) + [root.value] + walk(root.right)
        def depth(root):
            return 0 if root is None else 1 + max(depth(root.left), depth(root.right))
        def flat(nested):
            return [x for item in nested for x in (flat(item) if isinstance(item, list) else [item])]
    """
    tests = [
        f"assert walk(build({values})) == {sorted(values)}",
        f"root = build({values})\nassert root.value == {values[0] + off(rng)}",
        f"assert depth(insert(None, 1)) == {1 + off(rng)}",
        f"assert flat([1, [2, [3, {values}]]]) == {[1, 2, 3, *values]}",
        "assert depth(None) == 0",
    ]
    return program, tests


@kind
def early_exits(rng: random.Random) -> Case:
    value = rng.randint(1, 9)
    program = """
        import sys
        def stop(code):
            sys.exit(code)
        def leave():
            quit()
        def safe(code):
            try:
                sys.exit(code)
            except SystemExit as error:
                return error.code
        if __name__ == "__main__":
            ready = True
    """
    tests = [
        f"assert safe({value}) == {value + off(rng)}",
        f"try:\n    stop({value})\n    assert False\nexcept SystemExit as error:\n    assert error.code == {value + off(rng)}",
        "try:\n    leave()\nexcept SystemExit:\n    pass\nelse:\n    assert False",
        f"assert stop({value}) is None",
    ]
    return program, tests


@kind
def arguments_changed_in_place(rng: random.Random) -> Case:
    values = numbers(rng)
    program = """
        def sort_in_place(values):
            for i in range(len(values)):
                for j in range(len(values) - 1 - i):
                    if values[j] > values[j + 1]:
                        values[j], values[j + 1] = values[j + 1], values[j]
        def transposed(matrix):
            return [list(row) for row in zip(*matrix)]
        def rotate(matrix):
            matrix[:] = [list(row) for row in zip(*matrix[::-1])]
        def apply(function, values):
            return [function(value) for value in values]
    """
    tests = [
        f"values = {values}\nsort_in_place(values)\nassert values == {sorted(values)}",
        f"values = {values}\nassert sort_in_place(values) is None\nassert values[0] == {min(values) + off(rng)}",
        "matrix = [[1, 2], [3, 4]]\nrotate(matrix)\nassert matrix == [[3, 1], [4, 2]]",
        f"assert transposed([{values}, {values}])[0] == [{values[0]}, {values[0] + off(rng)}]",
        f"assert apply(lambda v: v + 1, {values}) == {[value + 1 for value in values]}",
        f"seen = []\napply(seen.append, {values})\nassert seen == {values}",
    ]
    return program, tests
