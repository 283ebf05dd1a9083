"""Plain data between two processes that don't trust each other: typed JSON in frames, and questions over it.

    None, bool, int, str   as in JSON (large ints: ["i", hex])       ["f", hex] float      ["b", latin1] bytes
    ["l", ..] list   ["t", ..] tuple   ["s", ..] set   ["z", ..] frozenset   ["d", key, value, ..] dict
    ["m", name, ..]  a type of MAKERS from its arguments             ["k", name] a constant or a builtin type
    ["n", name, fields, ..]  a named tuple

Nothing here runs code that the other side names, and every size is bounded. This module imports only modules
that are written in C (`_json`, `_socket`), because each module that a sandbox has loaded makes each of its
forks slower.
"""

from __future__ import annotations

import _json
import _socket
import builtins
import posix
import sys
from collections.abc import Callable
from typing import Any

MAX_BYTES = 48 << 20  # the limit of one message
# The module of a type, and a function that returns the arguments which make a value of it.
MAKERS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "complex": ("builtins", lambda value: [value.real, value.imag]),
    "range": ("builtins", lambda value: [value.start, value.stop, value.step]),
    "slice": ("builtins", lambda value: [value.start, value.stop, value.step]),
    "bytearray": ("builtins", lambda value: [bytes(value)]),
    "deque": ("collections", lambda value: [list(value), value.maxlen]),
    "Counter": ("collections", lambda value: [dict(value)]),
    "OrderedDict": ("collections", lambda value: [dict(value)]),
    "defaultdict": ("collections", lambda value: [value.default_factory, dict(value)]),
    "Decimal": ("decimal", lambda value: [str(value)]),
    "Fraction": ("fractions", lambda value: [value.numerator, value.denominator]),
    "array": ("array", lambda value: [value.typecode, value.tolist()]),
    "date": ("datetime", lambda value: [value.year, value.month, value.day]),
    "time": ("datetime", lambda value: [*clock_of(value)]),
    "datetime": ("datetime", lambda value: [value.year, value.month, value.day, *clock_of(value)]),
    "timedelta": ("datetime", lambda value: [value.days, value.seconds, value.microseconds]),
}
TYPES = "bool int float complex str bytes bytearray list tuple set frozenset dict range slice type object"
CONSTANTS: dict[str, Any] = {name: getattr(builtins, name) for name in TYPES.split()}
CONSTANTS |= {"Ellipsis": ..., "NotImplemented": NotImplemented, "NoneType": type(None)}
NAMES = {id(constant): name for name, constant in CONSTANTS.items()}
SMALL = 1 << 60
escape: Callable[[str], str] = _json.encode_basestring_ascii


class Torn(BaseException):
    """The error that the other side is gone, or has sent something other than a message.

    It is a BaseException so that no `except Exception` of a test hides it.
    """


class NotPlain(Exception):
    """The error that a value is no plain data, or too large to cross."""


def clock_of(value: Any) -> list[int]:
    if value.tzinfo is not None:
        raise NotPlain("a time zone")
    return [value.hour, value.minute, value.second, value.microsecond]


def encode(value: Any) -> str:
    """Return the JSON text of a value.

    A value of a subclass of a plain type becomes one of the plain type, if the subclass defines no operator.

    Raises:
        NotPlain: If the value is no plain data, or holds anything that is none.
        RecursionError: If the value is nested too deep, or within itself.
    """
    kind = type(value)
    if value is None:
        return "null"
    if value is True:
        return "true"
    if value is False:
        return "false"
    if kind is str:
        return escape(value)
    if kind is int:
        return int.__repr__(value) if -SMALL < value < SMALL else f'["i","{value:x}"]'
    if kind is float:
        return f'["f","{value.hex()}"]'
    is_long = kind is list and len(value) > 99 and set(map(type, value)) == {int}
    if is_long and min(value) > -SMALL and max(value) < SMALL:
        return f'["l",{repr(value)[1:]}'
    plain: Any
    for plain, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if kind is plain:
            return "".join([f'["{tag}"', *["," + encode(item) for item in value], "]"])
    if kind is dict:
        return "".join(['["d"', *[f",{encode(key)},{encode(item)}" for key, item in value.items()], "]"])
    if kind is bytes:
        return f'["b",{escape(value.decode("latin1"))}]'
    if id(value) in NAMES:
        return f'["k","{NAMES[id(value)]}"]'
    home = type.__getattribute__(kind, "__module__")
    name = type.__getattribute__(kind, "__name__")
    if name in MAKERS and MAKERS[name][0] == home:
        return encode_parts("m", [name, *MAKERS[name][1](value)])
    if home == "numpy":
        return encode_numpy(value)
    for plain in (int, float, str, tuple, list, dict, set, frozenset, bytes):
        if issubclass(kind, plain):
            return encode_subclass(value, plain)
    raise NotPlain(name)


def encode_parts(tag: str, parts: list[Any]) -> str:
    return "".join([f'["{tag}"', *["," + encode(part) for part in parts], "]"])


def encode_numpy(value: Any) -> str:
    """Return the text of an array or a scalar of numpy."""
    if type(value).__name__ != "ndarray":
        item = value.item() if hasattr(value, "item") and not hasattr(value, "fields") else value
        if type(item) in (bool, int, float, complex, str, bytes):
            return encode(item)
    elif value.dtype.kind in "biufcSU":
        return encode_parts("m", ["ndarray", value.tolist(), value.dtype.str])
    elif value.dtype.kind in "Mm":
        return encode_parts("m", ["ndarray", value.astype("i8").tolist(), value.dtype.str])
    raise NotPlain("an array of objects")


OPERATORS = frozenset(
    [
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__contains__",
        "__getitem__",
        "__missing__",
        "__add__",
        "__radd__",
        "__sub__",
        "__rsub__",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__rtruediv__",
        "__floordiv__",
        "__rfloordiv__",
        "__mod__",
        "__rmod__",
        "__pow__",
        "__rpow__",
        "__and__",
        "__rand__",
        "__or__",
        "__ror__",
        "__xor__",
        "__rxor__",
        "__matmul__",
        "__rmatmul__",
        "__iadd__",
        "__isub__",
        "__array__",
        "__array_ufunc__",
        "__array_function__",
        "__array_interface__",
        "__array_struct__",
        "__class__",
        "__bool__",
        "__instancecheck__",
        "__subclasscheck__",
        "__getattribute__",
        "__getattr__",
        "__iter__",
        "__len__",
    ]
)


def classes_of(kind: type) -> tuple[type, ...]:
    """Return the classes that a type inherits from, whatever its metaclass says."""
    return type.__dict__["__mro__"].__get__(kind)


def encode_subclass(value: Any, plain: Any) -> str:
    kind = type(value)
    for base in classes_of(kind):
        if base is plain:
            break
        if OPERATORS & type.__dict__["__dict__"].__get__(base).keys():
            raise NotPlain(kind.__name__)
    fields = getattr(kind, "_fields", None)
    if plain is tuple and type(fields) is tuple and len(fields) == len(value):
        return encode_parts("n", [kind.__name__, [*fields], *tuple.__iter__(value)])
    return encode(plain(value) if plain is not str else str.__str__(value))


def refuse(*_: Any) -> Any:
    raise Torn("not a message")


class ScannerSettings:
    """The settings that the C scanner of JSON asks for."""

    strict = False
    object_hook = None
    object_pairs_hook = staticmethod(refuse)
    parse_float = staticmethod(refuse)
    parse_constant = staticmethod(refuse)
    parse_int = int  # Python itself refuses texts of more than 4,300 digits
    memo: dict[str, str] = {}


settings: Any = ScannerSettings
scan = _json.make_scanner(settings)


def decode(text: str) -> Any:
    """Return the value of a text that `encode` made.

    Raises:
        Torn: If `encode` can't have made the text, whatever the text is.
    """
    try:
        tree, end = scan(text, 0)
        if end != len(text):
            refuse()
        return build(tree)
    except (StopIteration, ValueError, TypeError, ArithmeticError, LookupError, ImportError, AttributeError):
        raise Torn("not a message") from None
    except RecursionError:
        raise Torn("nested too deep") from None


def build(tree: Any) -> Any:
    if type(tree) is not list:
        return tree
    tag, *items = tree
    if tag == "l":
        return [build(item) for item in items] if len(items) < 100 or list in map(type, items) else items
    if tag == "f":
        (text,) = items
        return float.fromhex(text)
    if tag == "t":
        return tuple([build(item) for item in items])
    if tag == "d":
        keys = [build(item) for item in items[::2]]
        return dict(zip(keys, [build(item) for item in items[1::2]], strict=True))
    if tag in ("s", "z"):
        return (set if tag == "s" else frozenset)([build(item) for item in items])
    if tag == "i":
        (text,) = items
        return int(text, 16)
    if tag == "b":
        (text,) = items
        return text.encode("latin1")
    if tag == "k":
        (text,) = items
        return CONSTANTS[text]
    if tag == "n":
        kind = __import__("collections").namedtuple(items[0], build(items[1]))
        return kind(*[build(item) for item in items[2:]])
    if tag == "m" and items[0] == "ndarray":
        _, rows, dtype = items
        if dtype[1] not in "biufcSUMm" or len(dtype) > 12:
            refuse()
        array = __import__("numpy").array(build(rows), dtype="i8" if dtype[1] in "Mm" else dtype)
        return array.view(dtype) if dtype[1] in "Mm" else array
    if tag == "m":
        home = __import__(MAKERS[items[0]][0])
        return getattr(home, items[0])(*[build(item) for item in items[1:]])
    return refuse()


def send_fds(to: _socket.socket, data: bytes, fds: list[int]) -> None:
    packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    to.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])


def receive(of: _socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message and the files that come with it, or nothing at the end."""
    try:
        data, ancillary, _, _ = of.recvmsg(4096, 256)
    except OSError:
        return b"", []
    packed = b"".join(payload for _, kind, payload in ancillary if kind == _socket.SCM_RIGHTS)
    return data, [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]


def write_frame(fd: int, text: str) -> None:
    data = text.encode("ascii")
    view = memoryview(len(data).to_bytes(4, "little") + data)
    try:
        while view:
            view = view[posix.write(fd, view) :]
    except OSError:
        raise Torn("the other side is gone") from None


def read_frame(fd: int) -> str:
    """Read the next frame.

    Both sides take turns, so nothing may follow the frame.
    """
    chunks = [b""]
    size = 4
    num_bytes = 0
    while num_bytes < size:
        try:
            chunks.append(posix.read(fd, 1 << 18))
        except OSError:
            raise Torn("the other side is gone") from None
        if not chunks[-1]:
            raise Torn("the other side is gone")
        num_bytes += len(chunks[-1])
        if size == 4 and num_bytes >= 4:
            chunks = [b"".join(chunks)]
            size += int.from_bytes(chunks[0][:4], "little")
            if size > MAX_BYTES + 4:
                raise Torn("a message is too large")
    try:
        return b"".join(chunks)[4:].decode("ascii") if num_bytes == size else refuse()
    except UnicodeDecodeError:
        raise Torn("not a message") from None


def ask(fd: int, *question: Any) -> Any:
    """Send a question and return the answer of the other side.

    Raises:
        NotPlain: If the question or its answer is no plain data. The argument is "question" or "answer".
        Torn: If there is no answer, or if it is none.
        BaseException: The exception of the other side, as a builtin one.
    """
    try:
        text = encode([*question])
    except (NotPlain, RecursionError):
        raise NotPlain("question") from None
    if len(text) > MAX_BYTES:
        raise NotPlain("question")
    write_frame(fd, text)
    answer = decode(read_frame(fd))
    if type(answer) is not list or not answer or type(answer[0]) is not str:
        refuse()
    kind, *parts = answer
    if kind == "ok" and len(parts) == 1:
        return parts[0]
    if kind == "other":
        raise NotPlain("answer")
    if kind == "raise" and len(parts) == 3 and type(parts[1]) is list:
        raise exception_of(*parts)
    return refuse()


def answer(fd: int, serve: Callable[..., Any]) -> None:
    """Take one question, and answer it by what `serve(*question)` returns or raises.

    Raises Torn if there is no further question.
    """
    question = decode(read_frame(fd))
    try:
        value = serve(*question)
        try:
            text = encode(["ok", value])
        except RecursionError:
            raise NotPlain("nested too deep") from None
    except NotPlain:
        text = '["l","other"]'
    except BaseException as error:  # any exception crosses under the name of a builtin one
        text = encode(["raise", *parts_of(error)])
    write_frame(fd, text if len(text) <= MAX_BYTES else '["l","other"]')


def parts_of(error: BaseException) -> list[Any]:
    """Return an exception as plain data.

    The items are the name of its nearest builtin class, the list of its arguments, where "..." replaces any
    that is not plain, and whether its own class is another one.
    """
    names = [base.__name__ for base in classes_of(type(error)) if base.__module__ == "builtins"]
    plain = (str, int, float, bool, bytes, type(None))
    arguments = [argument if type(argument) in plain else "..." for argument in error.args[:8]]
    return [names[0], arguments, names[0] != type(error).__name__]


def exception_of(name: Any, arguments: list[Any], is_subclass: Any) -> BaseException:
    kind = getattr(builtins, name, None) if type(name) is str else None
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise Torn("not a message")
    try:
        error: BaseException = kind(*arguments)
    except Exception:  # some classes need certain arguments, such as UnicodeDecodeError
        error = RuntimeError(name)
    error.__dict__["is_subclass"] = is_subclass is True
    return error
