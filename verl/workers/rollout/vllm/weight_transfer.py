"""The policy's weights from the trainer into the workers of vLLM servers, in buckets.

    trainer: (name, tensor) pairs -> pack -> buckets --broadcast (NCCL, gloo)-> worker: unpack -> load_weights
                                                \\---> a safetensors file each -> (the workers read them)

With each server the trainer has a group of its own: trainer rank 0 and the server's workers. A server that
dies takes no other server's group with it. All servers receive the same bucket at the same time.

`WeightReceiver` is the other end, vLLM's `worker_extension_cls`: it runs in the server's environment. Both
ends listen and connect on the address that leads from the trainer to the server; nothing is encrypted.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch import Tensor

from verl.workers.rollout.vllm.weight_buckets import (
    BUCKET_BYTES,
    TRANSFER_SECONDS,
    Entry,
    Group,
    Pairs,
    local_address,
    pack,
    unpack,
)
from verl.workers.rollout.vllm.weights import checked_stream, expected_shapes
from verl.workers.rollout.vllm.worker_extension import RolloutWorkerExtension


class Workers(Protocol):
    """The workers of one server, as a sender sees them."""

    url: str
    num_workers: int

    def call(self, method: str, **arguments: str) -> Future[list[Any]]:
        """Start a method of `WeightReceiver` on all workers; their answers, in order."""


class WeightSender(Protocol):
    """Brings weights to servers that are paused."""

    def send(self, servers: Sequence[Workers], weights: Pairs, version: int) -> dict[str, str]:
        """Walk `weights` once; returns why it failed by address, for servers it failed with.

        What goes wrong with `weights` itself is raised, once the servers know that they got only a part.
        """

    def close(self) -> None:
        """Leave the groups, delete the files."""


# ---- broadcast ----


class GroupSender:
    """Sends by broadcast, over NCCL between CUDA devices or gloo between CPUs."""

    def __init__(
        self, backend: str, device: torch.device, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(
                f"weight_transfer is nccl and the trainer runs on {device.type}; use gloo or disk"
            )
        self._backend = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._groups: dict[str, Group] = {}
        self._update = 0

    def send(self, servers: Sequence[Workers], weights: Pairs, version: int) -> dict[str, str]:
        """See `WeightSender`. Groups are set up with servers that are new."""
        failed: dict[str, str] = {}
        self._update += 1
        urls = {server.url for server in servers}
        self._groups = {url: group for url, group in self._groups.items() if url in urls}
        for server in servers:
            if server.url not in self._groups:
                try:
                    self._groups[server.url] = self._join(server)
                except (
                    Exception
                ) as error:  # torch raises what its store and sockets raise: this server's loss
                    failed[server.url] = f"no group with its workers: {error}"
        receiving = {
            server.url: server.call("rollout_receive", update=str(self._update), version=str(version))
            for server in servers
            if server.url not in failed
        }
        number = 0
        end: dict[str, Any] = {}
        try:
            for entries, data in pack(weights, self._dtype, self._device, self._bucket_bytes):
                self._broadcast(receiving, failed, number, entries, data)
                number += 1
        except BaseException as error:
            end = {"failed": repr(error)}
            raise
        finally:
            for url in [url for url in receiving if url not in failed]:
                self._groups[url].announce(self._update, number, end)
        for url, answer in receiving.items():
            if url not in failed:
                _check(answer, url, version, failed)
        for url in failed:
            self._groups.pop(url, None)
        return failed

    def close(self) -> None:
        self._groups.clear()

    def _join(self, server: Workers) -> Group:
        host = local_address(*_address(server.url))
        size = 1 + server.num_workers

        def invite(port: int) -> Future[list[Any]]:
            return server.call(
                "rollout_join", backend=self._backend, host=host, port=str(port), size=str(size)
            )

        return Group.lead(self._backend, self._device, host, size, invite)

    def _broadcast(
        self,
        receiving: dict[str, Future[list[Any]]],
        failed: dict[str, str],
        number: int,
        entries: list[Entry],
        data: Tensor,
    ) -> None:
        """One bucket to all that still receive; who does not any more goes to `failed`."""
        message = {"bytes": data.numel(), "entries": [vars(entry) for entry in entries]}
        under_way = []
        for url, answer in receiving.items():
            if url in failed:
                continue
            if answer.done():  # it should wait for this bucket
                error = answer.exception()
                failed[url] = f"it stopped receiving: {error or 'without an error'}"
                continue
            self._groups[url].announce(self._update, number, message)
            under_way.append((url, self._groups[url].start_sending(data)))
        for url, work in under_way:
            try:
                work.wait()
            except RuntimeError as error:  # how torch says that a peer is gone
                failed[url] = f"the transfer broke: {error}"


def _check(answer: Future[list[Any]], url: str, version: int, failed: dict[str, str]) -> None:
    try:
        versions = [str(found) for found in answer.result(TRANSFER_SECONDS)]
    except Exception as error:  # whatever the call or the worker raised: this server has no usable weights
        failed[url] = f"its workers did not take the weights: {error}"
        return
    if any(found != str(version) for found in versions):
        failed[url] = f"its workers have the versions {versions} instead of {version}"


# ---- files ----


class DiskSender:
    """Writes one file per bucket into a new folder under `folder`, which the servers must see as well.

    The new folder gets its name when it is complete, and is deleted when all servers have read it.
    """

    def __init__(self, folder: str | None, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> None:
        """`folder` None: a temporary one of this machine."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if folder is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="vllm-weights-")
            folder = self._scratch.name
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes

    def send(self, servers: Sequence[Workers], weights: Pairs, version: int) -> dict[str, str]:
        """See `WeightSender`."""
        written = self._write(weights, version)
        try:
            answers = [
                (server.url, server.call("rollout_load_folder", folder=str(written), version=str(version)))
                for server in servers
            ]
            failed: dict[str, str] = {}
            for url, answer in answers:
                _check(answer, url, version, failed)
            return failed
        finally:
            shutil.rmtree(written)

    def close(self) -> None:
        """Delete a temporary folder."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def _write(self, weights: Pairs, version: int) -> Path:
        from safetensors.torch import save_file

        scratch = Path(tempfile.mkdtemp(prefix=f".weights-{version}-", dir=self._folder))
        try:
            for number, (entries, data) in enumerate(
                pack(weights, self._dtype, torch.device("cpu"), self._bucket_bytes)
            ):
                save_file(dict(unpack(entries, data)), scratch / f"{number:05d}.safetensors")
            final = scratch.with_name(scratch.name.removeprefix("."))
            scratch.rename(final)
            return final
        except BaseException:
            shutil.rmtree(scratch)
            raise


# ---- the server's side ----


class WeightReceiver(RolloutWorkerExtension):
    """vLLM's `worker_extension_cls`: mixed into each worker of a server, called by `collective_rpc`.

    Arguments are strings: HTTP allows no others. Errors go back to the caller; the server lives on, with
    weights of which only a part may be new.
    """

    rank: int
    device: torch.device
    model_config: Any

    def rollout_join(self, backend: str, host: str, port: str, size: str) -> None:
        """Enter the group of the trainer that listens there."""
        device = self.device if backend == "nccl" else torch.device("cpu")
        self._rollout_group = Group.join(backend, device, host, int(port), 1 + self.rank, int(size))

    def rollout_receive(self, update: str, version: str) -> str:
        """Take the weights that the trainer broadcasts; answers their version."""
        stream = self._rollout_group.receive(int(update))
        try:
            self.rollout_load_weights(checked_stream(stream, self._rollout_shapes()))
        finally:
            for _ in stream:  # also after an error: nobody else must wait for this worker
                pass
        return version

    def rollout_load_folder(self, folder: str, version: str) -> str:
        """Take the weights from a folder of safetensors files; answers their version."""
        self.rollout_load_weights(checked_stream(_stored(Path(folder)), self._rollout_shapes()))
        return version

    def _rollout_shapes(self) -> dict[str, tuple[int, ...]]:
        return expected_shapes(self.model_config.hf_config)


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict
                yield name, file.get_tensor(name)


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"{url!r} is no server address; expected http://HOST:PORT")
    return parts.hostname, parts.port or 80
