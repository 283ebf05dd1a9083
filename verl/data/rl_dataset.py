"""Questions from parquet or jsonl files, and the order in which a run goes through them.

    rows of files -> RLHFDataset[i] -> {raw_prompt_ids, data_source, reward_model, extra_info, index, episode}
    PromptSampler -> which rows make the next batch, the same again after a restart

The row schema is that of Search-R1: data_source str; prompt [{role, content}, ...]; reward_model {style,
ground_truth: {target: [golden answers]}} (SkyRL's rows call it reward_spec); extra_info {split, index, ...},
which may be missing. Other columns are kept, and are passed to the row's environment if that is not a search.
Rows of such an environment are SkyRL's, and data_source and the reward's column may be missing.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from verl.config import Config
from verl.environments.registry import SEARCH
from verl.utils.json_files import to_jsonable
from verl.utils.rows import row_max_turns
from verl.utils.text import encodable

Row = dict[str, Any]

_SUBSET_SEED = 42  # Search-R1's: train_data_num picks the same rows
_VERL_DEFAULTS: Row = {"prompt_key": "prompt", "max_prompt_length": 1024, "truncation": "error"}
_TEMPLATE_BYTES = 1024  # more than a chat template adds to the messages


def row_settings(config: Config) -> dict[str, Any]:
    """Return the settings of rows that `RLHFDataset` takes, as a dictionary of the caller's own."""
    return {**config.data, "env_class": config.environment.env_class}


class RLHFDataset:
    """Prompts as token ids, with what is needed to score their answers.

    Args:
        parquet_files: a file (.parquet or .jsonl) or several, read one after the other; "~" is expanded. Or
            the rows themselves.
        tokenizer: that of the policy. Its chat template is used if it has one, otherwise the first message's
            content.
        data_config: the `data` block of the configuration: prompt_key, truncation, max_prompt_length,
            max_start_length; and env_class, the environment of rows that name none.
        num_rows: use this many rows, drawn without replacement with a fixed seed; None: all.
        adapt: function that is applied to each row before anything is read from it (`mixture` has such
            functions).
        verl_arguments: those settings one by one, as Search-R1's verl takes them; others have no effect.

    Raises:
        ValueError: a file or a column is missing, there is no row, num_rows is too large, or a prompt is
            longer than data.max_prompt_length with data.truncation=error (skip leaves such rows out).
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str] | Sequence[Row],
        tokenizer: Any,
        data_config: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        adapt: Callable[[Row], Row] | None = None,
        **verl_arguments: Any,
    ) -> None:
        self._set_up(tokenizer, data_config or verl_arguments, adapt)
        files = [parquet_files] if isinstance(parquet_files, str) else parquet_files
        self.rows: list[Row] = []
        for file in files:
            self.rows += read_rows(file, self.check_columns) if isinstance(file, str) else [file]
        origin = ", ".join(file for file in files if isinstance(file, str)) or "the rows given"
        if num_rows is not None and num_rows > len(self):
            raise ValueError(
                f"Found {len(self)} rows in {origin}; expected at least the {num_rows} that "
                "data.train_data_num or data.val_data_num asks for. Set it to null for all rows."
            )
        self.limit_rows(num_rows)
        if adapt is not None:
            self.rows = list(map(adapt, self.rows))
        if not self.rows:
            raise ValueError(f"Found no rows in {origin}; expected at least one.")
        if self.config["truncation"] != "left":
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

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raise ValueError if a row with these columns can't be asked and scored."""
        needed = [self.prompt_key]
        # An environment has its own rewards. A source of a mixture also names itself.
        if self.adapt is None and self.config["env_class"] == SEARCH and "env_class" not in columns:
            needed += ["data_source", "reward_spec" if "reward_spec" in columns else "reward_model"]
        require_columns(columns, needed, where, "The prompt's column is named by data.prompt_key.")

    def __len__(self) -> int:
        return len(self.rows)

    def rows_to_check(self) -> Iterable[Row]:
        """Return the rows that can be checked before the run starts."""
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.encode_row(self.rows[index], index)

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
        row = self.adapt(row) if self.adapt is not None else row
        messages = self.messages_of(row)
        limit = self.config["max_start_length"]
        ids = encode_prompt(self.tokenizer, prompt_text(self.tokenizer, messages))
        if len(ids) > limit and not self._has_warned:
            self._has_warned = True
            print(f"note: a prompt has {len(ids)} tokens; the last data.max_start_length={limit} are used")
        extra_info = row.get("extra_info")
        env_class = self.env_class_of(row)
        rewards = {name: row.get(name) for name in ("reward_model", "reward_spec")}
        reward = next((value for value in rewards.values() if value is not None), None)
        episode = None
        if env_class != SEARCH:
            extras = {name: to_jsonable(value) for name, value in row.items() if name != self.prompt_key}
            if reward is not None:
                extras |= {name: to_jsonable(reward) for name, cell in rewards.items() if cell is None}
            episode = {"env_class": env_class, "prompt": messages, "extras": extras}
        elif (max_turns := row_max_turns(row)) is not None:
            episode = {"env_class": SEARCH, "prompt": [], "extras": {"max_turns": max_turns}}
        return {
            "raw_prompt_ids": cut_prompt(self.tokenizer, ids, limit),
            "data_source": row.get("data_source") or env_class.replace(":", "."),
            "reward_model": reward if isinstance(reward, Mapping) else {"ground_truth": None},
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
            "index": index,
            "episode": episode,
        }

    def env_class_of(self, row: Row) -> str:
        """Return the environment that a row names, or else that of the configuration."""
        named = row.get("env_class")
        if isinstance(named, str) and named:
            return named
        default: str = self.config["env_class"]
        return default

    def messages_of(self, row: Row) -> list[dict[str, Any]]:
        """Return a row's prompt as chat messages."""
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
        """Refuse prompts that are too long, or leave them out."""
        problems = {i: text for i, row in enumerate(self.rows) if (text := self.too_long(row)) is not None}
        if not problems:
            return
        too_long = f"{len(problems)} of {len(self)} prompts in {files} that are too long"
        if self.config["truncation"] == "error" or len(problems) == len(self):
            first, text = next(iter(problems.items()))
            raise self.length_error(f"{too_long} (the first: row {first}, {text})")
        print(f"note: {too_long} are skipped (data.truncation=skip)")
        self.rows = [row for i, row in enumerate(self.rows) if i not in problems]


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
) -> list[Row]:
    """Read all rows of a file.

    Args:
        file: a parquet or jsonl file; "~" is expanded.
        check: is called with the columns, and with a description of where they are.
        columns: of a parquet file only these columns are read, as far as it has them; None: all.

    Raises:
        ValueError: there is no such file, or a line of jsonl holds no row.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"Found no file at {path}; expected a parquet or jsonl file.")
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            numbered = ((f"{path}, line {number}", line) for number, line in enumerate(lines, 1))
            return [json_row(line, where, check) for where, line in numbered if line.strip()]
    names = pq.read_schema(path).names
    check(names, str(path))
    selected = None if columns is None else [name for name in names if name in columns]
    rows: list[Row] = pq.read_table(path, columns=selected).to_pylist()
    return rows


def json_row(line: bytes, where: str, check: Callable[[Iterable[str], str], None]) -> Row:
    """Return the row in a line of a jsonl file. Raises ValueError if it holds no row."""
    try:
        row = json.loads(line)
    except ValueError as error:
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


def chat_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Return a cell as chat messages, without their entries that are null; plain text is one user message.

    Raises ValueError if the cell is neither text nor chat messages.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence | np.ndarray) or len(value) == 0:
        raise ValueError(f"{column} holds {short_repr(value)}; expected text or chat messages")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} of {column} is {short_repr(message)}; expected {{role, content}}")
        entries = {name: item for name, item in message.items() if item is not None}
        if not isinstance(entries.get("content"), str) and not entries.get("tool_calls"):
            raise ValueError(f"message {i} of {column} has the content {short_repr(message.get('content'))}")
        messages.append(entries)
    return messages


def short_repr(value: Any) -> str:
    """Return a value as it appears in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def prompt_text(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    """Return the text that the policy continues.

    This is the chat template up to the policy's turn, or the first message if there is no chat template.
    `tools` are OpenAI's descriptions, for templates that support tools.
    """
    if tokenizer.chat_template:
        options = {} if tools is None else {"tools": tools}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
    return messages[0]["content"]


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
