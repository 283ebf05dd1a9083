"""Servers over HTTP: a client of each, and the pool of an engine's.

    client.connect -> its kind: verl.inference, vLLM with our extension, or plain vLLM
    client.generate(session) -> POST /inference/v1/generate -> Chunk(token ids, log-probs, its end) ...
    pool.pause -> weights come -> pool.finish_update       vLLM with our extension
    pool.read_folder                                       verl.inference

Prompts go out and tokens come back as ids. What fails is one of two things: `ServerFailed`, the connection
or the server itself (it may help to ask again, or elsewhere), and `RequestRefused`, which would be refused
everywhere. A server that fails is never used again, since nobody knows what weights it would come back
with. Everything here runs on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import httpx

from verl.sessions.engine_contract import EngineUnavailable, RolloutSession, SamplingParams
from verl.workers.rollout.vllm import sampling_arguments
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "ROLLOUT_API_KEY"  # the environment variable with the bearer token of the servers
STALL_SECONDS = 600.0  # without a byte of a request's answer; then the server is asked whether it works
RPC_SECONDS = 1800.0  # that a call of the workers, or an update from a folder, may take
PATIENCE_SECONDS = 10.0  # that a server may not answer before it is given up
STREAM_INTERVAL = 8  # tokens that a vLLM server collects before it sends them; a turn's end is sent at once
_CONTROL_SECONDS = 60.0
_UPDATING = "updating"
_MESSAGE_CHARACTERS = 600
_GENERATE = "/inference/v1/generate"
_MAX_SEED = 2**63 - 1


class ServerFailed(RuntimeError):
    """The error of a server that can't be reached, broke off, or says that it is broken."""


class RequestRefused(RuntimeError):
    """The error of a server that works, and refuses a request or answers what can't be understood."""


class Kind(Enum):
    """The kinds of servers. The values are their names in messages."""

    VERL = "python -m verl.inference"
    VLLM = "vLLM with our worker extension"
    PLAIN = "vLLM"


# Our name of a figure -> its name in the metrics of a server of the kind.
_VLLM_METRICS = {
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "prefilled_tokens": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
_METRICS = {
    Kind.VERL: {name: f"verl_inference_{name}" for name in _VLLM_METRICS},
    Kind.VLLM: _VLLM_METRICS,
    Kind.PLAIN: _VLLM_METRICS,
}


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together.

    Attributes:
        token_ids: The tokens.
        log_probs: The log-prob of each token under the distribution that was sampled from.
        model_log_probs: That under the model itself, or None if the server does not say it.
        versions: The version of the weights of each token, or None if the server does not say it.
        finish_reason: Why the request ended, in the last chunk.
    """

    token_ids: list[int]
    log_probs: list[float]
    model_log_probs: list[float] | None
    versions: list[int] | None
    finish_reason: str | None


def samples_plainly(params: SamplingParams) -> bool:
    """Return whether the log-probs of the sampled distribution are those of the model itself."""
    is_cut = params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0
    return params.temperature == 0.0 or (params.temperature == 1.0 and not is_cut)


def request_body(kind: Kind, model: str, session: RolloutSession, max_tokens: int) -> dict[str, Any]:
    """Return the request that continues from a session's tokens. It leaves nothing to the server's defaults.

    For vLLM stop strings are only a hint, so that it does not compute far beyond them: whether they are
    complete is decided on the tokens that come back (`StopCondition`). End-of-sequence tokens are given as
    stop tokens, so that those of the request count and not those of the model's folder. The session's seed,
    and how many tokens were drawn with it, are read by our sampler (`sampler.py`) and by verl.inference.
    Plain vLLM gets a seed for each request.
    """
    params = session.params
    num_drawn = params.drawn_before + session.num_sampled
    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "min_p": params.min_p,
        "stop": list(params.stop.strings) if params.stop else [],
        "include_stop_str_in_output": True,
    }
    if kind is Kind.VERL:
        sampling |= {
            "seed": params.seed & _MAX_SEED,
            "drawn_before": num_drawn,
            "ignore_eos": params.ignore_eos,
        }
        return {"token_ids": session.tokens.tolist(), "sampling_params": sampling}
    sampling |= {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [] if params.ignore_eos else sorted(params.eos_token_ids),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": 2,  # the sampled token's, and the one that our sampler puts beside it
        "stream_interval": STREAM_INTERVAL,
    }
    if kind is Kind.VLLM:
        sampling["extra_args"] = sampling_arguments(session)
    else:
        sampling["seed"] = (params.seed + 0x9E3779B97F4A7C15 * num_drawn) & _MAX_SEED
    return {
        "model": model,
        "token_ids": session.tokens.tolist(),
        "sampling_params": sampling,
        "stream": True,
    }


def parse_answer(data: str, kind: Kind) -> Chunk | None:
    """Return the tokens of a reply, or of one server-sent event.

    Returns None if it brings neither tokens nor an end.

    Raises:
        ServerFailed: If it is the server's own error.
        RequestRefused: If it can't be understood.
    """
    try:
        message = json.loads(data)
        if "error" in message:
            raise ServerFailed(f"it reports {message['error'].get('message', message['error'])!r}")
        if not message["choices"]:
            return None
        choice = message["choices"][0]
        tokens = [int(token_id) for token_id in choice.get("token_ids") or ()]
        entries = (choice.get("logprobs") or {}).get("content") or []
        log_probs = [float(entry["logprob"]) for entry in entries]
        if len(tokens) != len(log_probs):
            raise ValueError(f"{len(tokens)} tokens with {len(log_probs)} log-probs")
        model_log_probs = None
        if kind is Kind.VERL:
            model_log_probs = [float(entry["model_logprob"]) for entry in entries]
        elif kind is Kind.VLLM:
            model_log_probs = [_model_log_prob(*pair) for pair in zip(tokens, entries, strict=True)]
        versions = [int(version) for version in choice["versions"]] if kind is Kind.VERL else None
        return Chunk(tokens, log_probs, model_log_probs, versions, choice.get("finish_reason"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise RequestRefused(
            f"it sent what is no part of a completion ({error!r}): {data[:_MESSAGE_CHARACTERS]!r}"
        ) from error


def _model_log_prob(token_id: int, entry: Mapping[str, Any]) -> float:
    """Return the model's own log-prob, which our sampler gives under an id that no token has."""
    others = [other["logprob"] for other in entry["top_logprobs"] if other["token_id"] != token_id]
    if len(others) != 1:
        raise ValueError(f"expected the model's own log-prob beside token {token_id}'s, got {entry}")
    return float(others[0])


class ServerClient:
    """The calls to one server, all of them on one event loop.

    Attributes:
        url: The base address.
        dead: The reason why the server is not used any more, or None while it is.
        kind: The kind of the server, known after `connect`.
        model_name: The server's name for its model, known after `connect`.
        num_workers: Number of workers of a server with our extension, which have our sampler then.
        no_weights: The reason why the server takes no weights, or "" if it does.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.dead: str | None = None
        self.kind = Kind.PLAIN
        self.model_name = ""
        self.num_workers = 0
        self.no_weights = ""
        self.probing = asyncio.Lock()
        tls = httpx.create_ssl_context() if url.startswith("https:") else False
        token = os.environ.get(API_KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        stall = httpx.Timeout(_CONTROL_SECONDS, read=STALL_SECONDS)
        kept = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        shared: dict[str, Any] = {"trust_env": False, "verify": tls, "headers": headers}
        self._streams = httpx.AsyncClient(timeout=stall, limits=kept, **shared)
        # After an error vLLM closes a connection that it has promised to keep: each call takes a new one.
        new = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._control = httpx.AsyncClient(timeout=_CONTROL_SECONDS, limits=new, **shared)

    def bury(self, reason: str) -> None:
        """Use this server no more."""
        if self.dead is None:
            self.dead = reason
            logger.warning("server %s is not used any more: %s", self.url, reason)

    async def disconnect(self) -> None:
        await self._streams.aclose()
        await self._control.aclose()

    async def connect(self, max_model_len: int) -> None:
        """Find out what the server is, and install our sampler if it has our extension.

        Raises:
            ValueError: If it does not fit.
            EngineUnavailable: If it can't be used.
        """
        try:
            model = (await self.get("/v1/models"))["data"][0]
            health = await self._send("GET", "/health")
            if health.content and "version" in health.json():
                self.kind = Kind.VERL
                await self._connect_verl()
            else:
                await self._connect_vllm()
            self.model_name = str(model["id"])
            length = int(model["max_model_len"])
        except (ServerFailed, RequestRefused, LookupError, TypeError) as error:
            raise EngineUnavailable(f"server {self.url} can't be used: {error!r}") from error
        if length < max_model_len:
            raise ValueError(
                f"server {self.url} allows {length} tokens per sequence and {max_model_len} are needed: "
                "start it with a larger --max-model-len"
            )

    async def _connect_verl(self) -> None:
        answer = await self._control.post(f"{self.url}/resume")
        if answer.status_code == 404:
            self.no_weights = f"start it with --api_key_var, and set {API_KEY_VARIABLE} to its token"
        elif answer.status_code == 401:
            raise RequestRefused(f"it asks for a token: set {API_KEY_VARIABLE}")

    async def _connect_vllm(self) -> None:
        answer = await self._control.post(self.url + _GENERATE, json={})  # is refused, if it is served
        if answer.status_code in (403, 404):
            raise RequestRefused(f"it does not serve {_GENERATE}: start it with --enable-scale-out")
        answer = await self._control.get(f"{self.url}/server_info", params={"config_format": "json"})
        configuration = answer.json()["vllm_config"] if answer.status_code == 200 else {}
        extension = configuration.get("parallel_config", {}).get("worker_extension_cls") or ""
        mode = configuration.get("model_config", {}).get("logprobs_mode")
        if not extension.endswith(".WeightReceiver"):
            self.no_weights = (
                "start it with VLLM_SERVER_DEV_MODE=1, this package on its PYTHONPATH, --logprobs-mode "
                f"processed_logprobs and --worker-extension-cls {WORKER_EXTENSION}"
            )
            return
        if mode != "processed_logprobs":
            raise ValueError(
                f"server {self.url} runs with logprobs_mode={mode!r}; start it with --logprobs-mode "
                "processed_logprobs"
            )
        self.kind = Kind.VLLM
        self.num_workers = len(await self.call_workers("rollout_install_sampler"))

    async def generate(self, session: RolloutSession, max_tokens: int) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a request that continues from a session's tokens.

        If the caller stops early, the connection closes and the server drops the request.
        """
        body = request_body(self.kind, self.model_name, session, max_tokens)
        try:
            async with self._streams.stream("POST", f"{self.url}{_GENERATE}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    raise _error(response)
                finished = False
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        break
                    chunk = parse_answer(data, self.kind) if data else None
                    if chunk is not None:
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
        """Return the answer of each worker to a method (what is no list or dict comes as text)."""
        body = {"method": method, "kwargs": arguments, "timeout": RPC_SECONDS}
        answer = await self.post("/collective_rpc", json=body, timeout=RPC_SECONDS + _CONTROL_SECONDS)
        return list(answer.json()["results"]) if answer.content else []

    async def metrics(self) -> dict[str, float]:
        """Return the server's figures by our names. Prometheus metrics of one name are added up."""
        sums: dict[str, float] = {}
        for line in (await self._send("GET", "/metrics")).text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name = name.split("{", 1)[0]
                sums[name] = sums.get(name, 0.0) + float(value)
        figures = {name: sums.get(theirs, 0.0) for name, theirs in _METRICS[self.kind].items()}
        if self.kind is not Kind.VERL:  # vLLM counts the tokens of all prompts
            figures["prefilled_tokens"] -= figures["prefix_hit_tokens"]
        return figures

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
            raise RequestRefused(f"it has no {path}")
        if answer.status_code != 200:
            raise _error(answer)
        return answer


def _error(response: httpx.Response) -> RuntimeError:
    path = response.request.url.path
    answer = response.text[:_MESSAGE_CHARACTERS]
    text = f"{path} answered {response.status_code}: {answer}"
    return ServerFailed(text) if response.status_code >= 500 else RequestRefused(text)


class ServerPool:
    """The servers of an engine, all of one kind and with the same model."""

    def __init__(self, urls: Sequence[str]) -> None:
        """Make a client for each address."""
        self.clients = [ServerClient(url) for url in dict.fromkeys(urls)]

    @property
    def kind(self) -> Kind:
        return self.clients[0].kind

    async def connect(self, max_model_len: int) -> None:
        """Check that all servers answer and fit.

        Raises:
            ValueError: If they do not fit, or not together.
            EngineUnavailable: If one of them does not answer.
        """
        for client in self.clients:
            await client.connect(max_model_len)
        for what, values in (
            ("models", {client.model_name for client in self.clients}),
            ("kinds", {client.kind.value for client in self.clients}),
        ):
            if len(values) != 1:
                raise ValueError(
                    f"rollout.remote.urls: the servers are of different {what}: {sorted(values)}"
                )

    def check_takes_weights(self) -> None:
        """Raise ValueError if a server takes no weights."""
        for client in self.living():
            if client.no_weights:
                raise ValueError(
                    f"server {client.url} ({client.kind.value}) takes no new weights; {client.no_weights}"
                )

    def living(self) -> list[ServerClient]:
        """Return the servers that are used.

        Raises EngineUnavailable, with the reason of each, if there are none.
        """
        living = [client for client in self.clients if client.dead is None]
        if not living:
            reasons = "; ".join(f"{client.url}: {client.dead}" for client in self.clients)
            raise EngineUnavailable(f"no server is left ({reasons})")
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
        """Prepare vLLM's servers for weights: no request runs, and the label says so."""

        async def prepare(client: ServerClient) -> None:
            # ends all requests there (their streams with finish_reason "abort") and holds new ones back
            await client.post("/pause", params={"mode": "abort"})
            await client.post("/update_weight_version", json={"new_version": _UPDATING})

        await self.for_each(prepare)

    async def finish_update(self, version: int) -> None:
        """End the update of vLLM's servers: no KV state of older weights, the new label, and on."""

        async def finish(client: ServerClient) -> None:
            answer = await client.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
            if answer.json() != {"success": True}:
                raise ServerFailed(f"it did not drop its KV state: {answer.text[:600]}")
            await client.post("/update_weight_version", json={"new_version": str(version)})
            await client.post("/resume")

        await self.for_each(finish)

    async def read_folder(self, folder: Path, version: int) -> None:
        """Let the servers of verl.inference take the weights in a folder, between two of their steps."""

        async def read(client: ServerClient) -> None:
            body = {"weight_dir": str(folder), "version": version}
            try:
                await client.post("/update_weights", json=body, timeout=RPC_SECONDS)
            except RequestRefused as error:
                problem = f"{error}. Set rollout.weight_dir to a folder that it sees too"
                raise RequestRefused(problem) from error

        await self.for_each(read)

    # ---- all of them ----

    async def for_each(self, action: Callable[[ServerClient], Awaitable[None]]) -> None:
        """Run a call on every living server, side by side.

        A server that fails is not used again. Raises EngineUnavailable if none is left.
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
        sums = dict.fromkeys(_VLLM_METRICS, 0.0)
        for client in [client for client in self.clients if client.dead is None]:
            try:
                figures = await client.metrics()
            except (ServerFailed, RequestRefused) as error:
                logger.warning("server %s: no metrics: %s", client.url, error)
                return {}
            for name, value in figures.items():
                sums[name] += value
        return sums
