"""Which programs leave nothing in their process, so that their tests may run there one after the other.

What outlives a test there is Python's own: modules, and the functions, classes and other objects in them
that take attributes. Such a program names a module only to name something of FREE or OWNED in it, and never
has an object of OWNED in hand: it calls one, inherits from it, or writes it where a type stands. All that it
has in hand is its own then, or can't be changed; so it may make classes and set attributes as it likes. It
reaches no frame, no namespace, and no attribute whose name is made as it runs. What modules remember
`Servant.forget` puts back. Each test of any other program has a process of its own. Verdicts do not rest on
this: they are made elsewhere.
"""

from __future__ import annotations

import _ast
import builtins
import sys
from typing import Any

ERRORS = [n for n, v in vars(builtins).items() if isinstance(v, type) and issubclass(v, BaseException)]
SAFE_NAMES = (
    "abs all any bin bool bytes chr complex dict divmod enumerate filter float frozenset hash hex int "
    "isinstance issubclass iter len list map max min next oct ord pow print range repr reversed round set "
    "slice sorted str sum tuple type zip NotImplemented Ellipsis"
)
SAFE_BUILTINS = frozenset([*SAFE_NAMES.split(), *ERRORS])
MORE_NAMES = "bytearray callable classmethod id input object property staticmethod super __name__"
PROGRAM_BUILTINS = SAFE_BUILTINS | {*MORE_NAMES.split()}
PLAIN_NAMES = (
    "Module Assert Expr Assign AugAssign AnnAssign For While If Break Continue Pass Return Try Raise "
    "ExceptHandler FunctionDef Import ImportFrom alias Name Constant Call keyword Compare BoolOp BinOp "
    "UnaryOp IfExp List Tuple Dict Set Attribute Subscript Slice Starred JoinedStr FormattedValue "
    "GeneratorExp ListComp SetComp DictComp comprehension Lambda arguments arg operator cmpop boolop "
    "unaryop expr_context"
)
MORE = "ClassDef Global Nonlocal NamedExpr Delete With withitem Yield YieldFrom Match match_case pattern"


def kinds(names: str) -> frozenset[type]:
    found = [getattr(_ast, name) for name in names.split()]
    return frozenset([*found, *(below for kind in found for below in kind.__subclasses__())])


def public(module: str, but: str = "") -> str:
    return " ".join(name for name in dir(__import__(module)) if name[0] != "_" and name not in but.split())


PLAIN_NODES = kinds(PLAIN_NAMES)
PROGRAM_NODES = PLAIN_NODES | kinds(MORE)
NAMES = {  # what nobody can change, then what takes attributes
    "__future__": ("annotations", ""),
    "abc": ("", "ABC abstractmethod"),
    "bisect": ("bisect bisect_left bisect_right insort insort_left insort_right", ""),
    "collections": ("OrderedDict defaultdict deque", "Counter namedtuple"),
    "collections.abc": (
        "",
        "Callable Generator Hashable Iterable Iterator Mapping MutableMapping Sequence Set",
    ),
    "contextlib": ("", "contextmanager suppress"),
    "copy": ("", "copy deepcopy"),
    "dataclasses": ("", "asdict astuple dataclass field replace"),
    "datetime": ("date datetime time timedelta timezone", ""),
    "decimal": (
        "Decimal ROUND_DOWN ROUND_HALF_EVEN ROUND_HALF_UP getcontext localcontext",
        "InvalidOperation",
    ),
    "enum": ("", "Enum IntEnum unique"),
    "fractions": ("", "Fraction"),
    "functools": ("cmp_to_key partial reduce", "cache cached_property lru_cache total_ordering"),
    "heapq": ("heapify heappop heappush heappushpop heapreplace", "merge nlargest nsmallest"),
    "itertools": (public("itertools"), ""),
    "json": ("", "JSONDecodeError dump dumps load loads"),
    "math": (public("math"), ""),
    "operator": (public("_operator", "attrgetter methodcaller"), ""),
    "random": ("choice choices gauss randint random randrange sample seed shuffle uniform", "Random"),
    "re": ("Match Pattern", "compile escape findall finditer fullmatch match search split sub"),
    "statistics": ("", "fmean mean median mode pstdev pvariance stdev variance"),
    "string": (public("string", "Formatter Template capwords"), "capwords"),
    "sys": ("exit maxsize set_int_max_str_digits setrecursionlimit stderr stdin stdout", ""),
    "time": ("monotonic perf_counter sleep time time_ns", ""),
    "typing": (
        "",
        "Any Callable ClassVar Counter DefaultDict Deque Dict Final FrozenSet Generator Hashable "
        "Iterable Iterator List Literal Mapping MutableMapping NamedTuple NewType NoReturn Optional "
        "OrderedDict Sequence Set Tuple Type TypeVar Union cast",
    ),
}
FREE, OWNED = ({(m, name) for m, names in NAMES.items() for name in names[i].split()} for i in (0, 1))
BASES = {("abc", "ABC"), ("enum", "Enum"), ("enum", "IntEnum"), ("typing", "NamedTuple")}
ALIASES = {("typing", name) for name in ("Dict", "FrozenSet", "List", "Optional", "Set", "Tuple")}
EXACT = BASES | ALIASES | {(name, "") for name in NAMES}
OPERATIONS = (
    "abs add and bool bytes call ceil complex contains copy deepcopy delitem divmod enter eq exit float "
    "floor floordiv format ge getitem gt hash iadd iand ifloordiv ilshift imod imul index init int invert "
    "ior ipow irshift isub iter itruediv ixor le len lshift lt matmul missing mod mul ne neg new next or pos "
    "post_init pow radd rand repr reversed rfloordiv rlshift rmod rmul ror round rpow rrshift rshift rsub "
    "rtruediv rxor setitem slots str sub truediv trunc xor"
)
SPECIAL_NAMES = frozenset(["__name__", *(f"__{name}__" for name in OPERATIONS.split())])
HIDDEN_NAMES = (  # attributes by which an object leads to a frame, code, or what Python itself goes on to use
    "gi_frame gi_code gi_yieldfrom cr_frame ag_frame tb_frame tb_next f_back f_builtins f_code f_globals "
    "f_locals f_trace mro obj type register strptime format_map default default_factory kw_only "
    "_field_defaults _getitem encode decode"
)
HIDDEN = frozenset(HIDDEN_NAMES.split())
NAMING = (_ast.keyword, _ast.MatchClass, _ast.Global, _ast.Nonlocal, _ast.Name)  # the others bind their names


def nodes_of(tree: _ast.AST) -> list[Any]:
    """All nodes of a tree, each before those below it."""
    found: list[Any] = [tree]
    for node in found:
        for field in node._fields if node.__class__ is not _ast.Constant else ():
            value = getattr(node, field, None)
            if value.__class__ is list:
                found.extend([child for child in value if isinstance(child, _ast.AST)])
            elif isinstance(value, _ast.AST):
                found.append(value)
    return found


def modules_if_plain(program: str) -> list[str] | None:
    """The modules of a program that leaves nothing behind; None: it might leave something."""
    try:
        nodes = nodes_of(compile(program, "<program>", "exec", 0x400, True))  # of the tree alone
        return Reader(nodes).modules()
    except Exception:  # whatever is refused, too deep or too large gets processes of its own
        return None


def refuse_unless(fine: Any) -> None:
    if not fine:
        raise ValueError


class Reader:
    """Reads the nodes of a program. Any exception: it might leave something.

    imports: (module, name there) by the program's name; "" is the module itself. bound: the names that the
    program binds in other ways. places: ids of the nodes where an object of OWNED may stand.
    """

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes = nodes
        self.imports: dict[str, tuple[str, str]] = {}
        self.bound: set[str] = set()
        self.places: set[int] = set()

    def modules(self) -> list[str]:
        for node in self.nodes:
            kind = node.__class__
            refuse_unless(kind in PROGRAM_NODES)
            if kind is _ast.Import or kind is _ast.ImportFrom:
                self.read_import(node)
            elif kind is not _ast.Constant and kind is not _ast.Attribute and kind is not _ast.alias:
                self.read_words(node)
        owned = {name for name, target in self.imports.items() if target not in FREE}
        refuse_unless(not owned & self.bound)
        for node in self.nodes:
            self.find_places(node)
        attributes = [node for node in self.nodes if node.__class__ is _ast.Attribute]
        modules = {id(node.value) for node in attributes if self.is_module(node.value)}
        for node in attributes:
            self.check_attribute(node)
        for node in self.nodes:
            if node.__class__ is _ast.Name and (node.id in owned or node.id in ("super", "type")):
                refuse_unless(id(node) in (modules if self.is_module(node) else self.places))
        return sorted({module for module, _ in self.imports.values()} - {"__future__"})

    def read_words(self, node: Any) -> None:
        values = [getattr(node, field, None) for field in node._fields]
        found = [word for value in values for word in (value if value.__class__ is list else [value])]
        words: list[str] = [word for word in found if word.__class__ is str]
        for word in words:
            refuse_unless(word[0] != "_" or word[-1] != "_" or len(word) < 3 or word in SPECIAL_NAMES)
            refuse_unless(node.__class__ is not _ast.MatchClass or word not in HIDDEN)
        if node.__class__ is _ast.Name:
            refuse_unless(node.id in PROGRAM_BUILTINS or not hasattr(builtins, node.id))
        if (
            node.__class__ not in NAMING
            or node.__class__ is _ast.Name
            and node.ctx.__class__ is not _ast.Load
        ):
            self.bound.update(words)

    def read_import(self, node: Any) -> None:
        refuse_unless(not getattr(node, "level", 0))
        for alias in node.names:
            name = alias.asname or alias.name
            if node.__class__ is _ast.Import:
                refuse_unless(alias.name in NAMES and alias.name != "collections.abc")
                found = {name: (alias.name, "")}
            elif name == "*" and node.module in NAMES:  # what else it brings is refused where it is used
                names = getattr(sys.modules[node.module], "__all__", public(node.module).split())
                found = {name: (node.module, name) for name in names}
            else:
                refuse_unless((node.module, alias.name) in FREE | OWNED)
                found = {name: (node.module, alias.name)}
            for name, target in found.items():
                old = self.imports.setdefault(name, target)
                refuse_unless(name[:2] != "__" and (old == target or not {old, target} & EXACT))
                if old in FREE:
                    self.imports[name] = target

    def is_module(self, node: Any) -> bool:
        return node.__class__ is _ast.Name and self.imports.get(node.id, ("", "x"))[1] == ""

    def target(self, node: Any) -> tuple[str, str] | None:
        """(module, name) of what a node names, ("", name) of a builtin; None: it is the program's."""
        base: Any = node.value if node.__class__ is _ast.Attribute else None
        if self.is_module(base):
            return self.imports[base.id][0], node.attr
        if node.__class__ is not _ast.Name or node.id in self.bound:
            return None
        name: str = node.id
        return self.imports.get(name, ("", name) if hasattr(builtins, name) else None)

    def allow(self, node: Any, among: Any = OWNED) -> None:
        """An object of OWNED may stand here, or several in a tuple."""
        for one in node.elts if node.__class__ is _ast.Tuple else [node]:
            if self.target(one) in among:
                self.places.add(id(one))

    def allow_type(self, node: Any) -> None:
        """The same for all parts of a type: only Python's own methods get hold of them."""
        kind, target = node.__class__, self.target(node)
        if target in OWNED or target == ("", "type"):
            self.places.add(id(node))
        elif kind is _ast.Subscript and self.target(node.value) is not None:
            self.allow_type(node.value)
            self.allow_type(node.slice)
        elif kind is _ast.Tuple or kind is _ast.List:
            for part in node.elts:
                self.allow_type(part)

    def type_of(self, node: Any) -> Any:
        """The node that needs a place in `type(x)` or `x.__class__`, or None."""
        if node.__class__ is _ast.Attribute and node.attr == "__class__":
            return node
        asks = node.__class__ is _ast.Call and len(node.args) == 1 and not node.keywords
        return node.func if asks and self.target(node.func) == ("", "type") else None

    def find_places(self, node: Any) -> None:
        kind = node.__class__
        if kind is _ast.Call:
            called = self.target(node.func)
            self.allow(node.func, OWNED - BASES)
            if called == ("", "super") or getattr(node.func, "attr", "")[:2] == "__":
                self.places.add(id(node.func))
            elif called in (("", "isinstance"), ("", "issubclass")):
                self.allow(node.args[1], OWNED | {("", "type")})
        elif kind is _ast.FunctionDef or kind is _ast.ClassDef:
            refuse_unless(not getattr(node, "keywords", ()))
            for decorator in node.decorator_list:
                self.allow(decorator)
            for base in getattr(node, "bases", ()):
                self.allow(base, BASES)
            self.allow_type(getattr(node, "returns", None))
        elif kind is _ast.arg or kind is _ast.AnnAssign:
            self.allow_type(node.annotation)
        elif kind is _ast.ExceptHandler:
            self.allow(node.type)
        elif kind is _ast.Subscript and self.target(node.value) in ALIASES:
            self.allow_type(node)
        elif kind is _ast.Attribute and node.attr == "__name__":
            self.places.add(id(self.type_of(node.value)))
        elif kind is _ast.Compare:
            self.find_places_of_comparison(node)

    def find_places_of_comparison(self, node: Any) -> None:
        """`type(x) is int`; and `==` or `in` where all sides are types of Python's, so that no method of the
        program's is asked."""
        sides = [node.left]
        for side in node.comparators:
            sides += side.elts if side.__class__ in (_ast.Tuple, _ast.List) else [side]
        identity = all(op.__class__ in (_ast.Is, _ast.IsNot) for op in node.ops)
        equality = all(op.__class__ in (_ast.Eq, _ast.NotEq, _ast.In, _ast.NotIn) for op in node.ops)
        if identity or equality and all(self.type_of(side) or self.target(side) for side in sides):
            for side in sides:
                self.places.add(id(self.type_of(side) or side))

    def check_attribute(self, node: Any) -> None:
        name, loads, placed = node.attr, node.ctx.__class__ is _ast.Load, id(node) in self.places
        if self.is_module(node.value):
            refuse_unless(loads and self.target(node) in (FREE | OWNED if placed else FREE))
        elif name[0] == "_" and name[-1] == "_" and len(name) > 2:
            refuse_unless(name in SPECIAL_NAMES or name == "__class__")
            refuse_unless(loads and (placed or name == "__name__"))
        elif name == "format":  # it reads attributes
            text = node.value.value if node.value.__class__ is _ast.Constant else None
            refuse_unless(text.__class__ is str and "_" not in text)
        else:
            refuse_unless(name not in HIDDEN)
