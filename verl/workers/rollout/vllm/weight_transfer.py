"""The policy's weights from the trainer into the workers of vLLM servers, in buckets.

    trainer: (name, tensor) pairs -> pack -> buckets --broadcast (NCCL, gloo)-> worker: unpack -> load_weights
                                                \\---> a safetensors file each -> (the workers read them)

A bucket is a flat buffer of bounded size, so neither side holds a second full copy of the model. With each
server the trainer has a group of its own: trainer rank 0 and the server's workers. It is not the trainer's
default group, nor a part of it, and a server that dies takes no other server's group with it. What is in a
bucket travels over the group's key-value store (TCP), the bucket itself by broadcast; all servers receive the
same bucket at the same time.

`WeightReceiver` is the other end, vLLM's `worker_extension_cls`: it runs in the server's environment. Both
ends listen and connect on the address that leads from the trainer to the server; nothing is encrypted.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from verl.workers.rollout.vllm.weights import load_weights
from verl.workers.rollout.vllm.worker_extension import RolloutWorkerExtension

logger = logging.getLogger(__name__)

BUCKET_BYTES = 256 << 20
_ALIGNMENT = 64
_JOIN_SECONDS = 120.0
_TRANSFER_SECONDS = 1800.0

Pairs = Iterable[tuple[str, Tensor]]


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


# ---- buckets ----


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies in a bucket: offset in bytes, dtype by name ("bfloat16"), shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def pack(
    weights: Pairs, dtype: torch.dtype, device: torch.device, limit: int = BUCKET_BYTES
) -> Iterator[tuple[list[Entry], Tensor]]:
    """Cut a stream of tensors into buckets: (entries, uint8 [bytes] on `device`).

    Floating-point tensors are cast to `dtype`. A bucket has at most `limit` bytes, unless a single tensor has
    more. Its memory is used again for the next one.
    """
    buffer = torch.empty(limit, dtype=torch.uint8, device=device)
    entries: list[Entry] = []
    used = 0
    for name, tensor in weights:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        size = tensor.numel() * kind.itemsize
        if entries and used + size > limit:
            yield entries, buffer[:used]
            entries, used = [], 0
        shape = tuple(tensor.shape)
        if size > limit:
            whole = tensor.detach().to(device, kind).contiguous()
            yield [Entry(name, _name(kind), shape, 0)], whole.view(-1).view(torch.uint8)
            continue
        entries.append(Entry(name, _name(kind), shape, used))
        buffer[used : used + size].view(kind).view(shape).copy_(tensor.detach())
        used = min(limit, -(-(used + size) // _ALIGNMENT) * _ALIGNMENT)
    if entries:
        yield entries, buffer[:used]


def unpack(entries: Iterable[Entry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of it."""
    for entry in entries:
        kind = getattr(torch, entry.dtype)
        size = prod(entry.shape) * kind.itemsize
        yield entry.name, data[entry.offset : entry.offset + size].view(kind).view(entry.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- groups ----


class _Group:
    """One trainer process (rank 0) and one server's workers (ranks 1 ..): a store and a process group."""

    def __init__(
        self,
        backend: str,
        device: torch.device,
        address: tuple[str, int],
        rank: int,
        size: int,
        fd: int | None,
    ) -> None:
        host, port = address
        store: Any = dist.TCPStore  # its stubs, and those of the groups, are not complete
        self._store = store(
            host,
            port,
            is_master=fd is not None,
            timeout=timedelta(seconds=_JOIN_SECONDS),
            wait_for_workers=False,
            master_listen_fd=fd,
        )
        self._store.set_timeout(timedelta(seconds=_TRANSFER_SECONDS))
        self._device = device
        members = dist.PrefixStore("group", self._store)
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        options = kind.Options() if backend == "nccl" else kind._Options()
        options._timeout = timedelta(seconds=_TRANSFER_SECONDS)
        if backend == "gloo":
            here = host if fd is not None else _local_address(host, port)
            options._devices = [kind.create_device(hostname=here)]
        self._group = kind(members, rank, size, options)

    def announce(self, update: int, number: int, message: dict[str, Any]) -> None:
        self._store.set(f"{update}/{number}", json.dumps(message))

    def forget(self, update: int, number: int) -> None:
        self._store.delete_key(f"{update}/{number}")

    def start_sending(self, data: Tensor) -> Any:
        return self._group.broadcast(data, 0)

    def receive(self, update: int) -> Iterator[tuple[str, Tensor]]:
        """What rank 0 announces as `update`, to its end. RuntimeError if it says that it failed."""
        number = 0
        while True:
            message = json.loads(self._store.get(f"{update}/{number}"))
            if "failed" in message:
                raise RuntimeError(f"the trainer broke off: {message['failed']}")
            if "bytes" not in message:
                return
            data = torch.empty(message["bytes"], dtype=torch.uint8, device=self._device)
            self._group.broadcast(data, 0).wait()
            yield from unpack([Entry(**entry) for entry in message["entries"]], data)
            number += 1


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
        self._groups: dict[str, _Group] = {}
        self._update = 0

    def send(self, servers: Sequence[Workers], weights: Pairs, version: int) -> dict[str, str]:
        """See `WeightSender`. Groups are set up with servers that are new."""
        failed: dict[str, str] = {}
        self._update += 1
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

    def _join(self, server: Workers) -> _Group:
        host = _local_address(*_address(server.url))
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        size = 1 + server.num_workers
        joined = server.call("rollout_join", backend=self._backend, host=host, port=str(port), size=str(size))
        group = _Group(self._backend, self._device, (host, port), 0, size, listener.detach())
        joined.result(_JOIN_SECONDS)
        return group

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
                self._groups[url].forget(self._update, number - 1)
            except RuntimeError as error:  # how torch says that a peer is gone
                failed[url] = f"the transfer broke: {error}"


def _check(answer: Future[list[Any]], url: str, version: int, failed: dict[str, str]) -> None:
    try:
        versions = [str(found) for found in answer.result(_TRANSFER_SECONDS)]
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

    def rollout_join(self, backend: str, host: str, port: str, size: str) -> None:
        """Enter the group of the trainer that listens there."""
        device = self.device if backend == "nccl" else torch.device("cpu")
        self._rollout_group = _Group(backend, device, (host, int(port)), 1 + self.rank, int(size), None)

    def rollout_receive(self, update: str, version: str) -> str:
        """Take the weights that the trainer broadcasts; answers their version."""
        stream = self._rollout_group.receive(int(update))
        try:
            load_weights(self, stream)
        finally:
            for _ in stream:  # also after an error: nobody else must wait for this worker
                pass
        return version

    def rollout_load_folder(self, folder: str, version: str) -> str:
        """Take the weights from a folder of safetensors files; answers their version."""
        load_weights(self, _stored(Path(folder)))
        return version


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


def _local_address(host: str, port: int) -> str:
    """This machine's address on the way to another one (127.0.0.1 to itself); nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
