"""Questions from parquet or jsonl files, and the order in which a run goes through them.

    rows of files -> RLHFDataset[i] -> {raw_prompt_ids, data_source, reward_model, extra_info, index, episode}
    PromptSampler -> which rows make the next batch, the same again after a restart

Row schema (Search-R1's): data_source str; prompt [{role, content}, ...]; reward_model {style, ground_truth:
{target: [golden answers]}} (SkyRL's rows call it reward_spec); extra_info {split, index, ...}, which may be
missing. Other columns are kept, and given to the row's environment where that is not a search: then rows are
SkyRL's, and data_source and the reward's column may be missing.
"""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from verl.environments.base import row_max_turns
from verl.environments.registry import SEARCH
from verl.utils.records.files import plain

Row = dict[str, Any]

_SUBSET_SEED = 42  # Search-R1's: train_data_num picks the same rows
_VERL_DEFAULTS: Row = {"prompt_key": "prompt", "max_prompt_length": 1024, "truncation": "error"}
_TEMPLATE_BYTES = 1024  # more than a chat template adds to the messages


class RLHFDataset:
    """Prompts as token ids, with what is needed to score their answers.

    Args:
        parquet_files: a file (.parquet or .jsonl) or several, read one after the other; "~" is expanded.
            Or the rows themselves.
        tokenizer: the policy's; its chat template is used if it has one, else the first message's content.
        data_config: the `data` block of the configuration: prompt_key, truncation, max_prompt_length,
            max_start_length; and env_class, the environment of rows that name none.
        num_rows: use this many rows, drawn without replacement with a fixed seed; None: all.
        adapt: what is made of each row before anything is read from it (`mixture` has such functions).
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
        self.keep(num_rows)
        if adapt is not None:
            self.rows = list(map(adapt, self.rows))
        if not self.rows:
            raise ValueError(f"Found no rows in {origin}; expected at least one.")
        if self.config["truncation"] != "left":
            self._check_lengths(origin)
        self.num_places = len(self)  # one more than the largest index of a row

    def _set_up(self, tokenizer: Any, config: Mapping[str, Any], adapt: Callable[[Row], Row] | None) -> None:
        self.tokenizer = tokenizer
        self.adapt = adapt
        self.config = {"env_class": SEARCH, **_VERL_DEFAULTS, **config}
        self.config.setdefault("max_start_length", self.config["max_prompt_length"])
        self.prompt_key: str = self.config["prompt_key"]
        self._has_warned = False

    def keep(self, num_rows: int | None) -> None:
        """Leaves out all but so many rows, drawn with a fixed seed: those of pandas' DataFrame.sample."""
        if num_rows is not None:
            chosen = np.random.RandomState(_SUBSET_SEED).choice(len(self), num_rows, replace=False)
            self.rows = [self.rows[i] for i in chosen]

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raises ValueError if a row with these columns can't be asked and scored."""
        needed = [self.prompt_key]
        # an environment has rewards; and a source of a mixture names itself, too
        if self.adapt is None and self.config["env_class"] == SEARCH and "env_class" not in columns:
            needed += ["data_source", "reward_spec" if "reward_spec" in columns else "reward_model"]
        require_columns(columns, needed, where, "The prompt's column is named by data.prompt_key.")

    def __len__(self) -> int:
        return len(self.rows)

    def rows_to_check(self) -> Iterable[Row]:
        """The rows that can be looked at before the run starts."""
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.item(self.rows[index], index)

    def item(self, row: Row, index: int) -> dict[str, Any]:
        """A row as it is asked: raw_prompt_ids (list[int], special tokens as `encode_prompt` has them),
        data_source (str), reward_model (dict), extra_info (dict), index (int, its place in the data set),
        and `episode`: what the environment gets (env_class, prompt in messages, extras: all columns but the
        prompt), or None for a search as the configuration has it.
        """
        row = self.adapt(row) if self.adapt is not None else row
        messages = self.messages_of(row)
        kept = self.config["max_start_length"]
        ids = encode_prompt(self.tokenizer, prompt_text(self.tokenizer, messages))
        if len(ids) > kept and not self._has_warned:
            self._has_warned = True
            print(f"note: a prompt has {len(ids)} tokens; the last data.max_start_length={kept} are used")
        extra_info = row.get("extra_info")
        env_class = self.env_class_of(row)
        rewards = {name: row.get(name) for name in ("reward_model", "reward_spec")}
        reward = next((each for each in rewards.values() if each is not None), None)
        episode = None
        if env_class != SEARCH:
            extras = {name: plain(value) for name, value in row.items() if name != self.prompt_key}
            if reward is not None:
                extras |= {name: plain(reward) for name, own in rewards.items() if own is None}
            episode = {"env_class": env_class, "prompt": messages, "extras": extras}
        elif (max_turns := row_max_turns(row)) is not None:
            episode = {"env_class": SEARCH, "prompt": [], "extras": {"max_turns": max_turns}}
        return {
            "raw_prompt_ids": cut_prompt(self.tokenizer, ids, kept),
            "data_source": row.get("data_source") or env_class.replace(":", "."),
            "reward_model": reward if isinstance(reward, Mapping) else {"ground_truth": None},
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
            "index": index,
            "episode": episode,
        }

    def env_class_of(self, row: Row) -> str:
        """Return the environment that a row names, else the configuration's."""
        named = row.get("env_class")
        if isinstance(named, str) and named:
            return named
        default: str = self.config["env_class"]
        return default

    def messages_of(self, row: Row) -> list[dict[str, Any]]:
        """Return a row's prompt as chat messages."""
        return chat_messages(row[self.prompt_key], self.prompt_key)

    def too_long(self, row: Row) -> str | None:
        """The row's length and beginning if its prompt is longer than data.max_prompt_length, else None."""
        longest = self.config["max_prompt_length"]
        messages = self.messages_of(row)
        # a token has at least one byte, so only rows of many bytes are tokenised
        num_bytes = sum(len(str(message.get("content")).encode()) for message in messages)
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
        """Refuses, or leaves out, prompts that are too long."""
        found = {i: text for i, row in enumerate(self.rows) if (text := self.too_long(row)) is not None}
        if not found:
            return
        too_long = f"{len(found)} of {len(self)} prompts in {files} that are too long"
        if self.config["truncation"] == "error" or len(found) == len(self):
            first, text = next(iter(found.items()))
            raise self.length_error(f"{too_long} (the first: row {first}, {text})")
        print(f"note: {too_long} are skipped (data.truncation=skip)")
        self.rows = [row for i, row in enumerate(self.rows) if i not in found]


class DataFailed(RuntimeError):
    """The training data can't give the next prompts, for a reason outside of the program."""


class PromptSampler:
    """Row numbers to ask: every row once an epoch, in an order that depends on (seed, epoch) alone.

    Rows left over at an epoch's end, too few for what is asked for, are left out of that epoch. A row that
    the step has asked already, in the epoch before, is postponed: it comes first once it may be asked again.

    Args:
        num_rows, batch_size: rows of the data set, and of a training step. ValueError: too few rows for one.
        shuffle: a new order each epoch; else the file's order. seed: of the shuffling.
        retire_solved: rows whose group reached this mean score are not asked again, see `record`; None: all
            are.
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
        self.postponed: list[int] = []  # rows whose turn it was while they might not be asked
        self._order = lru_cache(1)(self.order_of)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_rows // self.batch_size

    def take(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        """Return the next `count` row numbers, going on into the next epoch where this one ends.

        No row comes twice, and none of `skip` (rows that the step has asked, or that are under way), while
        there are others. Where there are none left, as a step asks more than there are rows, rows are asked
        again, those of `skip` first. DataFailed: too many rows are retired.
        """
        self.check_left(count)
        asked = set(skip)
        taken: list[int] = []
        while len(taken) < count:
            if self.num_fresh(asked) <= 0:
                asked = set(taken)
            if self.num_fresh(asked) <= 0:
                asked = set()
            rows = self._draw(min(count - len(taken), self.num_fresh(asked)), asked)
            taken += rows
            asked.update(rows)
        return taken

    def _draw(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` rows that are not in `asked`, no row twice. There are so many."""
        rows: list[int] = []
        while len(rows) < count:
            rows += self._next_of_epoch(min(count - len(rows), self.batch_size), asked.union(rows))
        return rows

    def _next_of_epoch(self, count: int, asked: set[int]) -> list[int]:
        """Return the next `count` rows of one epoch that are not in `asked`: of this epoch, or of the next
        one if too few of this one are left.
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
        """Rows that are not retired."""
        return self.num_rows - len(self.retired)

    def num_fresh(self, asked: Collection[int]) -> int:
        """Return how many rows are neither retired nor in `asked`."""
        return self.num_left - len(set(asked) - self.retired)

    def check_left(self, count: int, left: int | None = None) -> None:
        """DataFailed: too many rows are retired to ask `count`, or a batch where that is less."""
        left = self.num_left if left is None else left
        if left < min(count, self.batch_size):
            raise DataFailed(
                f"{left} prompts are left that algorithm.filter_groups.retire_solved has not retired, and a "
                f"step asks {count}: the policy solves the others. Take harder or more rows, raise "
                "retire_solved, or call the run finished."
            )

    def record(self, rows: Sequence[int], scores: Sequence[float], teaching: Collection[int] = ()) -> None:
        """Hear the mean score of the group of each row. teaching: those of the rows that are not retired,
        however high their score is, as their answers still differ in something that is learnt.
        """
        if self.retire_solved is not None:
            pairs = zip(rows, scores, strict=True)
            solved = {row for row, score in pairs if score >= self.retire_solved}
            self.retired |= solved.difference(teaching)

    def metrics(self) -> dict[str, float]:
        """`filter/retired`: rows that are not asked again."""
        return {} if self.retire_solved is None else {"filter/retired": float(len(self.retired))}

    def history(self) -> dict[str, np.ndarray]:
        """What a checkpoint needs besides `state_dict`: values of many rows, copied."""
        return {} if self.retire_solved is None else {"retired": np.array([*self.retired], np.int64)}

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        """Takes what `history` gave. ValueError: that was of a sampler with other settings."""
        if ("draws" in history) != ("draws" in self.history()):
            found, value = ("what", "false") if "draws" in history else ("nothing that", "true")
            raise ValueError(
                f"Found {found} difficulty pools have measured in the checkpoint, with "
                f"data.difficulty_pools.enable={value}; a run keeps the data order it began with. Use the "
                "other value, or trainer.resume_mode=none."
            )
        self.retired = set(history["retired"].tolist()) if "retired" in history else set()

    def close(self) -> None:
        """Ends what runs in the background."""

    def order_of(self, epoch: int) -> np.ndarray:
        """The rows in the order of an epoch, [num_rows] int64."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain numbers."""
        numbers = {"epoch": self.epoch, "position": self.position, "num_rows": self.num_rows}
        numbers |= {"batch_size": self.batch_size, "shuffle": self.shuffle, "seed": self.seed}
        return numbers | {"postponed": list(self.postponed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. ValueError: data, batch size or seed are others than when it was saved."""
        own = self.state_dict()
        if state.keys() | {"postponed"} != own.keys():  # older versions postponed none
            raise ValueError(
                "Found a checkpoint of another kind of data: it was made with another value of "
                "data.streaming, or with data.mixture. Use the old settings, or trainer.resume_mode=none."
            )
        for name in ("num_rows", "batch_size", "shuffle", "seed"):
            if state[name] != own[name]:
                raise ValueError(
                    f"Found {name}={own[name]}, but the checkpoint was made with {state[name]}; a run keeps "
                    "the data order it began with. Use the old value, or trainer.resume_mode=none."
                )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._load_postponed(state.get("postponed", ()))

    def _load_postponed(self, postponed: Sequence[Any]) -> None:
        """Take the postponed rows of a `state_dict`."""
        self.postponed = list(postponed)


def read_rows(
    file: str, check: Callable[[Iterable[str], str], None], columns: Sequence[str] | None = None
) -> list[Row]:
    """All rows of a file. `check` is given their columns, and where they are. columns: of a parquet file only
    these are read, as far as it has them; None: all. ValueError.
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
    kept = None if columns is None else [name for name in names if name in columns]
    rows: list[Row] = pq.read_table(path, columns=kept).to_pylist()
    return rows


def json_row(line: bytes, where: str, check: Callable[[Iterable[str], str], None]) -> Row:
    """A line of a jsonl file. ValueError: it holds no row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: found no JSON ({error}); expected one row a line.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; expected an object with a row's columns.")
    check(row, where)
    return row


def require_columns(columns: Iterable[str], needed: Sequence[str], where: str, advice: str) -> None:
    """ValueError: `where` lacks a column."""
    if missing := [name for name in needed if name not in columns]:
        raise ValueError(
            f"Found no column {', '.join(missing)} in {where} (it has {', '.join(columns)}); expected "
            f"{', '.join(needed)}. {advice}"
        )


def chat_messages(value: Any, column: str) -> list[dict[str, Any]]:
    """A cell as chat messages, without what is null in them; plain text is one user message. ValueError."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence | np.ndarray) or len(value) == 0:
        raise ValueError(f"{column} holds {shown(value)}; expected text or chat messages")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {i} of {column} is {shown(message)}; expected {{role, content}}")
        given = {name: item for name, item in message.items() if item is not None}
        if not isinstance(given.get("content"), str) and not given.get("tool_calls"):
            raise ValueError(f"message {i} of {column} has the content {shown(message.get('content'))}")
        messages.append(given)
    return messages


def shown(value: Any) -> str:
    """A value in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def prompt_text(tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    """What the policy goes on with: the chat template up to its turn, or without one the first message.
    tools: OpenAI's descriptions, for templates that know tools.
    """
    if tokenizer.chat_template:
        told = {} if tools is None else {"tools": tools}
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **told)
    return messages[0]["content"]


def opening_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a document: a beginning of sequence (as Gemma's and Llama's), or []."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `prompt_text`. A chat template says itself what stands first; without one the prompt
    begins like the documents of pretraining, with exactly one beginning of sequence if they have it.
    """
    # Not verbose: no warning of a prompt that is too long, which is refused or cut afterwards.
    ids = list(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    opening = [] if tokenizer.chat_template else opening_ids(tokenizer)
    return ids if ids[:1] == opening else opening + ids


def cut_prompt(tokenizer: Any, ids: list[int], longest: int) -> list[int]:
    """A prompt's last `longest` tokens; a beginning of sequence stays in front, as one of them."""
    opening = ids[:1] if len(ids) > longest and ids[:1] == opening_ids(tokenizer) else []
    return opening + ids[max(0, len(ids) - longest + len(opening)) :]
