"""Weights in a group of all processes that sample: every bit of them, and what happens when one is lost."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from collective_members import CPU, Member, bits

from verl.sessions.engine_contract import EngineUnavailable
from verl.workers.rollout import collective
from verl.workers.rollout.collective import (
    CollectiveReader,
    CollectiveSender,
    WeightsDamaged,
    WeightsNotReceived,
)


def weights(seed):
    """Tensors of several kinds, one of which is larger than a bucket, with bits that are no number."""
    torch.manual_seed(seed)
    table = torch.randn(40, 30)
    table[3, 4] = float("nan")
    return [
        ("table", table),
        ("norm", torch.randn(7).to(torch.bfloat16)),
        ("count", torch.tensor(seed)),
        ("nothing", torch.zeros(0, 5)),
        ("head", torch.randn(30, 20).T),
        ("scale", torch.randn(5)),
    ]


@pytest.fixture
def make_sender():
    made = []

    def make(num_members, seconds=60.0):
        made.append(CollectiveSender("127.0.0.1", num_members, "gloo", CPU, seconds, bucket_bytes=2048))
        return made[-1]

    yield make
    for sender in made:
        sender.close()


@pytest.fixture
def threads(monkeypatch):
    """Readers in threads of this process: read(reader, point) gives a future of the pairs' bits."""
    monkeypatch.setattr(collective, "LEAVE_SECONDS", 0.1)  # gloo waits for those that were killed
    pool = ThreadPoolExecutor(4)
    readers = []

    def read(reader, point, seconds=60):
        readers.append(reader)
        return pool.submit(lambda: bits(reader.read(point, seconds)))

    yield read
    for reader in readers:
        reader.close()
    pool.shutdown()


class Flipping(CollectiveReader):
    """A member on whose way one byte of the second bucket changes."""

    num_buckets = 0

    def _receive_bytes(self, group, point, num_bytes, give_up):
        data = super()._receive_bytes(group, point, num_bytes, give_up)
        self.num_buckets += 1
        if self.num_buckets == 2:
            data[5] ^= 1
        return data


def test_another_process_gets_every_version_bit_for_bit(make_sender):
    member = Member(0)
    sender = make_sender(1)
    for version in (3, 4, 4):
        member.points.put(sender.send_in_background(iter(weights(version)), version))
        assert member.answers.get(timeout=60) == bits(weights(version))
        sender.wait()
    assert sender.epoch == 1 and sender.lost == {}
    member.end()


def test_a_member_that_is_killed_in_a_broadcast_is_named_and_the_others_get_this_version_and_the_next(
    make_sender, threads
):
    killed = Member(1, dies=True)
    sender = make_sender(3, seconds=20.0)  # so long gloo holds on to what broke
    readers = {rank: CollectiveReader(rank, CPU) for rank in (0, 2)}
    large = [("large", torch.arange(2**21)), *weights(1)]  # no buffer of the system holds it
    point = sender.send_in_background(large, 1)
    killed.points.put(point)
    found = [threads(reader, point) for reader in readers.values()]
    started = time.monotonic()
    assert [future.result(60) for future in found] == [bits(large)] * 2
    sender.wait()
    assert time.monotonic() - started < 15  # nobody waits for the deadline
    assert list(sender.lost) == [1] and sender.epoch == 2
    label = f"sampler-1 on node .*127.0.0.1, pid {killed.process.pid}\\) ended .* weights 1"
    assert pytest.RaisesExc(RuntimeError, match=label).matches(RuntimeError(sender.lost[1]))
    point = sender.send_in_background(weights(2), 2)
    found = [threads(reader, point) for reader in readers.values()]
    assert [future.result(60) for future in found] == [bits(weights(2))] * 2

    successor = CollectiveReader(1, CPU)
    successor._connect(point)
    point = sender.send_in_background(weights(3), 3)
    found = [threads(reader, point) for reader in (*readers.values(), successor)]
    assert [future.result(60) for future in found] == [bits(weights(3))] * 3
    assert sender.lost == {} and sender.epoch == 3
    killed.end()


def test_a_changed_byte_is_an_error_that_names_the_bucket_and_its_tensors(make_sender, threads):
    sender = make_sender(2)
    good = CollectiveReader(0, CPU)
    point = sender.send_in_background(weights(1), 1)
    found = threads(good, point)
    with pytest.raises(WeightsDamaged, match=r"bucket 2 of 4 of weights 1 \(norm, count, nothing\)"):
        threads(Flipping(1, CPU), point).result(60)
    assert found.result(60) == bits(weights(1))
    sender.wait()
    assert "pid" in sender.lost[1] and "norm, count" in sender.lost[1]
    point = sender.send_in_background(weights(2), 2)
    assert threads(good, point).result(60) == bits(weights(2))


def test_a_member_that_does_nothing_is_given_up_and_the_trainer_waits_no_longer_than_it_was_told(
    make_sender, threads
):
    sender = make_sender(2, seconds=1.5)
    point = sender.send_in_background(weights(1), 1)
    silent = CollectiveReader(1, CPU)
    silent._connect(point)
    assert threads(CollectiveReader(0, CPU), point).result(20) == bits(weights(1))
    sender.wait()
    assert "sampler-1 on node" in sender.lost[1] and "did not join the group within 1.5 s" in sender.lost[1]
    silent.close()


def test_a_trainer_without_members_says_so_and_a_member_without_a_trainer_too(make_sender):
    sender = make_sender(2, seconds=0.3)
    point = sender.send_in_background(weights(1), 1)
    expected = "took weights 1: sampler-0 did not come within 0.3 s before weights 1; sampler-1 did"
    with pytest.raises(EngineUnavailable, match=expected):
        sender.send_in_background(weights(2), 2)
    reader = CollectiveReader(0, CPU)
    with pytest.raises(WeightsNotReceived, match="weights 1 did not come from 127.0.0.1"):
        reader.read(point, 0.3)
    reader.close()
