"""From messages to token ids and back; what a session keeps. Pure: no engine, no server.

    messages + tools --extend a segment?--yes--> its ids as they are + the ids of the new messages alone
                              |
                              no: a new segment, all messages rendered

A sampled token is never encoded again: what follows an assistant's turn is rendered behind a placeholder
(`Codec.chat_ids`). Without a chat template a context is the messages' texts end to end. Where there is none,
or it knows no tools, tools are told in the system message (`verl/environments/messages.py`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verl.agent.codec import Codec
from verl.agent.trajectory import AgentConfig
from verl.environments.messages import CALL_BEGINS, calls_of, text_of, with_tool_calls, with_tools_told
from verl.inference.border import ApiError
from verl.inference.engine_thread import TurnResult
from verl.utils.dataset.rl_dataset import encode_prompt, prompt_text

MAX_SEGMENTS = 1000  # of a session
_NO_CUT = 1 << 40


class ChatCodec:
    """The tokenizer's side of the API. ApiError: a text leaves no room. eos_token_ids: the model's."""

    def __init__(self, tokenizer: Any, max_model_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        config = AgentConfig(0, 1, max_model_len, 1, _NO_CUT, eos_token_ids=eos_token_ids)
        self.codec = Codec(tokenizer, config)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.pieces = self.codec.pieces()  # bytes of each token id
        self._longest = max(map(len, self.pieces))
        self._has_template = bool(tokenizer.chat_template)
        self._knows_tools = "tools" in str(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """A prompt that is plain text."""
        self._check_length(text)
        ids = encode_prompt(self.tokenizer, text)
        self.check_room(len(ids))
        return ids

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[int]:
        """All messages, up to where the assistant goes on. ValueError: the template refuses them."""
        shown = self._shown(messages, tools)
        if not self._has_template:
            return self.encode("".join(message["content"] for message in shown))
        try:
            text = prompt_text(self.tokenizer, shown, tools if self._knows_tools else None)
        except Exception as error:  # templates raise all kinds
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error
        return self.encode(text)

    def next_ids(self, messages: Sequence[Mapping[str, Any]], last_id: int | None) -> list[int] | None:
        """What follows a turn of the assistant: messages of others, up to where the assistant goes on.
        last_id: of the turn; None: it has no tokens. None: the template does more than append them.
        """
        if any(message["role"] == "assistant" for message in messages):
            return None
        shown = self._shown(messages, None)
        text = "".join(message["content"] for message in shown)
        self._check_length(text)
        if not self._has_template:
            return list(self.codec.encode(text))
        try:
            return list(self.codec.chat_ids(shown, last_id))
        except Exception:  # templates raise all kinds; all messages together may be what this one wants
            return None

    def reply(
        self, token_ids: Sequence[int], stop_string: str | None, has_tools: bool, keeps_stop: bool
    ) -> list[dict[str, Any]]:
        """A turn's ids as the assistant's message (keeps_stop: with the stop string at its end); behind it
        the others that it may be in a client's history: some cut the white space around the text, or write
        back the stop string that OpenAI's API cuts off.
        """
        text = self.codec.decode_turn(token_ids)
        whole = text
        if stop_string is not None and (at := text.find(stop_string)) >= 0:
            whole = text[: at + len(stop_string)]
            text = whole if keeps_stop else text[:at]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if has_tools:
            message |= with_tool_calls(text, f"call_{secrets.token_hex(6)}_")
        spellings = {whole, whole.strip(), text.strip()} - {text}
        if message.get("tool_calls"):
            spellings = {message["content"].strip()}
            message["content"] = message["content"] or None
        return [message, *({**message, "content": spelling} for spelling in spellings)]

    def _shown(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
        """Messages as the template takes them: contents are texts, the arguments of calls are objects."""
        if not self._knows_tools:
            return [*with_tools_told(messages, tools)]
        shown = [{**message, "content": text_of(message)} for message in messages]
        for message in shown:
            if calls := calls_of(message):
                functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
                message["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return shown

    def _check_length(self, text: str) -> None:
        """Before the text is encoded, where it is sure."""
        if len(text) > self.max_model_len * self._longest:
            message = f"a text of {len(text)} characters; the model has {self.max_model_len} tokens"
            raise ApiError(400, "context_length_exceeded", message)

    def check_room(self, num_tokens: int) -> None:
        """ApiError: no token fits behind so many."""
        if num_tokens >= self.max_model_len:
            message = f"the messages take {num_tokens} tokens; with the reply the model has "
            raise ApiError(400, "context_length_exceeded", f"{message}{self.max_model_len}")


@dataclass(eq=False)
class ContextSegment:
    """A context that was only ever appended to. The four response lists have an entry for each token after
    the prompt.

    response_mask: 1 = the policy sampled it. log_probs: 0 where it did not. versions: of the weights that
    sampled it, -1 where none did. turns: spans of the turns in the response. engine_session: which has its KV
    state, if any. new_ids: the tokens before the turn under way, all of a new segment. key: of its history.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    engine_session: int | None = None
    new_ids: list[int] = field(default_factory=list)
    key: bytes = b""
    seed: int = field(default_factory=partial(secrets.randbits, 63))  # where the client gives none
    ends: list[bytes] = field(default_factory=list)  # the histories that it goes on from, as in `Transcript`

    @property
    def is_new(self) -> bool:
        return not self.turns

    def add(self, token_ids: list[int], mask: int, log_probs: list[float], versions: list[int]) -> None:
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)
        self.log_probs += log_probs
        self.versions += versions


class Transcript:
    """All that a session's model has read and written. A request goes on with the segment whose history it
    extends, also with an older one (two agents may share a session); while a segment has a turn under way it
    takes no other.
    """

    def __init__(self) -> None:
        self.segments: list[ContextSegment] = []
        self._ends: dict[bytes, ContextSegment] = {}  # by the digest of tools, messages and the last reply

    def place(
        self, codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> ContextSegment:
        """Takes out the segment of a request until `add` or `put_back`. ValueError, ApiError."""
        keys = [_digest(b"", tools)]
        for message in messages:
            keys.append(_digest(keys[-1], _compared(message)))
        for length in range(len(messages), 0, -1):
            segment = self._ends.get(keys[length])
            if segment is None:
                continue
            last = segment.response_ids[-1] if segment.response_mask[-1:] == [1] else None
            ids = codec.next_ids(messages[length:], last)
            if ids is None:
                break
            codec.check_room(len(segment.prompt_ids) + len(segment.response_ids) + len(ids))
            self._ends = {end: other for end, other in self._ends.items() if other is not segment}
            segment.new_ids = ids
            segment.key = keys[-1]
            return segment
        if len(self.segments) >= MAX_SEGMENTS:
            expected = "expected a client that appends to its history"
            raise ValueError(f"the session has {MAX_SEGMENTS} segments; {expected}")
        ids = codec.prompt_ids(messages, tools)
        return ContextSegment(ids, new_ids=ids, key=keys[-1])

    def put_back(self, segment: ContextSegment) -> None:
        """The turn did not come about."""
        self._ends |= dict.fromkeys(segment.ends, segment)

    def add(self, segment: ContextSegment, result: TurnResult, reply: list[dict[str, Any]]) -> None:
        """Takes the turn that was sampled, and what `ChatCodec.reply` made of it."""
        if segment.is_new:
            self.segments.append(segment)
        else:
            number = len(segment.new_ids)
            segment.add(segment.new_ids, 0, [0.0] * number, [-1] * number)
        start = len(segment.response_ids)
        segment.add(result.token_ids, 1, result.log_probs, result.versions)
        segment.turns.append((start, len(segment.response_ids)))
        segment.ends = [_digest(segment.key, _compared(message)) for message in reply]
        self._ends |= dict.fromkeys(segment.ends, segment)


def _compared(message: Mapping[str, Any]) -> list[Any]:
    """What two messages must have in common to be the same one."""
    names = ("role", "tool_call_id", "name")
    return [text_of(message), calls_of(message), *(message.get(name) for name in names)]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def stream_limit(text: str, stops: Sequence[str], has_tools: bool) -> int:
    """How many characters of a turn under way can be shown: what may be the beginning of a stop string or of
    a tool call is held back.
    """
    hidden = [*stops, *([CALL_BEGINS] if has_tools else ())]
    limit = min([len(text), *(len(text.partition(string)[0]) for string in hidden)])
    for string in hidden:
        for length in range(min(len(string) - 1, limit), 0, -1):
            if text.endswith(string[:length], 0, limit):
                limit -= length
                break
    return limit
