"""The tests of a request and the comparison of outputs, in Open-Instruct's formats."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from decimal import Decimal, InvalidOperation
from typing import Any

MAX_TEST_BYTES = 64 << 20  # the limit for all tests of a request, unpacked
MAX_TESTS = 10_000


class PlainUnpickler(pickle._Unpickler):
    """An unpickler of plain data only, which finds no class and no function.

    It is Python's own unpickler, because the one in C allocates as much as an index in the data says.
    """

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def decode_tests(tests: Any) -> list[Any]:
    """Return the tests of a request, which are a list, JSON text, or base64(zlib(pickle)).

    An empty value means that there are no tests.

    Raises:
        ValueError: If they are none of these, or if they are too many or too large.
    """
    if not tests:
        return []
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError):
            tests = unpickle(tests)
    if not isinstance(tests, list):
        raise ValueError(f"tests: found a {type(tests).__name__}, expected a list or text of one")
    texts = [value for test in tests for value in (test.values() if isinstance(test, dict) else [test])]
    flat = [value for text in texts for value in (text if isinstance(text, list) else [text])]
    if len(flat) > 100 * MAX_TESTS or len(tests) > MAX_TESTS:
        raise ValueError(f"tests: found {len(tests)}, expected at most {MAX_TESTS}")
    if sum(len(text) for text in flat if isinstance(text, str)) > MAX_TEST_BYTES:
        raise ValueError(f"tests: found more than {MAX_TEST_BYTES} characters")
    return tests


def unpickle(text: str) -> Any:
    try:
        packed = base64.b64decode(text.encode("ascii"))
        unpack = zlib.decompressobj()
        data = unpack.decompress(packed, MAX_TEST_BYTES)
        if not unpack.eof:
            raise ValueError("it is cut short, or too large")
        return PlainUnpickler(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"tests: found text that is neither JSON nor base64 of zlib ({error})") from None
    except Exception as error:  # a hostile pickle may fail in any way
        raise ValueError(f"tests: the pickle can't be read ({type(error).__name__}: {error})") from None


def same_output(output: str, expected: str) -> bool:
    """Return whether the stripped lines are equal, as text or as decimal numbers word by word."""
    lines, expected_lines = (
        [line.strip() for line in text.strip().split("\n")] for text in (output, expected)
    )
    return len(lines) == len(expected_lines) and all(
        line == want or same_numbers(line, want) for line, want in zip(lines, expected_lines, strict=True)
    )


def same_numbers(line: str, want: str) -> bool:
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in want.split()]
    except InvalidOperation:
        return False
