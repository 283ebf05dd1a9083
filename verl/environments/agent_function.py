"""Episodes that an agent of one's own plays, through OpenAI's chat API: `env_class: agent`.

    async def run(task, base_url) -> reward | None        or a plain function, which gets a thread

    run -> client -> POST {base_url}/chat/completions -> the policy writes a turn -> the reply -> run -> ...

`environment.env_config.agent`: {"function": "package.module:run", "tool_format": "hermes" | "search_r1"}.

task: the row's columns and its `prompt` (messages). base_url: of this episode alone; any client of OpenAI's
API takes it, any model name and any key will do. Each request is a turn: its messages are what the policy
reads. Those that follow the ones before are appended to them, tokens that were sampled stay as they are;
a request whose history is another one begins a context of its own in the same row. `stop` counts; how else
is sampled the run decides: temperature, max_tokens and seed of a request are not read. Two requests at a time
are answered one after the other. What `run` returns is the episode's reward, for all of its turns; None: the
run's reward function or the row's verifiers score it. What it raises leaves the batch, and so does a wait of
more than `environment.step_timeout` for its next request.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache
from typing import Any

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed, Message
from verl.environments.messages import FORMATS, plain, text_of, with_tool_calls, with_tools_told
from verl.utils.importing import import_named

HOST = "127.0.0.1"


def essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two messages that say the same have in common, however a client has written them."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    return message["role"], text_of(message).strip(), calls


_numbers = itertools.count()
_sessions: dict[str, AgentFunctionEnv] = {}


class AgentFunctionEnv(BaseTextEnv):
    """An episode in which a program asks and the policy answers."""

    counts_turns = reads_usage = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        name = config.get("function")
        if not isinstance(name, str):
            raise ValueError(
                f"Found environment.env_config.agent.function={name!r}; expected package.module:run."
            )
        if config.get("tool_format", "hermes") not in FORMATS:
            found = config["tool_format"]
            raise ValueError(f"Found tool_format={found!r} of agent; expected one of {', '.join(FORMATS)}.")
        self.function = import_named(name, f"function={name!r} of environment agent", ())
        self.form = FORMATS[config.get("tool_format", "hermes")]
        self.stop, self.row = self.form.stop, dict(extras or {})
        self.usage = (0, 0)  # tokens that the last turn has read and written
        self.events: asyncio.Queue[Any] = asyncio.Queue()  # requests (body, reply), and the run at its end
        self.body: dict[str, Any] = {}
        self.reply: Future[Any] | None = None
        self.running: asyncio.Task[Any] | None = None

    async def init(self, prompt: list[Message]) -> Any:  # type: ignore[override]
        self.loop, self.id = asyncio.get_running_loop(), f"s{next(_numbers)}"
        _sessions[self.id] = self
        base_url = f"{await asyncio.to_thread(endpoint)}/sessions/{self.id}/v1"
        task = {**self.row, "prompt": prompt}
        if inspect.iscoroutinefunction(self.function):
            self.running = asyncio.create_task(self.function(task, base_url))
        else:
            self.running = asyncio.create_task(asyncio.to_thread(self.function, task, base_url))
        self.running.add_done_callback(self.events.put_nowait)
        if await self._next() is not None:
            raise EpisodeFailed("the agent ended before its first request")
        return with_tools_told(self.body["messages"], self.body.get("tools"), self.form), {}

    async def _next(self) -> asyncio.Task[Any] | None:
        """Waits for the next request; the run, if it has ended instead."""
        event = await self.events.get()
        if isinstance(event, asyncio.Task):
            event.result()  # raises what it raised
            return event
        self.body, self.reply = event
        asked = self.body.get("stop") or ()
        self.stop = (*self.form.stop, *([asked] if isinstance(asked, str) else asked))
        return None

    async def step(self, action: str) -> BaseTextEnvStepOutput:  # type: ignore[override]
        self.turns += 1
        text = action
        for stop in set(self.stop) - set(self.form.stop):
            text = text.removesuffix(stop)
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if self.body.get("tools"):
            said |= with_tool_calls(text, f"call_{next(_numbers)}_", self.form)
        reply, before = self.reply, [*self.body["messages"], said]
        assert reply is not None
        self.reply = None
        reply.set_result((said, self.usage))
        if (ended := await self._next()) is not None:
            reward = ended.result()
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        messages = self.body["messages"]
        new = messages[len(before) :]
        is_new = not new or list(map(essence, before)) != list(map(essence, messages[: len(before)]))
        shown = [{"role": "user", "content": plain(each, self.form)} for each in new]
        if is_new:
            shown = with_tools_told(messages, self.body.get("tools"), self.form)
        return {
            "observations": shown,
            "reward": None,
            "done": False,
            "metadata": {},
            "is_new_context": is_new,
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}

    async def close(self) -> None:  # type: ignore[override]
        _sessions.pop(self.__dict__.get("id", ""), None)
        if self.running is not None:
            self.running.cancel()
        while not self.events.empty():
            event = self.events.get_nowait()
            if not isinstance(event, asyncio.Task):
                event[1].cancel()
        if self.reply is not None:
            self.reply.cancel()


# ---------------------------------------------------------------------------------------------- the endpoint
@cache
def endpoint() -> str:
    """The address of this process's endpoint, which lives as long as the process."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    def refused(status: int, code: str, message: str) -> Response:
        said = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
        return JSONResponse({"error": said}, status)

    async def complete(request: Request) -> Response:
        env = _sessions.get(request.path_params["id"])
        try:
            body = await request.json()
            messages = body["messages"]
            is_read = bool(messages) and all(isinstance(each["role"], str) for each in messages)
        except (ValueError, LookupError, TypeError):
            is_read = False
        if not is_read:
            return refused(400, "invalid_messages", "expected JSON with a list of messages, each with a role")
        reply: Future[Any] = Future()
        if env is None or env.loop.is_closed():
            return refused(404, "session_not_found", "there is no such episode, or it is over")
        env.loop.call_soon_threadsafe(env.events.put_nowait, (body, reply))
        try:
            said, (read, written) = await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            return refused(404, "session_not_found", "the episode is over")
        reason = "tool_calls" if said.get("tool_calls") else "stop"
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time())}
        head |= {"model": str(body.get("model", "policy"))}
        if not body.get("stream"):
            choice = {"index": 0, "message": said, "finish_reason": reason, "logprobs": None}
            return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})
        delta = {**said, "tool_calls": [{"index": i, **c} for i, c in enumerate(said.get("tool_calls", ()))]}
        parts: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}]
        parts.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        parts.append({"choices": [], "usage": usage})
        lines = [json.dumps({**head, "object": "chat.completion.chunk", **part}) for part in parts]
        text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
        return StreamingResponse(iter([text]), media_type="text/event-stream")

    app = Starlette(routes=[Route("/sessions/{id}/v1/chat/completions", complete, methods=["POST"])])
    listener = socket.create_server((HOST, 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    threading.Thread(target=server.run, args=([listener],), name="agent endpoint", daemon=True).start()
    return f"http://{HOST}:{listener.getsockname()[1]}"
