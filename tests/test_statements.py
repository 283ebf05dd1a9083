"""One statement does one thing: no tuple is assigned to a tuple, no choice stands inside another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from scripts.draw_rooms import ROOT, python_files


def compressed_statements(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for each statement of a module that does several things at once.

    A swap (`a, b = b, a`, also of attributes and items) is one thing.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and not is_swap(target, node.value):
                    yield node.lineno, "several assignments in one statement; write one on each line"
        if isinstance(node, ast.IfExp) and any(
            isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node
        ):
            yield node.lineno, "a conditional expression inside another one; write if, elif and else"


def is_swap(target: ast.Tuple, value: ast.Tuple) -> bool:
    """Return whether a tuple's values are the targets themselves, in another order."""
    targets = [ast.unparse(element) for element in target.elts]
    values = [ast.unparse(element) for element in value.elts]
    return sorted(targets) == sorted(values)


def test_each_statement_does_one_thing():
    found = [
        f"{path}:{line}: {message}"
        for path in python_files()
        for line, message in compressed_statements((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_compressed"),
    [
        ("a, b = 1, 2", True),
        ("(a, b), c = pair, 2", True),
        ("self.a, self.b = x, y", True),
        ("a, b = b, a", False),
        ("row[i], row[j] = row[j], row[i]", False),
        ("a, b = pair", False),
        ("first, *rest = words", False),
        ("x = 1 if a else 2 if b else 3", True),
        ("x = (1 if a else 2) if b else 3", True),
        ("x = 1 if a else f(2 if b else 3)", True),
        ("x = 1 if a else 2", False),
    ],
)
def test_the_checker_knows_what_is_compressed(source, is_compressed):
    assert bool(list(compressed_statements(source))) is is_compressed
