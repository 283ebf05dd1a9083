"""The servers of one engine: which of them live, and what is done to all of them at once.

    connect -> [pause -> weights come -> finish] ... per update -> close

A server that fails is buried: it is never used again, since nobody knows what weights it would come back
with. Everything here runs on the engine's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from verl.workers.rollout.base import EngineUnavailable
from verl.workers.rollout.vllm.server import VllmServers
from verl.workers.rollout.vllm.server_client import RequestRefused, ServerClient, ServerFailed
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

logger = logging.getLogger(__name__)

RPC_SECONDS = 1800.0
PATIENCE_SECONDS = 10.0  # that a server may not answer before it is given up
_UPDATING = "updating"
_METRICS = {
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "prefilled_tokens": "vllm:prompt_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}


class ServerPool:
    """vLLM servers with the same model. model_name: as the servers call it; after `connect`."""

    def __init__(self, urls: Sequence[str], servers: VllmServers | None) -> None:
        """For the arguments see `RemoteVllmEngine`."""
        self.clients = [ServerClient(url) for url in dict.fromkeys(urls)]
        self.model_name = ""
        self._servers = servers
        self._probing = {client.url: asyncio.Lock() for client in self.clients}

    async def connect(self, max_model_len: int, is_sender: bool) -> None:
        """Check that all servers answer and fit; the sender installs our sampler in them."""
        names = set()
        for client in self.clients:
            try:
                model = (await client.get("/v1/models"))["data"][0]
                configuration = (await client.get("/server_info", config_format="json"))["vllm_config"]
                _check_fit(client.url, model, configuration, max_model_len)
                names.add(str(model["id"]))
                if is_sender:
                    answers = await client.call_workers("rollout_install_sampler", RPC_SECONDS)
                    client.num_workers = len(answers)
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

    def least_loaded(self, load: Mapping[ServerClient, int], shift: int) -> ServerClient:
        """The living one with the least load; of equals, the first from position `shift` on."""
        living = self.living()
        shift %= len(living)
        return min(living[shift:] + living[:shift], key=lambda client: load.get(client, 0))

    def bury(self, url: str, reason: str) -> None:
        """Use this server no more."""
        for client in self.clients:
            if client.url == url and client.dead is None:
                processes = self._servers.processes if self._servers is not None else []
                tails = [process.log_tail() for process in processes if process.url == url]
                client.dead = reason + "".join(f"; the last lines of its log:\n{tail}" for tail in tails)
                logger.warning("vLLM server %s is not used any more: %s", url, client.dead)

    async def check(self, client: ServerClient, error: ServerFailed) -> None:
        """Bury a server that failed, unless it says before long that it is healthy."""
        async with self._probing[client.url]:  # one asks, for all turns that failed with it
            processes = self._servers.processes if self._servers is not None else []
            deadline = time.monotonic() + PATIENCE_SECONDS
            wait = 0.05
            while client.dead is None and not await client.is_healthy():
                ended = any(process.url == client.url and not process.alive for process in processes)
                if ended or time.monotonic() + wait > deadline:
                    self.bury(client.url, str(error))
                    return
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

    async def wait_for_version(self, version: int) -> None:
        """Wait until another process has brought weights `version` to all servers."""
        deadline = time.monotonic() + RPC_SECONDS

        async def wait(client: ServerClient) -> None:
            while (label := await client.weight_version()) != str(version):
                if time.monotonic() > deadline:
                    raise RequestRefused(f"it has the weights {label} instead of {version}")
                await asyncio.sleep(0.05)

        await self.each(wait)

    async def version_after_pause(self, client: ServerClient) -> int:
        """The weights that a server goes on with after another process has paused it."""
        while True:
            if not (await client.get("/is_paused"))["is_paused"]:
                label = await client.weight_version()
                if label != _UPDATING:
                    return int(label)
            await asyncio.sleep(0.05)

    # ---- all of them ----

    async def each(self, action: Callable[[ServerClient], Awaitable[None]]) -> None:
        """Do something with every living server, side by side; one that fails is buried, the last one an
        error.
        """

        async def attempt(client: ServerClient) -> None:
            try:
                await action(client)
            except (ServerFailed, RequestRefused) as error:
                self.bury(client.url, str(error))

        await asyncio.gather(*[attempt(client) for client in self.living()])
        self.living()

    async def metrics(self) -> dict[str, float]:
        """What the living count, added up; nothing if one does not tell."""
        sums = dict.fromkeys(_METRICS, 0.0)
        for client in self.clients:
            if client.dead is not None:
                continue
            try:
                metrics = await client.metrics()
            except (ServerFailed, RequestRefused) as error:
                logger.warning("vLLM server %s: no metrics: %s", client.url, error)
                return {}
            for ours, theirs in _METRICS.items():
                sums[ours] += metrics.get(theirs, 0.0)
        sums["prefilled_tokens"] -= sums["prefix_hit_tokens"]
        return sums

    async def close(self) -> None:
        for client in self.clients:
            await client.disconnect()


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
