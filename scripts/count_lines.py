"""Counts the lines of the Python files: all of them, and those of code (no docstring, comment or blank line).

    python scripts/count_lines.py                                     a table, room by room

Files are those that git knows or would add; the source is everything but tests/. Limits stand in
tests/test_structure.py.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Count(NamedTuple):
    lines: int
    code: int


def python_files(root: Path = ROOT) -> list[Path]:
    """Every Python file of the repository, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(Path(name) for name in names if name and (root / name).exists())


def count(source: str) -> Count:
    lines = source.splitlines()
    code = {number for number, line in enumerate(lines, 1) if line.strip() and line.strip()[0] != "#"}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr):  # its blank lines and those with a # are code
            code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return Count(len(lines), len(code - docstrings))


def room(file: Path) -> str:
    """The folder that a file is counted in: two levels of verl and search_r1, one of others."""
    depth = 2 if file.parts[0] in ("verl", "search_r1") else 1
    return "/".join(file.parent.parts[:depth]) or "."


def main() -> None:
    counts = {file: count((ROOT / file).read_text(encoding="utf-8")) for file in python_files()}
    rooms: dict[str, list[Path]] = {}
    for file in counts:
        rooms.setdefault(room(file), []).append(file)
    rooms["all source"] = [file for file in counts if file.parts[0] != "tests"]
    print(f"{'':24} {'files':>6} {'lines':>7} {'code':>7}")
    for name, files in rooms.items():
        lines, code = sum(counts[file].lines for file in files), sum(counts[file].code for file in files)
        print(f"{name:24} {len(files):6} {lines:7} {code:7}")


if __name__ == "__main__":
    main()
