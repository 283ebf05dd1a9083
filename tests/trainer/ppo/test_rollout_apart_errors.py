"""Calls of two groups that need each other: which of their errors is raised, and when."""

import threading
import time

import pytest

from verl.protocol import DataProtoFuture
from verl.single_controller.base.errors import ConnectionLostError, WorkerDiedError
from verl.trainer.ppo import rollout_apart

NEVER = float("inf")
DIED, LOST, OWN = WorkerDiedError("rank 1 died"), ConnectionLostError("lost"), MemoryError("out of memory")
ECHO = RuntimeError("the trainer broke off")


def call(seconds: float, error: Exception | None) -> DataProtoFuture:
    """A call that ends after so long, well or not."""

    def resolve(handles):
        threading.Event().wait(None if seconds == NEVER else seconds)
        if error is not None:
            raise error
        return handles

    return DataProtoFuture([1], resolve, lambda values: values)


@pytest.mark.parametrize(
    ("sender", "receiver", "raised"),
    [
        ((0.0, None), (0.1, None), None),
        ((0.1, None), (0.0, None), None),
        ((NEVER, None), (0.0, DIED), DIED),
        ((0.0, DIED), (NEVER, None), DIED),
        ((0.0, LOST), (0.3, DIED), DIED),
        ((0.0, OWN), (0.3, DIED), DIED),
        ((0.3, OWN), (0.0, ECHO), OWN),
        ((0.0, LOST), (0.1, None), LOST),
        ((NEVER, None), (0.0, ECHO), ECHO),
        ((NEVER, None), (0.0, LOST), LOST),
    ],
)
def test_the_error_that_says_most_is_raised(monkeypatch, sender, receiver, raised):
    seconds = 1.0 if NEVER in (sender[0], receiver[0]) else 60.0
    monkeypatch.setattr(rollout_apart, "_SECONDS_TO_EXPLAIN", seconds)
    monkeypatch.setattr(rollout_apart, "_SECONDS_TO_EXPLAIN_A_LOST_CONNECTION", seconds)
    calls = call(*sender), call(*receiver)
    started = time.monotonic()
    if raised is None:
        rollout_apart._wait_for_all(*calls)
        return
    with pytest.raises(type(raised)) as got:
        rollout_apart._wait_for_all(*calls)
    assert got.value is raised
    assert time.monotonic() - started < 30, "waits although nothing more can come"
