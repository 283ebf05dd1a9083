"""The policy's weights on their way to servers, by a collective group or by a folder.

    (name, tensor) pairs --broadcast, one at a time (NCCL, gloo)--> workers of vLLM with our extension
                         --safetensors in a folder that the server sees--> verl.inference

With each vLLM server one training process has a group of its own, which consists of it and the server's
workers. The processes, which gather each tensor together, share the servers out, so that none feeds them all.
A server that dies takes no other server's group with it. All servers receive the same tensor at the same
time. Both ends listen and connect on the address that leads from the trainer to the server. Nothing is
encrypted.
The workers' side is `WeightReceiver` (verl/workers/rollout/vllm/weight_transfer.py).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

JOIN_SECONDS = 120.0
TRANSFER_SECONDS = 1800.0
TENSOR_SECONDS = 300.0
LEAVE_SECONDS = 10.0

Pairs = Iterable[tuple[str, Tensor]]


@contextmanager
def weights_in_folder(weights: Pairs, parent: Path | None = None) -> Iterator[Path]:
    """Write the whole model to a *.safetensors file in a new folder, and yield the folder.

    It is deleted at the end.

    Args:
        weights: The pairs.
        parent: The folder to make it in. None means the system's folder of temporary files.
    """
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="rollout-weights-", dir=parent) as name:
        folder = Path(name)
        save_file({name: tensor.cpu().contiguous() for name, tensor in weights}, folder / "model.safetensors")
        yield folder


# ---- the group of a training process and a server's workers ----


class Group:
    """A store and a process group of one training process (rank 0) and one server's workers (ranks 1 ..).

    The group is made without torch.distributed's default group. The trainer's is not touched, and a process
    that has none can take part.
    """

    def __init__(
        self,
        store: Any,
        backend: str,
        device: torch.device,
        rank: int,
        size: int,
        address: str,
        seconds: float = TRANSFER_SECONDS,
    ) -> None:
        """Create the group. This returns when all members have joined.

        Args:
            store: The key-value store of the group.
            backend: "nccl" or "gloo".
            device: The device of the tensors.
            rank: The rank of this process in the group.
            size: Number of members.
            address: The address of this machine on the way to the other members.
            seconds: How long the members wait for each other.
        """
        self._store = store
        self._device = device
        self._told: list[str] = []  # the keys of the present update's messages
        self.under_way: Any = None  # the broadcast of the present tensor
        group_store = dist.PrefixStore("group", store)
        kind: Any = dist.ProcessGroupNCCL if backend == "nccl" else dist.ProcessGroupGloo
        options = kind.Options() if backend == "nccl" else kind._Options()
        options._timeout = timedelta(seconds=seconds)
        if backend == "gloo":
            options._devices = [kind.create_device(hostname=address)]
        self.members = kind(group_store, rank, size, options)

    @classmethod
    def lead(
        cls, backend: str, device: torch.device, address: str, size: int, invite: Callable[[int], Future[Any]]
    ) -> Group:
        """Create the group on rank 0.

        This listens on `address`, calls `invite` with the port, and waits for the others.

        Raises:
            RuntimeError: If the invitation ended before the others joined. A later error of the invitation is
                raised as it is.
            TimeoutError: If the others did not join in time.
        """
        store, port = listening_store(address)
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
        """Create the group on the other ranks."""
        store = open_store(host, port)
        store.set(f"ready/{rank}", "")
        return cls(store, backend, device, rank, size, local_address(host, port))

    def announce(self, update: int, number: int, message: dict[str, Any]) -> None:
        """Tell the others what comes next. Number 0 begins an update.

        All must have received the update before it, because its messages are deleted then. (They are not
        deleted earlier, as a rank may be a few tensors behind.)
        """
        if number == 0:
            for key in self._told:
                self._store.delete_key(key)
            self._told.clear()
        self._told.append(f"{update}/{number}")
        self._store.set(self._told[-1], json.dumps(message))

    def receive(self, update: int) -> Iterator[tuple[str, Tensor]]:
        """Yield what rank 0 announces as `update`, to its end.

        Raises:
            RuntimeError: If rank 0 says that the update failed.
        """
        number = 0
        while True:
            message = json.loads(self._store.get(f"{update}/{number}"))
            if "failed" in message:
                raise RuntimeError(f"the trainer broke off: {message['failed']}")
            if "name" not in message:
                return
            dtype = getattr(torch, message["dtype"])
            tensor = torch.empty(message["shape"], dtype=dtype, device=self._device)
            self.members.broadcast(tensor, 0).wait()
            yield message["name"], tensor
            number += 1

    def why_broken(self, receiving: Future[list[Any]], give_up: float) -> str:
        """Wait until the tensor under way has arrived, or until `give_up`, and return what is wrong.

        `Work.wait` alone is not enough. With NCCL it returns at once, even if a member is gone, and with gloo
        it waits for a member that has only stopped receiving.

        Args:
            receiving: The answer of the server's workers, which should not be done yet.
            give_up: The time, by `time.monotonic`, at which waiting ends.

        Returns:
            A reason, or "" if the tensor has arrived.
        """
        while not self.under_way.is_completed():
            if receiving.done():
                return _why_stopped(receiving)
            if time.monotonic() > give_up:
                return f"it did not take a tensor within {TENSOR_SECONDS:g} seconds"
            time.sleep(0.0002)
        try:
            self.under_way.wait()
        except RuntimeError as error:  # torch raises it when a peer is gone
            return f"the transfer broke: {error}"
        return ""

    def leave(self) -> threading.Thread:
        """Give up what is under way with others that may never answer.

        gloo's objects wait for it when they are released, so a thread releases them.
        """
        abandoned = [self.members, self.under_way]
        self.under_way = None
        del self.members

        def end() -> None:
            abandoned[0].abort()
            abandoned.clear()

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        return thread


def _why_stopped(receiving: Future[list[Any]]) -> str:
    """Return the reason why a server's workers, which should still receive, have stopped."""
    return f"it stopped receiving: {receiving.exception() or 'without an error'}"


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def listening_store(address: str) -> tuple[Any, int]:
    """Return a key-value store that holds the data and listens on this address, and its port."""
    listener = listen(address)
    port = int(listener.getsockname()[1])
    return open_store(address, port, listener.detach()), port


def open_store(host: str, port: int, listener: int | None = None) -> Any:
    """Return the key-value store at an address.

    With a listening socket's descriptor it is the store that holds the data.
    """
    kind: Any = dist.TCPStore  # its type stubs are incomplete
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
    """Return this machine's address on the way to another one (127.0.0.1 to itself). Nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


# ---- the trainer's side ----


@dataclass(frozen=True)
class ServerWorkers:
    """The workers of one server.

    Attributes:
        url: The address of the server.
        num_workers: Number of its workers.
        call: Function of (method, **arguments) that returns the workers' answers, in order, some time later.
    """

    url: str
    num_workers: int
    call: Callable[..., Future[list[Any]]]


class WeightSender:
    """The trainer's side of the transfer.

    It sends weights to servers that are paused, over NCCL between CUDA devices or gloo between CPUs.
    """

    def __init__(self, backend: str, device: torch.device, dtype: torch.dtype) -> None:
        if backend == "nccl" and device.type != "cuda":
            raise ValueError(f"weight_backend is nccl and the trainer runs on {device.type}; use gloo")
        self._backend = backend
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._dtype = dtype
        self._groups: dict[str, Group] = {}
        self._leaving: list[threading.Thread] = []
        self._update = 0

    def send(self, servers: Sequence[ServerWorkers], weights: Pairs, version: int) -> dict[str, str]:
        """Walk `weights` once and send them to all servers.

        Groups are set up with servers that are new. An error of `weights` itself is raised, once the servers
        know that they got only a part.

        Returns:
            For each server that failed, its address and the reason.
        """
        self._update += 1
        failed = self._meet(servers)
        receiving = {
            server.url: server.call("rollout_receive", update=str(self._update), version=str(version))
            for server in servers
            if server.url not in failed
        }
        number = 0
        end: dict[str, Any] = {}
        try:
            for name, tensor in weights:
                dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
                data = tensor.detach().to(self._device, dtype).contiguous()
                message = {
                    "name": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "shape": list(data.shape),
                }
                sent_to = receiving.keys() - failed.keys()
                for url in sent_to:
                    if receiving[url].done():  # it should still wait for this tensor
                        failed[url] = _why_stopped(receiving[url])
                        continue
                    group = self._groups[url]
                    group.announce(self._update, number, message)
                    group.under_way = group.members.broadcast(data, 0)
                give_up = time.monotonic() + TENSOR_SECONDS
                for url in sent_to - failed.keys():
                    if reason := self._groups[url].why_broken(receiving[url], give_up):
                        failed[url] = reason
                number += 1
        except BaseException as error:
            end = {"failed": repr(error)}
            raise
        finally:
            for url in receiving.keys() - failed.keys():
                self._groups[url].announce(self._update, number, end)
            self._leave(failed)
        for url in receiving.keys() - failed.keys():
            try:
                versions = receiving[url].result(TRANSFER_SECONDS)
            except Exception as error:  # whatever the call or the worker raised, it has no usable weights
                failed[url] = f"its workers did not take the weights: {error}"
                continue
            if any(str(answer) != str(version) for answer in versions):
                failed[url] = f"its workers have the versions {versions} instead of {version}"
        self._leave(failed)
        return failed

    def _leave(self, failed: Iterable[str]) -> None:
        self._leaving += [self._groups.pop(url).leave() for url in self._groups.keys() & set(failed)]

    def close(self) -> None:
        """Leave the groups. A thread that comes out of torch while the process ends would abort it."""
        self._groups.clear()
        for thread in self._leaving:
            thread.join(LEAVE_SECONDS)

    def _meet(self, servers: Sequence[ServerWorkers]) -> dict[str, str]:
        """Make a group with each server, and leave all others. Returns the reasons of failures by address."""
        failed = {}
        urls = {server.url for server in servers}
        self._groups = {url: group for url, group in self._groups.items() if url in urls}
        for server in servers:
            if server.url not in self._groups:
                try:
                    self._groups[server.url] = self._join(server)
                except Exception as error:  # torch passes on whatever its store and sockets raise
                    failed[server.url] = f"no group with its workers: {error}"
        return failed

    def _join(self, server: ServerWorkers) -> Group:
        address = urlsplit(server.url)
        if address.hostname is None:
            raise ValueError(f"{server.url!r} is no server address; expected http://HOST:PORT")
        host = local_address(address.hostname, address.port or 80)
        size = 1 + server.num_workers

        def invite(port: int) -> Future[list[Any]]:
            return server.call(
                "rollout_join", backend=self._backend, host=host, port=str(port), size=str(size)
            )

        return Group.lead(self._backend, self._device, host, size, invite)
