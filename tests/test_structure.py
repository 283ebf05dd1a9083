"""The shape of the source tree: who imports whom, and unique names."""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What no module may import: its package -> packages above it. The programs `verl.trainer.main_*` may import
# anything: they put the pieces together.
ABOVE = {
    "verl": ("search_r1", "data_prep"),
    "verl.algos": ("verl.workers", "verl.trainer", "verl.single_controller", "verl.preflight"),
    "verl.config": ("verl.workers", "verl.trainer", "verl.single_controller", "verl.preflight"),
    "verl.utils": ("verl.workers", "verl.trainer", "verl.single_controller", "verl.preflight"),
    "verl.protocol": ("verl.workers", "verl.trainer", "verl.single_controller", "verl.preflight"),
    "verl.single_controller": ("verl.workers", "verl.trainer", "verl.preflight"),
    "verl.workers": ("verl.trainer", "verl.preflight"),
    "search_r1": ("verl.trainer", "verl.preflight", "data_prep"),
}

# Violations that are known and not mended yet. An entry that is mended must go; this must end empty.
STILL_OPEN: set[str] = set()


def python_files() -> list[Path]:
    """List the Python files that git knows or would add, relative to the repository's root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(Path(name) for name in names if name and (ROOT / name).is_file())


@cache
def trees() -> dict[str, ast.Module]:
    """The parsed source of each module, by its name; tests are left out."""
    return {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): ast.parse((ROOT / file).read_text())
        for file in python_files()
        if file.parts[0] != "tests"
    }


def imports(module: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Modules of ours that import statements among `nodes` name; those in functions count as well."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(
                whole if (whole := f"{node.module}.{alias.name}") in trees() else node.module
                for alias in node.names
            )
    return names & trees().keys() - {module}


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those below `if TYPE_CHECKING:`, which no run executes."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from without_type_checking(child)


def circles() -> list[tuple[str, ...]]:
    """Groups of modules that import each other, directly or over others (Tarjan's strong components)."""
    edges = {module: imports(module, without_type_checking(tree)) for module, tree in trees().items()}
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for other in sorted(edges[module]):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[module] = min(lowest[module], lowest[other])
        if lowest[module] == index[module]:
            start = stack.index(module)
            groups.append(tuple(sorted(stack[start:])))
            del stack[start:]

    for module in edges:
        if module not in index:
            visit(module)
    return [group for group in groups if len(group) > 1]


def violations() -> Iterator[str]:
    for module, tree in trees().items():
        above = [name for package, names in ABOVE.items() if is_in(module, package) for name in names]
        for other in sorted(imports(module, ast.walk(tree))):
            if any(is_in(other, name) for name in above) and not module.startswith("verl.trainer.main_"):
                yield f"{module} imports {other}, which is above it"
    yield from (f"import circle: {', '.join(group)}" for group in circles())

    classes = [
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    yield from (f"several classes {name}" for name, number in Counter(classes).items() if number > 1)
    if sum(module.endswith(".engine") for module in trees()) > 1:
        yield "several modules engine.py"


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_the_tree_keeps_its_shape():
    present = set(violations())
    assert sorted(present - STILL_OPEN) == []
    assert sorted(STILL_OPEN - present) == [], "mended: delete it from STILL_OPEN"


def test_circles_and_upward_imports_are_seen(monkeypatch):
    lines = {
        "verl.algos.a": "def late():\n    from verl.workers import b",
        "verl.workers": "",
        "verl.workers.b": "import verl.workers.c",
        "verl.workers.c": "from verl.algos.a import late",
        "verl.workers.d": "if TYPE_CHECKING:\n    from verl.workers.e import E",
        "verl.workers.e": "from verl.workers.d import D",
    }
    parsed = {name: ast.parse(text) for name, text in lines.items()}
    monkeypatch.setitem(globals(), "trees", lambda: parsed)
    assert circles() == [("verl.algos.a", "verl.workers.b", "verl.workers.c")]
    assert "verl.algos.a imports verl.workers.b, which is above it" in set(violations())
