"""Weights from an actor to rollout processes: whole, in the dtype asked for, never half of them unsaid."""

import functools
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from verl.workers import weight_channel
from verl.workers.weight_channel import SendsWeights, WeightReceiver

CPU = torch.device("cpu")


class Actor(SendsWeights):
    """Rank 0 of an actor, with a stream of weights given."""

    def __init__(self, pairs, dtype: str = "auto") -> None:
        super().__init__()
        self.device = CPU
        mixed = {"param_dtype": None, "reduce_dtype": "fp32"}
        fsdp = {"mixed_precision": mixed, "model_dtype": "fp32"}
        self.config = SimpleNamespace(
            actor=SimpleNamespace(fsdp_config=fsdp), rollout=SimpleNamespace(dtype=dtype)
        )
        self.engine = SimpleNamespace(weights=lambda: iter(pairs()), loaded=nullcontext, weights_version=3)


def connected(actor: Actor, count: int) -> list[WeightReceiver]:
    address, port = actor.open_weight_channel()
    receivers: list[WeightReceiver] = [None] * count  # type: ignore[list-item]

    def join(rank: int) -> None:
        receivers[rank] = WeightReceiver(address, port, rank, count, CPU)

    joining = [threading.Thread(target=join, args=(rank,)) for rank in range(count)]
    for thread in joining:
        thread.start()
    actor.gather_receivers(count)
    for thread in joining:
        thread.join()
    return receivers


def exchange(actor: Actor, receivers: list[WeightReceiver]) -> list[dict[str, torch.Tensor] | Exception]:
    """What each receiver got, or the error that it met."""
    found: list = [None] * len(receivers)

    def receive(rank: int) -> None:
        try:
            found[rank] = dict(receivers[rank].receive())
        except RuntimeError as error:
            found[rank] = error

    threads = [threading.Thread(target=receive, args=(rank,)) for rank in range(len(receivers))]
    for thread in threads:
        thread.start()
    try:
        actor.send_weights()
    finally:
        for thread in threads:
            thread.join()
    return found


def test_every_receiver_gets_all_weights_again_and_again():
    version = [0.0]

    def pairs():
        yield "embed", torch.arange(12.0).view(3, 4) + version[0]
        yield "norm", torch.full((5,), 2.0 + version[0])

    actor = Actor(pairs)
    receivers = connected(actor, 2)
    assert actor.weights_version() == 3
    for version[0] in (0.0, 100.0):
        for got in exchange(actor, receivers):
            assert isinstance(got, dict) and list(got) == ["embed", "norm"]
            assert torch.equal(got["embed"], torch.arange(12.0).view(3, 4) + version[0])
            assert torch.equal(got["norm"], torch.full((5,), 2.0 + version[0]))


def test_weights_travel_in_the_rollouts_dtype():
    actor = Actor(lambda: [("w", torch.randn(7, 3))], dtype="bfloat16")
    (got,) = exchange(actor, connected(actor, 1))
    assert isinstance(got, dict) and got["w"].dtype == torch.bfloat16


def test_a_stream_that_breaks_off_is_an_error_on_both_sides_and_the_next_one_works():
    broken = [True]

    def pairs():
        yield "first", torch.ones(3)
        if broken[0]:
            raise ValueError("a disk is gone")

    actor = Actor(pairs)
    receivers = connected(actor, 1)
    with pytest.raises(ValueError, match="a disk is gone"):
        exchange(actor, receivers)
    broken[0] = False
    (got,) = exchange(actor, receivers)
    assert isinstance(got, dict) and torch.equal(got["first"], torch.ones(3))


def test_what_was_told_of_an_update_stays_until_the_next_and_no_longer(monkeypatch):
    """A rank may be a few buckets behind the actor, so none of an update's messages may go before its end."""
    small = functools.partial(weight_channel.pack, limit=64)
    monkeypatch.setattr(weight_channel, "pack", small)
    actor = Actor(lambda: [(f"w{i}", torch.full((16,), float(i))) for i in range(4)])
    receivers = connected(actor, 2)
    store, numbers = actor._channel._store, []
    for update in (1, 2, 3):
        assert all(isinstance(got, dict) and len(got) == 4 for got in exchange(actor, receivers))
        assert store.check([f"{update}/{number}" for number in range(5)])  # four buckets and the end
        numbers.append(store.num_keys())
    assert len(set(numbers)) == 1
