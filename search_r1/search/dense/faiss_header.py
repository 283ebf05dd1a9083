"""The header of a FAISS index file: its kind and its sizes, from some hundred bytes of a file of any size.

    <name>.index -> read_faiss_header -> FaissHeader(kind, dimension, num_rows, num_lists, ...)

Neither FAISS nor the vectors are loaded. The format is that of `faiss/impl/index_read.cpp` (FAISS 1.15): four
letters name the class, and an index inside of another one follows its header.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

FLAT = "Flat"
SCALAR_QUANTIZER = "SQ"
IVF_FLAT = "IVF-Flat"
IVF_SCALAR_QUANTIZER = "IVF-SQ"
IVF_PRODUCT_QUANTIZER = "IVF-PQ"

_KINDS = {
    **dict.fromkeys(("IxFI", "IxF2", "IxFl"), FLAT),
    "IxSQ": SCALAR_QUANTIZER,
    "IwFl": IVF_FLAT,
    **dict.fromkeys(("IwSQ", "IwSq"), IVF_SCALAR_QUANTIZER),
    "IwPQ": IVF_PRODUCT_QUANTIZER,
}
_OTHER_KINDS = {"IHN": "HNSW", "INS": "NSG", "INN": "NNDescent", "IxP": "PQ", "IPf": "PQ fast scan"}
_PRE_TRANSFORM = "IxPT"
_ID_MAPS = ("IxMp", "IxM2")
_HASHTABLE = 2  # `DirectMap::Hashtable`
# The name of `ScalarQuantizer::QuantizerType`, and the bits of a value. The position is its number.
SCALAR_TYPES = (
    ("8bit", 8),
    ("4bit", 4),
    ("8bit_uniform", 8),
    ("4bit_uniform", 4),
    ("fp16", 16),
    ("8bit_direct", 8),
    ("6bit", 6),
    ("bf16", 16),
    ("8bit_direct_signed", 8),
)


@dataclass(frozen=True)
class FaissHeader:
    """The sizes of a FAISS index.

    Attributes:
        kind: "Flat", "SQ", "IVF-Flat", "IVF-SQ", "IVF-PQ", or the name of a kind of which no more is known.
        dimension: The number of values of a vector, as the innermost index stores it.
        num_rows: The number of vectors.
        num_lists: The number of lists of an IVF index.
        quantizer: The kind of the index that finds an IVF index's lists, or "".
        scalar_type: The type of a stored value, a name in SCALAR_TYPES, or "".
        value_bits: The bits of a stored value. 32 if values are not quantized one by one.
        num_codes: The bytes of a vector in a product quantizer with 8 bits.
        code_bits: The bits of a code of a product quantizer.
        is_wrapped: Whether the index is inside of transforms or a map of ids.
    """

    kind: str
    dimension: int
    num_rows: int
    num_lists: int = 0
    quantizer: str = ""
    scalar_type: str = ""
    value_bits: int = 32
    num_codes: int = 0
    code_bits: int = 8
    is_wrapped: bool = False

    def __str__(self) -> str:
        name = f"{self.kind} {self.scalar_type}".strip()
        return f"{name}, {self.num_rows:,} x {self.dimension}"


def read_faiss_header(path: Path) -> FaissHeader:
    """Return the header of a FAISS index file.

    Raises ValueError for a file that ends in the middle of it.
    """
    with path.open("rb") as file:
        reader = _HeaderReader(file)
        try:
            return reader.read_index()
        except (struct.error, UnicodeDecodeError):
            raise ValueError(
                f"--index_path: found {path}, whose header can't be read; expected a whole FAISS index"
            ) from None


class _HeaderReader:
    """A reader of FAISS's little-endian numbers and vectors."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        return struct.unpack(layout, self._file.read(struct.calcsize(layout)))

    def _skip_vector(self, item_bytes: int) -> None:
        (count,) = self._numbers("Q")
        self._file.seek(count * item_bytes, 1)

    def _code(self) -> str:
        (code,) = self._numbers("4s")
        return str(code.decode("ascii"))

    def read_index(self, is_wrapped: bool = False) -> FaissHeader:
        """Return the header of the index that begins here, and read on to where its vectors begin."""
        code = self._code()
        dimension, num_rows, _, _, _, metric = self._numbers("iqqq?i")
        if metric > 1:
            self._numbers("f")
        if code == _PRE_TRANSFORM:
            (num_transforms,) = self._numbers("i")
            for _ in range(num_transforms):
                if (unknown := self._skip_transform()) is not None:
                    return FaissHeader(f"index behind a transform {unknown}", dimension, num_rows)
            return self.read_index(is_wrapped=True)
        if code in _ID_MAPS:
            return self.read_index(is_wrapped=True)
        kind = _KINDS.get(code) or _OTHER_KINDS.get(code[:3], code)
        if code not in _KINDS:
            return FaissHeader(kind, dimension, num_rows, is_wrapped=is_wrapped)
        sizes: dict[str, Any] = {}
        if code.startswith("Iw"):
            num_lists, _ = self._numbers("QQ")
            sizes["num_lists"] = num_lists
            quantizer = self.read_index()
            sizes["quantizer"] = quantizer.kind
            if quantizer.kind != FLAT:  # where it ends is not known
                return FaissHeader(kind, dimension, num_rows, **sizes)
            self._skip_vector(4)
            (map_type,) = self._numbers("b")
            self._skip_vector(8)
            if map_type == _HASHTABLE:
                self._skip_vector(16)
        if kind in (SCALAR_QUANTIZER, IVF_SCALAR_QUANTIZER):
            (number,) = self._numbers("i")
            is_known = 0 <= number < len(SCALAR_TYPES)
            name, bits = SCALAR_TYPES[number] if is_known else (f"type {number}", 32)
            sizes["scalar_type"] = name
            sizes["value_bits"] = bits
        if kind == IVF_PRODUCT_QUANTIZER:
            _, _, _, num_codes, code_bits = self._numbers("?QQQQ")
            sizes["num_codes"] = num_codes
            sizes["code_bits"] = code_bits
        return FaissHeader(kind, dimension, num_rows, is_wrapped=is_wrapped, **sizes)

    def _skip_transform(self) -> str | None:
        """Skip a transform of vectors, or return the code of one whose length is not known."""
        code = self._code()
        if code in ("PCAm", "PcAm", "Pcam"):
            self._numbers({"PCAm": "f?", "PcAm": "f?i", "Pcam": "ff?i"}[code])
            for _ in range(3):  # the mean, the eigenvalues, and the matrix
                self._skip_vector(4)
        if code in ("PCAm", "PcAm", "Pcam", "rrot", "LTra"):
            self._numbers("?")
            self._skip_vector(4)
            self._skip_vector(4)
        elif code == "RmDT":
            self._skip_vector(4)
        elif code == "VNrm":
            self._numbers("f")
        elif code == "VCnt":
            self._skip_vector(4)
        else:
            return code
        self._numbers("ii?")
        return None
