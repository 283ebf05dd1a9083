"""One engine over several training processes: the first of them decides, the others do the same.

    each process: its prompts --gather--> leader: the agent on all of them --scatter--> each its trajectories
                                             | open, resume, close; at every step: broadcast
                                             v
                                          followers: the same calls on their engines

A tensor-parallel engine computes in all of its processes at once, so all must make the same calls in the same
order. The agent can't run in each of them: which search is answered first is chance. It runs in the leader,
and `MirroredEngine` repeats its calls in the followers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.protocol import DataProto
from verl.workers.rollout.engine import Completion, Partial, RolloutEngine, SamplingParams

_CPU = torch.device("cpu")


class MirroredEngine:
    """A `RolloutEngine` whose session calls, made in the leader, are made in all processes of its group.

    `update_weights`, `sleep`, `wake` and `shutdown` are not repeated: every process calls them itself.
    """

    def __init__(self, engine: RolloutEngine, tensor_parallel_size: int) -> None:
        """All processes of torch.distributed's default group call this together, each with its own engine.

        Ranks 0 .. size - 1 form the first group, the next ones the second, and so on.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        firsts = range(0, world_size, tensor_parallel_size)
        groups = {
            first: dist.new_group(list(range(first, first + tensor_parallel_size)), backend="gloo")
            for first in firsts
        }
        self.leader = rank - rank % tensor_parallel_size
        self.is_leader = rank == self.leader
        self._group, self._size = groups[self.leader], tensor_parallel_size
        self._engine = engine
        self.max_model_len, self.version = engine.max_model_len, engine.version
        self._calls: list[tuple[Any, ...]] = []  # since the last step

    # ---- what the agent in the leader calls ----

    @property
    def has_runnable(self) -> bool:
        return self._engine.has_runnable

    def open(self, token_ids: Sequence[int], params: SamplingParams) -> int:
        session_id = self._engine.open(token_ids, params)
        self._calls.append(("open", list(token_ids), params))
        return session_id

    def resume(self, session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
        self._engine.resume(session_id, token_ids, params)
        self._calls.append(("resume", session_id, list(token_ids), params))

    def close(self, session_id: int) -> None:
        self._engine.close(session_id)
        self._calls.append(("close", session_id))

    def step(self) -> list[Completion]:
        self._broadcast([*self._calls, ("step",)])
        self._calls = []
        return self._engine.step()

    def partial(self, session_id: int) -> Partial:
        return self._engine.partial(session_id)

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    # ---- what every process calls ----

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._engine.update_weights(weights, version)
        self.version = version

    def sleep(self, level: int = 1) -> int:
        return self._engine.sleep(level)

    def wake(self) -> None:
        self._engine.wake()

    def shutdown(self) -> None:
        self._engine.shutdown()

    def run(self, prompts: DataProto, generate: Callable[[DataProto], DataProto]) -> DataProto:
        """Trajectories for this process's prompts. `generate` is called in the leader, with the group's.

        RuntimeError in the followers if it fails in the leader.
        """
        parts: list[Any] | None = [None] * self._size if self.is_leader else None
        dist.gather_object(prompts, parts, dst=self.leader, group=self._group)
        if parts is None:
            self._follow()
            return self._scatter(None)
        try:
            result = generate(DataProto.concat(parts))
        except BaseException as error:
            self._broadcast([("fail", repr(error))])
            raise
        self._broadcast([*self._calls, ("end",)])
        self._calls = []
        shares, start = [], 0
        for part in parts:
            share = result[start : start + len(part)]
            if start:  # figures of the whole group are the leader's alone
                share.meta_info.pop("metrics", None)
            shares.append(share)
            start += len(part)
        return self._scatter(shares)

    def _follow(self) -> None:
        """Repeat the leader's calls until it has ended."""
        while True:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=self.leader, group=self._group, device=_CPU)
            for name, *arguments in box[0]:
                if name == "end":
                    return
                if name == "fail":
                    raise RuntimeError(f"rank {self.leader}, which leads this engine, failed: {arguments[0]}")
                getattr(self._engine, name)(*arguments)

    def _broadcast(self, calls: list[tuple[Any, ...]]) -> None:
        dist.broadcast_object_list([calls], src=self.leader, group=self._group, device=_CPU)

    def _scatter(self, shares: list[DataProto] | None) -> DataProto:
        box: list[Any] = [None]
        dist.scatter_object_list(box, shares, src=self.leader, group=self._group)
        share = box[0]
        assert isinstance(share, DataProto)
        return share
