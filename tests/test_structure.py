"""The shape of the source tree: who imports whom, and unique names."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.draw_rooms import (  # noqa: E402
    DESIGN,
    HEIGHTS,
    PACKAGES,
    arrows_between_rooms,
    circles,
    direct_arrows,
    mermaid,
    read_trees,
    room_of,
    with_drawing,
    wrong_arrows,
)


@cache
def trees() -> Mapping[str, ast.Module]:
    return read_trees((*PACKAGES, "scripts", "examples"))


def trees_of_rooms() -> Mapping[str, ast.Module]:
    return {module: tree for module, tree in trees().items() if module.split(".")[0] in PACKAGES}


def test_every_arrow_between_rooms_leads_down_and_no_modules_import_each_other():
    assert wrong_arrows(trees_of_rooms()) == []
    assert sorted(HEIGHTS.keys() - set(map(room_of, trees()))) == [], "delete them from LAYERS"


def extends_its_namesake(node: ast.ClassDef) -> bool:
    """Return whether a class extends one of the same name, as `RLHFDataset` does with verl's arguments."""
    return any(ast.unparse(base).split(".")[-1] == node.name for base in node.bases)


def test_names_of_classes_are_unique():
    nodes = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    classes = [node.name for node in nodes if not extends_its_namesake(node)]
    assert [name for name, number in Counter(classes).items() if number > 1] == []
    assert sum(module.endswith(".engine") for module in trees()) <= 1


def test_the_drawing_of_the_rooms_is_up_to_date():
    text = DESIGN.read_text(encoding="utf-8")
    drawing = mermaid(arrows_between_rooms(trees_of_rooms()))
    assert text == with_drawing(text, drawing), "python scripts/draw_rooms.py --write"


def test_what_runs_and_users_leave_in_a_checkout_is_ignored_by_git():
    names = [".env", "slurm-logs/7/training.log", "evals/model/test/page.html", "search-r1-smoke-7.log"]
    command = ["git", "check-ignore", "--no-index", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == names or not (ROOT / ".git").exists()


def test_circles_and_upward_imports_are_seen():
    lines = {
        "verl.algos.a": "def late():\n    from verl.workers import b",
        "verl.workers": "",
        "verl.workers.b": "import verl.workers.c",
        "verl.workers.c": "from verl.algos.a import late",
        "verl.workers.d": "if TYPE_CHECKING:\n    from verl.workers.e import E",
        "verl.workers.e": "from verl.workers.d import D",
        "verl.attic": "import verl.workers.d",
        "verl.workers.g": "import search_r1.search",
        "search_r1.search": "",
        "verl.monitor.f": "if TYPE_CHECKING:\n    from verl.workers.e import E",
    }
    parsed = {name: ast.parse(text) for name, text in lines.items()}
    assert circles(parsed) == [("verl.algos.a", "verl.workers.b", "verl.workers.c")]
    assert wrong_arrows(parsed) == [
        "verl.attic is in no layer; put it into LAYERS",
        "verl.algos.a imports verl.workers.b, which is above it",
        "verl.monitor.f imports verl.workers.e, which is above it",
        "verl.workers.g imports search_r1.search, which is above it",
        "import circle: verl.algos.a, verl.workers.b, verl.workers.c",
    ]


def test_a_drawing_leaves_out_what_follows():
    arrows = {("verl.a", "verl.b"): set(), ("verl.b", "verl.c"): set(), ("verl.a", "verl.c"): set()}
    assert direct_arrows(arrows) == [("verl.a", "verl.b"), ("verl.b", "verl.c")]
