"""Buckets of weights, and the group of processes that they travel in.

    (name, tensor) pairs -> pack -> (entries, flat bytes) -> Group: entries by its store, bytes by broadcast
                                                                  -> unpack -> (name, tensor) pairs

A bucket is bounded, so neither side holds a second full copy of the model. The group is made of a key-value
store and a process group of its own, without torch.distributed's default group: the trainer's is not touched,
and a process that has none can take part.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Pairs = Iterable[tuple[str, Tensor]]

BUCKET_BYTES = 256 << 20
JOIN_SECONDS = 120.0
TRANSFER_SECONDS = 1800.0
_ALIGNMENT = 64


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

    Floating-point tensors are cast to `dtype`. A bucket has at most `limit` bytes (rounded up to 64), unless
    a single tensor has more. Its memory is used again for the next one.
    """
    limit = _aligned(limit)
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
        used = _aligned(used + size)
    if entries:
        yield entries, buffer[:used]


def unpack(entries: Iterable[Entry], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of it."""
    for entry in entries:
        kind = getattr(torch, entry.dtype)
        size = prod(entry.shape) * kind.itemsize
        yield entry.name, data[entry.offset : entry.offset + size].view(kind).view(entry.shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Group:
    """One trainer process (rank 0) and one server's workers (ranks 1 ..): a store and a process group."""

    def __init__(
        self, store: Any, backend: str, device: torch.device, rank: int, size: int, address: str
    ) -> None:
        """Returns when all are there. `address`: of this machine, on the way to the others."""
        self._store = store
        self._device = device
        self._told: list[str] = []  # keys of the present update's messages
        members = dist.PrefixStore("group", store)
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        options = kind.Options() if backend == "nccl" else kind._Options()
        options._timeout = timedelta(seconds=TRANSFER_SECONDS)
        if backend == "gloo":
            options._devices = [kind.create_device(hostname=address)]
        self._group = kind(members, rank, size, options)

    @classmethod
    def lead(
        cls, backend: str, device: torch.device, address: str, size: int, invite: Callable[[int], Future[Any]]
    ) -> Group:
        """Rank 0's side: listen on `address`, `invite` the others to the port, wait for them.

        Raises what the invitation raised, or TimeoutError.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
        port = int(listener.getsockname()[1])
        store = _store(address, port, listener.detach())
        invited = invite(port)
        deadline = time.monotonic() + JOIN_SECONDS
        while not store.check([f"ready/{rank}" for rank in range(1, size)]):
            if invited.done():
                raise RuntimeError(f"the invitation ended with {invited.exception() or invited.result()!r}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"its workers did not join within {JOIN_SECONDS:g} seconds")
            time.sleep(0.005)
        group = cls(store, backend, device, 0, size, address)
        invited.result(JOIN_SECONDS)
        return group

    @classmethod
    def join(cls, backend: str, device: torch.device, host: str, port: int, rank: int, size: int) -> Group:
        """The other ranks' side."""
        store = _store(host, port, None)
        store.set(f"ready/{rank}", "")
        return cls(store, backend, device, rank, size, local_address(host, port))

    def announce(self, update: int, number: int, message: dict[str, Any]) -> None:
        """Tells the others what comes next; number 0 begins an update. All must have received the one before
        it: what was told then is deleted. (No earlier, as a rank may be a few buckets behind.)
        """
        if number == 0:
            for key in self._told:
                self._store.delete_key(key)
            self._told.clear()
        self._told.append(f"{update}/{number}")
        self._store.set(self._told[-1], json.dumps(message))

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


def _store(host: str, port: int, listener: int | None) -> Any:
    """The key-value store at an address; with a listening socket's descriptor, the one that holds it."""
    kind: Any = dist.TCPStore  # its stubs are not complete
    store = kind(
        host,
        port,
        is_master=listener is not None,
        timeout=timedelta(seconds=JOIN_SECONDS),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    store.set_timeout(timedelta(seconds=TRANSFER_SECONDS))
    return store


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to another one (127.0.0.1 to itself); nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
