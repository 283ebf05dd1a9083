"""vLLM servers over HTTP: a client of each, and the pool of an engine's.

    client.complete(body) -> POST /v1/completions, streamed -> Chunk(token ids, both log-probs, its end) ...
    client.get, post      -> the endpoints of VLLM_SERVER_DEV_MODE=1: pause, resume, weights, workers' calls
    pool.connect -> [pause -> weights come -> finish_update] ... per update -> close

Prompts go out and tokens come back as ids. What fails is one of two things: `ServerFailed`, the connection
or the server itself (it may help to ask again, or elsewhere), and `RequestRefused`, which would be refused
everywhere. A server that fails is buried: it is never used again, since nobody knows what weights it would
come back with. Everything here runs on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from verl.sessions.engine_contract import EngineUnavailable, RolloutSession
from verl.workers.rollout.vllm import sampling_arguments
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

logger = logging.getLogger(__name__)

STALL_SECONDS = 600.0  # without a byte of a request's answer; then the server is asked whether it works
RPC_SECONDS = 1800.0  # that a call of the workers may take
PATIENCE_SECONDS = 10.0  # that a server may not answer before it is given up
_CONTROL_SECONDS = 60.0
_UPDATING = "updating"
_METRICS = {
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "prefilled_tokens": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
_MESSAGE_CHARACTERS = 600
STREAM_INTERVAL = 8  # tokens that a server collects before it sends them; a turn's end is sent at once


class ServerFailed(RuntimeError):
    """The server can't be reached, broke off, or says that it is broken."""


class RequestRefused(RuntimeError):
    """The server works, and refuses this request or answers what can't be understood."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together, one log-prob of each kind per token; `finish_reason` in the last chunk."""

    token_ids: list[int]
    log_probs: list[float]
    model_log_probs: list[float]
    finish_reason: str | None


def completion_body(model: str, session: RolloutSession, max_tokens: int) -> dict[str, Any]:
    """Return the request that continues from a session's tokens. It leaves nothing to the server's defaults.

    Stop strings are only a hint to the server, so that it does not compute far beyond them: whether they
    are complete is decided on the tokens that come back (`StopCondition`). End-of-sequence tokens are given
    as stop tokens, so that those of the request count and not those of the model's folder. The session's
    seed, and how many tokens were drawn with it, are read by our sampler (`sampler.py`).
    """
    params = session.params
    return {
        "model": model,
        "prompt": session.tokens.tolist(),
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(params.stop.strings) if params.stop else [],
        "include_stop_str_in_output": True,
        "stop_token_ids": [] if params.ignore_eos else sorted(params.eos_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "add_special_tokens": False,
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_interval": STREAM_INTERVAL,
        "vllm_xargs": sampling_arguments(session),
    }


def parse_chunk(data: str) -> Chunk | None:
    """One server-sent event's data; None if it brings neither tokens nor an end. Raises ServerFailed for the
    server's own error, RequestRefused for what is no chunk of a completion.
    """
    try:
        message = json.loads(data)
        if "error" in message:
            raise ServerFailed(f"it reports {message['error'].get('message', message['error'])!r}")
        if not message["choices"]:
            return None
        choice = message["choices"][0]
        tokens = [int(token_id) for token_id in choice.get("token_ids") or ()]
        probs = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
        log_probs = [float(value) for value in probs["token_logprobs"]]
        plain = [_plain_log_prob(*pair) for pair in zip(tokens, probs["top_logprobs"], strict=True)]
        if not len(tokens) == len(log_probs) == len(plain):
            raise ValueError(f"{len(tokens)} tokens with {len(log_probs)} log-probs")
        return Chunk(tokens, log_probs, plain, choice.get("finish_reason"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RequestRefused(
            f"it sent what is no part of a completion ({error!r}): {data[:_MESSAGE_CHARACTERS]!r}"
        ) from error


def _plain_log_prob(token_id: int, top: dict[str, float]) -> float:
    """Return the model's own log-prob, which our sampler gives under an id that no token has."""
    own = f"token_id:{token_id}"
    others = [value for name, value in top.items() if name != own]
    if len(others) != 1:
        raise ValueError(f"expected the model's own log-prob beside token {token_id}'s, got {top}")
    return float(others[0])


class ServerClient:
    """Calls to one server; all of them on one event loop. url: its base address. dead: why it is not used any
    more, once it is not. num_workers: of it; known once our sampler is installed in them.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.dead: str | None = None
        self.probing = asyncio.Lock()
        self.num_workers = 0
        tls = httpx.create_ssl_context() if url.startswith("https:") else False
        stall = httpx.Timeout(_CONTROL_SECONDS, read=STALL_SECONDS)
        kept = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._streams = httpx.AsyncClient(trust_env=False, timeout=stall, limits=kept, verify=tls)
        # After an error vLLM closes a connection that it has promised to keep: each call takes a new one.
        new = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._control = httpx.AsyncClient(trust_env=False, timeout=_CONTROL_SECONDS, limits=new, verify=tls)

    def bury(self, reason: str) -> None:
        """Use this server no more."""
        if self.dead is None:
            self.dead = reason
            logger.warning("vLLM server %s is not used any more: %s", self.url, self.dead)

    async def disconnect(self) -> None:
        await self._streams.aclose()
        await self._control.aclose()

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one request.

        If the caller stops early, the connection closes and the server drops the request.
        """
        try:
            async with self._streams.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error(response)
                finished = False
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        break
                    if line.startswith("data: ") and (chunk := parse_chunk(line[6:])) is not None:
                        finished = finished or chunk.finish_reason is not None
                        yield chunk
        except httpx.TransportError as error:
            raise ServerFailed(f"the connection broke: {error!r}") from error
        if not finished:
            raise ServerFailed("its answer broke off")

    async def is_healthy(self) -> bool:
        try:
            return (await self._control.get(f"{self.url}/health", timeout=10.0)).status_code == 200
        except httpx.TransportError:
            return False

    async def call_workers(self, method: str, **arguments: str) -> list[Any]:
        """`collective_rpc`: the method's answer of each worker (what is no list or dict comes as text)."""
        body = {"method": method, "kwargs": arguments, "timeout": RPC_SECONDS}
        answer = await self.post("/collective_rpc", json=body, timeout=RPC_SECONDS + _CONTROL_SECONDS)
        return list(answer.json()["results"]) if answer.content else []

    async def metrics(self) -> dict[str, float]:
        """Prometheus metrics by name, those of one name added up."""
        sums: dict[str, float] = {}
        for line in (await self._send("GET", "/metrics")).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{", 1)[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    async def get(self, path: str, **params: str) -> dict[str, Any]:
        answer = await self._send("GET", path, params=params)
        try:
            return dict(answer.json())
        except ValueError as error:
            raise RequestRefused(f"{path} answered {answer.text[:_MESSAGE_CHARACTERS]!r}, no JSON") from error

    async def post(self, path: str, **arguments: Any) -> httpx.Response:
        return await self._send("POST", path, **arguments)

    async def _send(self, verb: str, path: str, **arguments: Any) -> httpx.Response:
        try:
            answer = await self._control.request(verb, self.url + path, **arguments)
        except httpx.TransportError as error:
            raise ServerFailed(f"{path} failed: {error!r}") from error
        if answer.status_code == 404:
            raise RequestRefused(f"it has no {path}: start it with VLLM_SERVER_DEV_MODE=1")
        if answer.status_code != 200:
            raise _error(answer)
        return answer


def _error(response: httpx.Response) -> RuntimeError:
    path = response.request.url.path
    answer = response.text[:_MESSAGE_CHARACTERS]
    text = f"{path} answered {response.status_code}: {answer}"
    return ServerFailed(text) if response.status_code >= 500 else RequestRefused(text)


class ServerPool:
    """vLLM servers with the same model. model_name: as the servers call it; after `connect`."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Make a client for each address."""
        self.clients = [ServerClient(url) for url in dict.fromkeys(urls)]
        self.model_name = ""

    async def connect(self, max_model_len: int) -> None:
        """Check that all servers answer and fit, and install our sampler in them."""
        names = set()
        for client in self.clients:
            try:
                model = (await client.get("/v1/models"))["data"][0]
                configuration = (await client.get("/server_info", config_format="json"))["vllm_config"]
                _check_fit(client.url, model, configuration, max_model_len)
                names.add(str(model["id"]))
                client.num_workers = len(await client.call_workers("rollout_install_sampler"))
            except (ServerFailed, RequestRefused, LookupError, TypeError) as error:
                raise EngineUnavailable(f"vLLM server {client.url} can't be used: {error!r}") from error
        if len(names) != 1:
            raise ValueError(f"the servers have different models: {sorted(names)}")
        self.model_name = names.pop()

    def living(self) -> list[ServerClient]:
        """EngineUnavailable, with each one's reason, if there are none."""
        living = [client for client in self.clients if client.dead is None]
        if not living:
            reasons = "; ".join(f"{client.url}: {client.dead}" for client in self.clients)
            raise EngineUnavailable(f"no vLLM server is left ({reasons})")
        return living

    async def check(self, client: ServerClient, error: ServerFailed) -> None:
        """Bury a server that failed, unless it says before long that it is healthy."""
        async with client.probing:  # one asks, for all turns that failed with it
            deadline = time.monotonic() + PATIENCE_SECONDS
            wait = 0.05
            while client.dead is None and not await client.is_healthy():
                if time.monotonic() + wait > deadline:
                    return client.bury(str(error))
                await asyncio.sleep(wait)
                wait *= 2

    # ---- weights ----

    async def pause(self) -> None:
        """Before weights come: no request runs, and the label says that there are no complete weights."""

        async def prepare(client: ServerClient) -> None:
            # ends all requests there (their streams with finish_reason "abort") and holds new ones back
            await client.post("/pause", params={"mode": "abort"})
            await client.post("/update_weight_version", json={"new_version": _UPDATING})

        await self.each(prepare)

    async def finish_update(self, version: int) -> None:
        """After weights came: no KV state of older ones, the new label, and on."""

        async def finish(client: ServerClient) -> None:
            answer = await client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if answer.json() != {"success": True}:
                raise ServerFailed(f"it did not drop its KV state: {answer.text[:600]}")
            await client.post("/update_weight_version", json={"new_version": str(version)})
            await client.post("/resume")

        await self.each(finish)

    # ---- all of them ----

    async def each(self, action: Callable[[ServerClient], Awaitable[None]]) -> None:
        """Do something with every living server, side by side; one that fails is buried, the last one an
        error.
        """

        async def attempt(client: ServerClient) -> None:
            try:
                await action(client)
            except (ServerFailed, RequestRefused) as error:
                client.bury(str(error))

        await asyncio.gather(*[attempt(client) for client in self.living()])
        self.living()

    async def metrics(self) -> dict[str, float]:
        """Return the sums of the living servers' counters, and nothing if one of them does not answer."""
        sums = dict.fromkeys(_METRICS, 0.0)
        for client in [each for each in self.clients if each.dead is None]:
            try:
                metrics = await client.metrics()
            except (ServerFailed, RequestRefused) as error:
                logger.warning("vLLM server %s: no metrics: %s", client.url, error)
                return {}
            for ours, theirs in _METRICS.items():
                sums[ours] += metrics.get(theirs, 0.0)
        sums["prefilled_tokens"] -= sums["prefix_hit_tokens"]
        return sums


def _check_fit(url: str, model: Mapping[str, Any], configuration: Mapping[str, Any], needed: int) -> None:
    """ValueError if the server can't do what the engine relies on."""
    if model["max_model_len"] < needed:
        raise ValueError(
            f"vLLM server {url} allows {model['max_model_len']} tokens per sequence and {needed} are needed: "
            "start it with a larger --max-model-len"
        )
    extension = configuration["parallel_config"].get("worker_extension_cls") or ""
    mode = configuration["model_config"].get("logprobs_mode")
    if not extension.endswith(".WeightReceiver") or mode != "processed_logprobs":
        raise ValueError(
            f"vLLM server {url} runs with worker_extension_cls={extension!r} and logprobs_mode={mode!r}; "
            "start it with this package on its PYTHONPATH, --logprobs-mode processed_logprobs, "
            f"--no-async-scheduling and --worker-extension-cls {WORKER_EXTENSION}"
        )
