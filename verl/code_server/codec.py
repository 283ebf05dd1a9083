"""Plain data between two processes that don't trust each other: typed JSON in frames, and calls over it.

    None, bool, int, str   as in JSON (large ints: ["i", hex])       ["f", hex] float      ["b", latin1] bytes
    ["l", ..] list   ["t", ..] tuple   ["s", ..] set   ["z", ..] frozenset   ["d", key, value, ..] dict
    ["m", name, ..]  a type of MAKERS from its arguments              ["h", n]    handle    ["c", n]  callback

Nothing here runs code that the other side names, and every size is bounded. The modules are C alone (`_json`,
`_socket`), as each module that a sandbox has loaded makes each of its forks slower.
"""

from __future__ import annotations

import _json
import _socket
import builtins
import posix
import sys
from collections.abc import Callable
from typing import Any

MAX_BYTES = 8 << 20  # of one message
MAKERS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {  # the module of a type, and a value's arguments
    "complex": ("builtins", lambda value: [value.real, value.imag]),
    "range": ("builtins", lambda value: [value.start, value.stop, value.step]),
    "bytearray": ("builtins", lambda value: [bytes(value)]),
    "deque": ("collections", lambda value: [list(value), value.maxlen]),
    "Decimal": ("decimal", lambda value: [str(value)]),
    "Fraction": ("fractions", lambda value: [value.numerator, value.denominator]),
}
escape: Callable[[str], str] = _json.encode_basestring_ascii


class Torn(BaseException):
    """The other side is gone, or sent what is no message. No `except Exception` of a test may hide it."""


class TooLarge(Torn):
    """A message above MAX_BYTES."""


def encode(value: Any, other: Callable[[Any], list[Any]]) -> str:
    """The JSON text of a value. Subclasses of plain types become the plain type.

    other: gives the parts of the list that stands for an object of no plain type. RecursionError: it is
    nested too deep, or within itself.
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
        return int.__repr__(value) if -(1 << 60) < value < 1 << 60 else f'["i","{value:x}"]'
    if kind is float:
        return f'["f","{value.hex()}"]'
    plain: Any
    for plain, tag in ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z")):
        if isinstance(value, plain):
            return "".join([f'["{tag}"', *["," + encode(item, other) for item in plain.__iter__(value)], "]"])
    if isinstance(value, dict):
        pairs = [f",{encode(key, other)},{encode(dict.__getitem__(value, key), other)}" for key in [*value]]
        return "".join(['["d"', *pairs, "]"])
    if isinstance(value, bytes):
        return f'["b",{escape(bytes.decode(value, "latin1"))}]'
    if isinstance(value, int):
        return encode(int.__pos__(value), other)
    if isinstance(value, float):
        return encode(float.__pos__(value), other)
    if isinstance(value, str):
        return escape(str.__str__(value))
    home = getattr(kind, "__module__", None)
    name = kind.__name__
    if name in MAKERS and MAKERS[name][0] == home:
        return encode_parts(name, MAKERS[name][1](value), other)
    if home == "numpy":
        if kind.__name__ == "ndarray" and value.dtype.kind in "biufcSU":
            return encode_parts("ndarray", [value.tolist(), value.dtype.str], other)
        if hasattr(value, "item") and kind.__name__ != "ndarray" and type(value.item()) is not kind:
            return encode(value.item(), other)
    return encode([*other(value)], other).replace('"l",', "", 1)


def encode_parts(name: str, parts: list[Any], other: Callable[[Any], list[Any]]) -> str:
    return "".join([f'["m","{name}"', *["," + encode(part, other) for part in parts], "]"])


def refuse(*_: Any) -> Any:
    raise Torn("not a message")


def parse_int(text: str) -> int:
    return int(text) if len(text) < 21 else refuse()


class ScannerSettings:
    """What the C scanner of JSON asks for."""

    strict = False
    object_hook = None
    object_pairs_hook = staticmethod(refuse)
    parse_float = staticmethod(refuse)
    parse_constant = staticmethod(refuse)
    parse_int = staticmethod(parse_int)
    memo: dict[str, str] = {}


settings: Any = ScannerSettings
scan = _json.make_scanner(settings)


def decode(text: str, other: Callable[[str, int], Any]) -> Any:
    """The value of a text of `encode`. other: gives the object of a handle ("h") or callback ("c").

    Raises:
        Torn: the text is no such text, whatever it is.
    """
    try:
        tree, end = scan(text, 0)
        if end != len(text):
            refuse()
        return build(tree, other)
    except (StopIteration, ValueError, TypeError, ArithmeticError, LookupError, ImportError, AttributeError):
        raise Torn("not a message") from None
    except RecursionError:
        raise Torn("nested too deep") from None


def build(tree: Any, other: Callable[[str, int], Any]) -> Any:
    if type(tree) is not list:
        return tree
    tag, *parts = tree
    if tag == "l":
        return [build(part, other) for part in parts]
    if tag == "f":
        (text,) = parts
        return float.fromhex(text)
    if tag == "t":
        return tuple([build(part, other) for part in parts])
    if tag == "d":
        keys = [build(part, other) for part in parts[::2]]
        return dict(zip(keys, [build(part, other) for part in parts[1::2]], strict=True))
    if tag in ("s", "z"):
        return (set if tag == "s" else frozenset)([build(part, other) for part in parts])
    if tag == "i":
        (text,) = parts
        return int(text, 16)
    if tag == "b":
        (text,) = parts
        return text.encode("latin1")
    if tag == "m" and parts[0] == "ndarray":
        _, rows, dtype = parts
        if dtype[1] not in "biufcSU" or len(dtype) > 8:
            refuse()
        return __import__("numpy").array(build(rows, other), dtype=dtype)
    if tag == "m":
        home = __import__(MAKERS[parts[0]][0])
        return getattr(home, parts[0])(*[build(part, other) for part in parts[1:]])
    if tag in ("h", "c") and type(parts[0]) is int and len(parts) == 1:
        return other(tag, parts[0])
    return refuse()


def send_fds(to: _socket.socket, data: bytes, fds: list[int]) -> None:
    packed = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
    to.sendmsg([data], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)])


def receive(of: _socket.socket) -> tuple[bytes, list[int]]:
    """One message and the files that came with it; nothing at the end."""
    try:
        data, ancillary, _, _ = of.recvmsg(4096, 256)
    except OSError:
        return b"", []
    packed = b"".join(part for _, kind, part in ancillary if kind == _socket.SCM_RIGHTS)
    return data, [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]


def write_frame(fd: int, text: str) -> None:
    data = text.encode("ascii")
    if len(data) > MAX_BYTES:
        raise TooLarge("a value is too large to cross")
    data = len(data).to_bytes(4, "little") + data
    try:
        while data:
            data = data[posix.write(fd, data) :]
    except OSError:
        raise Torn("the other side is gone") from None


def read_frame(fd: int) -> str:
    """The next frame. Both sides take turns, so nothing may follow it."""
    parts = [b""]
    size = 4
    held = 0
    while held < size:
        try:
            parts.append(posix.read(fd, 1 << 16))
        except OSError:
            raise Torn("the other side is gone") from None
        if not parts[-1]:
            raise Torn("the other side is gone")
        held += len(parts[-1])
        if size == 4 and held >= 4:
            parts = [b"".join(parts)]
            size += int.from_bytes(parts[0][:4], "little")
            if size > MAX_BYTES + 4:
                raise TooLarge("a message is too large")
    try:
        return b"".join(parts)[4:].decode("ascii") if held == size else refuse()
    except UnicodeDecodeError:
        raise Torn("not a message") from None


class Peer:
    """One end of calls that may nest in both directions: while one side waits, it serves the other.

    serve: does what a message asks, `serve(op, *arguments)`. pack, unpack: objects that are no plain data,
    see `encode` and `decode`.
    """

    def __init__(
        self,
        fd: int,
        serve: Callable[..., Any],
        pack: Callable[[Any], list[Any]],
        unpack: Callable[[str, int], Any],
    ) -> None:
        self.fd = fd
        self.serve = serve
        self.pack = pack
        self.unpack = unpack

    def request(self, *message: Any) -> Any:
        """What the other side answers. Raises what it raised, as a builtin exception, or Torn."""
        write_frame(self.fd, encode(list(message), self.pack))
        while True:
            answer = self.answer_next()
            if answer is not None:
                return answer[0]

    def answer_next(self) -> list[Any] | None:
        """Takes one message: serves it (None), or it is the answer that was awaited ([value])."""
        message = decode(read_frame(self.fd), self.unpack)
        if type(message) is not list or not message or type(message[0]) is not str:
            raise Torn("not a message")
        kind, *parts = message
        if kind == "ok" and len(parts) == 1:
            return parts
        if kind == "large":
            raise TooLarge("a value is too large to cross")
        if kind == "raise" and len(parts) == 2 and type(parts[1]) is list:
            raise exception_of(parts[0], parts[1])
        try:
            text = encode(["ok", self.serve(kind, *parts)], self.pack)
            if len(text) > MAX_BYTES:
                raise TooLarge("a value is too large to cross")
        except TooLarge:
            write_frame(self.fd, '["l","large"]')
            return None
        except Torn:
            raise
        except BaseException as error:  # whatever it is crosses by its builtin name
            text = encode(["raise", *parts_of(error)], lambda value: ["?"])
        write_frame(self.fd, text)
        return None


def parts_of(error: BaseException) -> list[Any]:
    """An exception as plain data: its nearest builtin class, and its arguments where they are plain."""
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins"]
    plain = (str, int, float, bool, bytes, type(None))
    return [names[0], [a if isinstance(a, plain) else "..." for a in error.args[:8]]]


def exception_of(name: Any, arguments: list[Any]) -> BaseException:
    kind = getattr(builtins, name, None) if type(name) is str else None
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise Torn("not a message")
    try:
        return kind(*arguments)
    except Exception:  # such as UnicodeDecodeError, which wants certain arguments
        return RuntimeError(name)
