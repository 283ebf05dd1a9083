"""From messages to token ids and back; what a session keeps. Pure: no engine, no server.

    messages + tools --extend a segment?--yes--> its ids as they are + the ids of the new messages alone
                              |
                              no: a new segment, all messages rendered

A sampled token is never encoded again: what follows an assistant's turn is rendered behind a placeholder
(`Codec.chat_ids`), so that it does not matter what a template does to earlier turns. Where a template does
more than append: a new segment.

Without a chat template a context is the messages' texts end to end, as `observation_format=raw` has it. Where
there is none, or it knows no tools, tools are told in the system message (`verl/environments/messages.py`).
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
from verl.utils.dataset.rl_dataset import encode_prompt, prompt_text

MAX_SEGMENTS = 1000  # of a session
_NO_CUT = 1 << 40


@dataclass(frozen=True)
class Reply:
    """A turn as a client sees it. message: of the assistant. spellings: the texts that this turn may have in
    a client's history, beside `message`'s own: some clients cut the white space around it, or write back the
    stop string that OpenAI's API cuts off.
    """

    message: dict[str, Any]
    spellings: tuple[str, ...] = ()


class ChatCodec:
    """The tokenizer's side of the API. eos_token_ids: the model's, beside the tokenizer's. ApiError: a text
    leaves no room for a token.
    """

    def __init__(self, tokenizer: Any, max_model_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        config = AgentConfig(0, 1, max_model_len, 1, _NO_CUT, eos_token_ids=eos_token_ids)
        self.codec = Codec(tokenizer, config)
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
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
    ) -> Reply:
        """A turn's ids as a message. keeps_stop: with the stop string at its end."""
        text = self.codec.decode_turn(token_ids)
        whole = text
        if stop_string is not None and (at := text.find(stop_string)) >= 0:
            whole = text[: at + len(stop_string)]
            text = whole if keeps_stop else text[:at]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if has_tools:
            message |= with_tool_calls(text, f"call_{secrets.token_hex(6)}_")
        if message.get("tool_calls"):
            content, message["content"] = message["content"], message["content"] or None
            return Reply(message, (content.strip(),))
        return Reply(message, tuple({whole, whole.strip(), text.strip()} - {text}))

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


# ------------------------------------------------------------------------------------------------ sessions


@dataclass(eq=False)
class ContextSegment:
    """A context that was only ever appended to. The four response lists have an entry for each token after
    the prompt.

    response_mask: 1 = the policy sampled it. log_probs: 0 where it did not. versions: of the weights that
    sampled it, -1 where none did. turns: spans of the turns in the response. engine_session: which has its KV
    state, if any.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turns: list[tuple[int, int]] = field(default_factory=list)
    engine_session: int | None = None
    seed: int = field(default_factory=partial(secrets.randbits, 63))  # where the client gives none
    ends: list[bytes] = field(default_factory=list)  # the histories that it goes on from, as in `Transcript`

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def add(self, token_ids: list[int], mask: int, log_probs: list[float], versions: list[int]) -> None:
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)
        self.log_probs += log_probs
        self.versions += versions


@dataclass(eq=False)
class Place:
    """Where a request belongs. new_ids: the tokens that come before its turn; all of them, where the segment
    is new. key: of its history.
    """

    segment: ContextSegment
    new_ids: list[int]
    is_new: bool
    key: bytes


class Transcript:
    """All that a session's model has read and written. A request goes on with the segment whose history it
    extends, also with an older one (two agents may share a session); while a segment has a turn under way it
    takes no other.
    """

    def __init__(self) -> None:
        self.segments: list[ContextSegment] = []
        self._ends: dict[bytes, ContextSegment] = {}  # by the digest of tools, messages and the last reply

    @property
    def num_turns(self) -> int:
        return sum(len(segment.turns) for segment in self.segments)

    def place(
        self, codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> Place:
        """Takes the segment out until `add` or `put_back`. ValueError, ApiError: as `ChatCodec` says."""
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
            codec.check_room(segment.num_tokens + len(ids))
            self._ends = {end: other for end, other in self._ends.items() if other is not segment}
            return Place(segment, ids, False, keys[-1])
        if len(self.segments) >= MAX_SEGMENTS:
            expected = "expected a client that appends to its history"
            raise ValueError(f"the session has {MAX_SEGMENTS} segments; {expected}")
        ids = codec.prompt_ids(messages, tools)
        return Place(ContextSegment(ids), ids, True, keys[-1])

    def put_back(self, place: Place) -> None:
        """The turn did not come about."""
        if not place.is_new:
            self._ends |= dict.fromkeys(place.segment.ends, place.segment)

    def add(
        self, place: Place, token_ids: list[int], log_probs: list[float], versions: list[int], reply: Reply
    ) -> None:
        """Takes the turn that was sampled, and the reply as the client got it."""
        segment = place.segment
        if place.is_new:
            self.segments.append(segment)
        else:
            number = len(place.new_ids)
            segment.add(place.new_ids, 0, [0.0] * number, [-1] * number)
        start = len(segment.response_ids)
        segment.add(token_ids, 1, log_probs, versions)
        segment.turns.append((start, len(segment.response_ids)))
        messages = [reply.message, *({**reply.message, "content": text} for text in reply.spellings)]
        segment.ends = [_digest(place.key, _compared(message)) for message in messages]
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
    at = [text.find(string) for string in hidden]
    limit = min([len(text), *(each for each in at if each >= 0)])
    for string in hidden:
        for length in range(min(len(string) - 1, limit), 0, -1):
            if text.endswith(string[:length], 0, limit):
                limit = min(limit, len(text[:limit]) - length)
                break
    return limit
