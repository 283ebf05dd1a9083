"""Questions from parquet files, and the order in which a run goes through them.

    parquet rows -> RLHFDataset[i] -> {raw_prompt_ids, data_source, reward_model, extra_info, index}
    PromptSampler -> which rows make the next batch, the same again after a restart

Row schema (Search-R1's): data_source str; prompt [{role, content}, ...]; reward_model {style, ground_truth:
{target: [golden answers]}}; extra_info {split, index, ...}, which may be missing.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

_SUBSET_SEED = 42  # Search-R1's: train_data_num picks the same rows


class RLHFDataset:
    """Prompts as token ids, with what is needed to score their answers.

    Args:
        files: a parquet file or several, read one after the other; "~" is expanded.
        tokenizer: the policy's; its chat template is used if it has one, else the first message's content.
        data_config: the `data` block of the configuration: prompt_key, truncation, max_prompt_length,
            max_start_length, return_raw_chat.
        num_rows: use this many rows, drawn without replacement with a fixed seed; None: all.

    Raises:
        ValueError: a file or a column is missing, there is no row, or num_rows is too large.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: Any,
        data_config: Mapping[str, Any],
        num_rows: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = data_config
        self.prompt_key: str = data_config["prompt_key"]
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
        frame = pd.concat([self._read(path) for path in paths], ignore_index=True)
        if num_rows is not None:
            if num_rows > len(frame):
                raise ValueError(
                    f"Found {len(frame)} rows in {_names(paths)}; expected at least the {num_rows} that "
                    "data.train_data_num or data.val_data_num asks for. Set it to null for all rows."
                )
            frame = frame.sample(num_rows, random_state=_SUBSET_SEED)
        if frame.empty:
            raise ValueError(f"Found no rows in {_names(paths)}; expected at least one.")
        self.rows: list[dict[str, Any]] = frame.to_dict("records")
        self._has_warned = False

    def _read(self, path: Path) -> pd.DataFrame:
        if not path.is_file():
            raise ValueError(f"Found no file at {path}; expected a parquet file with questions.")
        columns = pq.read_schema(path).names
        needed = [self.prompt_key, "data_source", "reward_model"]
        missing = [name for name in needed if name not in columns]
        if missing:
            raise ValueError(
                f"Found no column {', '.join(missing)} in {path} (it has {', '.join(columns)}); expected "
                f"{', '.join(needed)}. The prompt's column is named by data.prompt_key."
            )
        return pd.read_parquet(path, columns=needed + ["extra_info"] * ("extra_info" in columns))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row: raw_prompt_ids (list[int], no special tokens added but the chat template's), data_source
        (str), reward_model (dict), extra_info (dict), index (int, its place in the data set), and raw_prompt
        (list of messages) with data.return_raw_chat.

        Raises:
            ValueError: the prompt is longer than data.max_prompt_length, unless data.truncation=left.
        """
        row = self.rows[index]
        messages = _messages(row[self.prompt_key])
        extra_info = row.get("extra_info")
        item = {
            "raw_prompt_ids": self._prompt_ids(messages, index),
            "data_source": row["data_source"],
            "reward_model": row["reward_model"],
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
            "index": index,
        }
        if self.config["return_raw_chat"]:
            item["raw_prompt"] = messages
        return item

    def _prompt_ids(self, messages: list[dict[str, str]], index: int) -> list[int]:
        text = prompt_text(self.tokenizer, messages)
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        longest, kept = self.config["max_prompt_length"], self.config["max_start_length"]
        if len(ids) > longest and self.config["truncation"] == "error":
            raise ValueError(
                f"Found a prompt of {len(ids)} tokens (row {index}: {text[:60]!r}...); expected at most "
                f"data.max_prompt_length={longest}. Set data.truncation=left to keep the end of it."
            )
        if len(ids) > kept and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A prompt has {len(ids)} tokens; of each the last data.max_start_length={kept} are used.",
                stacklevel=2,
            )
        return ids[-kept:]


class PromptSampler:
    """Batches of row numbers: every row once an epoch, in an order that depends on (seed, epoch) alone.

    Rows left over at an epoch's end, too few for a batch, are left out of that epoch.

    Args:
        num_rows: rows of the data set.
        batch_size: rows of a batch.
        shuffle: a new order each epoch; else the file's order.
        seed: of the shuffling.

    Raises:
        ValueError: there are fewer rows than a batch takes.
    """

    def __init__(self, num_rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        if num_rows < batch_size:
            raise ValueError(
                f"Found {num_rows} training rows and data.train_batch_size={batch_size}; expected at least "
                f"one batch of rows. Set data.train_batch_size={num_rows} or less."
            )
        self.num_rows, self.batch_size, self.shuffle, self.seed = num_rows, batch_size, shuffle, seed
        self.epoch, self.offset = 0, 0
        self._order = self._epoch_order()

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_rows // self.batch_size

    def next_batch(self) -> list[int]:
        """Row numbers of the next batch; goes on into the next epoch by itself."""
        if self.offset >= len(self):
            self.epoch, self.offset = self.epoch + 1, 0
            self._order = self._epoch_order()
        start = self.offset * self.batch_size
        self.offset += 1
        return self._order[start : start + self.batch_size].tolist()

    def _epoch_order(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows)
        return np.random.default_rng([self.seed, self.epoch]).permutation(self.num_rows)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on; plain numbers."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
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
        self.epoch, self.offset = int(state["epoch"]), int(state["offset"])
        self._order = self._epoch_order()


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
