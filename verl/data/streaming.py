"""Rows of files that are too large to hold, read when they are needed, without a pass before.

    files -> groups (row groups of parquet, pieces of 1 MiB of jsonl) -> blocks of 512 rows -> windows
    windows, each read at once and shuffled -> a thread makes prompts of its rows -> StreamSampler

The order follows from (seed, epoch). The groups are shuffled. The blocks of a group that is larger than a
window are shuffled within it (pandas writes one group of up to a million rows). The rows of a window (16,384
rows or 32 MiB) are shuffled. Rows of different groups meet only where groups are small, so a sorted file
mixes best with many row groups. A window of a large group takes one pass over that group.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.rl_dataset import DataFailed, PromptSampler, RLHFDataset, json_row, row_name, table_rows
from verl.data.row_cells import Row

BLOCK_ROWS = 512
PIECE_BYTES = 2**20
WINDOW_ROWS = 16_384
WINDOW_BYTES = 32 * 2**20
STREAMED_ROWS = 200_000
STREAMED_BYTES = {".parquet": 256 * 2**20, ".jsonl": 64 * 2**20}
_STEPS_AHEAD = 2

# The index of a row, and where it is: a batch and the row's number in it, or a path and the line.
StoredRow = tuple[int, Any, Any]


def is_large(files: Iterable[Path]) -> bool:
    """Return whether `data.streaming=null` streams these files.

    It does for more than 200,000 rows of parquet, or for a file above 256 MiB of parquet or 64 MiB of jsonl.
    """
    files = [path for path in files if path.is_file()]
    if any(path.stat().st_size > STREAMED_BYTES.get(path.suffix, 0) for path in files):
        return True
    return sum(pq.read_metadata(path).num_rows for path in files if path.suffix == ".parquet") > STREAMED_ROWS


class RowBlock(NamedTuple):
    """Rows that are read together, those from `start` to `stop`.

    Attributes:
        file: number of the file.
        group: number of the row group, -1 for jsonl.
        first: where the row group, or the jsonl file, starts.
        start: index of the first row. An index counts the rows of all files before it (for jsonl, the bytes).
        stop: index after the last row.
        share: how much of a window the rows fill.
    """

    file: int
    group: int
    first: int
    start: int
    stop: int
    share: float


class RowStream(RLHFDataset):
    """Rows that are read while the run goes on; the arguments are those of `RLHFDataset`.

    The index of a row is the number of rows before it in all files; for jsonl it is the number of bytes.
    `stream[i]` exists only for the rows that the sampler returned last. The tokenizer is copied, because
    another thread uses it.
    """

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Any,
        data_config: Mapping[str, Any],
        adapt: Callable[[Row], Row] | None = None,
    ) -> None:
        self._set_up(copy.deepcopy(tokenizer), data_config, adapt)
        self.files = list(files)
        self.groups = list[RowBlock]()
        self.limit: int | None = None  # rows of an epoch
        self.ready: dict[int, dict[str, Any]] = {}
        self._num_rows = next_index = 0
        for number, path in enumerate(self.files):
            if not path.is_file():
                raise ValueError(f"Found no file at {path}; expected a parquet or jsonl file.")
            if path.suffix == ".jsonl":
                first = next_index
                size = path.stat().st_size
                next_index += size
                for start in range(first, next_index, PIECE_BYTES):
                    stop = min(start + PIECE_BYTES, next_index)
                    share = (stop - start) / WINDOW_BYTES
                    self.groups.append(RowBlock(number, -1, first, start, stop, share))
                with path.open("rb") as file:
                    piece = file.read(PIECE_BYTES)
                lines = piece.split(b"\n")[: None if len(piece) == size else -1]
                num_lines = sum(bool(line.strip()) for line in lines)
                self._num_rows += num_lines if len(piece) == size else max(1, num_lines) * size // len(piece)
            else:
                metadata = pq.read_metadata(path)
                self.check_columns(metadata.schema.to_arrow_schema().names, str(path))
                for index in range(metadata.num_row_groups):
                    group = metadata.row_group(index)
                    first = next_index
                    next_index += group.num_rows
                    share = max(group.num_rows / WINDOW_ROWS, group.total_byte_size / WINDOW_BYTES)
                    self.groups.append(RowBlock(number, index, first, first, next_index, share))
                self._num_rows += metadata.num_rows
        self.index_end = next_index
        if self._num_rows == 0:
            raise ValueError(f"Found no rows in {', '.join(map(str, files))}; expected at least one.")

    def __len__(self) -> int:
        """Return the rows of an epoch; for jsonl this is an estimate from the first MiB of each file."""
        return self._num_rows if self.limit is None else self.limit

    def limit_rows(self, num_rows: int | None) -> None:
        """Limit an epoch to its first `num_rows` rows; all epochs then have the order of the first one."""
        self.limit = None if num_rows is None or num_rows >= self._num_rows else num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.ready[index]

    def rows_to_check(self) -> Iterator[tuple[Any, Row]]:
        """Yield all rows in the order of the files, each with its index as its place."""
        for blocks in self.windows(None):
            rows = self.read_window(blocks)
            for source, batch_rows in groupby(rows, key=lambda stored: stored[1]):
                stored_rows = list(batch_rows)
                if isinstance(source, pa.RecordBatch):
                    decoded = table_rows(source)
                    yield from ((index, decoded[inner]) for index, _, inner in stored_rows)
                else:
                    yield from ((stored[0], self.decode_row(stored)) for stored in stored_rows)

    def files_of_rows(self) -> list[str] | None:
        return list(map(str, self.files))

    def place_name(self, place: int) -> str:
        """Return the file and the row or line of an index."""
        block = next(block for block in self.groups if block.start <= place < block.stop)
        path = self.files[block.file]
        first = min(other.first for other in self.groups if other.file == block.file)
        number = place - first
        if block.group < 0:  # the index counts bytes
            with path.open("rb") as file:
                number = file.read(number).count(b"\n") + 1
        return row_name(str(path), number)

    def windows(self, rng: np.random.Generator | None) -> Iterator[list[RowBlock]]:
        """Yield the blocks of each window of an epoch, in order.

        `rng` shuffles them. With None they come as in the files.
        """
        waiting = list[RowBlock]()
        filled = 0.0
        order = range(len(self.groups)) if rng is None else rng.permutation(len(self.groups)).tolist()
        for group in (self.groups[i] for i in order):
            blocks = [group]
            if group.group >= 0:
                starts = range(group.start, group.stop, BLOCK_ROWS)
                stops = [*starts[1:], group.stop]
                share = group.share / max(len(starts), 1)
                spans = zip(starts, stops, strict=False)  # none in a group without rows
                blocks = [group._replace(start=start, stop=stop, share=share) for start, stop in spans]
                if rng is not None and group.share > 1:
                    blocks = [blocks[i] for i in rng.permutation(len(blocks))]
            for block in blocks:
                waiting.append(block)
                filled += block.share
                if filled >= 1:
                    yield waiting
                    waiting = []
                    filled = 0.0
        if waiting:
            yield waiting

    def read_window(self, blocks: Sequence[RowBlock]) -> list[StoredRow]:
        """Return the rows of a window, in the order of the files; `decode_row` makes rows of them."""
        rows: list[StoredRow] = []
        for (number, is_text), in_file in groupby(
            sorted(blocks), lambda block: (block.file, block.group < 0)
        ):
            path = self.files[number]
            if is_text:  # the lines that start within a block
                with path.open("rb") as lines:
                    for block in in_file:
                        index = max(block.start - 1, block.first)
                        lines.seek(index - block.first)
                        if index < block.start:  # a line that began in the block before belongs to that block
                            index += len(lines.readline())
                        while index < block.stop and (line := lines.readline()):
                            if line.strip():
                                rows.append((index, path, line))
                            index += len(line)
                continue
            # Without a buffer, whole columns of a group are read into memory at once.
            with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
                for group, in_group in groupby(in_file, lambda block: block.group):
                    pending = list(in_group)
                    start = pending[0].first
                    for batch in file.iter_batches(BLOCK_ROWS, row_groups=[group], use_threads=False):
                        stop = start + len(batch)
                        for block in pending:
                            inside = range(max(start, block.start), min(stop, block.stop))
                            rows += [(index, batch, index - start) for index in inside]
                        pending = [block for block in pending if block.stop > stop]
                        start = stop
                        if not pending:
                            break
        return rows

    def decode_row(self, stored: StoredRow) -> Row:
        """Return the row of an entry of `read_window`.

        The row is as it is in the file. Raises ValueError if a line is no row, or lacks a column.
        """
        _index, source, inner = stored
        if isinstance(source, pa.RecordBatch):
            return table_rows(source.slice(inner, 1))[0]
        return json_row(inner, f"{source}, the line that begins {inner[:40]!r}", self.check_columns)


class Cursor(NamedTuple):
    """A position in the order.

    Attributes:
        epoch: number of the epoch.
        position: rows of the epoch that were passed.
        window: number of the window in the epoch.
        offset: rows of the window that were passed.
        skipped: rows that were skipped as too long since the run began.
    """

    epoch: int = 0
    position: int = 0
    window: int = 0
    offset: int = 0
    skipped: int = 0


Postponed = tuple[Cursor, int, dict[str, Any]]  # the cursor before a row, its index, and its prompt


class StreamSampler(PromptSampler):
    """A sampler that draws from a stream; a thread has the prompts of the next two steps ready, and no more.

    Args:
        stream: the rows.
        step_size: rows of a step.
        batch_size: as for `PromptSampler`.
        sampling: the other arguments of `PromptSampler`.
    """

    def __init__(self, stream: RowStream, step_size: int, batch_size: int, *sampling: Any) -> None:
        self.stream = stream
        self.cursor = Cursor()
        self.num_ahead = _STEPS_AHEAD * step_size
        self._thread: ThreadPoolExecutor | None = None
        self._postponed: list[Postponed] = []
        self._ahead = deque[Future[tuple[int, dict[str, Any], Cursor]]]()
        super().__init__(len(stream), batch_size, *sampling)

    def take(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        """Return the next `count` rows, as `PromptSampler` does.

        Raises DataFailed if a row can't be read or is too long, or if too many rows are retired.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "rows")
            self._prompt_iterator = self._prompts_from(self.cursor)
        self.stream.ready = {}
        try:
            self._request_prompts()
            rows = super().take(count, skip)
        except BaseException as error:  # it has ended the generator of the thread's prompts
            self.close()
            if isinstance(error, ValueError | OSError | pa.ArrowException):
                raise DataFailed(f"the training rows can't be used: {error}") from error
            raise
        self.epoch = self.cursor.epoch
        self.position = self.cursor.position
        return rows

    def _draw(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` rows that are not in `asked`, no row twice.

        The number of rows may be an estimate. If a whole epoch has no further row, rows are asked again.
        """
        barred = set(asked)
        waiting = deque(self._postponed)
        postponed: list[Postponed] = []
        rows: list[int] = []
        last_epoch = self.cursor.epoch  # the last epoch in which a row was found
        while len(rows) < count:
            if waiting:
                before, index, item = waiting.popleft()
            else:
                before = self.cursor
                index, item, self.cursor = self._ahead.popleft().result()
                self._request_prompts()
            if index not in self.retired and index not in barred:
                rows.append(index)
                self.stream.ready[index] = item
                barred.add(index)
                last_epoch = self.cursor.epoch
                continue
            if index not in self.retired:
                postponed.append((before, index, item))
            if self.cursor.epoch > last_epoch + 1:
                if not barred:
                    self.check_enough_left(count, num_left=0)
                barred.clear()
                postponed.clear()
                last_epoch = self.cursor.epoch
        self._postponed = [*postponed, *waiting]
        return rows

    def _request_prompts(self) -> None:
        """Have the thread make prompts until `num_ahead` of them are ready, and one more."""
        while self._thread is not None and len(self._ahead) <= self.num_ahead:
            self._ahead.append(self._thread.submit(next, self._prompt_iterator))

    def _prompts_from(self, cursor: Cursor) -> Iterator[tuple[int, dict[str, Any], Cursor]]:
        """Yield (index, item, the cursor after it) of each row from `cursor` on, without end."""
        stream = self.stream
        limit = self.stream.limit
        truncation = stream.config["truncation"]
        while True:
            key = [self.seed, 0 if limit else cursor.epoch]
            position = cursor.position
            skipped = cursor.skipped
            has_prompts = position > 0
            windows = stream.windows(np.random.default_rng(key) if self.shuffle else None)
            for number, blocks in enumerate(windows):
                if number < cursor.window or position == limit:
                    continue
                rows = stream.read_window(blocks)
                order = np.arange(len(rows))
                if self.shuffle:
                    order = np.random.default_rng([*key, number]).permutation(len(rows))
                start = cursor.offset if number == cursor.window else 0
                stop = len(rows) if limit is None else min(len(rows), start + limit - position)
                for offset in range(start, stop):
                    stored = rows[int(order[offset])]
                    index = stored[0]
                    row = stream.decode_row(stored)
                    position += 1
                    too_long = None if truncation == "left" else stream.too_long(row)
                    if too_long is None:
                        has_prompts = True
                        after = Cursor(cursor.epoch, position, number, offset + 1, skipped)
                        yield index, stream.encode_row(row, index), after
                    elif truncation == "skip":
                        skipped += 1
                    else:
                        raise stream.length_error(f"a prompt that is too long (row {index}, {too_long})")
            if not has_prompts:
                raise ValueError(f"no prompt is left of {len(stream)} rows: all are too long.")
            cursor = Cursor(cursor.epoch + 1, skipped=skipped)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | {"data/skipped": float(self.cursor.skipped)}

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | self.cursor._asdict()
        return state | {"postponed": [list(before) for before, _, _ in self._postponed]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        super().load_state_dict(state)
        self.cursor = Cursor(*(int(state[name]) for name in Cursor._fields))

    def _load_postponed(self, postponed: Sequence[Any]) -> None:
        """Read the postponed rows of a `state_dict` again: each is the next one after its cursor."""
        self._postponed = []
        for numbers in postponed:
            before = Cursor(*numbers)
            index, item, _ = next(self._prompts_from(before))
            self._postponed.append((before, index, item))

    def close(self) -> None:
        """End the thread; the prompts that it has ready are made again when they are asked for."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self._ahead.clear()
