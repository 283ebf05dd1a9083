"""Episodes that your own agent plays through OpenAI's chat API: `env_class: agent`.

    async def run(task, base_url) -> reward        or a plain function, which gets a thread

    run -> client -> POST {base_url}/chat/completions -> the policy writes a turn -> the reply -> run -> ...

`environment.env_config.agent`: {"function": "package.module:run", "tool_format": "hermes" | "search_r1",
"rewards": true}.

`task` has the row's columns and its `prompt` (messages). `base_url` belongs to this episode alone. It works
with any client, model name and key.

Each request is a turn. A request whose messages continue those of the request before has only its new
messages appended. A request with another history or other tools begins a context of its own in the same row.
`stop` of a request is honoured. Its temperature, max_tokens and seed are not read, because the run decides
them. Two requests at the same time are answered one after the other.

`run` returns the episode's reward. An episode that a limit ends earlier has a reward of 0. With
`rewards: false` `run` returns nothing, and the run's reward function or the row's verifiers score the turns.
An episode leaves the batch if `run` raises, or if it makes the policy wait for more than
`environment.step_timeout`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from verl.environments.calls import in_thread
from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed, Message
from verl.environments.messages import FORMATS, calls_of, text_of, with_tool_calls, with_tool_list
from verl.utils.importing import import_named

HOST = "127.0.0.1"
_numbers = itertools.count()
_sessions: dict[str, AgentFunctionEnv] = {}
_endpoint_lock = threading.Lock()


def comparison_key(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what two messages with the same content have in common, however a client has written them."""
    return message["role"], text_of(message).strip(), calls_of(message)


class ProgramEnv(BaseTextEnv):
    """An episode in which a program asks and the policy answers.

    `play` is the program. It returns a reward, and puts each request into `events` together with a future of
    the reply. The reply is the message of the policy and its usage.
    """

    counts_turns = reads_usage = True
    tool_format = FORMATS["hermes"]
    rewards = True

    def __init__(self) -> None:
        super().__init__()
        # The numbers of tokens that the last turn has read and written, and whether a limit cut it.
        self.usage = (0, 0, False)
        # The requests as (body, reply), and the task of `play` when it ends.
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self.body: dict[str, Any] = {}
        self.reply: Future[Any] = Future()
        self.running: asyncio.Task[Any] | None = None

    async def play(self, prompt: list[Message]) -> float | None:
        raise NotImplementedError

    async def init(self, prompt: list[Message]) -> Any:  # type: ignore[override]
        self.running = asyncio.create_task(self.play(prompt))
        self.running.add_done_callback(self.events.put_nowait)
        if await self._next():
            raise EpisodeFailed("the agent ended before its first request")
        return with_tool_list(self.body["messages"], self.body.get("tools"), self.tool_format), {}

    async def _next(self) -> bool:
        """Wait for the next request, and return whether the program has ended instead.

        Raises the program's exception if it ended with one.
        """
        event = await self.events.get()
        if isinstance(event, asyncio.Task):
            event.result()
            return True
        self.body, self.reply = event
        stop = self.body.get("stop") or ()
        self.stop = (*self.tool_format.stop, *([stop] if isinstance(stop, str) else stop))
        return False

    async def step(self, action: str) -> BaseTextEnvStepOutput:  # type: ignore[override]
        self.turns += 1
        ends = [action.find(stop) for stop in self.stop[len(self.tool_format.stop) :]]
        # OpenAI's API leaves out the stop string and what follows it.
        text = action[: min((end for end in ends if end >= 0), default=len(action))]
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        tools = self.body.get("tools")
        if tools:
            turn |= with_tool_calls(text, f"call_{next(_numbers)}_", self.tool_format)
        reply = self.reply
        history = [*self.body["messages"], turn]
        if reply.set_running_or_notify_cancel():  # otherwise the client is gone
            reply.set_result((turn, self.usage))
        if await self._next():
            assert self.running is not None
            return {"observations": [], "reward": self.running.result(), "done": True, "metadata": {}}
        messages = self.body["messages"]
        new = messages[len(history) :]
        is_new = (
            not new
            or tools != self.body.get("tools")
            or any(message["role"] == "assistant" for message in new)
        )
        is_new = is_new or list(map(comparison_key, history)) != list(
            map(comparison_key, messages[: len(history)])
        )
        shown = messages if is_new else new
        return {
            "observations": with_tool_list(
                shown, self.body.get("tools") if is_new else None, self.tool_format
            ),
            "reward": 0.0 if self.rewards else None,
            "done": False,
            "metadata": {},
            "is_new_context": is_new,
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}

    async def close(self) -> None:  # type: ignore[override]
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running], timeout=1.0)
        while not self.events.empty():
            event = self.events.get_nowait()
            if not isinstance(event, asyncio.Task):
                event[1].cancel()
        self.reply.cancel()


def function_of(env_config: Mapping[str, Any]) -> Any:
    """Return the user's function that the environment's settings name.

    Raises ValueError if the settings are wrong, or if the function can't be imported.
    """
    name = env_config.get("function")
    tool_format = env_config.get("tool_format", "hermes")
    if not isinstance(name, str):
        problem = f"Found environment.env_config.agent.function={name!r}"
        raise ValueError(f"{problem}; expected package.module:run.")
    if tool_format not in FORMATS:
        raise ValueError(f"Found tool_format={tool_format!r} of agent; expected one of {', '.join(FORMATS)}.")
    return import_named(name, f"function={name!r} of environment agent", ())


class AgentFunctionEnv(ProgramEnv):
    """An episode that the user's function plays."""

    @classmethod
    def check_settings(cls, env_config: Mapping[str, Any]) -> None:
        function_of(env_config)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        self.function = function_of(config)
        self.tool_format = FORMATS[config.get("tool_format", "hermes")]
        self.rewards = bool(config.get("rewards", True))
        self.stop = self.tool_format.stop
        self.row = dict(extras or {})
        self.session_id = secrets.token_hex(16)  # whoever knows it can play this episode

    async def play(self, prompt: list[Message]) -> float | None:
        self.loop = asyncio.get_running_loop()
        _sessions[self.session_id] = self
        base_url = f"{await asyncio.wrap_future(in_thread(endpoint))}/sessions/{self.session_id}/v1"
        task = {**self.row, "prompt": prompt}
        if inspect.iscoroutinefunction(self.function):
            reward = await self.function(task, base_url)
        else:
            reward = await asyncio.wrap_future(in_thread(partial(self.function, task, base_url)))
        if self.rewards == (reward is None):
            expected = "a reward" if self.rewards else "nothing, as rewards is false"
            raise EpisodeFailed(f"the agent returned {reward!r:.100}; expected {expected}")
        return reward

    def put(self, body: dict[str, Any], reply: Future[Any]) -> None:
        """Queue a request.

        This method runs in the event loop of the episode.
        """
        if self.session_id in _sessions:
            self.events.put_nowait((body, reply))
        else:
            reply.cancel()

    async def close(self) -> None:  # type: ignore[override]
        _sessions.pop(self.session_id, None)
        await super().close()


def endpoint() -> str:
    """Return the address of this process's endpoint, which lives as long as the process."""
    with _endpoint_lock:
        return _serve()


@cache
def _serve() -> str:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from verl.environments.chat_requests import AgentRequest
    from verl.utils.http_border import STREAM_END, ApiError, answer_errors, as_json, event, openai_refusal
    from verl.utils.serving import SERVER_OPTIONS, Door, DoorRules

    async def complete(request: Request) -> Response:
        try:
            body = AgentRequest.model_validate_json(await request.body()).model_dump(exclude_unset=True)
        except ValueError as error:  # also raised for half of a surrogate pair
            message = f"expected JSON with a list of messages: {error}"
            raise ApiError(400, "invalid_messages", message) from None
        env = _sessions.get(request.path_params["id"])
        reply: Future[Any] = Future()
        if env is None or env.loop.is_closed():
            raise ApiError(404, "session_not_found", "there is no such episode, or it is over")
        env.loop.call_soon_threadsafe(env.put, body, reply)
        try:
            turn, (num_read, num_written, is_cut) = await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            raise ApiError(404, "session_not_found", "the episode is over") from None
        if turn.get("tool_calls"):
            reason = "tool_calls"
        else:
            reason = "length" if is_cut else "stop"
        usage = {
            "prompt_tokens": num_read,
            "completion_tokens": num_written,
            "total_tokens": num_read + num_written,
        }
        name = "chat.completion"
        model = str(body.get("model", "policy"))
        common = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": model}
        if not body.get("stream"):
            choice = {"index": 0, "message": turn, "finish_reason": reason, "logprobs": None}
            return as_json({**common, "object": name, "choices": [choice], "usage": usage})
        common["object"] = f"{name}.chunk"
        calls = [{"index": index, **call} for index, call in enumerate(turn.get("tool_calls", ()))]
        beginning = {"index": 0, "delta": {**turn, "tool_calls": calls}, "finish_reason": None}
        end = {"index": 0, "delta": {}, "finish_reason": reason}
        pieces = [event({**common, "choices": [choice]}) for choice in (beginning, end)]
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event({**common, "choices": [], "usage": usage}))
        return Response(b"".join([*pieces, STREAM_END]), media_type="text/event-stream")

    app = Starlette()
    app.add_route("/sessions/{id}/v1/chat/completions", complete, methods=["POST"])
    # Nobody but its agent knows an episode's id, so that clients need not say the type of their bodies.
    app.add_middleware(Door, rules=DoorRules(host=HOST, needs_json=False), answer=openai_refusal)
    answer_errors(app)
    listener = socket.create_server((HOST, 0), backlog=1024)
    options = SERVER_OPTIONS | {"log_level": "warning", "lifespan": "off"}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    threading.Thread(target=server.run, args=([listener],), name="agent endpoint", daemon=True).start()
    return f"http://{HOST}:{listener.getsockname()[1]}"
