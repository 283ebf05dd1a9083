"""The conversion from messages to token ids and back, and what a session keeps. No engine and no server.

    messages + tools --extend a segment?--yes--> its ids as they are + the ids of the new messages alone
                              |
                              no: a new segment, all messages rendered

A sampled token is never encoded again. The text that follows an assistant's turn is rendered behind a
placeholder (`Codec.chat_ids`). Without a chat template a context is the messages' texts end to end, and those
before the first turn are joined as a row's prompt is (`joined_contents`). If there is no template, or it
knows no tools, tools are described in the system message (`verl/environments/messages.py`).
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
from verl.data.rl_dataset import encode_prompt, joined_contents, prompt_text
from verl.environments.messages import CALL_BEGINS, calls_of, text_of, with_tool_calls, with_tool_list
from verl.inference.engine_thread import TurnResult
from verl.utils.http_border import ApiError

MAX_SEGMENTS = 1000  # of a session
_NO_CUT = 1 << 40


def _end_to_end(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the context of a conversation without a chat template, as training writes it."""
    roles = [message["role"] for message in messages]
    num_before_turns = roles.index("assistant") if "assistant" in roles else len(roles)
    later_texts = [message["content"] for message in messages[num_before_turns:]]
    return joined_contents(messages[:num_before_turns]) + "".join(later_texts)


class ChatCodec:
    """The tokenizer's side of the API. Its methods raise ApiError if a text leaves no room."""

    def __init__(self, tokenizer: Any, max_model_len: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Create a codec.

        Args:
            tokenizer: The tokenizer of the model.
            max_model_len: Maximum number of tokens of prompt and reply.
            eos_token_ids: The end-of-sequence ids of the model.
        """
        config = AgentConfig(0, 1, max_model_len, 1, _NO_CUT, eos_token_ids=eos_token_ids)
        self.codec = Codec(tokenizer, config)
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.pieces = self.codec.pieces()  # bytes of each token id
        self._longest = max(map(len, self.pieces))
        self._has_template = bool(tokenizer.chat_template)
        self._knows_tools = "tools" in str(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Encode a prompt that is plain text."""
        self._check_length(text)
        ids = encode_prompt(self.tokenizer, text)
        self.check_room(len(ids))
        return ids

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None) -> list[int]:
        """Encode all messages, up to where the assistant goes on.

        Raises ValueError if the template refuses them.
        """
        prepared = self._template_messages(messages, tools)
        if not self._has_template:
            return self.encode(_end_to_end(prepared))
        try:
            text = prompt_text(self.tokenizer, prepared, tools if self._knows_tools else None)
        except Exception as error:  # templates raise all kinds of errors
            raise ValueError(f"the model's chat template does not take these messages: {error}") from error
        return self.encode(text)

    def next_ids(self, messages: Sequence[Mapping[str, Any]], last_id: int | None) -> list[int] | None:
        """Encode what follows a turn of the assistant: messages of others, up to where the assistant goes on.

        Args:
            messages: The messages after the turn.
            last_id: The last token of the turn, or None if it has no tokens.

        Returns:
            The token ids, or None if the template does more than append the messages.
        """
        if any(message["role"] == "assistant" for message in messages):
            return None
        prepared = self._template_messages(messages, None)
        text = "".join(message["content"] for message in prepared)
        self._check_length(text)
        if not self._has_template:
            return list(self.codec.encode(text))
        try:
            return list(self.codec.chat_ids(prepared, last_id))
        # Templates raise all kinds of errors. This one may accept all messages together.
        except Exception:
            return None

    def reply(
        self, token_ids: Sequence[int], stop_string: str | None, has_tools: bool, keeps_stop: bool
    ) -> list[dict[str, Any]]:
        """Return a turn as the assistant's message, followed by other forms of that message.

        A client's history may have one of the other forms: some clients cut the white space around the text,
        or write back the stop string that OpenAI's API cuts off.

        Args:
            token_ids: The tokens of the turn.
            stop_string: The stop string that ended the turn, if one did.
            has_tools: Whether the text may contain tool calls.
            keeps_stop: Whether the message keeps the stop string at its end.
        """
        text = self.codec.decode_turn(token_ids)
        full_text = text
        if stop_string is not None and (at := text.find(stop_string)) >= 0:
            full_text = text[: at + len(stop_string)]
            text = full_text if keeps_stop else text[:at]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if has_tools:
            message |= with_tool_calls(text, f"call_{secrets.token_hex(6)}_")
        spellings = {full_text, full_text.strip(), text.strip()} - {text}
        if message.get("tool_calls"):
            spellings = {message["content"].strip()}
            message["content"] = message["content"] or None
        return [message, *({**message, "content": spelling} for spelling in spellings)]

    def _template_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> list[dict[str, Any]]:
        """Return the messages in the form that the template takes.

        Contents are texts, and the arguments of calls are objects.
        """
        if not self._knows_tools:
            return [*with_tool_list(messages, tools)]
        prepared = [{**message, "content": text_of(message)} for message in messages]
        for message in prepared:
            if calls := calls_of(message):
                functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
                message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
        return prepared

    def _check_length(self, text: str) -> None:
        """Raise ApiError for a text that is certainly too long, before it is encoded."""
        if len(text) > self.max_model_len * self._longest:
            message = f"a text of {len(text)} characters; the model has {self.max_model_len} tokens"
            raise ApiError(400, "context_length_exceeded", message)

    def check_room(self, num_tokens: int) -> None:
        """Raise ApiError if no token fits after this many."""
        if num_tokens >= self.max_model_len:
            message = f"the messages take {num_tokens} tokens; with the reply the model has "
            raise ApiError(400, "context_length_exceeded", f"{message}{self.max_model_len}")


@dataclass(eq=False)
class ContextSegment:
    """A context that was only ever appended to.

    The four response lists have an entry for each token after the prompt.

    Attributes:
        prompt_ids: The tokens of the prompt.
        response_ids: The tokens after the prompt.
        response_mask: 1 for tokens that the policy sampled, 0 for others.
        log_probs: Log-probs of the sampled tokens, 0 for others.
        versions: Versions of the weights that sampled the tokens, -1 for others.
        turns: The spans of the turns in the response.
        engine_session: The engine's session that has the KV state of the context, if any.
        new_ids: The tokens before the turn under way, or all tokens of a new segment.
        key: The digest of its history.
        seed: The seed of its turns if the client gives none.
        history_keys: The digests of the histories that it continues, as in `Transcript`.
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
    seed: int = field(default_factory=partial(secrets.randbits, 63))
    history_keys: list[bytes] = field(default_factory=list)

    @property
    def is_new(self) -> bool:
        return not self.turns

    def add(self, token_ids: list[int], mask: int, log_probs: list[float], versions: list[int]) -> None:
        self.response_ids += token_ids
        self.response_mask += [mask] * len(token_ids)
        self.log_probs += log_probs
        self.versions += versions


class Transcript:
    """Everything that a session's model has read and written.

    A request goes on with the segment whose history it extends, which may be an older one (two agents may
    share a session). While a segment has a turn under way it takes no other.
    """

    def __init__(self) -> None:
        self.segments: list[ContextSegment] = []
        self._ends: dict[bytes, ContextSegment] = {}  # by the digest of tools, messages and the last reply

    def take_segment(
        self, codec: ChatCodec, messages: Sequence[Mapping[str, Any]], tools: list[Any] | None
    ) -> ContextSegment:
        """Take out the segment of a request until `add` or `put_back`.

        Raises:
            ValueError: If the session has too many segments, or the template refuses the messages.
            ApiError: If the messages leave no room.
        """
        keys = [_digest(b"", tools)]
        for message in messages:
            keys.append(_digest(keys[-1], _identity(message)))
        for length in range(len(messages), 0, -1):
            segment = self._ends.get(keys[length])
            if segment is None:
                continue
            last_id = segment.response_ids[-1] if segment.response_mask[-1:] == [1] else None
            ids = codec.next_ids(messages[length:], last_id)
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
        """Put back a segment whose turn was not sampled."""
        self._ends |= dict.fromkeys(segment.history_keys, segment)

    def add(self, segment: ContextSegment, result: TurnResult, reply: list[dict[str, Any]]) -> None:
        """Add the turn that was sampled, and what `ChatCodec.reply` made of it."""
        if segment.is_new:
            self.segments.append(segment)
        else:
            number = len(segment.new_ids)
            segment.add(segment.new_ids, 0, [0.0] * number, [-1] * number)
        start = len(segment.response_ids)
        segment.add(result.token_ids, 1, result.log_probs, result.versions)
        segment.turns.append((start, len(segment.response_ids)))
        segment.history_keys = [_digest(segment.key, _identity(message)) for message in reply]
        self._ends |= dict.fromkeys(segment.history_keys, segment)


def _identity(message: Mapping[str, Any]) -> list[Any]:
    """Return what two messages must have in common to be the same one."""
    names = ("role", "tool_call_id", "name")
    return [text_of(message), calls_of(message), *(message.get(name) for name in names)]


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def stream_limit(text: str, stops: Sequence[str], has_tools: bool) -> int:
    """Return how many characters of a turn under way can be shown.

    Text that may be the beginning of a stop string or of a tool call is held back.
    """
    hidden = [*stops, *([CALL_BEGINS] if has_tools else ())]
    limit = min([len(text), *(len(text.partition(string)[0]) for string in hidden)])
    for string in hidden:
        for length in range(min(len(string) - 1, limit), 0, -1):
            if text.endswith(string[:length], 0, limit):
                limit -= length
                break
    return limit
