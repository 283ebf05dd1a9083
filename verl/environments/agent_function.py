"""Episodes that an agent of one's own plays, through OpenAI's chat API: `env_class: agent`.

    async def run(task, base_url) -> reward        or a plain function, which gets a thread

    run -> client -> POST {base_url}/chat/completions -> the policy writes a turn -> the reply -> run -> ...

`environment.env_config.agent`: {"function": "package.module:run", "tool_format": "hermes" | "search_r1",
"rewards": true}.

task: the row's columns and its `prompt` (messages). base_url: of this episode alone, for any client, model
name and key. Each request is a turn. Messages that follow the ones before are appended to them; a request
whose history or tools are others begins a context of its own in the same row. `stop` counts; temperature,
max_tokens and seed of a request are not read: the run decides. Two requests at a time are answered one after
the other. What `run` returns is the episode's reward; an episode that a limit ends before has 0. With
`rewards: false` nothing is returned, and the run's reward function or the row's verifiers score the turns.
What `run` raises leaves the batch, and so does a wait of more than `environment.step_timeout`.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from typing import Any

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, EpisodeFailed, Message
from verl.environments.calls import in_thread
from verl.environments.messages import FORMATS, calls_of, text_of, with_tool_calls, with_tools_told
from verl.utils.importing import import_named

HOST = "127.0.0.1"
_numbers = itertools.count()
_sessions: dict[str, AgentFunctionEnv] = {}
_endpoint_lock = threading.Lock()


def essence(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two messages that say the same have in common, however a client has written them."""
    return message["role"], text_of(message).strip(), calls_of(message)


class ProgramEnv(BaseTextEnv):
    """An episode in which a program asks and the policy answers. `play` is the program: it returns a reward,
    and puts each request into `events`, with a future of the reply: what was said, and its usage.
    """

    counts_turns = reads_usage = True
    form = FORMATS["hermes"]
    rewards = True

    def __init__(self) -> None:
        super().__init__()
        self.usage = (0, 0, False)  # tokens that the last turn has read and written; whether a limit cut it
        self.events: asyncio.Queue[Any] = asyncio.Queue()  # requests (body, reply), and the run at its end
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
        return with_tools_told(self.body["messages"], self.body.get("tools"), self.form), {}

    async def _next(self) -> bool:
        """Waits for the next request; True: the run has ended instead. Raises what it raised."""
        event = await self.events.get()
        if isinstance(event, asyncio.Task):
            event.result()
            return True
        self.body, self.reply = event
        asked = self.body.get("stop") or ()
        self.stop = (*self.form.stop, *([asked] if isinstance(asked, str) else asked))
        return False

    async def step(self, action: str) -> BaseTextEnvStepOutput:  # type: ignore[override]
        self.turns += 1
        ends = [action.find(stop) for stop in self.stop[len(self.form.stop) :]]
        text = action[: min((end for end in ends if end >= 0), default=len(action))]  # as OpenAI cuts it off
        said: dict[str, Any] = {"role": "assistant", "content": text}
        tools = self.body.get("tools")
        if tools:
            said |= with_tool_calls(text, f"call_{next(_numbers)}_", self.form)
        reply = self.reply
        before = [*self.body["messages"], said]
        if reply.set_running_or_notify_cancel():  # else the client is gone
            reply.set_result((said, self.usage))
        if await self._next():
            assert self.running is not None
            return {"observations": [], "reward": self.running.result(), "done": True, "metadata": {}}
        messages = self.body["messages"]
        new = messages[len(before) :]
        is_new = not new or tools != self.body.get("tools") or any(m["role"] == "assistant" for m in new)
        is_new = is_new or list(map(essence, before)) != list(map(essence, messages[: len(before)]))
        shown = messages if is_new else new
        return {
            "observations": with_tools_told(shown, self.body.get("tools") if is_new else None, self.form),
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


class AgentFunctionEnv(ProgramEnv):
    """An episode that a function of the user's plays."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        config = env_config or {}
        name = config.get("function")
        form = config.get("tool_format", "hermes")
        if not isinstance(name, str):
            found = f"Found environment.env_config.agent.function={name!r}"
            raise ValueError(f"{found}; expected package.module:run.")
        if form not in FORMATS:
            raise ValueError(f"Found tool_format={form!r} of agent; expected one of {', '.join(FORMATS)}.")
        self.function = import_named(name, f"function={name!r} of environment agent", ())
        self.form = FORMATS[form]
        self.rewards = bool(config.get("rewards", True))
        self.stop = self.form.stop
        self.row = dict(extras or {})
        self.session_id = f"s{next(_numbers)}"

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
        """A request, in the event loop of the episode."""
        if self.session_id in _sessions:
            self.events.put_nowait((body, reply))
        else:
            reply.cancel()

    async def close(self) -> None:  # type: ignore[override]
        _sessions.pop(self.session_id, None)
        await super().close()


def endpoint() -> str:
    """The address of this process's endpoint, which lives as long as the process."""
    with _endpoint_lock:
        return _serve()


@cache
def _serve() -> str:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

    from verl.inference.border import STREAM_END, ApiError, answer_errors, as_json, event
    from verl.inference.requests import AgentRequest

    async def complete(request: Request) -> Response:
        try:
            body = AgentRequest.model_validate_json(await request.body()).model_dump(exclude_unset=True)
        except ValueError as error:  # half of a surrogate pair, too
            message = f"expected JSON with a list of messages: {error}"
            raise ApiError(400, "invalid_messages", message) from None
        env = _sessions.get(request.path_params["id"])
        reply: Future[Any] = Future()
        if env is None or env.loop.is_closed():
            raise ApiError(404, "session_not_found", "there is no such episode, or it is over")
        env.loop.call_soon_threadsafe(env.put, body, reply)
        try:
            said, (read, written, is_cut) = await asyncio.wrap_future(reply)
        except asyncio.CancelledError:
            raise ApiError(404, "session_not_found", "the episode is over") from None
        if said.get("tool_calls"):
            reason = "tool_calls"
        else:
            reason = "length" if is_cut else "stop"
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        name = "chat.completion"
        model = str(body.get("model", "policy"))
        head = {"id": f"chatcmpl-{next(_numbers)}", "created": int(time.time()), "model": model}
        if not body.get("stream"):
            choice = {"index": 0, "message": said, "finish_reason": reason, "logprobs": None}
            return as_json({**head, "object": name, "choices": [choice], "usage": usage})
        head["object"] = f"{name}.chunk"
        calls = [{"index": i, **call} for i, call in enumerate(said.get("tool_calls", ()))]
        beginning = {"index": 0, "delta": {**said, "tool_calls": calls}, "finish_reason": None}
        end = {"index": 0, "delta": {}, "finish_reason": reason}
        pieces = [event({**head, "choices": [choice]}) for choice in (beginning, end)]
        if (body.get("stream_options") or {}).get("include_usage"):
            pieces.append(event({**head, "choices": [], "usage": usage}))
        return Response(b"".join([*pieces, STREAM_END]), media_type="text/event-stream")

    app = Starlette()
    app.add_route("/sessions/{id}/v1/chat/completions", complete, methods=["POST"])
    answer_errors(app)
    listener = socket.create_server((HOST, 0), backlog=1024)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    threading.Thread(target=server.run, args=([listener],), name="agent endpoint", daemon=True).start()
    return f"http://{HOST}:{listener.getsockname()[1]}"
