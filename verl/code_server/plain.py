"""The programs that leave nothing in their process, so that their tests may run there one after the other.

Such a program computes with plain data. It makes no classes, it reaches no attribute but the methods of plain
data and some functions of modules, and it can write to nothing that outlives its names. Each test of any
other program has a process of its own. Verdicts do not depend on this, because they are made elsewhere.
"""

from __future__ import annotations

import _ast
import builtins
from typing import Any

ERRORS = [n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)]
SAFE_NAMES = (
    "abs all any bin bool bytes chr complex dict divmod enumerate filter float frozenset hash hex int "
    "isinstance issubclass iter len list map max min next oct ord pow print range repr reversed round set "
    "slice sorted str sum tuple type zip NotImplemented Ellipsis"
)
SAFE_BUILTINS = frozenset([*SAFE_NAMES.split(), *ERRORS])
PLAIN_NAMES = (
    "Module Assert Expr Assign AugAssign AnnAssign For While If Break Continue Pass Return Try Raise "
    "ExceptHandler FunctionDef Import ImportFrom alias Name Constant Call keyword Compare BoolOp BinOp "
    "UnaryOp IfExp List Tuple Dict Set Attribute Subscript Slice Starred JoinedStr FormattedValue "
    "GeneratorExp ListComp SetComp DictComp comprehension Lambda arguments arg operator cmpop boolop "
    "unaryop expr_context"
)
PLAIN_NODES = frozenset(
    kind
    for name in PLAIN_NAMES.split()
    for kind in [getattr(_ast, name), *getattr(_ast, name).__subclasses__()]
)
PROGRAM_NODES = PLAIN_NODES | {_ast.Global, _ast.Nonlocal, _ast.NamedExpr, _ast.Delete}
# `type` is left out because it makes classes.
PROGRAM_BUILTINS = SAFE_BUILTINS - {"type", "hash"} | {"input", "__name__"}
PLAIN_TYPES = (str, bytes, list, dict, set, tuple, int, float, complex)
OTHER_METHODS = (
    "appendleft popleft extendleft rotate most_common elements subtract total move_to_end args read readline "
    "readlines write flush buffer"
)
METHODS = frozenset(n for kind in PLAIN_TYPES for n in dir(kind) if n[0] != "_") | {*OTHER_METHODS.split()}
METHODS -= {"format", "format_map", "encode", "decode"}  # A format reads attributes. A codec is a module.
MODULES = {
    "bisect": "bisect bisect_left bisect_right insort insort_left insort_right",
    "collections": "deque defaultdict Counter OrderedDict",
    "functools": "reduce cmp_to_key lru_cache cache partial",
    "heapq": "heappush heappop heapify heappushpop heapreplace merge nlargest nsmallest",
    "itertools": " ".join(name for name in dir(__import__("itertools")) if name[0] != "_"),
    "math": " ".join(name for name in dir(__import__("math")) if name[0] != "_"),
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits",
    "sys": "stdin stdout stderr maxsize exit setrecursionlimit",
    "typing": "Any Callable Dict Iterable Iterator List Optional Sequence Set Tuple Union",
}
ALLOWED = {module: frozenset(names.split()) for module, names in MODULES.items()}


def nodes_of(tree: _ast.AST) -> list[Any]:
    """Return all nodes of a tree, each before those below it."""
    nodes: list[Any] = [tree]
    for node in nodes:
        for field in node._fields if node.__class__ is not _ast.Constant else ():
            value = getattr(node, field, None)
            if value.__class__ is list:
                nodes.extend([child for child in value if isinstance(child, _ast.AST)])
            elif isinstance(value, _ast.AST):
                nodes.append(value)
    return nodes


def modules_if_plain(program: str) -> list[str] | None:
    """Return the modules of a program that can leave nothing behind, or None if it might leave something.

    The program's own names, and the objects that `typing` remembers, do not count.
    """
    try:
        nodes = nodes_of(compile(program, "<program>", "exec", 0x400, True))  # makes the tree alone
    except Exception:  # a program that is too deep or too large gets processes of its own
        return None
    modules: dict[str, str] = {}
    used: set[str] = set()
    for node in nodes:
        kind = node.__class__
        words = [getattr(node, field, None) for field in node._fields] if kind is not _ast.Constant else []
        if kind not in PROGRAM_NODES or any(
            word.__class__ is str and word[:2] == "__" and word != "__name__" for word in words
        ):
            return None
        for alias in node.names if kind in (_ast.Import, _ast.ImportFrom) else ():
            if kind is _ast.Import and alias.name in ALLOWED:
                modules[alias.asname or alias.name] = alias.name
            elif kind is _ast.Import or node.level or alias.name not in ALLOWED.get(node.module, ()):
                return None
            used.add(alias.name if kind is _ast.Import else node.module)
    attributes: list[Any] = [node for node in nodes if node.__class__ is _ast.Attribute]
    aside = {id(n.value) for n in attributes if n.value.__class__ is _ast.Name and n.value.id in modules}
    for node in attributes:
        allowed = ALLOWED[modules[node.value.id]] if id(node.value) in aside else METHODS
        text = node.value.value if node.value.__class__ is _ast.Constant else None
        formats = node.attr == "format" and text.__class__ is str and "_" not in text
        if node.ctx.__class__ is not _ast.Load or node.attr not in allowed and not formats:
            return None
    names = (node for node in nodes if node.__class__ is _ast.Name and id(node) not in aside)
    if any(n.id in modules or hasattr(builtins, n.id) and n.id not in PROGRAM_BUILTINS for n in names):
        return None
    return sorted(used)
