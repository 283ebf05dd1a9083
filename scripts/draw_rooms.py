"""Draw the rooms of the code and the arrows between them: who imports whom.

    python scripts/draw_rooms.py              a table of the rooms, from the top to the bottom
    python scripts/draw_rooms.py --mermaid    the drawing of docs/design.md
    python scripts/draw_rooms.py --write      put that drawing into docs/design.md

    source files -> modules and their imports -> rooms -> arrows -> wrong_arrows(): none, or exit status 1

A room is a package or a module directly below `verl` or `search_r1`; `data_prep` is one room. All imports
count, those inside functions and for type checking, too. `verl.utils.dataset` is a room of its own: it hands
on a name of verl from above.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DESIGN = ROOT / "docs" / "design.md"
BEGIN = "<!-- rooms: python scripts/draw_rooms.py --write -->\n"
END = "<!-- end of rooms -->\n"

# The rooms from the bottom to the top. A room may import the rooms of the layers below its own. A room of
# verl imports no other package (see verl/plugins.py).
LAYERS = (
    ("verl.plugins", "verl.sessions", "verl.utils"),
    ("search_r1.search", "verl.code_server", "verl.config", "verl.packing", "verl.protocol_compat"),
    ("verl.protocol", "verl.verifiers"),
    ("verl", "verl.algos", "verl.environments", "verl.records", "verl.single_controller"),
    ("search_r1", "verl.data", "verl.monitor"),
    ("verl.agent", "verl.utils.dataset"),
    ("verl.workers", "search_r1.llm_agent"),
    ("verl.checkpoints",),
    ("verl.planning",),
    ("verl.preflight",),
    ("verl.trainer",),
    ("verl.evaluation", "verl.inference", "verl.rl"),
    ("verl.synthesis",),
    ("search_r1.command", "search_r1.verl_plugin"),
    ("data_prep",),
)
PACKAGES = ("verl", "search_r1", "data_prep")
HEIGHTS = {room: height for height, layer in enumerate(LAYERS) for room in layer}
Trees = Mapping[str, ast.Module]
Arrows = Mapping[tuple[str, str], set[tuple[str, str]]]
"""The imports, as (module, module that it imports), by (room, room that it imports)."""


def python_files() -> list[Path]:
    """Return the Python files that git knows or would add, relative to the repository's root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return sorted(Path(name) for name in set(names) if name and (ROOT / name).is_file())


def read_trees(folders: Iterable[str] = PACKAGES) -> dict[str, ast.Module]:
    """Return the parsed source of the modules in some folders, by their names."""
    return {
        ".".join(file.with_suffix("").parts).removesuffix(".__init__"): ast.parse((ROOT / file).read_text())
        for file in python_files()
        if file.parts[0] in folders
    }


def imports_of(module: str, nodes: Iterable[ast.AST], trees: Trees) -> set[str]:
    """Return the other modules of `trees` that import statements among the nodes name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in trees else node.module)
    return names & trees.keys() - {module}


def without_type_checking(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those below `if TYPE_CHECKING:`, which no run executes."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
            yield child
            yield from without_type_checking(child)


def room_of(module: str) -> str:
    """Return the room in which a module is. A layer may name a package inside a room as one of its own."""
    names = module.split(".")
    if ".".join(names[:3]) in HEIGHTS:
        return ".".join(names[:3])
    return names[0] if names[0] == "data_prep" else ".".join(names[:2])


def is_of_verl(room: str) -> bool:
    return room.split(".")[0] == "verl"


def arrows_between_rooms(trees: Trees) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Return all arrows between rooms with their imports."""
    arrows: dict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for module, tree in trees.items():
        for imported in imports_of(module, ast.walk(tree), trees):
            if room_of(imported) != room_of(module):
                arrows[room_of(module), room_of(imported)].add((module, imported))
    return dict(arrows)


def wrong_arrows(trees: Trees) -> list[str]:
    """Return what is wrong with the rooms: rooms that no layer names, arrows that do not lead down, circles.

    Circles of rooms can't be where every arrow leads down. Circles of modules may be inside a room, too.
    """
    rooms = set(map(room_of, trees))
    problems = [f"{room} is in no layer; put it into LAYERS" for room in sorted(rooms - HEIGHTS.keys())]
    for (room, other), imports in sorted(arrows_between_rooms(trees).items()):
        is_up = HEIGHTS.get(room, 0) <= HEIGHTS.get(other, 0) and {room, other} <= HEIGHTS.keys()
        if is_up or (is_of_verl(room) and not is_of_verl(other)):
            problems += [
                f"{module} imports {imported}, which is above it" for module, imported in sorted(imports)
            ]
    return [*problems, *(f"import circle: {', '.join(group)}" for group in circles(trees))]


def circles(trees: Trees) -> list[tuple[str, ...]]:
    """Return groups of modules that import each other, directly or through others (Tarjan's components)."""
    edges = {module: imports_of(module, without_type_checking(tree), trees) for module, tree in trees.items()}
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


def table(arrows: Arrows) -> str:
    """Return one line for each room, from the top to the bottom, with the rooms that it imports."""
    width = max(map(len, HEIGHTS))
    lines = []
    for layer in reversed(LAYERS):
        for room in layer:
            below = sorted(other for start, other in arrows if start == room)
            lines.append(f"{room:<{width}}  ->  {', '.join(below) or '-'}")
        lines.append("")
    return "\n".join(lines[:-1])


def direct_arrows(arrows: Arrows) -> list[tuple[str, str]]:
    """Return the arrows that do not follow from the others, so that a drawing can be read."""
    below: dict[str, set[str]] = defaultdict(set)
    for room, other in arrows:
        below[room].add(other)

    def reaches(room: str, goal: str) -> bool:
        return goal in below[room] or any(reaches(other, goal) for other in below[room])

    return sorted(
        (room, other)
        for room, other in arrows
        if not any(reaches(between, other) for between in below[room] - {other})
    )


def mermaid(arrows: Arrows) -> str:
    """Return the drawing in Mermaid's language, without the arrows that follow from others."""
    drawn = direct_arrows(arrows)
    rooms = {room for arrow in drawn for room in arrow}
    lines = ["```mermaid", "flowchart TD"]
    for layer in reversed(LAYERS):
        for room in layer:
            if room in rooms:
                lines.append(f'    {room.replace(".", "_")}["{room.removeprefix("verl.")}"]')
    for room, other in drawn:
        lines.append(f"    {room.replace('.', '_')} --> {other.replace('.', '_')}")
    return "\n".join([*lines, "```", ""])


def with_drawing(text: str, drawing: str) -> str:
    """Return the text of docs/design.md with the drawing between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + drawing + END + after


def main(argv: list[str] | None = None) -> int:
    """Run the program; return 1 if there are wrong arrows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mermaid", action="store_true", help="print the drawing of docs/design.md")
    parser.add_argument("--write", action="store_true", help="put the drawing into docs/design.md")
    options = parser.parse_args(argv)
    trees = read_trees()
    problems = wrong_arrows(trees)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if problems:
        return 1
    arrows = arrows_between_rooms(trees)
    if options.write:
        DESIGN.write_text(with_drawing(DESIGN.read_text(encoding="utf-8"), mermaid(arrows)), encoding="utf-8")
    print(mermaid(arrows) if options.mermaid else table(arrows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
