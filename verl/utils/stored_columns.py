"""Token columns that lie outside of the process that decides over their rows.

    result of a worker [n, W] --pack--> PackedColumn --object store--> Piece (a reference)
    driver: StoredColumns = name -> which rows of which pieces, which of their positions
    process that computes: the pieces' contents in place of the references --tensors()--> [N, W]

The driver selects, orders, joins and cuts rows by their numbers and never holds a token. A batch has them as
`DataProto.stored`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from verl.utils.columns import to_array

FILL_MASK = "response_mask"  # the column that is 0 in rows that only fill up


@dataclass(frozen=True)
class PackedColumn:
    """A tensor [n, W, ...] without what is the same in all rows at its left and right end (padding), and in
    the narrowest integers that hold it; nothing is lost.

    Example: [[0, 0, 5, 6], [0, 7, 8, 0]] int64 is the int8 array [[0, 5, 6], [7, 8, 0]] from position 1 on.

    Attributes:
        array: [n, w, ...] what is kept. start: position of its first column in the tensor.
        fill: what stands left of it and right of it.
        width: W. dtype: of the tensor; `wide`: of its numpy array.
    """

    array: np.ndarray
    start: int
    fill: tuple[Any, Any]
    width: int
    dtype: torch.dtype
    wide: np.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> PackedColumn:
        array, dtype = to_array("column", tensor)
        wide, start, end, fill = array.dtype, 0, array.shape[1], (0, 0)
        if array.ndim == 2 and array.size:
            bits = array.view(f"i{array.itemsize}") if array.dtype.kind == "f" else array
            fill = (array[0, 0], array[0, -1])
            left, right = (~(bits == bits[:1, edge, None]).all(axis=0) for edge in (0, -1))
            start = int(left.argmax()) if left.any() else end
            end = max(end - int(right[::-1].argmax()) if right.any() else 0, start)
        return cls(_narrow(array[:, start:end]), start, fill, array.shape[1], dtype, wide)

    def write(self, out: np.ndarray, where: Any, rows: Any, first: int) -> None:
        """Puts its `rows` into the rows `where` of `out`, whose first column is position `first`."""
        left = min(max(self.start - first, 0), out.shape[1])
        right = min(max(self.start + self.array.shape[1] - first, left), out.shape[1])
        begin = left + first - self.start
        out[where, :left] = self.fill[0]
        out[where, left:right] = self.array[rows, begin : begin + right - left]
        out[where, right:] = self.fill[1]


def _narrow(array: np.ndarray) -> np.ndarray:
    """A contiguous copy, integers in the narrowest type that holds them all."""
    if array.dtype.kind == "i" and array.size:
        low, high = int(array.min()), int(array.max())
        for dtype in (np.int8, np.int16, np.int32):
            if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
                return array.astype(dtype)
    return np.ascontiguousarray(array)


@dataclass(frozen=True)
class Piece:
    """Rows that one process made in one call. content: name -> PackedColumn, or a reference to that."""

    content: Any
    num_rows: int


@dataclass(frozen=True)
class Rows:
    """Row i is row `index[i]` of all pieces one below the other; index [N] int64."""

    pieces: tuple[Piece, ...]
    index: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        """[number of pieces + 1] int64: where each piece begins."""
        return np.cumsum([0, *(piece.num_rows for piece in self.pieces)])

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, in order."""
        offsets = np.cumsum([0, *(part.starts[-1] for part in parts)])
        index = [part.index + offset for part, offset in zip(parts, offsets, strict=False)]
        return Rows(tuple(piece for part in parts for piece in part.pieces), np.concatenate(index))

    def needed(self) -> Rows:
        """The same rows over those pieces alone that have one of them."""
        of_row = np.searchsorted(self.starts, self.index, side="right") - 1
        used = np.unique(of_row)
        sizes = np.array([self.pieces[i].num_rows for i in used], dtype=np.int64)
        shift = np.zeros(len(self.pieces), dtype=np.int64)
        shift[used] = np.cumsum(sizes) - sizes - self.starts[used]
        return Rows(tuple(self.pieces[i] for i in used), self.index + shift[of_row])

    def same_as(self, other: Rows) -> bool:
        """Whether these are the same rows of the same pieces."""
        contents, others = ([piece.content for piece in rows.pieces] for rows in (self, other))
        alike = len(contents) == len(others) and all(a is b for a, b in zip(contents, others, strict=True))
        return alike and np.array_equal(self.index, other.index)


@dataclass(frozen=True)
class Column:
    """The positions from `start` to `stop` of what the pieces of `rows` hold under `name`."""

    rows: Rows
    name: str
    start: int
    stop: int

    def tensor(self) -> torch.Tensor:
        """[N, stop - start]; the pieces must hold their contents."""
        packed = [piece.content[self.name] for piece in self.rows.pieces]
        first: PackedColumn = packed[0]
        out = np.empty((len(self.rows.index), self.stop - self.start, *first.array.shape[2:]), first.wide)
        for where, rows, column in self._parts(packed):
            column.write(out, where, rows, self.start)
        return torch.from_numpy(out).view(first.dtype)

    def _parts(self, packed: list[PackedColumn]) -> Iterator[tuple[Any, Any, PackedColumn]]:
        """(rows of the result, rows of the piece, piece), slices where they stand side by side."""
        index, starts = self.rows.index, self.rows.starts
        of_row = np.searchsorted(starts, index, side="right") - 1
        for i, column in enumerate(packed):
            where = np.flatnonzero(of_row == i)
            if len(where):
                yield _as_slice(where), _as_slice(index[where] - starts[i]), column


def _as_slice(places: np.ndarray) -> Any:
    adjoining = places[-1] - places[0] + 1 == len(places) and bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if adjoining else places


@dataclass(frozen=True)
class StoredColumns:
    """Columns of a batch of N rows by name; `fills` [N] bool are rows that only fill up, whose response_mask
    is 0 whatever is stored. Every operation gives a new object; columns with the same rows go on sharing
    them.
    """

    columns: Mapping[str, Column]
    fills: np.ndarray

    @staticmethod
    def of(content: Any, widths: Mapping[str, int], num_rows: int) -> StoredColumns:
        """The columns of one piece, as wide as `widths` says."""
        rows = Rows((Piece(content, num_rows),), np.arange(num_rows))
        columns = {name: Column(rows, name, 0, width) for name, width in widths.items()}
        return StoredColumns(columns, np.zeros(num_rows, dtype=bool))

    def __len__(self) -> int:
        return len(self.fills)

    @property
    def widths(self) -> dict[str, int]:
        return {name: column.stop - column.start for name, column in self.columns.items()}

    def choose(self, names: Sequence[str]) -> StoredColumns:
        """These columns alone."""
        return replace(self, columns={name: self.columns[name] for name in names})

    def take(self, index: Any) -> StoredColumns:
        """The rows at a slice or an array of positions."""
        moved = self._with_rows(lambda rows: Rows(rows.pieces, rows.index[index]))
        return replace(moved, fills=self.fills[index])

    def narrowed(self, windows: Mapping[str, tuple[int, int]]) -> StoredColumns:
        """The columns cut to these positions (start, stop) of what they are now."""
        columns = dict(self.columns)
        for name, (start, stop) in windows.items():
            column = columns[name]
            columns[name] = replace(column, start=column.start + start, stop=column.start + stop)
        return replace(self, columns=columns)

    def filled_up(self, fills: np.ndarray) -> StoredColumns:
        """With more rows that only fill up; fills [N] bool."""
        return replace(self, fills=self.fills | fills)

    def union(self, other: StoredColumns) -> StoredColumns:
        """The columns of both. ValueError for a name that both have with other rows."""
        for name in self.columns.keys() & other.columns.keys():
            mine, theirs = self.columns[name], other.columns[name]
            alike = (mine.name, mine.start, mine.stop) == (theirs.name, theirs.start, theirs.stop)
            if not (alike and mine.rows.same_as(theirs.rows)):
                raise ValueError(f"tensor {name!r} differs in the two batches; rename or pop one of them")
        return StoredColumns({**self.columns, **other.columns}, self.fills | other.fills)

    @staticmethod
    def concat(parts: Sequence[StoredColumns]) -> StoredColumns:
        """The rows of all parts, which have the same columns and widths."""
        shapes = [part.widths for part in parts]
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"stored columns have other widths: {shapes}; all parts must agree")
        joined: dict[tuple[int, ...], Rows] = {}
        columns = {}
        for name, column in parts[0].columns.items():
            places = [part.columns[name] for part in parts]
            if any((it.name, it.start, it.stop) != (column.name, column.start, column.stop) for it in places):
                raise ValueError(f"tensor {name!r} is cut differently in the parts")
            key = tuple(id(it.rows) for it in places)
            if key not in joined:
                joined[key] = Rows.joined([it.rows for it in places])
            columns[name] = replace(column, rows=joined[key])
        return StoredColumns(columns, np.concatenate([part.fills for part in parts]))

    def needed(self) -> StoredColumns:
        """Over those pieces alone that have one of the rows."""
        return self._with_rows(Rows.needed)

    def with_contents(self, content_of: Callable[[Any], Any]) -> StoredColumns:
        """Each piece's content replaced by what `content_of` makes of it."""
        return self._with_rows(
            lambda rows: Rows(
                tuple(replace(piece, content=content_of(piece.content)) for piece in rows.pieces), rows.index
            )
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """The columns as tensors [N, W] of their own; the pieces must hold their contents."""
        found = {name: column.tensor() for name, column in self.columns.items()}
        if FILL_MASK in found and self.fills.any():
            found[FILL_MASK][torch.from_numpy(self.fills)] = 0
        return found

    def _with_rows(self, change: Callable[[Rows], Rows]) -> StoredColumns:
        changed: dict[int, Rows] = {}
        for column in self.columns.values():
            if id(column.rows) not in changed:
                changed[id(column.rows)] = change(column.rows)
        columns = {
            name: replace(column, rows=changed[id(column.rows)]) for name, column in self.columns.items()
        }
        return replace(self, columns=columns)


def pack(tensors: Mapping[str, torch.Tensor]) -> dict[str, PackedColumn]:
    """What a piece holds. A tensor that stands under two names is packed once."""
    packed: dict[int, PackedColumn] = {}
    for tensor in tensors.values():
        if id(tensor) not in packed:
            packed[id(tensor)] = PackedColumn.of(tensor)
    return {name: packed[id(tensor)] for name, tensor in tensors.items()}
