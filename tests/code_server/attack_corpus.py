"""The programs of attacks/*.txt as requests: cheats want a pass without solving anything, hostile ones harm.

`#: name` starts a program. Nobody can solve the usual task: f(n) must return a number of nine digits, n
first, that is drawn anew for each run. So a pass means that a program found the number or fooled the
comparison. `#: name | test` gives tests of its own; ` || second test` belongs to the same request, ` >> test`
to a second one; ` | stdio` has the number printed. @S@ is a number that stands nowhere else, @DIR@ a folder
that anybody may write to, @ANSWERS@ a file with all the numbers that anybody may read; more in HostWatch.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent / "attacks"
USUAL_TESTS = (
    "assert f(1) == {1}",
    "assert {2} == f(2)",
    "assert not f(3) != {3}",
    "assert f(4) in [{4}]",
    "assert abs(f(5) - {5}) < 1e-6",
    "assert f(6) > {6} - 1 and f(6) < {6} + 1",
    "assert isinstance(f(7), int) and int(f(7)) == {7}",
    "def check(candidate):\n    assert candidate(8) == {8}\ncheck(f)",
    "assert {{f(9): 0, 'x': f(9)}} == {{{9}: 0, 'x': {9}}}",
)


class Attack(NamedTuple):
    name: str
    program: str
    requests: list[list]
    """The tests of each request, in order: strings, or {"input", "output"} of standard input and output."""
    stdio: bool


def draw_numbers(seed: int) -> list[int]:
    """The expected results of f(0) .. f(9); the first one is @S@."""
    rng = random.Random(seed)
    return [int(f"{n or 7}{rng.randrange(10**8):08d}") for n in range(10)]


def read_attacks(kind: str, numbers: list[int], values: dict[str, str]) -> list[Attack]:
    """kind: cheats or hostile; values: what stands for the @NAMES@ of the programs."""
    prelude = (FOLDER / "prelude.txt").read_text(encoding="utf-8")
    values = {**values, "S": str(numbers[0])}
    attacks = []
    for block in re.split(r"^#: ", (FOLDER / f"{kind}.txt").read_text(encoding="utf-8"), flags=re.M)[1:]:
        head, _, program = block.partition("\n")
        name, _, tests = head.partition(" | ")
        if stdio := tests == "stdio":
            requests = [[{"input": f"{n}\n", "output": f"{numbers[n]}\n"} for n in (1, 2, 3)]]
        elif tests:
            filled = re.sub("@([A-Z]+)@", lambda match: values[match[1]], tests).replace("\\n", "\n")
            requests = [request.split(" || ") for request in filled.split(" >> ")]
        elif kind == "hostile":
            requests = [["assert f(1)"]]
        else:
            requests = [[test.format(*numbers) for test in USUAL_TESTS]]
        program = re.sub("@([A-Z]+)@", lambda match: values[match[1]], prelude + program)
        attacks.append(Attack(name.strip(), program, requests, stdio))
    assert len({attack.name for attack in attacks}) == len(attacks)
    return attacks
