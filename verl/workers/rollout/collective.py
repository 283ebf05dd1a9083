"""The policy's weights on their way to the processes that sample, by broadcasts in a group of all of them.

    trainer, rank 0: pairs -> buckets of bytes --> store: manifest (names, dtypes, shapes, CRC of each bucket)
                                    |
                                    +--broadcast, one at a time (NCCL, gloo)--> sampler 0, 1, ..: checks CRC

The trainer gives the others a `MeetingPoint`, and sends in a thread. A group lives for an epoch, in which its
members stay the same, and it knows nothing of torch.distributed's default group:

    epoch e: members meet -> version, version, ... -> a member is lost: its name, node and cause are noted
    epoch e + 1: those that lack the version, and who has come anew, meet -> the version from its beginning

Each member keeps a connection to the trainer open, on which it says its name. The system closes the
connection when the process ends, so the trainer sees at once who is gone. Who neither ends nor goes on is
given up after a time. Nothing is encrypted.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.sessions.engine_contract import EngineUnavailable
from verl.workers.rollout.remote.weights import (
    Group,
    Pairs,
    listen,
    listening_store,
    local_address,
    open_store,
)

logger = logging.getLogger(__name__)

BUCKET_BYTES = 64 * 2**20
ALIGNMENT = 16  # bytes; each tensor of a bucket begins at a multiple of it
POLL_SECONDS = 0.002
EPOCH_SECONDS = 0.05  # between two looks at the number of the epoch
NOTICE_SECONDS = 2.0  # how long the end of a process takes to be seen once a transfer broke
LEAVE_SECONDS = 2.0  # for the groups that were left, when the run ends
MEET_AGAIN_SECONDS = 30.0  # for those who have just been there
MOST_ATTEMPTS = 3  # transfers of one version that break while nobody is seen to be lost


class WeightsDamaged(RuntimeError):
    """The error of a bucket whose bytes are not those that were sent; it names the tensors."""


class WeightsNotReceived(RuntimeError):
    """The error of a member that did not get a version in time."""


class TransferBroken(RuntimeError):
    """The error of a transfer that has to begin again in another epoch.

    Attributes:
        lost: The reason of each lost member, by its rank. It is empty while nobody knows who it is.
    """

    def __init__(self, message: str, lost: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.lost = lost or {}


@dataclass(frozen=True)
class MeetingPoint:
    """What the trainer gives to its samplers in place of a version's tensors.

    Attributes:
        address: The trainer's address.
        port: The port of the key-value store.
        epoch: The number of the epoch when the version was announced; it may have risen since.
        version: The version of the weights.
        number: How many versions were announced before; one that is sent again counts again.
        backend: "nccl" or "gloo".
    """

    address: str
    port: int
    epoch: int
    version: int
    number: int
    backend: str


# ---- buckets ----


@dataclass
class Bucket:
    """Tensors whose bytes lie one after another.

    Attributes:
        data: The bytes, uint8, in CPU memory; a little longer than what is used of it.
        num_bytes: How many of them are used.
        tensors: (name, dtype, shape, offset in bytes) of each tensor.
    """

    data: Tensor
    num_bytes: int = 0
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)

    def used(self) -> Tensor:
        """Return the bytes that are used."""
        return self.data[: self.num_bytes]

    def has_room_for(self, num_bytes: int) -> bool:
        return self.num_bytes + num_bytes <= len(self.data)

    def add(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor to the end."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.tensors.append((name, dtype, list(tensor.shape), self.num_bytes))
        target = self.data[self.num_bytes : self.num_bytes + tensor.nbytes]
        target.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
        self.num_bytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT

    def pairs(self) -> list[tuple[str, Tensor]]:
        """Return the tensors, which share the memory of the bytes."""
        pairs = []
        for name, dtype_name, shape, offset in self.tensors:
            dtype = getattr(torch, dtype_name)
            num_bytes = dtype.itemsize * torch.Size(shape).numel()
            pairs.append((name, self.data[offset : offset + num_bytes].view(dtype).reshape(shape)))
        return pairs

    def checksum(self) -> int:
        return zlib.crc32(self.used().numpy().data)


class BucketList:
    """The buckets of a version. Their memory is used again for the next one."""

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Bucket] = []

    def fill(self, pairs: Pairs) -> None:
        """Copy a version into the buckets. A tensor larger than a bucket gets one of its size."""
        memory = [bucket.data for bucket in self.buckets]
        self.buckets = []
        for name, tensor in pairs:
            num_bytes = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            if not self.buckets or not self.buckets[-1].has_room_for(num_bytes):
                self.buckets.append(Bucket(self._memory(memory, num_bytes)))
            self.buckets[-1].add(name, tensor)

    def manifest(self) -> list[dict[str, Any]]:
        """Return what a member has to know of each bucket before it comes."""
        return [
            {"num_bytes": bucket.num_bytes, "checksum": bucket.checksum(), "tensors": bucket.tensors}
            for bucket in self.buckets
        ]

    def _memory(self, unused: list[Tensor], num_bytes: int) -> Tensor:
        """Return memory for so many bytes."""
        size = max(num_bytes, self.bucket_bytes)
        if unused and len(unused[0]) == size:
            return unused.pop(0)
        return torch.empty(size, dtype=torch.uint8)


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Have what follows wait for no other work of a CUDA device; on a CPU nothing happens."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)  # a thread begins with device 0
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def wait_for_threads(threads: Iterable[threading.Thread]) -> None:
    """Wait a moment for threads, since one that comes out of torch while the process ends would abort it."""
    give_up = time.monotonic() + LEAVE_SECONDS
    for thread in threads:
        thread.join(max(0.0, give_up - time.monotonic()))


# ---- the trainer's side ----


@dataclass(eq=False)
class Connection:
    """An open connection of a member.

    Attributes:
        socket: The connection.
        text: What came on it so far.
        rank: The member's rank among the samplers; -1 until it has said it.
        label: The member's name and node.
        token: A text that no other connection has.
    """

    socket: socket.socket
    text: bytes = b""
    rank: int = -1
    label: str = ""
    token: str = ""

    def is_open(self) -> bool:
        """Read what has come, and return whether the other side still holds the connection."""
        try:
            data = self.socket.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            return False
        self.text += data
        if self.rank < 0 and self.text.endswith(b"\n"):
            try:
                message = json.loads(self.text)
                self.label = message["label"]
                self.token = message["token"]
                self.rank = message["rank"]
            except (ValueError, KeyError, TypeError):  # it is no member
                return False
        return True


class MemberConnections:
    """The connections that members keep open for as long as they live."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._open: list[Connection] = []

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def present(self) -> dict[int, Connection]:
        """Return the newest connection of each member that is there now, by its rank."""
        with suppress(BlockingIOError):
            while True:
                accepted, _ = self._listener.accept()
                accepted.setblocking(False)
                self._open.append(Connection(accepted))
        for connection in list(self._open):
            if not connection.is_open():
                self.close_one(connection)
        return {connection.rank: connection for connection in self._open if connection.rank >= 0}

    def close_one(self, connection: Connection) -> None:
        """Have nothing more to do with a member until it comes anew."""
        connection.socket.close()
        if connection in self._open:
            self._open.remove(connection)

    def close(self) -> None:
        self._listener.close()
        for connection in list(self._open):
            self.close_one(connection)


class CollectiveSender:
    """The trainer's side, on its rank 0.

    Args:
        address: The address of this machine on the way to the samplers.
        num_members: Number of samplers.
        backend: "nccl" or "gloo".
        device: The device on which NCCL finds the tensors; gloo takes them from CPU memory.
        seconds: How long a member may take to come, to take a bucket, and to answer.
        bucket_bytes: The size of a bucket.
    """

    def __init__(
        self,
        address: str,
        num_members: int,
        backend: str,
        device: torch.device,
        seconds: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.address = address
        self.backend = backend
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.seconds = seconds
        self.epoch = 0
        self.lost: dict[int, str] = {}  # rank -> who was lost and why, until it has come anew
        self._num_members = num_members
        self._buckets = BucketList(bucket_bytes)
        self._store, self._port = listening_store(address)
        self._connections = MemberConnections(address)
        self._store.set("epoch", "0")
        self._store.set("connections", str(self._connections.port))
        self._group: Group | None = None
        self._members: dict[int, Connection] = {}  # those of the group
        self._number = -1  # of the present version
        self._done: set[int] = set()  # ranks that have answered for it
        self._leaving: list[threading.Thread] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._sent: Future[None] | None = None
        self._closing = threading.Event()

    def send_in_background(self, pairs: Pairs, version: int) -> MeetingPoint:
        """Copy a version, and send it in a thread once the version before it is sent.

        Args:
            pairs: The whole model.
            version: Its version. A version may be sent again.

        Returns:
            What a member needs to get it.

        Raises:
            EngineUnavailable: If no member took the version before it.
        """
        if self._sent is not None:
            self._sent.result()
        self._buckets.fill(pairs)
        self._number += 1
        self._done = set()
        self._sent = self._thread.submit(self._send, version)
        return MeetingPoint(self.address, self._port, self.epoch, version, self._number, self.backend)

    def wait(self) -> None:
        """Wait until the last version is sent, and raise what `send_in_background` would raise."""
        if self._sent is not None:
            self._sent.result()

    def close(self) -> None:
        """End what is under way, and leave the group."""
        self._closing.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._leave()
        wait_for_threads(self._leaving)
        self._connections.close()

    def _send(self, version: int) -> None:
        """Send what is in the buckets to all members, again and again while members are lost.

        Raises EngineUnavailable if no member takes it, or if it breaks and nobody is seen to be lost.
        """
        num_breaks = 0
        seconds = self.seconds
        self._welcome()
        while lacking := self._lacking():
            try:
                self._meet(version, seconds)
                with on_own_stream(self.device):
                    self._broadcast(version)
                self._await_answers(version)
            except TransferBroken as error:
                logger.warning(
                    "weights %d broke off, and go again to those that lack them: %s", version, error
                )
                self._leave()
                self._note_answers()
                self._note_lost(error.lost)
                num_breaks = num_breaks + 1 if self._lacking() == lacking else 0
                if num_breaks == MOST_ATTEMPTS:
                    raise EngineUnavailable(f"weights {version} could not be sent: {error}") from error
            seconds = min(self.seconds, MEET_AGAIN_SECONDS)
        for rank, member in self._members.items():
            if rank in self._done:
                self._store.delete_key(self._answer_key(member))
        self._store.delete_key(f"{self.epoch}/{self._number}")
        if not self._done:
            reasons = "; ".join(self.lost.values())
            raise EngineUnavailable(f"no process that samples took weights {version}: {reasons}")

    def _welcome(self) -> None:
        """Count those who were lost and have come anew among the members again."""
        for rank in self.lost.keys() & self._connections.present().keys():
            del self.lost[rank]

    def _lacking(self) -> set[int]:
        """Return the ranks that are to get the present version and have not said that they have it."""
        return set(range(self._num_members)) - self.lost.keys() - self._done

    def _answer_key(self, member: Connection) -> str:
        return f"answer/{self._number}/{member.token}"

    def _note_answers(self) -> None:
        """Note which members have the version. What one of them found wrong ends its membership."""
        damaged = {}
        for rank, member in self._members.items():
            key = self._answer_key(member)
            if rank not in self._done and self._store.check([key]):
                if text := self._store.get(key).decode():
                    damaged[rank] = f"{member.label}: {text}"
                else:
                    self._done.add(rank)
        if damaged:  # who has the version meets anew before the next one
            self._leave()
            self._note_lost(damaged)

    def _note_lost(self, lost: dict[int, str]) -> None:
        for rank, reason in lost.items():
            logger.warning("%s", reason)
            self.lost.setdefault(rank, reason)  # what ended its membership, not what followed
            if rank in self._members:
                self._connections.close_one(self._members.pop(rank))

    # ---- the acts of a transfer, each of which raises TransferBroken

    def _meet(self, version: int, seconds: float) -> None:
        """Have a group with all members that are not lost, and with who has come anew."""
        doing = f"before weights {version}"
        self._check_members(doing)
        lacking = self._lacking()

        def all_are_there() -> bool:
            return lacking <= self._connections.present().keys()

        if not self._until(all_are_there, seconds):
            missing = lacking - self._connections.present().keys()
            self._give_up(missing, f"did not come within {seconds:g} s {doing}")
        present = {
            rank: member for rank, member in self._connections.present().items() if rank not in self._done
        }
        self._welcome()
        if self._group is not None and present == self._members:
            return
        self._leave()
        self._members = present
        self.epoch += 1
        prefix = f"{self.epoch}/"
        ranks = sorted(present)
        self._store.set(f"{prefix}members", json.dumps([[rank, present[rank].token] for rank in ranks]))
        self._store.set("epoch", str(self.epoch))

        def all_have_joined() -> bool:
            self._check_members(doing)
            self._note_answers()
            if self._done & present.keys():  # a moment ago, in the group that broke
                raise TransferBroken(f"some have weights {version} already")
            return bool(self._store.check([f"{prefix}joined/{rank}" for rank in ranks]))

        if not self._until(all_have_joined, seconds):
            absent = {rank for rank in ranks if not self._store.check([f"{prefix}joined/{rank}"])}
            self._give_up(absent, f"did not join the group within {seconds:g} s {doing}")
        size = 1 + len(ranks)
        self._store.set(f"{prefix}complete", "")
        store = dist.PrefixStore(prefix, self._store)
        try:
            self._group = Group(store, self.backend, self.device, 0, size, self.address, seconds)
        except RuntimeError as error:  # torch raises it when a peer does not answer
            self._explain(f"the group could not be made: {error}", doing)

    def _broadcast(self, version: int) -> None:
        """Announce the version, and send its buckets."""
        group = self._group
        assert group is not None
        self._store.set(f"{self.epoch}/{self._number}", json.dumps(self._buckets.manifest()))
        number = len(self._buckets.buckets)
        for index, bucket in enumerate(self._buckets.buckets, 1):
            doing = f"during bucket {index} of {number} of weights {version}"
            group.under_way = group.members.broadcast(bucket.used().to(self.device), 0)

            def is_over(doing: str = doing) -> bool:
                self._check_members(doing)
                return bool(group.under_way.is_completed())

            if not self._until(is_over, self.seconds):
                raise TransferBroken(f"somebody took nothing for {self.seconds:g} s {doing}")
            try:
                group.under_way.wait()
            except RuntimeError as error:  # torch raises it when a peer is gone
                self._explain(f"the transfer broke {doing}: {error}", doing)

    def _await_answers(self, version: int) -> None:
        """Wait until all members of the group have the version or have found it damaged."""
        doing = f"at the end of weights {version}"

        def all_have_answered() -> bool:
            self._note_answers()
            answered = self._members.keys() <= self._done
            if not answered:
                self._check_members(doing)
            return answered

        if not self._until(all_have_answered, self.seconds):
            silent = self._members.keys() - self._done
            self._give_up(silent, f"said nothing for {self.seconds:g} s {doing}")

    # ---- helpers

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, and return whether it did so in time."""
        give_up = time.monotonic() + seconds
        while not condition():
            if self._closing.wait(POLL_SECONDS):
                raise EngineUnavailable("the trainer ends")
            if time.monotonic() > give_up:
                return False
        return True

    def _check_members(self, doing: str) -> None:
        """Raise TransferBroken if a member has closed its connection, or says that the transfer broke."""
        present = self._connections.present()
        gone = {rank: member for rank, member in self._members.items() if present.get(rank) is not member}
        if gone:
            lost = {
                rank: f"{member.label} ended {doing}: its connection is closed"
                for rank, member in gone.items()
            }
            raise TransferBroken("; ".join(lost.values()), lost)
        key = f"{self.epoch}/broken"
        if self._group is not None and self._store.check([key]):
            raise TransferBroken(f"it broke {doing}: {self._store.get(key).decode()}")

    def _give_up(self, ranks: Iterable[int], reason: str) -> None:
        lost = {}
        for rank in ranks:
            member = self._members.get(rank)
            label = member.label if member is not None else f"sampler-{rank}"
            lost[rank] = f"{label} {reason}"
        raise TransferBroken("; ".join(lost.values()), lost)

    def _explain(self, message: str, doing: str) -> None:
        """Raise TransferBroken, with the members that are seen to be gone within a moment."""

        def nobody_ended() -> bool:
            self._check_members(doing)
            return False

        self._leave()  # what members say of the broken group explains nothing more
        self._until(nobody_ended, NOTICE_SECONDS)
        raise TransferBroken(message)

    def _leave(self) -> None:
        if self._group is not None:
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            self._leaving.append(self._group.leave())
            self._group = None


# ---- the sampler's side ----


class CollectiveReader:
    """The side of a process that samples, which is `rank` among those processes.

    Args:
        rank: The rank.
        device: The device that receives with NCCL.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.num_bytes = 0  # bytes that came so far
        self._point: MeetingPoint | None = None
        self._epoch = 0  # that of the group
        self._store: Any = None
        self._connection: socket.socket | None = None
        self._token = ""  # of the connection
        self._group: Group | None = None
        self._leaving: list[threading.Thread] = []
        self._reading = threading.Lock()
        self._closing = threading.Event()

    def read(self, point: MeetingPoint, seconds: float) -> list[tuple[str, Tensor]]:
        """Return a version in CPU memory, bit for bit, in tensors that nobody changes.

        Args:
            point: What the trainer gave for it.
            seconds: How long it may take.

        Raises:
            WeightsDamaged: If a bucket is not what was sent.
            WeightsNotReceived: If it did not come in time, or the trainer is gone.
        """
        give_up = time.monotonic() + seconds
        with self._reading:
            try:
                return self._read(point, give_up)
            except (dist.DistError, OSError) as error:
                self._disconnect()
                trainer = f"the trainer at {point.address}:{point.port}"
                message = f"weights {point.version} did not come: {trainer} does not answer ({error})"
                raise WeightsNotReceived(message) from error
            except BaseException:  # the trainer must not wait for this process
                self._disconnect()
                raise

    def close(self) -> None:
        """End the waiting of everyone who waits in `read`, and leave the group."""
        self._closing.set()
        if self._reading.acquire(timeout=NOTICE_SECONDS):
            self._disconnect()
        wait_for_threads(self._leaving)

    def _read(self, point: MeetingPoint, give_up: float) -> list[tuple[str, Tensor]]:
        """Return a version; begin again in the next epoch whenever the transfer breaks."""
        self._connect(point)
        while True:
            try:
                self._join_newest_epoch(point, give_up)
                with on_own_stream(self._device_of(point)):
                    buckets = self._receive(point, give_up)
            except TransferBroken as error:
                logger.warning("weights %d break off: %s", point.version, error)
                if self._group is not None:
                    self._store.set(f"{self._epoch}/broken", f"sampler-{self.rank}: {error}")
                self._leave()
            else:
                return [pair for bucket in buckets for pair in bucket.pairs()]

    def _connect(self, point: MeetingPoint) -> None:
        """Open the connections to the trainer, unless they are open."""
        known = self._point
        if known is not None and self._connection is not None:
            if (known.address, known.port) == (point.address, point.port):
                return
            self._disconnect()
        self._point = point
        self._store = open_store(point.address, point.port)
        here = local_address(point.address, point.port)
        label = f"sampler-{self.rank} on node {socket.gethostname()} ({here}, pid {os.getpid()})"
        connection = socket.create_connection((point.address, int(self._store.get("connections"))))
        self._token = uuid.uuid4().hex
        message = {"rank": self.rank, "label": label, "token": self._token}
        connection.sendall((json.dumps(message) + "\n").encode())
        self._connection = connection

    def _join_newest_epoch(self, point: MeetingPoint, give_up: float) -> None:
        """Join the group of the newest epoch that counts this process, unless it is in it."""
        while True:
            epoch = int(self._store.get("epoch"))
            if epoch == self._epoch and self._group is not None:
                return
            prefix = f"{epoch}/"
            if epoch > self._epoch and epoch > 0:
                members = json.loads(self._store.get(f"{prefix}members"))
                if [self.rank, self._token] in members:
                    break
            self._pause(point, give_up, EPOCH_SECONDS)
        self._leave()
        self._epoch = epoch
        self._store.set(f"{prefix}joined/{self.rank}", "")
        while not self._store.check([f"{prefix}complete"]):
            self._check_epoch()
            self._pause(point, give_up, POLL_SECONDS)
        store = dist.PrefixStore(prefix, self._store)
        here = local_address(point.address, point.port)
        place = 1 + members.index([self.rank, self._token])
        device = self._device_of(point)
        size = 1 + len(members)
        seconds = max(1.0, give_up - time.monotonic())
        try:
            self._group = Group(store, point.backend, device, place, size, here, seconds)
        except RuntimeError as error:  # torch raises it when a peer does not answer
            raise TransferBroken(f"the group could not be made: {error}") from error

    def _receive(self, point: MeetingPoint, give_up: float) -> list[Bucket]:
        """Return the buckets of a version that the present group gets."""
        group = self._group
        assert group is not None
        key = f"{self._epoch}/{point.number}"
        while not self._store.check([key]):
            self._check_epoch()
            self._pause(point, give_up, POLL_SECONDS)
        buckets = []
        damaged = []
        manifest = json.loads(self._store.get(key))
        for index, entry in enumerate(manifest, 1):
            data = self._receive_bytes(group, point, entry["num_bytes"], give_up)
            bucket = Bucket(data, entry["num_bytes"], entry["tensors"])
            self.num_bytes += bucket.num_bytes
            buckets.append(bucket)
            if bucket.checksum() != entry["checksum"]:
                names = ", ".join(name for name, *_ in bucket.tensors)
                damaged.append(f"bucket {index} of {len(manifest)} of weights {point.version} ({names})")
        reason = ""
        if damaged:
            reason = f"{'; '.join(damaged)}: the bytes are not those that were sent, their CRC is another"
        self._store.set(f"answer/{point.number}/{self._token}", reason)
        if damaged:
            raise WeightsDamaged(reason)
        return buckets

    def _receive_bytes(self, group: Group, point: MeetingPoint, num_bytes: int, give_up: float) -> Tensor:
        """Return what is broadcast next, in CPU memory."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device_of(point))
        group.under_way = group.members.broadcast(data, 0)
        look = time.monotonic() + EPOCH_SECONDS
        while not group.under_way.is_completed():
            if time.monotonic() > look:
                self._check_epoch()
                look = time.monotonic() + EPOCH_SECONDS
            self._pause(point, give_up, POLL_SECONDS)
        try:
            group.under_way.wait()
        except RuntimeError as error:  # torch raises it when a peer is gone
            raise TransferBroken(str(error)) from error
        return data.cpu()

    def _device_of(self, point: MeetingPoint) -> torch.device:
        return self.device if point.backend == "nccl" else torch.device("cpu")

    def _check_epoch(self) -> None:
        """Raise TransferBroken if the trainer has begun another epoch."""
        epoch = int(self._store.get("epoch"))
        if epoch != self._epoch:
            raise TransferBroken(f"epoch {epoch} has begun")

    def _pause(self, point: MeetingPoint, give_up: float, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise WeightsNotReceived("the process ends")
        if time.monotonic() > give_up:
            raise WeightsNotReceived(
                f"weights {point.version} did not come from {point.address}:{point.port} in time; epoch "
                f"{self._epoch}. Is the address one that all nodes reach?"
            )

    def _leave(self) -> None:
        if self._group is not None:
            self._leaving = [thread for thread in self._leaving if thread.is_alive()]
            self._leaving.append(self._group.leave())
            self._group = None

    def _disconnect(self) -> None:
        self._leave()
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._store = None
        self._epoch = 0
