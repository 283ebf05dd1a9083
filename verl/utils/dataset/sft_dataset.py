"""Supervised rows from parquet files: token ids, and which of them are trained.

    row --row_reader--> [(text, trained), ...] --tokenizer--> input_ids, trained --batch--> DataProto

A row comes in one of three forms: prompt and response; a conversation, of which the assistant's messages are
trained; or pieces of text, each marked as trained or not, as search trajectories are. Each piece is tokenised
alone, as in a rollout. Text between the tags of an observation is never trained, whatever holds it. All rows
are read and checked before anything else starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto

Segment = tuple[str, bool]  # (text, whether its tokens are trained)

_SHOWN = 3  # bad rows that an error message shows
_CHUNK = 2000  # rows that are tokenised at once


class BadRow(ValueError):
    """What is wrong with one row."""


@dataclass(frozen=True)
class RowReader:
    """How rows of one form are read.

    columns: those that must be there; optional: those that are read where there are any. read: row ->
    segments, or BadRow. ends_with_eos: the end-of-sequence token is added after a last segment that is
    trained (a chat template brings its own).
    """

    columns: list[str]
    optional: list[str]
    read: Callable[[Mapping[str, Any]], list[Segment]]
    ends_with_eos: bool


def row_reader(data_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> RowReader:
    """The reader of the form that the `data` block names.

    Raises:
        ValueError: conversations without a chat template.
    """
    template = ChatTemplate(tokenizer, data_config["apply_chat_template_kwargs"])
    multiturn = data_config["multiturn"]
    if multiturn["enable"]:
        if not tokenizer.chat_template:
            raise ValueError(
                "Found data.multiturn.enable=true, but the tokenizer has no chat template; give one with "
                "data.chat_template, or rows as pieces of text with data.segments_key."
            )
        key, tools, thinking = (
            multiturn[name] for name in ("messages_key", "tools_key", "enable_thinking_key")
        )

        def read_messages(row: Mapping[str, Any]) -> list[Segment]:
            extra: dict[str, Any] = {}
            if row.get(tools) is not None:
                extra["tools"] = json.loads(row[tools]) if isinstance(row[tools], str) else list(row[tools])
            if row.get(thinking) is not None:
                extra["enable_thinking"] = bool(row[thinking])
            return conversation_segments(_messages(row[key], key), template, extra)

        return RowReader([key], [tools, thinking], read_messages, ends_with_eos=False)
    if data_config["segments_key"] is not None:
        column: str = data_config["segments_key"]
        return RowReader([column], [], lambda row: marked_segments(row[column], column), ends_with_eos=True)
    prompt, response = data_config["prompt_key"], data_config["response_key"]
    inside = [list(data_config[name] or []) for name in ("prompt_dict_keys", "response_dict_keys")]

    def read_pair(row: Mapping[str, Any]) -> list[Segment]:
        question = _messages(_inside(row[prompt], inside[0], prompt), prompt)
        answer = _messages(_inside(row[response], inside[1], response), response)[-1]["content"]
        return [(template.prompt(question), False), (answer, True)]

    return RowReader([prompt, response], [], read_pair, ends_with_eos=True)


class ChatTemplate:
    """The tokenizer's chat template; without one a single message is its own text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        self.tokenizer, self.arguments = tokenizer, dict(arguments)

    def render(self, messages: Sequence[Mapping[str, Any]], opens_reply: bool, **extra: Any) -> str:
        """The conversation as text; `opens_reply` adds what stands before the assistant's next message."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),  # type: ignore[arg-type]
                add_generation_prompt=opens_reply,
                tokenize=False,
                **self.arguments,
                **extra,
            )
        except jinja2.TemplateError as error:
            raise BadRow(f"the chat template does not take it ({error})") from error
        return str(text)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """What the policy is given to continue."""
        if self.tokenizer.chat_template:
            return self.render(messages, opens_reply=True)
        if len(messages) > 1:
            raise BadRow(f"{len(messages)} messages, but the tokenizer has no chat template to join them")
        return str(messages[0]["content"])


def conversation_segments(
    messages: Sequence[Mapping[str, Any]], template: ChatTemplate, extra: Mapping[str, Any]
) -> list[Segment]:
    """The text up to the last trained message; trained is what the assistant writes, its end token included.

    An assistant's message with `trained: false` is read only. What the template puts before a message (its
    header) and the white space after its end token are not the policy's to write.
    """
    segments: list[Segment] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or not _flag(message.get("trained", True)):
            continue
        if i == 0:
            raise BadRow("the conversation begins with the assistant, who has nothing to reply to")
        head = template.render(messages[:i], opens_reply=True, **extra)
        whole = template.render(messages[: i + 1], opens_reply=False, **extra)
        if not head.startswith(done) or not whole.startswith(head):
            raise BadRow(
                f"the chat template changes earlier text when message {i} is added, so what is trained would "
                "not be what the policy sees; give the rows as segments (data.segments_key)"
            )
        reply = whole[len(head) :]
        end = len(reply.rstrip()) if reply.rstrip().endswith(_special(template.tokenizer)) else len(reply)
        segments += [(head[len(done) :], False), (reply[:end], True)]
        done = whole[: len(head) + end]
    return segments


def marked_segments(cell: Any, column: str) -> list[Segment]:
    """[{text or content, trained or role}, ...] as segments; of the roles, assistant is trained."""
    if not isinstance(cell, list | tuple | np.ndarray) or len(cell) == 0:
        raise BadRow(f"{column} holds {_shown(cell)}; expected a list of pieces")
    segments: list[Segment] = []
    for i, piece in enumerate(cell):
        if not isinstance(piece, Mapping):
            raise BadRow(f"piece {i} of {column} is {_shown(piece)}; expected {{text, trained}}")
        text = piece.get("text") if piece.get("text") is not None else piece.get("content")
        if not isinstance(text, str):
            raise BadRow(f"piece {i} of {column} has the text {_shown(text)}; expected text or content")
        if piece.get("trained") is not None:
            segments.append((text, _flag(piece["trained"])))
        elif isinstance(piece.get("role"), str):
            segments.append((text, piece["role"] == "assistant"))
        else:
            raise BadRow(f"piece {i} of {column} has neither trained nor role")
    return segments


def without_observations(segments: Sequence[Segment], tag: str | None) -> list[Segment]:
    """The same text with `<tag>...</tag>` (and the line breaks around it) cut out of what is trained."""
    if tag is None:
        return list(segments)
    name = re.escape(tag)
    observation = re.compile(rf"(\n*<{name}>.*?(?:</{name}>\n*|\Z))", re.DOTALL)
    result: list[Segment] = []
    for text, trained in segments:
        parts = observation.split(text) if trained else [text]
        result += [(part, trained and i % 2 == 0) for i, part in enumerate(parts) if part]
    return result


class SFTDataset:
    """Rows as token ids with a mark on those that are trained.

    Args:
        files: a parquet file or several, read one after the other.
        tokenizer: of the model that is trained.
        data_config: the `data` block of the configuration.

    Raises:
        ValueError: a file or a column is missing, there is no row, or rows are bad: all are looked at, and
            the first few are named.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data_config: Mapping[str, Any],
    ) -> None:
        self.reader = row_reader(data_config, tokenizer)
        self.tokenizer = tokenizer
        self.tag, self.max_length, self.truncation = (
            data_config[name] for name in ("observation_tag", "max_length", "truncation")
        )
        self.names: list[str] = []  # of each row: its file and number there
        self.input_ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.num_cut_away = 0  # rows of which truncation leaves nothing to train
        bad: list[str] = []
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str) else files)]
        for path in paths:
            rows = self._read(path)
            for start in range(0, len(rows), _CHUNK):
                bad += self._add(path.name, start, rows[start : start + _CHUNK])
        total = len(self.names) + self.num_cut_away + len(bad)
        if bad:
            raise ValueError(
                f"Found {len(bad)} of {total} rows that can't be trained on: " + "; ".join(bad[:_SHOWN]) + "."
            )
        if not self.names:
            cut = f" that data.max_length={self.max_length} leaves anything to train of" if total else ""
            raise ValueError(f"Found no rows{cut} in {', '.join(map(str, paths))}; expected at least one.")

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.input_ids))

    @property
    def num_trained_tokens(self) -> int:
        """Those of them that are trained."""
        return int(sum(trained.sum() for trained in self.trained))

    def batch(self, rows: Sequence[int]) -> DataProto:
        """Some rows, padded on the right: input_ids, attention_mask, position_ids, response_mask, all [N, W]
        int64 (response_mask: 1 where a token is trained); `uid` names each row.
        """
        width = max(len(self.input_ids[row]) for row in rows)
        input_ids, attention, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
        for i, row in enumerate(rows):
            length = len(self.input_ids[row])
            input_ids[i, :length] = torch.from_numpy(self.input_ids[row])
            attention[i, :length] = 1
            mask[i, :length] = torch.from_numpy(self.trained[row])
        return DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": attention,
                "position_ids": (attention.cumsum(1) - 1) * attention,
                "response_mask": mask,
            },
            non_tensors={"uid": np.array([self.names[row] for row in rows], dtype=object)},
        )

    def _read(self, path: Path) -> list[dict[str, Any]]:
        if not path.is_file():
            raise ValueError(f"Found no file at {path}; expected a parquet file.")
        there, reader = pq.read_schema(path).names, self.reader
        missing = [name for name in reader.columns if name not in there]
        if missing:
            raise ValueError(
                f"Found no column {', '.join(missing)} in {path} (it has {', '.join(there)}). They are named "
                "by data.prompt_key and data.response_key, data.multiturn.messages_key, or data.segments_key."
            )
        columns = reader.columns + [name for name in reader.optional if name in there]
        return pd.read_parquet(path, columns=columns).to_dict("records")

    def _add(self, file: str, start: int, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Adds rows; returns a line for each that is bad."""
        bad: list[str] = []
        segments: list[tuple[int, list[Segment]]] = []
        for number, row in enumerate(rows, start):
            try:
                segments.append((number, without_observations(self.reader.read(row), self.tag)))
            except BadRow as error:
                bad.append(f"row {number} of {file}: {error}")
        for number, (ids, trained) in zip(
            [number for number, _ in segments], self._encode([s for _, s in segments]), strict=True
        ):
            try:
                ids, trained = self._fitted(ids, trained)
            except BadRow as error:
                bad.append(f"row {number} of {file}: {error}")
                continue
            if not trained.any():
                self.num_cut_away += 1
                continue
            self.names.append(f"row {number} of {file}")
            self.input_ids.append(ids)
            self.trained.append(trained)
        return bad

    def _encode(self, rows: Sequence[list[Segment]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        texts = [text for segments in rows for text, _ in segments]
        # Not verbose: no warning of texts that are too long for the model, which are counted and cut here.
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        flat = iter(encoded)
        eos = self.tokenizer.eos_token_id if self.reader.ends_with_eos else None
        for segments in rows:
            ids: list[int] = []
            trained: list[bool] = []
            for _, is_trained in segments:
                piece = next(flat)
                ids += piece
                trained += [is_trained] * len(piece)
            if eos is not None and trained and trained[-1] and ids[-1] != eos:
                ids.append(eos)
                trained.append(True)
            yield np.array(ids, dtype=np.int64), np.array(trained, dtype=bool)

    def _fitted(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row, cut to max_length where data.truncation allows that."""
        if not trained.any():
            raise BadRow(
                "nothing in it is trained; expected a response, or a piece that is marked as trained"
            )
        if trained[0]:
            raise BadRow("its first token is trained, with nothing before it; expected a prompt")
        if len(ids) > self.max_length and self.truncation == "error":
            raise BadRow(
                f"{len(ids)} tokens; expected at most data.max_length={self.max_length}, or "
                "data.truncation=left or right, which cut it"
            )
        kept = slice(-self.max_length, None) if self.truncation == "left" else slice(self.max_length)
        ids, trained = ids[kept], trained[kept].copy()
        trained[0] = False  # what stood before it may have been cut off
        return ids, trained


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    """Chat messages; plain text is one user message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list | tuple | np.ndarray) or len(value) == 0:
        raise BadRow(f"{column} holds {_shown(value)}; expected text or chat messages")
    messages: list[dict[str, Any]] = []
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRow(f"message {i} of {column} is {_shown(message)}; expected {{role, content}}")
        given = {name: item for name, item in message.items() if item is not None}
        if not isinstance(given.get("content"), str) and not given.get("tool_calls"):
            raise BadRow(f"message {i} of {column} has the content {_shown(message.get('content'))}")
        messages.append(given)
    return messages


def _inside(value: Any, names: Sequence[str], column: str) -> Any:
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            raise BadRow(f"{column} holds {_shown(value)}, without {name!r}")
        value = value[name]
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise BadRow(f"trained is {_shown(value)}; expected true or false")
    return bool(value)


def _special(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(str(token) for token in tokenizer.all_special_tokens)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
