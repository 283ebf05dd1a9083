"""docs/walk.md names files and functions that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_station_of_the_walk_is_a_function_of_its_file():
    text = (ROOT / "docs/walk.md").read_text()
    stations = re.findall(r"^\| (\d+) \|[^|]*\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _, _ in stations] == list(range(1, len(stations) + 1))
    for _, path, names in stations:
        nodes = ast.walk(ast.parse((ROOT / path).read_text()))
        defined = {
            n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert set(re.findall(r"`(\w+)`", names)) <= defined, path
