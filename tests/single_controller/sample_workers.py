"""Worker classes that the tests run in both backends."""

from __future__ import annotations

import os

import torch

from verl.protocol import DataProto
from verl.single_controller import Dispatch, Execute, Worker, register


class ScaleWorker(Worker):
    """Multiplies `x` [N] by a factor; reports where each row was computed."""

    def __init__(self, factor: int, fail_in_init: bool = False) -> None:
        super().__init__()
        self.factor = factor
        if fail_in_init and self.rank == self.world_size - 1:
            raise ValueError("the factor is not to my taste")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto, offset: int = 0) -> DataProto:
        rows = len(data)
        return DataProto.from_dict(
            {"y": data.batch["x"] * self.factor + offset},
            {"names": [f"{name}!" for name in data.non_tensor_batch["name"]], "rank": [self.rank] * rows},
            {"metrics": {"rows": rows}},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(
            {"x": data.batch["x"] * self.factor}, {"name": data.non_tensor_batch["name"]}
        )

    @register()
    def describe(self, greeting: str) -> str:
        return f"{greeting} from {self.rank} of {self.world_size}"

    @register(execute_mode=Execute.RANK_ZERO)
    def set_factor_on_rank_zero(self, factor: int) -> int:
        self.factor = factor
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def add_rank(self, number: int) -> int:
        return number + self.rank

    @register()
    def sum_of_ranks(self) -> float:
        """All-reduce over the process group, if there is one."""
        self.init_process_group("cpu", timeout_seconds=240)
        total = torch.tensor([self.rank + 1.0])
        if self.world_size > 1:
            torch.distributed.all_reduce(total)
        return total.item()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def fail(self, message: str | None) -> None:
        if message is not None:
            raise KeyError(message)

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register()
    def give_a_function(self) -> object:
        return lambda: None

    @register()
    def leave(self) -> None:
        raise SystemExit(0)

    @register()
    def ray_node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    @register()
    def num_threads(self) -> int:
        return torch.get_num_threads()

    @register()
    def die_in_all_reduce(self, rank: int) -> None:
        """One rank ends its process while the others wait for it."""
        self.init_process_group("cpu", timeout_seconds=240)
        if self.rank == rank:
            os._exit(3)
        torch.distributed.all_reduce(torch.ones(1))


class SumWorker(Worker):
    """A second role."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add_up(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"total": data.batch["x"].cumsum(0)[-1:].expand(len(data)).clone()})

    @register()
    def pid(self) -> int:
        return os.getpid()


def sample_batch(num_rows: int) -> DataProto:
    names = [f"row {i}" for i in range(num_rows)]
    return DataProto.from_dict({"x": torch.arange(num_rows)}, {"name": names}, {"step": 7})
