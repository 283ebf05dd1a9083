"""The answers about turns in the forms of OpenAI's API: whole, or in pieces while the turns go on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from verl.inference.chat import ChatCodec, stream_limit
from verl.inference.engine_thread import TurnResult
from verl.inference.requests import ChatRequest, CompletionRequest

Json = dict[str, Any]
AnyRequest = ChatRequest | CompletionRequest


def choice_of(index: int, result: TurnResult) -> Json:
    """Return the entries about a turn that every form has.

    weight_version is that of the turn's last token, or None if it has no tokens.
    """
    reason = "stop" if result.finish_reason == "eos" else result.finish_reason
    version = result.versions[-1] if result.versions else None
    return {"index": index, "finish_reason": reason, "token_ids": result.token_ids, "weight_version": version}


def usage_of(num_read: int, num_written: int) -> dict[str, int]:
    """Return the numbers of tokens that OpenAI's API reports."""
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_written,
        "total_tokens": num_read + num_written,
    }


class GrowingText:
    """The text of a turn under way, decoded once.

    A character whose last bytes are still to come is left out until they do.
    """

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec.codec
        self.text = ""
        self.num_shown = self._start = self._end = 0

    def grow(self, token_ids: list[int]) -> str:
        """Return the text of the turn so far. `token_ids` are all its tokens."""
        old_text = self.codec.decode(token_ids[self._start : self._end])
        new_text = self.codec.decode(token_ids[self._start :])
        if not new_text.endswith("\ufffd"):
            self.text += new_text[len(old_text) :]
            self._start = self._end
            self._end = len(token_ids)
        return self.text


class Completions:
    """The answer to POST /v1/completions.

    In pieces it is `opening`, then `news` and `ending` of each turn, then `closing`.
    """

    name = chunk_name = "text_completion"
    has_tools = False

    def __init__(self, codec: ChatCodec, model: str, request: AnyRequest, prompts: list[list[int]]) -> None:
        """Create the answer.

        Args:
            codec: The tokenizer's side of the API.
            model: The name of the model.
            request: The request.
            prompts: The prompt of each choice.
        """
        self.codec = codec
        self.request = request
        self.prompts = prompts
        self.head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.texts = [GrowingText(codec) for _ in prompts]

    def reply(self, result: TurnResult) -> list[Json]:
        keeps_stop = bool(self.request.include_stop_str_in_output)
        return self.codec.reply(result.token_ids, result.stop_string, self.has_tools, keeps_stop)

    def whole(self, results: Sequence[TurnResult]) -> Json:
        choices = [self._choice(i, result, self.reply(result)[0]) for i, result in enumerate(results)]
        return {**self.head, "object": self.name, "choices": choices, "usage": self._usage(results)}

    def _choice(self, index: int, result: TurnResult, message: Json, is_piece: bool = False) -> Json:
        """Return the choice of a turn that ended.

        `is_piece` leaves out the message, which was sent already.
        """
        prompt = self.prompts[index]
        log_probs = None
        if self.request.logprobs is not None:
            log_probs = self._token_log_probs(prompt, result)
        text = "" if is_piece else message["content"]
        if self._echoes:
            text = self.codec.codec.decode(prompt) + text
        return choice_of(index, result) | {"prompt_token_ids": prompt, "logprobs": log_probs, "text": text}

    @property
    def _echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)

    def _token_log_probs(self, prompt: list[int], result: TurnResult) -> Json:
        """Return the log-probs of a choice in the form of OpenAI's completions.

        Where the request asks for the most probable tokens or for those of the prompt, all log-probs are the
        model's own.
        """
        token_ids = result.token_ids
        log_probs: list[float | None] = list(result.log_probs)
        most_probable: list[dict[str, float] | None] | None = None
        if result.scores is not None:
            first = 0 if self._echoes else len(prompt)
            token_ids = [*prompt, *result.token_ids][first:]
            log_probs = [None, *result.scores.log_probs][first:]
            if self.request.logprobs:
                all_places = [None, *map(self._by_text, result.scores.most_probable)]
                most_probable = all_places[first:]
                for token_id, log_prob, place in zip(token_ids, log_probs, most_probable, strict=True):
                    if place is not None and log_prob is not None:
                        place.setdefault(self._text_of(token_id), log_prob)
        tokens = [self._text_of(token_id) for token_id in token_ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        more = {"top_logprobs": most_probable, "text_offset": offsets[:-1]}
        return {"tokens": tokens, "token_logprobs": log_probs, **more}

    def _by_text(self, most_probable: Sequence[tuple[int, float]]) -> dict[str, float]:
        log_probs: dict[str, float] = {}
        for token_id, log_prob in most_probable:  # of tokens that look alike the most probable one counts
            log_probs.setdefault(self._text_of(token_id), log_prob)
        return log_probs

    def _text_of(self, token_id: int) -> str:
        return self._bytes_of(token_id).decode(errors="replace")

    def _bytes_of(self, token_id: int) -> bytes:
        pieces = self.codec.pieces
        return pieces[token_id] if token_id < len(pieces) else b""

    def _usage(self, results: Sequence[TurnResult]) -> dict[str, int]:
        num_read = sum(map(len, {id(prompt): prompt for prompt in self.prompts}.values()))
        num_written = sum(len(result.token_ids) for result in results)
        return usage_of(num_read, num_written)

    def _chunk(self, *choices: Json, **more: Any) -> Json:
        return {**self.head, "object": self.chunk_name, "choices": list(choices), **more}

    def _piece(self, index: int, delta: Json, **more: Any) -> Json:
        """Return a chunk with more of a turn's message."""
        text = {"text": delta["content"], "finish_reason": None, "logprobs": None}
        return self._chunk({"index": index, **text}, **more)

    def opening(self) -> Iterator[Json]:
        yield from ()

    def news(self, index: int, token_ids: list[int]) -> Iterator[Json]:
        """Yield what can be shown of a turn under way. `token_ids` are all its tokens so far."""
        growing = self.texts[index]
        text = growing.grow(token_ids)
        limit = stream_limit(text, self.request.stops, self.has_tools)
        if limit > growing.num_shown:
            new_text = text[growing.num_shown : limit]
            growing.num_shown = limit
            yield self._piece(index, {"content": new_text})

    def ending(self, index: int, result: TurnResult) -> Iterator[Json]:
        """Yield the rest of a turn's message, and a last piece with everything besides the message."""
        message = self.reply(result)[0]
        if rest := (message["content"] or "")[self.texts[index].num_shown :]:
            yield self._piece(index, {"content": rest})
        if calls := message.get("tool_calls"):
            yield self._piece(index, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        yield self._chunk(self._choice(index, result, message, is_piece=True))

    def closing(self, results: Sequence[TurnResult]) -> Iterator[Json]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._chunk(usage=self._usage(results))


class Chat(Completions):
    """The answer to POST chat/completions."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, codec: ChatCodec, model: str, request: ChatRequest, prompt: list[int]) -> None:
        super().__init__(codec, model, request, [prompt] * (request.n or 1))
        self.head["id"] = f"chatcmpl-{uuid.uuid4().hex}"
        self.has_tools = request.visible_tools() is not None

    def whole(self, results: Sequence[TurnResult]) -> Json:
        return super().whole(results) | {"prompt_token_ids": self.prompts[0]}

    def _choice(self, index: int, result: TurnResult, message: Json, is_piece: bool = False) -> Json:
        choice = choice_of(index, result) | {"logprobs": self._log_probs(result)}
        if message.get("tool_calls"):
            choice["finish_reason"] = "tool_calls"
        return choice | ({"delta": {}} if is_piece else {"message": message})

    def _log_probs(self, result: TurnResult) -> Json | None:
        if not self.request.logprobs:
            return None
        content = []
        for token_id, log_prob in zip(result.token_ids, result.log_probs, strict=True):
            piece = self._bytes_of(token_id)
            text = {"token": piece.decode(errors="replace"), "bytes": list(piece)}
            content.append({**text, "logprob": log_prob, "top_logprobs": []})
        return {"content": content}

    def _piece(self, index: int, delta: Json, **more: Any) -> Json:
        return self._chunk({"index": index, "delta": delta, "finish_reason": None}, **more)

    def opening(self) -> Iterator[Json]:
        for index in range(len(self.prompts)):
            yield self._piece(index, {"role": "assistant", "content": ""}, prompt_token_ids=self.prompts[0])
