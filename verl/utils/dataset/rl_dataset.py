"""Questions from parquet or jsonl files, and the order in which a run goes through them.

    rows of files -> RLHFDataset[i] -> {raw_prompt_ids, data_source, reward_model, extra_info, index}
    PromptSampler -> which rows make the next batch, the same again after a restart

Row schema (Search-R1's): data_source str; prompt [{role, content}, ...]; reward_model {style, ground_truth:
{target: [golden answers]}} (SkyRL's rows call it reward_spec); extra_info {split, index, ...}, which may be
missing. Other columns are kept.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

_SUBSET_SEED = 42  # Search-R1's: train_data_num picks the same rows
_VERL_DEFAULTS = {"prompt_key": "prompt", "max_prompt_length": 1024, "truncation": "error"}
_TEMPLATE_BYTES = 1024  # more than a chat template adds to the messages

LENGTH_ADVICE = (
    "Raise it, take the rows out, set data.truncation=skip to leave them out, or data.truncation=left to "
    "keep the end of each prompt."
)

Row = dict[str, Any]


class RLHFDataset:
    """Prompts as token ids, with what is needed to score their answers.

    Args:
        parquet_files: a file (.parquet or .jsonl) or several, read one after the other; "~" is expanded.
        tokenizer: the policy's; its chat template is used if it has one, else the first message's content.
        data_config: the `data` block of the configuration: prompt_key, truncation, max_prompt_length,
            max_start_length.
        num_rows: use this many rows, drawn without replacement with a fixed seed; None: all.
        adapt: what is made of each row before anything is read from it (`mixture` has such functions).
        verl_arguments: those settings one by one, as Search-R1's verl takes them; others have no effect.

    Raises:
        ValueError: a file or a column is missing, there is no row, num_rows is too large, or a prompt is
            longer than data.max_prompt_length with data.truncation=error (skip leaves such rows out).
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        data_config: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
        adapt: Callable[[Row], Row] | None = None,
        **verl_arguments: Any,
    ) -> None:
        self._set_up(tokenizer, data_config or verl_arguments, adapt)
        files = [parquet_files] if isinstance(parquet_files, str) else parquet_files
        paths = [Path(file).expanduser() for file in files]
        rows = [row for path in paths for row in self._read(path)]
        if num_rows is not None:
            if num_rows > len(rows):
                raise ValueError(
                    f"Found {len(rows)} rows in {_names(paths)}; expected at least the {num_rows} that "
                    "data.train_data_num or data.val_data_num asks for. Set it to null for all rows."
                )
            chosen = np.random.RandomState(_SUBSET_SEED).choice(len(rows), num_rows, replace=False)
            rows = [rows[i] for i in chosen]  # those of pandas' DataFrame.sample
        self._take_rows(rows, _names(paths))

    def _set_up(
        self, tokenizer: Any, config: Mapping[str, Any], adapt: Callable[[Row], Row] | None = None
    ) -> None:
        self.tokenizer, self.adapt = tokenizer, adapt
        self.config = {**_VERL_DEFAULTS, **config}
        self.config.setdefault("max_start_length", self.config["max_prompt_length"])
        self.prompt_key: str = self.config["prompt_key"]
        self._has_warned = False

    def _take_rows(self, rows: list[Row], origin: str) -> None:
        if not rows:
            raise ValueError(f"Found no rows in {origin}; expected at least one.")
        self.rows = rows
        if self.config["truncation"] != "left":
            self._check_lengths(origin)

    def _read(self, path: Path) -> list[Row]:
        """All rows of a file, with all their columns."""
        if not path.is_file():
            raise ValueError(f"Found no file at {path}; expected a parquet or jsonl file with questions.")
        if path.suffix == ".jsonl":
            rows = []
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        rows.append(json_row(line, f"{path}, line {number}"))
                        self.check_columns(rows[-1], f"{path}, line {number}")
            return rows
        self.check_columns(pq.read_schema(path).names, str(path))
        return pd.read_parquet(path).to_dict("records")

    def check_columns(self, columns: Iterable[str], where: str) -> None:
        """Raises ValueError if a row with these columns can't be asked and scored."""
        columns = list(columns)
        needed = [self.prompt_key, "data_source", "reward_model"]
        if self.adapt is not None:  # the source of a mixture names itself, and may bring its own rewards
            needed = needed[:1]
        elif "reward_spec" in columns:
            needed[2] = "reward_spec"
        missing = [name for name in needed if name not in columns]
        if missing:
            raise ValueError(
                f"Found no column {', '.join(missing)} in {where} (it has {', '.join(columns)}); expected "
                f"{', '.join(needed)}. The prompt's column is named by data.prompt_key."
            )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row: raw_prompt_ids (list[int], no special tokens added but the chat template's), data_source
        (str), reward_model (dict), extra_info (dict), index (int, its place in the data set).
        """
        return self.item(self.rows[index], index)

    def item(self, row: Row, index: int) -> dict[str, Any]:
        """`self[index]`, of a row that is given."""
        row = self.adapt(row) if self.adapt is not None else row
        extra_info, reward_model = row.get("extra_info"), row.get("reward_model")
        return {
            "raw_prompt_ids": self._prompt_ids(_messages(row[self.prompt_key])),
            "data_source": row["data_source"],
            "reward_model": row["reward_spec"] if reward_model is None else reward_model,
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
            "index": index,
        }

    def too_long(self, row: Row) -> str | None:
        """The row's length and beginning if its prompt is longer than data.max_prompt_length, else None.

        A token has at least one byte, so only rows of many bytes are tokenised.
        """
        longest, messages = self.config["max_prompt_length"], _messages(row[self.prompt_key])
        num_bytes = sum(len(str(message["content"]).encode()) for message in messages)
        if num_bytes + _TEMPLATE_BYTES <= longest:
            return None
        text, ids = self._encoded(messages)
        return f"{len(ids)} tokens: {text[:60]!r}..." if len(ids) > longest else None

    def _check_lengths(self, files: str) -> None:
        """Refuses or leaves out prompts that are too long before anything else is started."""
        found = {i: text for i, row in enumerate(self.rows) if (text := self.too_long(row)) is not None}
        if not found:
            return
        too_long = f"{len(found)} of {len(self)} prompts in {files} that are too long"
        first = next(iter(found))
        if self.config["truncation"] == "error" or len(found) == len(self):
            raise ValueError(
                f"Found {too_long} (the first: row {first}, {found[first]}); expected at most "
                f"data.max_prompt_length={self.config['max_prompt_length']} tokens. {LENGTH_ADVICE}"
            )
        print(f"note: {too_long} are skipped (data.truncation=skip)")
        self.rows = [row for i, row in enumerate(self.rows) if i not in found]

    def _encoded(self, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
        text = prompt_text(self.tokenizer, messages)
        # Not verbose: no warning of a prompt that is too long, which is refused or cut here.
        return text, list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def _prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        _, ids = self._encoded(messages)
        kept = self.config["max_start_length"]
        if len(ids) > kept and not self._has_warned:
            self._has_warned = True
            print(f"note: a prompt has {len(ids)} tokens; the last data.max_start_length={kept} are used")
        return ids[-kept:]


class PromptSampler:
    """Row numbers to ask: every row once an epoch, in an order that depends on (seed, epoch) alone.

    Rows left over at an epoch's end, too few for what is asked for, are left out of that epoch.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of a training step.
        shuffle: a new order each epoch; else the file's order.
        seed: of the shuffling.

    Raises:
        ValueError: there are fewer rows than a step takes.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"Found {num_rows} training rows and data.train_batch_size={batch_size}; expected at least "
                f"one batch of rows. Set data.train_batch_size={num_rows} or less."
            )
        self.num_rows, self.batch_size, self.shuffle, self.seed = num_rows, batch_size, shuffle, seed
        self.epoch, self.position = 0, 0
        self._order = self.order_of(0)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_rows // self.batch_size

    def next_batch(self) -> list[int]:
        """Row numbers of the next batch; goes on into the next epoch by itself."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[int]:
        """The next `count` row numbers, at most `batch_size`, for a step that needs more prompts."""
        assert count <= self.batch_size
        if self.position + count > self.num_rows:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self.order_of(self.epoch)
        start = self.position
        self.position += count
        return self._order[start : start + count].tolist()

    def order_of(self, epoch: int) -> np.ndarray:
        """The rows in the order of an epoch, [num_rows] int64."""
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain numbers."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": self.num_rows,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: the data, batch size or seed are others than when the position was saved.
        """
        own = self.state_dict()
        for name in ("num_rows", "batch_size", "shuffle", "seed"):
            if state[name] != own[name]:
                raise ValueError(
                    f"Found {name}={own[name]}, but the checkpoint was made with {state[name]}; a run keeps "
                    "the data order it began with. Use the old value, or trainer.resume_mode=none."
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._order = self.order_of(self.epoch)


def json_row(line: bytes, where: str) -> Row:
    """A line of a jsonl file. ValueError: it holds no row."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: found no JSON ({error}); expected one row a line.") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {type(row).__name__}; expected an object with a row's columns.")
    return row


def prompt_text(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """What the policy is given to continue: the tokenizer's chat template filled in, up to the assistant's
    turn, or the first message as it is if the tokenizer has no template."""
    if tokenizer.chat_template:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return messages[0]["content"]


def _messages(prompt: Any) -> list[dict[str, str]]:
    """A prompt cell as a list of chat messages; plain text is one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(message) for message in prompt]


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(str(path) for path in paths)
