"""Questions from parquet or jsonl files, and the order in which a run goes through them.

    rows of files -> RLHFDataset[i] -> {raw_prompt_ids, data_source, reward_model, extra_info, index, episode}
    PromptSampler -> which rows make the next batch, the same again after a restart

The row schema is that of Search-R1: data_source str; prompt [{role, content}, ...]; reward_model {style,
ground_truth: {target: [golden answers]}} (SkyRL's rows call it reward_spec); extra_info {split, index, ...},
which may be missing. Other columns are kept, and are passed to the row's environment if that is not a search.
Rows of such an environment are SkyRL's, and data_source and the reward's column may be missing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl.config import Config
from verl.data.row_cells import (
    CellError,
    Row,
    chat_messages,
    is_missing,
    reward_cell,
    struct_cell,
    text_cell,
    without_nulls,
)
from verl.environments.registry import SEARCH
from verl.utils.json_files import to_jsonable
from verl.utils.rows import row_max_turns
from verl.utils.text import encodable, is_encodable

_SUBSET_SEED = 42  # Search-R1's: train_data_num picks the same rows
_VERL_DEFAULTS: Row = {"prompt_key": "prompt", "max_prompt_length": 1024, "truncation": "error"}
_SHOWN = 10  # mistakes that a message names
_TEMPLATE_BYTES = 1024  # more than a chat template adds to the messages


def row_settings(config: Config) -> dict[str, Any]:
    """Return the settings of rows that `RLHFDataset` takes, as a dictionary of the caller's own."""
    return {**config.data, "env_class": config.environment.env_class}


class RLHFDataset:
    """Prompts as token ids, with what is needed to score their answers.

    Args:
        parquet_files: a file (.parquet or .jsonl) or several, read one after the other; "~" is expanded. Or
            the rows themselves.
        tokenizer: that of the policy; None if the rows are only read. Its chat template is used if it has
            one, otherwise the contents of all messages.
        data_config: the `data` block of the configuration: prompt_key, truncation, max_prompt_length,
            max_start_length; and env_class, the environment of rows that name none.
        num_rows: use this many rows, drawn without replacement with a fixed seed; None: all. If there are
            fewer, all are used, with a note.
        adapt: function that is applied to each row before anything is read from it (`mixture` has such
            functions).
        verl_arguments: those settings one by one, as Search-R1's verl takes them; others have no effect.

    Raises:
        ValueError: a file or a column is missing, there is no row, or a prompt is longer than
            data.max_prompt_length with data.truncation=error (skip leaves such rows out).
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str | Row],
        tokenizer: Any,
        data_config: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        adapt: Callable[[Row], Row] | None = None,
        **verl_arguments: Any,
    ) -> None:
        self._set_up(tokenizer, data_config or verl_arguments, adapt)
        files = [parquet_files] if isinstance(parquet_files, str) else parquet_files
        self._files = [file for file in files if isinstance(file, str)]
        self.rows: list[Row] = []
        self.places: list[tuple[str, int]] = []
        for number, file in enumerate(files):
            if not isinstance(file, str):
                self.rows.append(file)
                self.places.append(("the rows given", number))
                continue
            for row_number, row in read_rows(file, self.check_columns):
                self.rows.append(row)
                self.places.append((file, row_number))
        origin = ", ".join(file for file in files if isinstance(file, str)) or "the rows given"
        if num_rows is not None and num_rows > len(self) > 0:
            if tokenizer is not None:  # else the rows are only looked at
                print(
                    f"note: {num_rows} rows of {origin} are asked for; all {len(self)} are taken", flush=True
                )
            num_rows = None
        self.limit_rows(num_rows)
        if not self.rows:
            raise ValueError(f"Found no rows in {origin}; expected at least one.")
        if self.config["truncation"] != "left" and tokenizer is not None:
            self._check_lengths(origin)
        self.index_end = len(self)  # one more than the largest index of a row

    def _set_up(self, tokenizer: Any, config: Mapping[str, Any], adapt: Callable[[Row], Row] | None) -> None:
        self.tokenizer = tokenizer
        self.adapt = adapt
        self.config = {"env_class": SEARCH, **_VERL_DEFAULTS, **config}
        self.config.setdefault("max_start_length", self.config["max_prompt_length"])
        self.prompt_key: str = self.config["prompt_key"]
        self._has_warned = False

    def limit_rows(self, num_rows: int | None) -> None:
        """Keep only `num_rows` rows, drawn with a fixed seed: the same as pandas' DataFrame.sample draws."""
        if num_rows is not None:
            chosen = np.random.RandomState(_SUBSET_SEED).choice(len(self), num_rows, replace=False)
            self.rows = [self.rows[i] for i in chosen]
            self.places = [self.places[i] for i in chosen]

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise ValueError if a row with these columns can't be asked and scored."""
        needed = [self.prompt_key]
        # An environment has its own rewards. A source of a mixture also names itself.
        if self.adapt is None and self.config["env_class"] == SEARCH and "env_class" not in columns:
            needed += ["data_source", "reward_spec" if "reward_spec" in columns else "reward_model"]
        require_columns(columns, needed, where, "The prompt's column is named by data.prompt_key.")

    def __len__(self) -> int:
        return len(self.rows)

    def rows_to_check(self) -> Iterator[tuple[Any, Row]]:
        """Yield all rows as they are in the files, each with what `place_name` makes its place of."""
        return zip(self.places, self.rows, strict=True)

    def files_of_rows(self) -> list[str] | None:
        """Return the files of the rows, or None if the rows were given."""
        return self._files or None

    def place_name(self, place: Any) -> str:
        """Return where a row is, for messages: its file, and its row or line."""
        return row_name(*place)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encode_row(self.rows[index], index)

    def read_row(self, row: Row) -> ReadRow:
        """Read the cells of a row. Nothing is rendered or encoded.

        Raises CellError, with the column, if a cell is none that a run can use.
        """
        row = self.adapt(row) if self.adapt is not None else row
        messages = self.messages_of(row)
        env_class = self.env_class_of(row)
        try:
            max_turns = row_max_turns(row)
        except ValueError as error:
            raise CellError("max_turns", str(error)) from error
        named_reward = reward_cell(row)
        reward = {"ground_truth": None} if named_reward is None else named_reward[1]
        if named_reward is None and row.get("ground_truth") is not None:  # Open-Instruct's columns
            reward = {"verifier": row.get("dataset"), "ground_truth": row["ground_truth"]}
        extra_info = struct_cell(row.get("extra_info"), "extra_info") or {}
        question = extra_info.get("question")
        if isinstance(question, str) and not is_encodable(question):
            raise CellError("extra_info", "found a question with half of a letter; expected whole letters")
        source = text_cell(row.get("data_source"), "data_source")
        extras: Row = {}
        if env_class != SEARCH:
            extras = {name: to_jsonable(value) for name, value in row.items() if name != self.prompt_key}
            if named_reward is not None:
                spec = to_jsonable(named_reward[1])
                names = ("reward_model", "reward_spec")
                extras |= {name: spec for name in names if name == named_reward[0] or row.get(name) is None}
            if isinstance(row.get("extra_info"), str):
                extras["extra_info"] = to_jsonable(extra_info)
        elif max_turns is not None:
            extras = {"max_turns": max_turns}
        return ReadRow(
            messages, env_class, source or env_class.replace(":", "."), reward, extra_info, extras, row
        )

    def encode_row(self, row: Row, index: int) -> dict[str, Any]:
        """Return a row in the form in which it is asked.

        Returns:
            A dictionary with

            - raw_prompt_ids (list[int], special tokens as `encode_prompt` has them);
            - data_source (str), reward_model (dict), extra_info (dict);
            - index (int, the row's index in the data set);
            - episode: what the environment gets (env_class, prompt in messages, extras: all columns but the
              prompt), or None for a search as the configuration has it.
        """
        cells = self.read_row(row)
        limit = self.config["max_start_length"]
        ids = encode_prompt(self.tokenizer, prompt_text(self.tokenizer, cells.messages))
        if len(ids) > limit and not self._has_warned:
            self._has_warned = True
            print(f"note: a prompt has {len(ids)} tokens; the last data.max_start_length={limit} are used")
        episode = None
        if cells.env_class != SEARCH:
            episode = {"env_class": cells.env_class, "prompt": cells.messages, "extras": cells.extras}
        elif cells.extras:
            episode = {"env_class": SEARCH, "prompt": [], "extras": cells.extras}
        return {
            "raw_prompt_ids": cut_prompt(self.tokenizer, ids, limit),
            "data_source": cells.data_source,
            "reward_model": cells.reward_model,
            "extra_info": cells.extra_info,
            "index": index,
            "episode": episode,
        }

    def env_class_of(self, row: Row) -> str:
        """Return the environment that a row names, or else that of the configuration.

        Raises CellError if the row's cell is no text.
        """
        default: str = self.config["env_class"]
        return text_cell(row.get("env_class"), "env_class") or default

    def messages_of(self, row: Row) -> list[dict[str, Any]]:
        """Return a row's prompt as chat messages. Raises CellError if the cell holds none."""
        if is_missing(row.get(self.prompt_key)):
            raise CellError(self.prompt_key, f"{self.prompt_key} holds None; expected text or chat messages")
        return chat_messages(row[self.prompt_key], self.prompt_key)

    def too_long(self, row: Row) -> str | None:
        """Return the length and the beginning of a prompt that is too long, else None.

        A prompt is too long if it is longer than data.max_prompt_length.
        """
        longest = self.config["max_prompt_length"]
        messages = self.messages_of(row)
        # A token has at least one byte, so only rows of many bytes are tokenised.
        num_bytes = sum(len(str(message.get("content")).encode(errors="replace")) for message in messages)
        if num_bytes + _TEMPLATE_BYTES <= longest:
            return None
        ids = encode_prompt(self.tokenizer, text := prompt_text(self.tokenizer, messages))
        return f"{len(ids)} tokens: {text[:60]!r}..." if len(ids) > longest else None

    def length_error(self, what: str) -> ValueError:
        longest = self.config["max_prompt_length"]
        return ValueError(
            f"Found {what}; expected at most data.max_prompt_length={longest} tokens. Raise it, take the "
            "rows out, set data.truncation=skip to leave them out, or =left to keep the end of each prompt."
        )

    def _check_lengths(self, files: str) -> None:
        """Refuse prompts that are too long, or leave them out. Prompts that can't be read are refused."""
        problems: dict[int, str] = {}
        mistakes: list[str] = []
        for i, row in enumerate(self.rows):
            try:
                text = self.too_long(row)
            except Exception as error:  # templates and tokenizers raise all kinds of errors
                reason = " ".join(str(error).split())[:300]
                mistakes.append(f"\n  {self.place_name(self.places[i])}, column {self.prompt_key}: {reason}")
                continue
            if text is not None:
                problems[i] = text
        if mistakes:
            raise ValueError(
                f"Found {len(mistakes)} of {len(self)} rows that can't be asked; correct them, or take them "
                f"out:{''.join(mistakes[:_SHOWN])}"
            )
        if not problems:
            return
        too_long = f"{len(problems)} of {len(self)} prompts in {files} that are too long"
        if self.config["truncation"] == "error" or len(problems) == len(self):
            first, text = next(iter(problems.items()))
            raise self.length_error(f"{too_long} (the first: row {first}, {text})")
        print(f"note: {too_long} are skipped (data.truncation=skip)")
        self.rows = [row for i, row in enumerate(self.rows) if i not in problems]
        self.places = [place for i, place in enumerate(self.places) if i not in problems]


@dataclass(frozen=True)
class ReadRow:
    """The cells of a row, read.

    Attributes:
        messages: the prompt as chat messages.
        env_class: the environment of the row.
        data_source: the row's source; the environment's name if the row has none.
        reward_model: the reward's struct, with `ground_truth`.
        extra_info: the struct `extra_info`; empty if the row has none.
        extras: what the environment gets of the row.
        columns: the row itself, completed by its source.
    """

    messages: list[dict[str, Any]]
    env_class: str
    data_source: str
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    extras: Row
    columns: Row


class DataFailed(RuntimeError):
    """The error of training data that can't give the next prompts, for a reason outside of the program."""


class PromptSampler:
    """Row numbers to ask: every row once an epoch, in an order that depends only on (seed, epoch).

    If the rows that remain at an epoch's end are too few for what is asked for, they are left out of that
    epoch. A row that the step has already asked, in the epoch before, is postponed: it comes first once it
    may be asked again.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of a training step.
        shuffle: whether each epoch has a new order. If not, the order is that of the file.
        seed: seed of the shuffling.
        retire_solved: rows whose group reached this mean score are not asked again, see `record`. None: all
            rows are asked.

    Raises:
        ValueError: there are too few rows for one batch.
    """

    def __init__(
        self, num_rows: int, batch_size: int, shuffle: bool, seed: int, retire_solved: float | None = None
    ) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"Found {num_rows} training rows and data.train_batch_size={batch_size}; expected at least "
                f"one batch of rows. Set data.train_batch_size={num_rows} or less."
            )
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.retire_solved = retire_solved
        self.retired = set[int]()
        self.epoch = 0
        self.position = 0
        self.postponed: list[int] = []  # rows whose turn came while they were not allowed to be asked
        self._order = lru_cache(1)(self.order_of)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.num_rows // self.batch_size

    def take(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        """Return the next `count` row numbers, going on into the next epoch where this one ends.

        No row comes twice, and none of `skip` (rows that the step has asked, or that are under way), while
        there are others. If a step asks more rows than there are, rows are asked again, those of `skip`
        first.

        Raises DataFailed if too many rows are retired.
        """
        self.check_enough_left(count)
        excluded = set(skip)
        chosen: list[int] = []
        while len(chosen) < count:
            if self.num_fresh(excluded) <= 0:
                excluded = set(chosen)
            if self.num_fresh(excluded) <= 0:
                excluded = set()
            rows = self._draw(min(count - len(chosen), self.num_fresh(excluded)), excluded)
            chosen += rows
            excluded.update(rows)
        return chosen

    def _draw(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` rows that are not in `asked`, no row twice.

        The caller makes sure that there are as many.
        """
        rows: list[int] = []
        while len(rows) < count:
            rows += self._next_of_epoch(min(count - len(rows), self.batch_size), asked.union(rows))
        return rows

    def _next_of_epoch(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` rows of one epoch that are not in `asked`.

        They are of this epoch, or of the next one if too few of this one are left.
        """
        while True:
            order = self._order(self.epoch)
            position = self.position
            waiting = deque(self.postponed)
            barred = set(asked)
            rows: list[int] = []
            rows_that_waited: list[int] = []
            postponed: list[int] = []
            while len(rows) < count and (waiting or position < self.num_rows):
                has_waited = bool(waiting)
                if has_waited:
                    row = waiting.popleft()
                else:
                    row = int(order[position])
                    position += 1
                if row in self.retired:
                    continue
                if row in barred:
                    postponed.append(row)
                    continue
                barred.add(row)
                rows.append(row)
                if has_waited:
                    rows_that_waited.append(row)
            if len(rows) == count:
                self.position = position
                self.postponed = [*postponed, *waiting]
                return rows
            self.epoch += 1
            self.position = 0
            self.postponed = [*rows_that_waited, *postponed]

    @property
    def num_left(self) -> int:
        """Return the number of rows that are not retired."""
        return self.num_rows - len(self.retired)

    def num_fresh(self, asked: Collection[int]) -> int:
        """Return how many rows are neither retired nor in `asked`."""
        return self.num_left - len(set(asked) - self.retired)

    def check_enough_left(self, count: int, num_left: int | None = None) -> None:
        """Raise DataFailed if too many rows are retired to ask `count`, or a batch if that is less."""
        num_left = self.num_left if num_left is None else num_left
        if num_left < min(count, self.batch_size):
            raise DataFailed(
                f"{num_left} prompts are left that prompt_selection.retire_solved has not retired, "
                f"and a step asks {count}: the policy solves the others. Take harder or more rows, raise "
                "retire_solved, or call the run finished."
            )

    def record(
        self, rows: Sequence[int], scores: Sequence[float], still_informative: Collection[int] = ()
    ) -> None:
        """Record the mean score of the group of each row.

        `still_informative` holds those of the rows that are not retired, however high their score is, because
        their answers still differ in something that can be learnt.
        """
        if self.retire_solved is not None:
            pairs = zip(rows, scores, strict=True)
            solved = {row for row, score in pairs if score >= self.retire_solved}
            self.retired |= solved.difference(still_informative)

    def metrics(self) -> dict[str, float]:
        """Return `filter/retired`, the number of rows that are not asked again."""
        return {} if self.retire_solved is None else {"filter/retired": float(len(self.retired))}

    def history(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint needs besides `state_dict`: values of many rows, copied."""
        return {} if self.retire_solved is None else {"retired": np.array([*self.retired], np.int64)}

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        """Restore what `history` returned. Raises ValueError if that was of a sampler with other settings."""
        if ("draws" in history) != ("draws" in self.history()):
            subject, value = ("what", "false") if "draws" in history else ("nothing that", "true")
            raise ValueError(
                f"Found {subject} difficulty pools have measured in the checkpoint, with "
                f"prompt_selection.difficulty_pools.enable={value}; a run keeps the data order it began "
                "with. Use the other value, or trainer.resume_mode=none."
            )
        self.retired = set(history["retired"].tolist()) if "retired" in history else set()

    def close(self) -> None:
        """End the work in the background, if there is any."""

    def order_of(self, epoch: int) -> np.ndarray:
        """Return the rows in the order of an epoch, [num_rows] int64."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what the order depends on, as plain numbers."""
        numbers = {"epoch": self.epoch, "position": self.position, "num_rows": self.num_rows}
        numbers |= {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}
        return numbers | {"postponed": list(self.postponed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises ValueError if data, batch size or seed differ from those of the saved position.
        """
        now = self.state_dict()
        if state.keys() | {"postponed"} != now.keys():  # older versions postponed none
            raise ValueError(
                "Found a checkpoint of another kind of data: it was made with another value of "
                "data.streaming, or with data.mixture. Use the old settings, or trainer.resume_mode=none."
            )
        for name in ("num_rows", "batch_size", "shuffle", "seed"):
            if state[name] != now[name]:
                raise ValueError(
                    f"Found {name}={now[name]}, but the checkpoint was made with {state[name]}; a run keeps "
                    "the data order it began with. Use the old value, or trainer.resume_mode=none."
                )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._load_postponed(state.get("postponed", ()))

    def _load_postponed(self, postponed: Sequence[Any]) -> None:
        """Load the postponed rows of a `state_dict`."""
        self.postponed = list(postponed)


def read_rows(
    file: str, check: Callable[[Iterable[str], str], None], columns: Sequence[str] | None = None
) -> Iterator[tuple[int, Row]]:
    """Yield all rows of a file, each with the number of its row (from 0), or of its line in jsonl (from 1).

    Args:
        file: a parquet or jsonl file; "~" is expanded.
        check: is called with the columns, and with a description of where they are.
        columns: of a parquet file only these columns are read, as far as it has them; None: all.

    Raises:
        ValueError: there is no such file, a line of jsonl holds no row, or a parquet file can't be read.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"Found no file at {path}; expected a parquet or jsonl file.")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, json_row(line, f"{path}, line {number}", check)
        return
    try:
        names = pq.read_schema(path).names
        check(names, str(path))
        selected = None if columns is None else [name for name in names if name in columns]
        yield from enumerate(table_rows(pq.read_table(path, columns=selected)))
    except (pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"Found {path}, which can't be read ({error}); expected a parquet file.") from error


def first_rows(file: str, count: int) -> list[Row]:
    """Return at most `count` rows from the beginning of a parquet or jsonl file, of which no more is read.

    Raises ValueError if they can't be read.
    """
    if file.endswith(".jsonl"):
        return [row for _, row in islice(read_rows(file, lambda columns, where: None), count)]
    try:
        with pq.ParquetFile(Path(file).expanduser()) as table:
            batch = next(table.iter_batches(count), None)
            return [] if batch is None else table_rows(batch)
    except (OSError, pa.ArrowException, UnicodeDecodeError, KeyError) as error:
        raise ValueError(f"Found {file}, which can't be read ({error}); expected a parquet file.") from error


def table_rows(table: pa.Table | pa.RecordBatch) -> list[Row]:
    """Return the rows of a table, with maps as structs.

    A table has one struct for all rows of a column, so structs lose the entries that are null.
    """
    rows: list[Row] = table.to_pylist(maps_as_pydicts="strict")
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if _has_null_entries(column):
            for row in rows:
                row[name] = without_nulls(row[name])
    return rows


def _has_null_entries(column: pa.ChunkedArray | pa.Array) -> bool:
    """Return whether an entry of a struct in a column may be null."""
    if isinstance(column, pa.ChunkedArray):
        return any(map(_has_null_entries, column.chunks))
    if pa.types.is_struct(column.type):
        entries = [column.field(index) for index in range(column.type.num_fields)]
        return any(entry.null_count > 0 or _has_null_entries(entry) for entry in entries)
    if pa.types.is_map(column.type):
        return column.items.null_count > 0 or _has_null_entries(column.items)
    is_list = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if is_list or pa.types.is_fixed_size_list(column.type):
        return _has_null_entries(column.values)
    return False


def row_name(file: str, number: int) -> str:
    """Return where a row is, for messages, by the number that `read_rows` has for it."""
    return f"{file}, {'line' if file.endswith('.jsonl') else 'row'} {number}"


def json_row(line: bytes, where: str, check: Callable[[Iterable[str], str], None]) -> Row:
    """Return the row in a line of a jsonl file. Raises ValueError if it holds no row."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: found no JSON ({error}); expected one row a line.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; expected an object with a row's columns.")
    check(row, where)
    return row


def require_columns(columns: Iterable[str], needed: Sequence[str], where: str, advice: str) -> None:
    """Raise ValueError if `columns`, those of `where`, lack one of `needed`."""
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(
            f"Found no column {', '.join(missing)} in {where} (it has {', '.join(columns)}); expected "
            f"{', '.join(needed)}. {advice}"
        )


def prompt_text(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    """Return the text that the policy continues.

    This is the chat template up to the policy's turn. Without a chat template, these are the contents of all
    messages, end to end.

    Args:
        tokenizer: the policy's tokenizer.
        messages: the messages.
        tools: OpenAI's descriptions, for templates that support tools.
    """
    if tokenizer.chat_template:
        options = {} if tools is None else {"tools": tools}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return joined_contents(messages)


def joined_contents(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the contents of messages, end to end.

    A message begins on a new line if white space does not end the message before it. Raises ValueError for
    calls of tools, which only a chat template can write.
    """
    text = ""
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str):
            raise ValueError(
                f"Found no text in message {number} and no chat template; expected a content in each "
                "message, or a tokenizer whose template writes calls of tools."
            )
        if text and content and not text[-1].isspace() and not content[0].isspace():
            text += "\n"
        text += content
    return text


def opening_ids(tokenizer: Any) -> list[int]:
    """Return the ids that the tokenizer puts before a document.

    These are a beginning of sequence (as Gemma's and Llama's tokenizers have it), or none.
    """
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `prompt_text`.

    A chat template says itself what stands first. Without one the prompt begins like the documents of
    pretraining, with exactly one beginning of sequence if they have it. What UTF-8 can't encode becomes
    U+FFFD.
    """
    # Not verbose, to avoid a warning of a prompt that is too long. It is refused or cut afterwards.
    ids = list(tokenizer.encode(encodable(text), add_special_tokens=False, verbose=False))
    opening = [] if tokenizer.chat_template else opening_ids(tokenizer)
    return ids if ids[:1] == opening else opening + ids


def cut_prompt(tokenizer: Any, ids: list[int], longest: int) -> list[int]:
    """Return a prompt's last `longest` tokens; a beginning of sequence stays in front, as one of them."""
    opening = ids[:1] if len(ids) > longest and ids[:1] == opening_ids(tokenizer) else []
    return opening + ids[max(0, len(ids) - longest + len(opening)) :]
