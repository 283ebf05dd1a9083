"""Rows of files that are too large to hold: what is needed is read when it is needed, without a pass before.

    files -> groups (row groups of parquet, pieces of 1 MiB of jsonl) -> blocks of 512 rows -> windows
    windows, each read at once and shuffled -> a thread makes prompts of its rows -> StreamSampler

The order follows from (seed, epoch): the groups are shuffled; the blocks of a group that is larger than a
window are shuffled within it (pandas writes one group of up to a million rows); the rows of a window (16,384
rows or 32 MiB) are shuffled. Rows of different groups meet only where groups are small: a sorted file mixes
best with many row groups. A window of a large group takes one pass over that group.
"""

from __future__ import annotations

import bisect
import copy
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.dataset.rl_dataset import (
    LENGTH_ADVICE,
    DataFailed,
    NoPromptsLeft,
    PromptSampler,
    RLHFDataset,
    Row,
    json_row,
)

BLOCK_ROWS, PIECE_BYTES = 512, 2**20
WINDOW_ROWS, WINDOW_BYTES = 16_384, 32 * 2**20
STREAMED_ROWS, STREAMED_BYTES = 200_000, {".parquet": 256 * 2**20, ".jsonl": 64 * 2**20}
_STEPS_AHEAD, _CHECKED_ROWS = 2, 200


def is_large(files: Iterable[Path]) -> bool:
    """Whether `data.streaming=null` streams these: more than 200,000 rows of parquet, or a file above 256 MiB
    of parquet or 64 MiB of jsonl.
    """
    files = list(files)
    if any(path.is_file() and path.stat().st_size > STREAMED_BYTES.get(path.suffix, 0) for path in files):
        return True
    parquet = [path for path in files if path.is_file() and path.suffix == ".parquet"]
    return sum(pq.read_metadata(path).num_rows for path in parquet) > STREAMED_ROWS


@dataclass(frozen=True)
class RowBlock:
    """Rows that are read together: those from `start` to `stop`, which count the rows of all files before (of
    jsonl: the bytes). group: number of the row group, -1 for jsonl. first: where the group starts.
    """

    file: int
    group: int
    first: int
    start: int
    stop: int
    num_bytes: int


class RowStream(RLHFDataset):
    """Rows that are read while the run goes on. An index is the place of a row: the rows before it in all
    files, of jsonl the bytes. `stream[i]` is there for the rows that the sampler gave last.

    Args:
        files: parquet and jsonl. tokenizer, data_config, adapt: as for `RLHFDataset`; of the tokenizer a copy
            is used, as another thread does.

    Raises:
        ValueError: a file or a column is missing.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        data_config: Mapping[str, Any],
        adapt: Callable[[Row], Row] | None = None,
    ) -> None:
        self._set_up(copy.deepcopy(tokenizer), data_config, adapt)
        self.files, self.groups = list(files), list[RowBlock]()
        self.limit: int | None = None  # rows of an epoch
        self.ready: dict[int, dict[str, Any]] = {}
        self._num_rows = self._num_places = 0
        for number, path in enumerate(self.files):
            if not path.is_file():
                raise ValueError(f"Found no file at {path}; expected a parquet or jsonl file with questions.")
            first, size = self._num_places, path.stat().st_size
            if path.suffix == ".jsonl":
                starts = range(first, first + size, PIECE_BYTES)
                stops = [*starts[1:], first + size]
                spans = zip(starts, stops, strict=True)
                groups = [RowBlock(number, -1, first, start, stop, stop - start) for start, stop in spans]
                with path.open("rb") as file:
                    piece = file.read(PIECE_BYTES)
                num_lines = max(1, sum(bool(line.strip()) for line in piece.split(b"\n")[:-1]))
                self._num_rows += num_lines * size // max(len(piece), 1)
                self._num_places += size
            else:
                groups, metadata = [], pq.read_metadata(path)
                self.check_columns(metadata.schema.to_arrow_schema().names, str(path))
                for index in range(metadata.num_row_groups):
                    group, start_at = metadata.row_group(index), self._num_places
                    self._num_places += group.num_rows
                    span = (start_at, start_at, self._num_places)
                    groups.append(RowBlock(number, index, *span, group.total_byte_size))
                self._num_rows += metadata.num_rows
            self.groups += groups
        if self._num_rows == 0:
            raise ValueError(f"Found no rows in {', '.join(map(str, files))}; expected at least one.")

    def __len__(self) -> int:
        """Rows of an epoch; of jsonl an estimate from the first MiB of each file."""
        return self._num_rows if self.limit is None else self.limit

    @property
    def num_places(self) -> int:
        return self._num_places

    def keep(self, num_rows: int | None) -> None:
        """An epoch is its first so many rows from now on, and all epochs have the order of the first one."""
        self.limit = None if num_rows is None or num_rows >= self._num_rows else num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.ready[index]

    def rows_to_check(self) -> Iterator[Row]:
        rows = self.read(next(self.windows(None)))
        for place in range(min(len(rows), _CHECKED_ROWS)):
            row = rows[place][1]
            yield row if self.adapt is None else self.adapt(row)

    def windows(self, rng: np.random.Generator | None) -> Iterator[list[RowBlock]]:
        """The blocks of each window of an epoch, in order. rng: shuffles them; None: as in the files."""
        waiting: list[RowBlock] = []
        filled = 0.0
        order = range(len(self.groups)) if rng is None else rng.permutation(len(self.groups)).tolist()
        for group in (self.groups[i] for i in order):
            blocks, num_rows = [group], group.stop - group.start
            if group.group >= 0:
                starts = range(group.start, group.stop, BLOCK_ROWS)
                num_bytes = group.num_bytes * BLOCK_ROWS // max(num_rows, 1)
                blocks = [
                    replace(group, start=start, stop=min(start + BLOCK_ROWS, group.stop), num_bytes=num_bytes)
                    for start in starts
                ]
                if rng is not None and max(num_rows / WINDOW_ROWS, group.num_bytes / WINDOW_BYTES) > 1:
                    blocks = [blocks[i] for i in rng.permutation(len(blocks))]
            for block in blocks:
                waiting.append(block)
                num_rows = block.stop - block.start if block.group >= 0 else 0
                filled += max(num_rows / WINDOW_ROWS, block.num_bytes / WINDOW_BYTES)
                if filled >= 1:
                    yield waiting
                    waiting, filled = [], 0.0
        if waiting:
            yield waiting

    def read(self, blocks: Sequence[RowBlock]) -> Window:
        """The rows of a window, in the order of the files."""
        window, blocks = Window(self), sorted(blocks, key=astuple)
        for number in sorted({block.file for block in blocks}):
            own = [block for block in blocks if block.file == number]
            if own[0].group < 0:
                for block in own:
                    window.add_lines(block)
                continue
            # a buffer, as else whole columns of a group are read into memory at once
            with pq.ParquetFile(self.files[number], buffer_size=2**20, pre_buffer=False) as file:
                for group in sorted({block.group for block in own}):
                    wanted = [block for block in own if block.group == group]
                    stop = wanted[0].first
                    for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], use_threads=False):
                        start, stop = stop, stop + len(batch)
                        for block in wanted:
                            lower, upper = max(start, block.start), min(stop, block.stop)
                            if lower < upper:
                                window.add_batch(lower, batch.slice(lower - start, upper - lower))
                        wanted = [block for block in wanted if block.stop > stop]
                        if not wanted:
                            break
        return window


class Window:
    """Rows that are held in memory, compact as they were read. `window[i]` is (place of the row, the row)."""

    def __init__(self, stream: RowStream) -> None:
        self.stream = stream
        self._parts: list[tuple[np.ndarray, Any]] = []  # places; a batch, or (file, its first place, lines)
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[int, Row]:
        part = bisect.bisect_right(self._ends, index)
        places, rows = self._parts[part]
        inner = index - (self._ends[part - 1] if part else 0)
        if isinstance(rows, pa.RecordBatch):
            row: Row = rows.slice(inner, 1).to_pylist()[0]
        else:
            path, first, lines = rows
            where = f"{path}, byte {places[inner] - first}"
            row = json_row(lines[inner], where)
            self.stream.check_columns(row, where)
        return int(places[inner]), row

    def add_batch(self, place: int, batch: pa.RecordBatch) -> None:
        self._add(np.arange(place, place + len(batch)), batch)

    def add_lines(self, block: RowBlock) -> None:
        """The lines that start within the block."""
        places, lines = [], []
        path = self.stream.files[block.file]
        with path.open("rb") as file:
            place = block.start
            if place > block.first:  # what goes on from the block before belongs to that
                file.seek(place - block.first - 1)
                place += len(file.readline()) - 1
            while place < block.stop and (line := file.readline()):
                if line.strip():
                    places.append(place)
                    lines.append(line)
                place += len(line)
        if lines:
            self._add(np.array(places), (path, block.first, lines))

    def _add(self, places: np.ndarray, rows: Any) -> None:
        self._parts.append((places, rows))
        self._ends.append(len(self) + len(places))


@dataclass(frozen=True)
class Cursor:
    """A place in the order. position, offset: rows of the epoch and of the window that were passed; skipped:
    too long ones since the run began.
    """

    epoch: int = 0
    position: int = 0
    window: int = 0
    offset: int = 0
    skipped: int = 0


class StreamSampler(PromptSampler):
    """Draws from a stream; a thread has the prompts of the next two steps ready, and no more.

    Args:
        stream: the rows. batch_size, shuffle, seed, retire_solved: as for `PromptSampler`.
    """

    def __init__(
        self, stream: RowStream, batch_size: int, shuffle: bool, seed: int, retire_solved: float | None = None
    ) -> None:
        self.stream, self.cursor = stream, Cursor()
        self._thread: threading.Thread | None = None
        super().__init__(len(stream), batch_size, shuffle, seed, retire_solved)

    def order_of(self, epoch: int) -> np.ndarray:
        return np.arange(0)  # is never held: see `_prompts`

    def take(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        """The next `count` rows; goes on into the next epoch by itself.

        Raises:
            DataFailed: a row can't be read or is too long; NoPromptsLeft: too many are retired.
        """
        if self.retired and self.num_left < count:
            raise NoPromptsLeft(self.num_left, count)
        if self._thread is None:
            self._stop, self._made = threading.Event(), queue.Queue[Any](_STEPS_AHEAD * self.batch_size)
            arguments = (self.cursor, self._made, self._stop)
            self._thread = threading.Thread(target=self._produce, args=arguments, daemon=True)
            self._thread.start()
        taken: list[tuple[int, dict[str, Any]]] = []
        first_epoch = self.cursor.epoch
        while len(taken) < count:
            made = self._made.get()
            if isinstance(made, BaseException):
                self.close()
                raise made
            index, item, self.cursor = made
            if index not in self.retired:
                taken.append((index, item))
            elif self.cursor.epoch > first_epoch + 1:
                raise NoPromptsLeft(len(taken), count)
        self.epoch, self.position = self.cursor.epoch, self.cursor.position
        self.stream.ready = dict(taken)
        return [index for index, _ in taken]

    def draw(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        return self.take(count) if count else []

    def _produce(self, cursor: Cursor, made: queue.Queue[Any], stop: threading.Event) -> None:
        """Puts what `_prompts` yields, or the exception that ends it."""
        ready: Any
        prompts = self._prompts(cursor)
        while not stop.is_set():
            try:
                ready = next(prompts)
            except (ValueError, OSError, pa.ArrowException) as error:
                ready = DataFailed(f"the training rows can't be used: {error}")
            except Exception as error:  # whatever it is, the run must hear of it, not wait for ever
                ready = error
            while not stop.is_set():
                with suppress(queue.Full):
                    made.put(ready, timeout=0.1)
                    break
            if isinstance(ready, BaseException):
                return

    def _prompts(self, cursor: Cursor) -> Iterator[tuple[int, dict[str, Any], Cursor]]:
        """(index, row for `prompt_batch`, the place after it) of each row from `cursor` on, without end."""
        stream, limit = self.stream, self.stream.limit
        truncation = stream.config["truncation"]
        while True:
            key, position, skipped = (
                [self.seed, 0 if limit else cursor.epoch],
                cursor.position,
                cursor.skipped,
            )
            has_prompts = position > 0
            windows = stream.windows(np.random.default_rng(key) if self.shuffle else None)
            for number, blocks in enumerate(windows):
                if number < cursor.window:
                    continue
                if limit is not None and position >= limit:
                    break
                rows = stream.read(blocks)
                order = np.arange(len(rows))
                if self.shuffle:
                    order = np.random.default_rng([*key, number]).permutation(len(rows))
                start = cursor.offset if number == cursor.window else 0
                stop = len(rows) if limit is None else min(len(rows), start + limit - position)
                for offset in range(start, stop):
                    index, row = rows[int(order[offset])]
                    position += 1
                    too_long = None if truncation == "left" else stream.too_long(row)
                    if too_long is None:
                        has_prompts = True
                        after = Cursor(cursor.epoch, position, number, offset + 1, skipped)
                        yield index, stream.item(row, index), after
                    elif truncation == "skip":
                        skipped += 1
                    else:
                        longest = stream.config["max_prompt_length"]
                        raise ValueError(
                            f"row {index} is too long ({too_long}); expected at most "
                            f"data.max_prompt_length={longest} tokens. {LENGTH_ADVICE}"
                        )
            if not has_prompts:
                raise ValueError(f"no prompt is left of {len(stream)} rows: all are too long.")
            cursor = Cursor(cursor.epoch + 1, skipped=skipped)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"data/skipped": float(self.cursor.skipped)}

    def state_dict(self) -> dict[str, Any]:
        inside = {"window": self.cursor.window, "offset": self.cursor.offset, "skipped": self.cursor.skipped}
        return super().state_dict() | inside

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.close()
        self.cursor = Cursor(*(int(state[name]) for name in Cursor.__annotations__))

    def close(self) -> None:
        """Ends the thread; what it has made ready is made again when it is asked for."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
