"""Models behind OpenAI's API as a `RolloutEngine`, so that the agent loop of training evaluates them too.

    a tokenizer is known   POST /completions, token ids in and out   as in training (vLLM, verl.inference)
    none is known          POST /chat/completions, messages          any server; observations are a user's

In the second form a token is a whole message (`MessageTokenizer`). Lengths of prompts and observations count
messages, and data.max_response_length goes to the server as it is. Log-probs are 0, because such rollouts are
measured and never trained on.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from torch import Tensor

from verl.sessions.engine_contract import (
    Completion,
    EngineUnavailable,
    RolloutEngine,
    RolloutSession,
)
from verl.utils.patient import RequestFailed, post_patiently

MOST_IDS = 2**31 - 1
STEP_SECONDS = 0.05  # time that `step` waits for a turn
REQUEST_ERROR_STATUSES = (400, 413, 422)  # statuses that tell an error of one request
MOST_REFUSED = 20  # after this many refusals in a row, something is wrong with all requests
_PIECE = re.compile("\0([a-z]*)\1([^\0]*)")


class MessageTokenizer:
    """A tokenizer for `Codec` whose tokens are messages. Ids are given out as texts arrive."""

    chat_template = "messages"
    eos_token_id = bos_token_id = pad_token_id = None
    added_tokens_decoder: Mapping[int, Any] = {}
    all_special_ids: Sequence[int] = ()

    def __init__(self) -> None:
        self.messages: list[dict[str, str]] = []
        self._ids: dict[tuple[str, str], int] = {}

    def id_of(self, role: str, content: str) -> int:
        key = role, content
        if key not in self._ids:
            self._ids[key] = len(self.messages)
            self.messages.append({"role": role, "content": content})
        return self._ids[key]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> str:
        """Return a text that `encode` takes apart again."""
        contents = [(message["role"], str(message["content"]).replace("\0", "")) for message in messages]
        return "".join(f"\0{role}\1{content}" for role, content in contents)

    def encode(self, text: str, **_: Any) -> list[int]:
        if not text.startswith("\0"):
            return [self.id_of("user", text)] if text else []
        return [self.id_of(*piece) for piece in _PIECE.findall(text)]

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return "".join(self.messages[int(token_id)]["content"] for token_id in token_ids)

    def batch_decode(self, rows: Sequence[np.ndarray], **_: Any) -> list[str]:
        return [self.decode(row.tolist()) for row in rows]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        return []

    def get_vocab(self) -> dict[str, int]:
        return {}


@dataclass(eq=False)
class ApiSession(RolloutSession):
    """A session, and the task in the loop's thread that asks for its turn."""

    task: asyncio.Task[None] | None = None


class ApiEngine(RolloutEngine[ApiSession]):
    """One model of a server. Turns are requests, at most `concurrency` at a time.

    Attributes:
        usage: Seed of a rollout -> number of tokens that the server says it has read ("prompt_tokens") and
            written ("completion_tokens").
        refused: Seed of a rollout -> the reason why the server refused one of its requests
            (REQUEST_ERROR_STATUSES), but not those of others. Its turn is empty, and nobody
            knows the rollout's worth.
    """

    session_class = ApiSession

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        messages: MessageTokenizer | None,
        max_model_len: int,
        concurrency: int,
        api_key: str | None = None,
        timeout: float = 300.0,
        patience: float = 1800.0,
    ) -> None:
        """Create the engine and start its thread.

        Args:
            base_url: The address of the API.
            model: The name of the model.
            messages: The tokenizer for servers that take messages. None means that the server takes token
                ids.
            max_model_len: Maximum number of tokens of a session.
            concurrency: Maximum number of requests at a time.
            api_key: The bearer token, if the server needs one.
            timeout: Number of seconds of one request, after which it is sent again.
            patience: Number of seconds of a turn with all its requests.
        """
        super().__init__(max_model_len, MOST_IDS)
        self.base_url = base_url.rstrip("/")
        self.model = model
        self.messages = messages
        self.patience = patience
        self.version = 0
        self.usage: dict[int, Counter[str]] = defaultdict(Counter)
        self.refused: dict[int, str] = {}
        self._refused_in_a_row = 0
        self._under_way: set[int] = set()
        self._ended: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency)
        timeouts = httpx.Timeout(timeout, pool=None)
        self._client = httpx.AsyncClient(headers=headers, timeout=timeouts, limits=limits)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="api", daemon=True)
        self._thread.start()

    @property
    def has_runnable(self) -> bool:
        return bool(self._under_way or self._without_room)

    def _queue(self, session: ApiSession) -> None:
        self._under_way.add(session.session_id)
        self._loop.call_soon_threadsafe(self._start, session)

    def _drop(self, session: ApiSession) -> None:
        self._under_way.discard(session.session_id)
        self._loop.call_soon_threadsafe(lambda: session.task and session.task.cancel())

    def _advance(self) -> list[Completion]:
        """Return the turns that ended, after a short wait if there are none.

        Raises EngineUnavailable if the server refuses, or does not answer.
        """
        completions: list[Completion] = []
        while True:
            try:
                item = self._ended.get(timeout=0.0 if completions or self._without_room else STEP_SECONDS)
            except queue.Empty:
                return completions
            if isinstance(item, Exception):
                raise EngineUnavailable(f"{self.base_url}: {item}") from item
            if item.session_id in self._under_way:
                self._under_way.remove(item.session_id)
                completions.append(item)

    def _start(self, session: ApiSession) -> None:
        session.task = self._loop.create_task(self._turn(session))

    async def _turn(self, session: ApiSession) -> None:
        try:
            ids, stop_string, reason = await self._request_turn(session)
            self._refused_in_a_row = 0
        except RequestFailed as error:
            self._refused_in_a_row += 1
            if error.status not in REQUEST_ERROR_STATUSES or self._refused_in_a_row >= MOST_REFUSED:
                self._ended.put(error)
                return
            self.refused[session.params.seed] = str(error)
            stop_string = None
            reason = "eos"
            ids = [] if self.messages is None else [self.messages.id_of("assistant", "")]
        except Exception as error:  # the reply has another shape
            self._ended.put(
                RequestFailed(f"found a reply that can't be read ({type(error).__name__}: {error})")
            )
            return
        session.tokens.extend(ids)
        session.log_probs = session.model_log_probs = [0.0] * len(ids)
        session.num_sampled += len(ids)
        self._generated_tokens += len(ids)
        self._ended.put(session.end_turn(reason, stop_string, self.version))

    async def _request_turn(self, session: ApiSession) -> tuple[list[int], str | None, str]:
        """Return ids, stop string and reason of a turn. Raises RequestFailed."""
        reply = await self._ask(session)
        choice = reply["choices"][0]
        usage = reply.get("usage") or {}
        for name in ("prompt_tokens", "completion_tokens"):
            self.usage[session.params.seed][name] += number_of_tokens(usage.get(name))
        stops = session.params.stop.strings if session.params.stop else ()
        if self.messages is None:
            ids = choice["token_ids"]
            stop = session.params.stop
            stop_string = next((s for n in range(len(ids)) if stop and (s := stop.match(ids[: n + 1]))), None)
        else:
            text = str(choice["message"].get("content") or "")
            # The server leaves out the stop string. It is one whose tag is still open.
            stop_string = next((s for s in stops if text.count(s.replace("/", "", 1)) > text.count(s)), None)
            stop_string = stop_string if choice["finish_reason"] == "stop" else None
            ids = [self.messages.id_of("assistant", text + (stop_string or ""))]
        if choice["finish_reason"] == "length":
            reason = "length"
        else:
            reason = "stop" if stop_string else "eos"
        return ids, stop_string, reason

    async def _ask(self, session: ApiSession) -> dict[str, Any]:
        """Return what the server answers. Raises RequestFailed."""
        params = session.params
        tokens = session.tokens.tolist()
        body: dict[str, Any] = {"model": self.model, "temperature": params.temperature}
        if params.temperature:
            body |= {"top_p": params.top_p, "seed": params.seed & 2**31 - 1}
        if params.stop:
            body["stop"] = list(params.stop.strings)
        if self.messages is None:
            body |= {"prompt": tokens, "max_tokens": session.limit, "return_token_ids": True}
            route = "completions"
            required = "token_ids"
        else:
            history = [self.messages.messages[token] for token in tokens]
            body |= {"messages": history, "max_completion_tokens": params.max_tokens}
            route = "chat/completions"
            required = "message"
        url = f"{self.base_url}/{route}"
        content = json.dumps(body)
        reply = await post_patiently(self._client, url, content, self.patience)
        try:
            answer: dict[str, Any] = reply.json()
            if answer["choices"][0].get(required) is None or "finish_reason" not in answer["choices"][0]:
                raise KeyError(required)
        except (ValueError, LookupError, TypeError, AttributeError):
            hint = "; leave out --tokenizer" if self.messages is None else ""
            raise RequestFailed(
                f"{route}: found the reply {reply.text:.200}; expected a choice with {required}{hint}"
            ) from None
        return answer

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError("a server of others keeps its weights")

    def shutdown(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result(10.0)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10.0)


def number_of_tokens(value: Any) -> int:
    """Return a number of tokens of a server's `usage`; 0 for what is none, such as a negative number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < math.inf else 0
