"""The results of one call on all ranks, or the error that says most.

    refs of the ranks -> wait for any -> all there: their values
                                      -> an error:  wait a little for a death that explains it -> raise

A rank that dies leaves the others in a collective that never ends. They hold nothing up here: the first rank
that is known to be gone ends the call, and the group is shut down by whoever gets the error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from verl.single_controller.base.errors import (
    ConnectionLostError,
    WorkerDiedError,
    WorkerFailedError,
)
from verl.single_controller.ray.deaths import RankPlace, describe_death

_SECONDS_FOR_OTHER_RANKS = 3.0  # after a first error: the death of a rank explains the errors of the others
_SECONDS_TO_MISS_A_NODE = 40.0  # after an error of the network: Ray notices the loss of a node by its silence
# What gloo and NCCL say when a peer has gone.
_PEER_GONE = re.compile(
    r"connection closed by peer|connection reset|connection refused|broken pipe|connection was likely closed"
    r"|remote process exited|connectFullMesh|ncclRemoteError|NCCL communicator was aborted|socket timeout",
    re.IGNORECASE,
)


def resolve_refs(refs: list[Any], group: str, method: str, places: Sequence[RankPlace] = ()) -> list[Any]:
    """The values of one call's object references, one per rank; raises at the first error of any rank.

    Args:
        refs: of rank 0, 1, ...
        group, method: what was called.
        places: of the ranks, as far as they are known.
    """
    pending = list(refs)
    values: dict[Any, Any] = {}
    errors: dict[Any, Exception] = {}
    while pending and not errors:
        _check_ray_is_up()
        ready, pending = ray.wait(pending, num_returns=1)
        _fetch(ready, values, errors)
    if not errors:
        return [values[ref] for ref in refs]
    _wait_for_a_death(pending, values, errors)
    _check_ray_is_up()
    rank = min((refs.index(ref) for ref in errors), key=lambda r: not _is_death(errors[refs[r]]))
    who = f"rank {rank} of worker group {group!r}"
    _raise_error(errors[refs[rank]], who, method, places[rank] if rank < len(places) else None)


def _wait_for_a_death(pending: list[Any], values: dict[Any, Any], errors: dict[Any, Exception]) -> None:
    """Lets a death that explains the first error come to light."""
    seconds = _SECONDS_FOR_OTHER_RANKS
    if any(_peer_gone(error) for error in errors.values()):
        seconds = _SECONDS_TO_MISS_A_NODE
    end = time.monotonic() + seconds
    while pending and not any(map(_is_death, errors.values())) and time.monotonic() < end:
        _check_ray_is_up()
        ready, pending = ray.wait(pending, num_returns=1, timeout=end - time.monotonic())
        _fetch(ready, values, errors)


def _fetch(ready: list[Any], values: dict[Any, Any], errors: dict[Any, Exception]) -> None:
    for ref in ready:
        _check_ray_is_up()
        try:
            values[ref] = ray.get(ref)
        except Exception as error:  # whatever a worker's method may raise; raised again by the caller
            errors[ref] = error


def _check_ray_is_up() -> None:
    """For threads that still wait when the run has ended: Ray would start again for whoever asks it."""
    if not ray.is_initialized():
        raise RuntimeError("Ray has been shut down.")


def _is_death(error: Exception) -> bool:
    if isinstance(error, RayTaskError):  # of a future that a worker waited for
        return isinstance(error.cause, WorkerDiedError)
    return isinstance(error, RayActorError | WorkerCrashedError | OutOfMemoryError | ObjectLostError)


def _peer_gone(error: Exception) -> bool:
    return isinstance(error, RayTaskError) and _PEER_GONE.search(str(error.cause)) is not None


def _raise_error(error: Exception, who: str, method: str, place: RankPlace | None) -> NoReturn:
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, WorkerDiedError):
            raise error.cause
        if _peer_gone(error):
            raise ConnectionLostError(
                f"{who} lost its connection to another rank during {method}, and none was seen to die: "
                f"{' '.join(str(error.cause).split())[:400]}"
            ) from WorkerFailedError(f"{who} failed in {method}:\n{error}")
        if isinstance(error.cause, ObjectLostError):
            raise WorkerDiedError(
                f"{who} can't run {method}: rows that it needs lay with a process or on a node that is gone: "
                f"{' '.join(str(error.cause).split())[:400]}"
            ) from error
        if isinstance(error.cause, Exception):
            raise error.cause from WorkerFailedError(f"{who} failed in {method}:\n{error}")
    if _is_death(error):
        raise WorkerDiedError(describe_death(who, place, method, error)) from error
    raise error
