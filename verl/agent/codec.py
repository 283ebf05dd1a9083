"""The conversion between texts, token ids and tensors of trajectories.

    sampled ids -> decode_turn -> the environment
    its observation -> observation_ids, chat_ids -> appended once to the context
    many trajectories -> to_tensors

Sampled ids become text only so that an action can be read from it. Nothing is decoded and encoded again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from verl.agent.trajectory import AgentConfig, Trajectory
from verl.data.rl_dataset import encode_prompt, prompt_text
from verl.environments.environment import Message
from verl.environments.registry import SEARCH
from verl.sessions.stop import StopCondition, token_bytes
from verl.utils.text import encodable

_MARK = re.compile(r"content-\d+-of-a-message")
# The tags of Search-R1. A tokenizer may have them as special tokens, and observations may hold these.
PROTOCOL_TAGS = tuple(
    f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")
)


class Codec:
    """The tokenizer, stop strings and lengths of one run.

    Attributes:
        eos_token_ids: The tokenizer's end of sequence, if it has one, and those of the model.
    """

    def __init__(self, tokenizer: Any, config: AgentConfig, observation_format: str | None = None) -> None:
        """Create a codec.

        Args:
            tokenizer: The tokenizer of the policy.
            config: The lengths, and the model's end-of-sequence ids.
            observation_format: The value of `environment.observation_format`.
        """
        self.tokenizer = tokenizer
        self.max_obs_length = config.max_obs_length
        self._format = observation_format
        eos = tokenizer.eos_token_id
        self.eos_token_ids = frozenset(config.eos_token_ids) | (set() if eos is None else {eos})
        added_tokens = tokenizer.added_tokens_decoder.items()
        # No document may turn into these ids. An end of sequence that it spells out is plain text.
        self._control_ids = {
            *tokenizer.all_special_ids,
            *(id_ for id_, token in added_tokens if token.special),
        }
        self._control_ids -= set(tokenizer.convert_tokens_to_ids(list(PROTOCOL_TAGS)))
        # The rows of a group often get the same observation, and they have one prompt.
        self._encode_cached = lru_cache(maxsize=4096)(self.encode)
        self.decode_prompt = lru_cache(maxsize=4096)(self.decode)
        self._is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
        self.stop = lru_cache(maxsize=64)(self._stop)
        self.pieces = cache(partial(token_bytes, tokenizer))

    def _stop(self, strings: tuple[str, ...]) -> StopCondition | None:
        """Return the condition that ends a turn at one of these strings, or None if there are no strings."""
        return StopCondition(self.tokenizer, strings, self.pieces()) if strings else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text that continues a context. Nothing is added around it.

        If the text contains the name of a control token (an end of sequence, a role marker), the name is
        split like any other words. What UTF-8 can't encode becomes U+FFFD.
        """
        text = encodable(text)
        if self._is_fast:  # the backend skips conversions that cost as much as the encoding
            backend = self.tokenizer.backend_tokenizer
            backend.no_padding()  # an earlier call may have set it
            backend.no_truncation()
            backend.encode_special_tokens = False
            ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:  # verbose would warn of a text that is too long for the model, but the text is cut afterwards
            ids = self.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        if not self._control_ids.isdisjoint(ids):
            ids = self.tokenizer.encode(
                text, add_special_tokens=False, split_special_tokens=True, verbose=False
            )
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        if self._is_fast:
            return self.tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Return the text of a turn, without the end-of-sequence tokens at its end."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.eos_token_ids:
            end -= 1
        return self.decode(token_ids[:end])

    def is_chat(self, env_class: str) -> bool:
        """Return whether an environment's observations are messages of the chat template."""
        if self._format is None:
            return bool(self.tokenizer.chat_template) and env_class != SEARCH
        return self._format == "chat"

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Return the tokens of a prompt, encoded as in a row of the data.

        Without a chat template the contents of all messages are put end to end (`joined_contents`).
        """
        return encode_prompt(self.tokenizer, prompt_text(self.tokenizer, messages))

    def chat_ids(self, messages: Sequence[Message], last_id: int | None) -> tuple[int, ...]:
        """Return the tokens that follow an assistant's turn according to the tokenizer's chat template.

        These are the end of the turn, the messages and the beginning of the next turn, `max_obs_length`
        tokens at most. If there are more, the contents of the messages are cut, and the template is not.

        Args:
            messages: The messages that follow the turn.
            last_id: The last token of the turn. If it is the end of sequence with which the template ends a
                turn, the result does not repeat it.

        Raises:
            ValueError: If the template is not one to which messages can be appended, or if the template alone
                takes more than `max_obs_length` tokens.
        """
        pieces = self._bridge(messages)
        if last_id is not None and last_id in self.eos_token_ids:
            pieces[0] = pieces[0].removeprefix(self.decode([last_id]))
        contents = [encodable(str(message["content"])) for message in messages]
        encode = self.tokenizer.encode
        full_text = pieces[0] + "".join(
            content + piece for content, piece in zip(contents, pieces[1:], strict=True)
        )
        ids = encode(full_text, add_special_tokens=False, verbose=False)
        content_ids = encode("\n".join(contents), add_special_tokens=False, verbose=False)
        if len(ids) <= self.max_obs_length and self._control_ids.isdisjoint(content_ids):
            return tuple(ids)
        frame_ids = [encode(piece, add_special_tokens=False, verbose=False) for piece in pieces]
        room = self.max_obs_length - sum(map(len, frame_ids))
        if room < 0:
            raise ValueError(
                f"data.max_obs_length: found {self.max_obs_length}, but the chat template alone takes "
                f"{self.max_obs_length - room} tokens; raise it, or set environment.observation_format=raw"
            )
        shortened = list(frame_ids[0])
        for content, frame_after in zip(contents, frame_ids[1:], strict=True):
            cut = self.encode(content)[:room]
            room -= len(cut)
            shortened += [*cut, *frame_after]
        return tuple(shortened)

    def _bridge(self, messages: Sequence[Message]) -> list[str]:
        """Return the chat template's text around the contents of messages that follow an assistant's turn."""
        marks = [f"content-{number}-of-a-message" for number in range(len(messages) + 1)]
        history = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": marks[0]}]
        appended = [{**message, "content": mark} for message, mark in zip(messages, marks[1:], strict=True)]
        render = self.tokenizer.apply_chat_template
        end_of_turn = render(history, tokenize=False).partition(marks[0])[2]
        text = render([*history, *appended], tokenize=False, add_generation_prompt=True)
        pieces = _MARK.split(text)[1:]
        if _MARK.findall(text) != marks or not pieces[0].startswith(end_of_turn):
            raise ValueError(
                "the tokenizer's chat template does not just append messages; set "
                "environment.observation_format=raw"
            )
        return pieces

    def observation_ids(self, text: str, closing: str = "") -> tuple[int, ...]:
        """Return the tokens of an observation, `max_obs_length` at most.

        If the text is too long and ends in `closing`, the text before `closing` is cut and `closing` stays
        whole.
        """
        ids = self._encode_cached(text)
        if len(ids) <= self.max_obs_length:
            return ids
        closing_ids = self._encode_cached(closing) if closing and text.endswith(closing) else ()
        return ids[: self.max_obs_length - len(closing_ids)] + closing_ids


def to_tensors(
    trajectories: Sequence[Trajectory], prompt_width: int, response_width: int, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Build the tensors of a batch of trajectories.

    The masks are made from lengths, because the pad token may be any id, even the end of sequence. Positions
    begin at 0 again where another context begins.

    Args:
        trajectories: The trajectories, one for each row.
        prompt_width: The number of columns P of the prompts, in the terms of the table in `verl/protocol.py`.
        response_width: The number of columns R of the responses.
        pad_token_id: The id that fills the columns of `input_ids` outside of the trajectory.

    Returns:
        The tensors of generation in the table of `verl/protocol.py`.
    """
    num_rows = len(trajectories)
    input_ids = np.full((num_rows, prompt_width + response_width), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros_like(input_ids)
    response_mask = np.zeros((num_rows, response_width), dtype=np.int64)
    log_probs = np.zeros((num_rows, response_width), dtype=np.float32)
    for row, trajectory in enumerate(trajectories):
        start = prompt_width - len(trajectory.prompt_ids)
        length = len(trajectory.response_ids)
        input_ids[row, start:prompt_width] = trajectory.prompt_ids
        input_ids[row, prompt_width : prompt_width + length] = trajectory.response_ids
        attention_mask[row, start : prompt_width + length] = 1
        response_mask[row, :length] = trajectory.response_mask
        log_probs[row, :length] = trajectory.log_probs
    position_ids = np.maximum(attention_mask.cumsum(axis=1) - 1, 0) * attention_mask
    for row, trajectory in enumerate(trajectories):
        for start in trajectory.contexts:
            later = slice(prompt_width + start, prompt_width + len(trajectory.response_ids))
            position_ids[row, later] -= position_ids[row, prompt_width + start]
    return {
        "prompts": torch.from_numpy(input_ids[:, :prompt_width].copy()),
        "responses": torch.from_numpy(input_ids[:, prompt_width:].copy()),
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "position_ids": torch.from_numpy(position_ids),
        "response_mask": torch.from_numpy(response_mask),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }
