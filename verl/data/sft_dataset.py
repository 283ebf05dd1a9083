"""Supervised rows from parquet or jsonl files: token ids, and which of them are trained.

    row -> [(text, trained), ...] -> input_ids, trained -> batch -> DataProto

A row comes in one of three forms: prompt and response; a conversation, of which the assistant's messages are
trained; or pieces of text, each marked as trained or not, as search trajectories are. Each piece is tokenised
alone, as in a rollout, and the first one is tokenised as a prompt is (`encode_prompt`). Text between the tags
of an observation is never trained, whatever piece holds it. All rows are read and checked before anything
else starts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from verl.data.rl_dataset import joined_contents, opening_ids, read_rows, require_columns, row_name
from verl.data.row_cells import chat_messages
from verl.protocol import DataProto
from verl.utils.text import encodable, short_repr

Segment = tuple[str, bool]  # (text, whether its tokens are trained)

_SHOWN = 3  # bad rows that an error message shows


class SFTDataset:
    """Rows as token ids with a mark on those that are trained.

    Args:
        files: a file (.parquet or .jsonl) or several, read one after the other.
        tokenizer: that of the model that is trained.
        data_config: the `data` block of the configuration.
        vocab_size: number of tokens that the model knows; None if that is not known.

    Attributes:
        names: the file of each row and its number in the file.
        input_ids: for each row [length] int64.
        trained: for each row [length] bool, the tokens that are trained.
        num_cut_away: number of rows of which truncation leaves nothing to train. They are left out.

    Raises:
        ValueError: a file or a column is missing, there is no row, or rows are bad. All rows are checked, and
            the first few bad ones are named.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        data_config: Mapping[str, Any],
        vocab_size: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.config = data_config
        self.vocab_size = vocab_size
        self.names: list[str] = []
        self.input_ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.num_cut_away = 0
        multiturn = data_config["multiturn"]
        needed = [data_config["prompt_key"], data_config["response_key"]]
        segments_of: Callable[[Mapping[str, Any]], list[Segment]] = self._pair_segments
        if multiturn["enable"]:
            if not tokenizer.chat_template:
                raise ValueError(
                    "Found data.multiturn.enable=true, but the tokenizer has no chat template; give one with "
                    "data.chat_template, or rows as pieces of text with data.segments_key."
                )
            needed = [multiturn["messages_key"]]
            segments_of = self._conversation_segments
        elif data_config["segments_key"] is not None:
            needed = [data_config["segments_key"]]
            segments_of = self._marked_segments

        def check(columns: Iterable[str], where: str) -> None:
            keys = "data.prompt_key and data.response_key, data.multiturn.messages_key, or data.segments_key"
            require_columns(columns, needed, where, f"They are named by {keys}.")

        bad: list[str] = []
        files = [files] if isinstance(files, str) else files
        optional = [multiturn["tools_key"], multiturn["enable_thinking_key"]] if multiturn["enable"] else []
        for file in files:
            for number, row in read_rows(file, check, needed + optional):
                name = row_name(Path(file).name, number)
                try:
                    ids, trained = self._encoded(segments_of(row), ends_with_eos=not multiturn["enable"])
                except ValueError as error:
                    bad.append(f"{name}: {error}")
                    continue
                except Exception as error:  # templates and tokenizers raise all kinds of errors
                    bad.append(f"{name}: {type(error).__name__}: {error}")
                    continue
                if trained.any():
                    self.names.append(name)
                    self.input_ids.append(ids)
                    self.trained.append(trained)
                else:
                    self.num_cut_away += 1
        total = len(self.names) + self.num_cut_away + len(bad)
        if bad:
            raise ValueError(
                f"Found {len(bad)} of {total} rows that can't be trained on: " + "; ".join(bad[:_SHOWN]) + "."
            )
        if not self.names:
            longest = data_config["max_length"]
            cut = f" that data.max_length={longest} leaves anything to train of" if total else ""
            raise ValueError(f"Found no rows{cut} in {', '.join(files)}; expected at least one.")

    def __len__(self) -> int:
        return len(self.names)

    def batch(self, rows: Sequence[int]) -> DataProto:
        """Return some rows, padded on the right.

        The tensors are input_ids, attention_mask, position_ids and response_mask (1 where a token is
        trained), all [N, W] int64. `uid` names each row.
        """
        ids = [torch.from_numpy(self.input_ids[row]) for row in rows]
        attention = pad_sequence([torch.ones_like(row_ids) for row_ids in ids], batch_first=True)
        tensors = {
            "input_ids": pad_sequence(ids, batch_first=True),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1) * attention,
            "response_mask": pad_sequence([torch.from_numpy(self.trained[row]) for row in rows], True).long(),
        }
        return DataProto.from_dict(tensors, {"uid": np.array([self.names[row] for row in rows], object)})

    def _pair_segments(self, row: Mapping[str, Any]) -> list[Segment]:
        """Return the segments of a row of prompt and response."""
        messages = []
        for role in ("prompt", "response"):
            column = self.config[f"{role}_key"]
            value = row[column]
            for name in self.config[f"{role}_dict_keys"] or []:
                if not isinstance(value, Mapping) or name not in value:
                    raise ValueError(f"{column} holds {short_repr(value)}, without {name!r}")
                value = value[name]
            messages.append(chat_messages(value, column))
        prompt, response = messages
        if self.tokenizer.chat_template:
            question = self._render(prompt, opens_reply=True)
        elif len(prompt) > 1:
            raise ValueError(f"{len(prompt)} messages, but the tokenizer has no chat template to join them")
        else:
            question = joined_contents(prompt)
        return [(question, False), (joined_contents(response[-1:]), True)]

    def _conversation_segments(self, row: Mapping[str, Any]) -> list[Segment]:
        """Return the segments of a conversation up to the last trained message.

        What the assistant writes is trained, with its end token. Headers of the template and messages with
        `trained: false` are not.
        """
        keys = self.config["multiturn"]
        key = keys["messages_key"]
        tools = keys["tools_key"]
        thinking = keys["enable_thinking_key"]
        messages = chat_messages(row[key], key)
        extra: dict[str, Any] = {}
        if row.get(tools) is not None:
            extra["tools"] = json.loads(row[tools]) if isinstance(row[tools], str) else list(row[tools])
        if row.get(thinking) is not None:
            extra["enable_thinking"] = bool(row[thinking])
        special = tuple(str(token) for token in self.tokenizer.all_special_tokens)
        segments: list[Segment] = []
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not _flag(message.get("trained", True)):
                continue
            if i == 0:
                raise ValueError("the conversation begins with the assistant, who has nothing to reply to")
            head = self._render(messages[:i], opens_reply=True, **extra)
            text = self._render(messages[: i + 1], opens_reply=False, **extra)
            if not head.startswith(done) or not text.startswith(head):
                raise ValueError(
                    f"the chat template changes earlier text when message {i} is added, so what is trained "
                    "would not be what the policy sees; give the rows as segments (data.segments_key)"
                )
            reply = text[len(head) :]
            end = len(reply.rstrip()) if reply.rstrip().endswith(special) else len(reply)
            segments += [(head[len(done) :], False), (reply[:end], True)]
            done = text[: len(head) + end]
        return segments

    def _render(self, messages: Sequence[Mapping[str, Any]], opens_reply: bool, **extra: Any) -> str:
        """Return the conversation as text; `opens_reply` adds the header of the assistant's next message."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),  # type: ignore[arg-type]
                add_generation_prompt=opens_reply,
                tokenize=False,
                **self.config["apply_chat_template_kwargs"],
                **extra,
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not take it ({error})") from error
        return str(text)

    def _marked_segments(self, row: Mapping[str, Any]) -> list[Segment]:
        """Return the segments of a row of pieces [{text or content, trained or role}, ...].

        Of the roles, the assistant's is trained.
        """
        column: str = self.config["segments_key"]
        cell = row[column]
        if not isinstance(cell, list) or len(cell) == 0:
            raise ValueError(f"{column} holds {short_repr(cell)}; expected a list of pieces")
        segments: list[Segment] = []
        for i, piece in enumerate(cell):
            if not isinstance(piece, Mapping):
                raise ValueError(f"piece {i} of {column} is {short_repr(piece)}; expected {{text, trained}}")
            text = piece.get("text") if piece.get("text") is not None else piece.get("content")
            if not isinstance(text, str):
                raise ValueError(
                    f"piece {i} of {column} has the text {short_repr(text)}; expected text or content"
                )
            if piece.get("trained") is not None:
                segments.append((text, _flag(piece["trained"])))
            elif isinstance(piece.get("role"), str):
                segments.append((text, piece["role"] == "assistant"))
            else:
                raise ValueError(f"piece {i} of {column} has neither trained nor role")
        return segments

    def _encoded(self, segments: Sequence[Segment], ends_with_eos: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids and which of them are trained; the tokens of observations are not.

        Both are cut to data.max_length where data.truncation allows that. With `ends_with_eos`, the end of
        sequence is added after a last segment that is trained.
        """
        if self.config["observation_tag"] is not None:
            tag = re.escape(self.config["observation_tag"])
            observation = re.compile(rf"(\n*<{tag}>.*?(?:</{tag}>\n*|\Z))", re.DOTALL)
            segments = [
                (piece, trained and i % 2 == 0)
                for text, trained in segments
                for i, piece in enumerate(observation.split(text) if trained else [text])
                if piece
            ]
        token_ids: list[int] = []
        flags: list[bool] = []
        if segments:
            # Not verbose, to avoid a warning of texts that are too long for the model. They are counted and
            # cut below.
            texts = [encodable(text) for text, _ in segments]
            pieces = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            for piece, (_, is_trained) in zip(pieces, segments, strict=True):
                token_ids += piece
                flags += [is_trained] * len(piece)
        opening = opening_ids(self.tokenizer)
        if not self.tokenizer.chat_template and token_ids[:1] != opening:
            token_ids = opening + token_ids
            flags = [False] * len(opening) + flags
        eos = self.tokenizer.eos_token_id if ends_with_eos else None
        if eos is not None and flags and flags[-1] and token_ids[-1] != eos:
            token_ids.append(eos)
            flags.append(True)
        ids = np.array(token_ids, dtype=np.int64)
        trained = np.array(flags, dtype=bool)
        if self.vocab_size is not None and len(ids) > 0 and ids.max() >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(int(ids.max()))
            raise ValueError(
                f"found the token {token!r} with the id {ids.max()}; expected ids below {self.vocab_size}, "
                "the size of the model's vocabulary"
            )
        if not trained.any():
            raise ValueError("nothing in it is trained; expected a response, or a piece marked as trained")
        if trained[0]:
            raise ValueError("its first token is trained, with nothing before it; expected a prompt")
        longest = self.config["max_length"]
        truncation = self.config["truncation"]
        if len(ids) > longest and truncation == "error":
            raise ValueError(
                f"{len(ids)} tokens; expected at most data.max_length={longest}, or data.truncation=left or "
                "right, which cut it"
            )
        kept_indices = np.arange(len(ids))[:longest]
        if truncation == "left" and len(ids) > longest:
            head = int(token_ids[:1] == opening)  # a beginning of sequence stays
            kept_indices = np.r_[:head, len(ids) - longest + head : len(ids)]
        ids = ids[kept_indices]
        trained = trained[kept_indices]
        trained[0] = False  # the text before it may have been cut off
        return ids, trained


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"trained is {short_repr(value)}; expected true or false")
    return value
