"""Plain data between two processes that don't trust each other: typed JSON in frames, and calls over it.

    None, bool, int, str   as in JSON (large ints: ["i", hex])       ["f", hex] float      ["b", latin1] bytes
    ["l", ..] list   ["t", ..] tuple   ["s", ..] set   ["z", ..] frozenset   ["d", key, value, ..] dict
    ["m", name, ..]  a type of MAKERS from its arguments              ["h", n]    handle    ["c", n]  callback

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

MAX_BYTES = 8 << 20  # the limit of one message
# The module of a type, and a function that returns the arguments which make a value of it.
MAKERS: dict[str, tuple[str, Callable[[Any], list[Any]]]] = {
    "complex": ("builtins", lambda value: [value.real, value.imag]),
    "range": ("builtins", lambda value: [value.start, value.stop, value.step]),
    "bytearray": ("builtins", lambda value: [bytes(value)]),
    "deque": ("collections", lambda value: [list(value), value.maxlen]),
    "Decimal": ("decimal", lambda value: [str(value)]),
    "Fraction": ("fractions", lambda value: [value.numerator, value.denominator]),
}
escape: Callable[[str], str] = _json.encode_basestring_ascii


class Torn(BaseException):
    """The error that the other side is gone, or has sent something other than a message.

    It is a BaseException so that no `except Exception` of a test hides it.
    """


class TooLarge(Torn):
    """The error that a message is above MAX_BYTES."""


def encode(value: Any, other: Callable[[Any], list[Any]]) -> str:
    """Return the JSON text of a value.

    A value of a subclass of a plain type becomes one of the plain type.

    Args:
        value: The value.
        other: Takes an object of no plain type, and returns the items of the list that stands for it.

    Raises:
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
    """The settings that the C scanner of JSON asks for."""

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
    """Return the value of a text that `encode` made.

    Args:
        text: The text.
        other: Takes "h" and the number of a handle, or "c" and the number of a callback, and returns its
            object.

    Raises:
        Torn: If `encode` can't have made the text, whatever the text is.
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
    tag, *items = tree
    if tag == "l":
        return [build(item, other) for item in items]
    if tag == "f":
        (text,) = items
        return float.fromhex(text)
    if tag == "t":
        return tuple([build(item, other) for item in items])
    if tag == "d":
        keys = [build(item, other) for item in items[::2]]
        return dict(zip(keys, [build(item, other) for item in items[1::2]], strict=True))
    if tag in ("s", "z"):
        return (set if tag == "s" else frozenset)([build(item, other) for item in items])
    if tag == "i":
        (text,) = items
        return int(text, 16)
    if tag == "b":
        (text,) = items
        return text.encode("latin1")
    if tag == "m" and items[0] == "ndarray":
        _, rows, dtype = items
        if dtype[1] not in "biufcSU" or len(dtype) > 8:
            refuse()
        return __import__("numpy").array(build(rows, other), dtype=dtype)
    if tag == "m":
        home = __import__(MAKERS[items[0]][0])
        return getattr(home, items[0])(*[build(item, other) for item in items[1:]])
    if tag in ("h", "c") and type(items[0]) is int and len(items) == 1:
        return other(tag, items[0])
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
    if len(data) > MAX_BYTES:
        raise TooLarge("a value is too large to cross")
    data = len(data).to_bytes(4, "little") + data
    try:
        while data:
            data = data[posix.write(fd, data) :]
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
            chunks.append(posix.read(fd, 1 << 16))
        except OSError:
            raise Torn("the other side is gone") from None
        if not chunks[-1]:
            raise Torn("the other side is gone")
        num_bytes += len(chunks[-1])
        if size == 4 and num_bytes >= 4:
            chunks = [b"".join(chunks)]
            size += int.from_bytes(chunks[0][:4], "little")
            if size > MAX_BYTES + 4:
                raise TooLarge("a message is too large")
    try:
        return b"".join(chunks)[4:].decode("ascii") if num_bytes == size else refuse()
    except UnicodeDecodeError:
        raise Torn("not a message") from None


class Peer:
    """One end of calls that may nest in both directions.

    While one side waits for an answer, it serves the other.

    Args:
        fd: The file of the channel.
        serve: Does what a message asks for, as `serve(op, *arguments)`.
        pack: Packs objects that are no plain data, as `other` of `encode`.
        unpack: Unpacks objects that are no plain data, as `other` of `decode`.
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
        """Send a message and return the answer of the other side.

        Raises the exception of the other side, as a builtin one, or Torn.
        """
        write_frame(self.fd, encode(list(message), self.pack))
        while True:
            answer = self.answer_next()
            if answer is not None:
                return answer[0]

    def answer_next(self) -> list[Any] | None:
        """Take one message.

        Returns [value] if the message is the answer that was awaited. Otherwise the message is served, and
        the result is None.
        """
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
        except BaseException as error:  # any exception crosses under the name of a builtin one
            text = encode(["raise", *parts_of(error)], lambda value: ["?"])
        write_frame(self.fd, text)
        return None


def parts_of(error: BaseException) -> list[Any]:
    """Return an exception as plain data.

    The first item is the name of its nearest builtin class, and the second is the list of its arguments,
    where "..." replaces any that is not plain.
    """
    names = [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins"]
    plain = (str, int, float, bool, bytes, type(None))
    return [names[0], [argument if isinstance(argument, plain) else "..." for argument in error.args[:8]]]


def exception_of(name: Any, arguments: list[Any]) -> BaseException:
    kind = getattr(builtins, name, None) if type(name) is str else None
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise Torn("not a message")
    try:
        return kind(*arguments)
    except Exception:  # some classes need certain arguments, such as UnicodeDecodeError
        return RuntimeError(name)
