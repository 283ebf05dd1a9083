"""A module that is trained: sharded over processes or not, with optimizer, schedule, checkpoints and a
weight stream; the `Engine` (base.py) over FSDP2.

With one process the module stays plain. With several it is sharded by FSDP2 (`fully_shard`): each decoder
layer is a unit, the rest is the root; `ProcessLayout` says over which of them. Losses are sums divided by the
whole world's counts, so gradients are summed over processes, not averaged. With sequence parallelism a
process computes its share of each micro-batch's tokens (`verl/utils/ulysses.py`), and gradients are summed
all the same.

Which processes of an FSDP2 run hold what: shards of the weights, and shares of the tokens.

    world 8, fsdp_size 4, sequence parallel 2:

    weights sharded over   [0 1 2 3] [4 5 6 7]     the two groups hold the same (hybrid sharding)
    packs shared by        [0 1] [2 3] [4 5] [6 7] four replicas, each with rows of its own

The two are independent: a gradient is summed over all processes, whoever has the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verl.single_controller.base import DataPosition
from verl.utils.packing import PackedMicroBatch, shard_micro_batch
from verl.workers.engine.base import Outputs, Share, ShareOf
from verl.workers.engine.checkpoint import SavedEngine
from verl.workers.engine.loading import PolicyModel, Precision, ValueModel
from verl.workers.engine.lora import Adapters, plain_parameters
from verl.workers.engine.optim import build_optimizer, build_scheduler, hidden_matrices


@dataclass(frozen=True)
class ProcessLayout:
    """How a model's processes are divided, as one of them sees it. One process alone has no mesh, no group.

    mesh: for `fully_shard`, of one dimension (shard) or two (replicate, shard). data: which replica the
    process is a part of. sequence: the processes of its replica. peers: the processes with
    the same place in the other replicas, and itself.
    """

    mesh: DeviceMesh | None
    data: DataPosition
    sequence: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None

    @classmethod
    def build(
        cls, device: torch.device, world_size: int, fsdp_size: int = -1, sequence_parallel_size: int = 1
    ) -> ProcessLayout:
        """All processes together. fsdp_size: processes that shard the weights among them (-1, or more than
        there are: all); sequence_parallel_size: processes that share a pack's tokens.

        Raises:
            ValueError: one of the two does not divide the number of processes.
        """
        sizes = {
            "fsdp_config.fsdp_size": world_size if fsdp_size == -1 else min(fsdp_size, world_size),
            "ulysses_sequence_parallel_size": sequence_parallel_size,
        }
        for name, size in sizes.items():
            if size < 1 or world_size % size:
                raise ValueError(
                    f"Found {name}={size} with {world_size} processes; expected a number that divides them."
                )
        if world_size == 1:
            return cls(None, DataPosition(0, 1), None, None)
        if fsdp_size < 0 or fsdp_size >= world_size:
            mesh = init_device_mesh(device.type, (world_size,))
        else:
            shape = world_size // fsdp_size, fsdp_size
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        num_replicas = world_size // sequence_parallel_size
        rank, place = divmod(dist.get_rank(), sequence_parallel_size)
        if sequence_parallel_size == 1:
            return cls(mesh, DataPosition(rank, num_replicas), None, dist.group.WORLD)
        groups = init_device_mesh(
            device.type, (num_replicas, sequence_parallel_size), mesh_dim_names=("replica", "sequence")
        )
        data = DataPosition(rank, num_replicas, leads=place == 0)
        return cls(mesh, data, groups["sequence"].get_group(), groups["replica"].get_group())


Module = TypeVar("Module", PolicyModel, ValueModel)


class TrainEngine(SavedEngine, Generic[Module]):
    """Owns a PolicyModel or ValueModel on this rank. `optim=None` makes it frozen (a reference model).

    Args:
        module: on CPU, of dtype precision.model, the same on every rank.
        fsdp_config: `param_offload`, `optimizer_offload`: on CUDA, keep them in CPU memory between uses.
            `reshard_after_forward`: see `_backward`. `fsdp_size`: see `ProcessLayout`.
        world_size: number of processes; more than 1 needs torch.distributed to be initialised.
        optim: the configuration's `optim` block. grad_clip: largest norm of the gradient over all ranks.
        sequence_parallel_size: processes that share each micro-batch's tokens.
    """

    def __init__(
        self,
        module: Module,
        precision: Precision,
        fsdp_config: Mapping[str, Any],
        device: torch.device,
        world_size: int = 1,
        optim: Mapping[str, Any] | None = None,
        grad_clip: float = 1.0,
        sequence_parallel_size: int = 1,
    ):
        self.device, self.world_size, self.precision, self.grad_clip = (
            device,
            world_size,
            precision,
            grad_clip,
        )
        self.layout = ProcessLayout.build(
            device, world_size, fsdp_config["fsdp_size"], sequence_parallel_size
        )
        self.data = self.layout.data
        if optim is None:
            module.requires_grad_(False)
        self.reshards = bool(fsdp_config["reshard_after_forward"])
        stored = {p.dtype for p in module.parameters()}  # LoRA adapters are float32 in any model
        self._casts = stored != {precision.compute}
        mesh = self.layout.mesh
        self.module: Module = module.to(device) if mesh is None else self._shard(module, mesh)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler = None
        if optim is not None:
            matrices = hidden_matrices(self.module.model.base_model)
            self.optimizer = build_optimizer(self.module.parameters(), optim, matrices)
            self.scheduler = build_scheduler(self.optimizer, optim)
        self.weights_version = 0
        on_cuda = device.type == "cuda"
        self.offloads_params = on_cuda and bool(fsdp_config["param_offload"])
        self._offloads_optimizer = (
            on_cuda and self.optimizer is not None and bool(fsdp_config["optimizer_offload"])
        )
        self._params_needed = self._optimizer_needed = 0  # blocks of `loaded` that are open
        self._offload(params=self.offloads_params, optimizer=self._offloads_optimizer)

    def _shard(self, module: Module, mesh: DeviceMesh) -> Module:
        policy = MixedPrecisionPolicy(
            param_dtype=self.precision.compute if self._casts else None,
            reduce_dtype=self.precision.reduce,
            cast_forward_inputs=False,
        )
        layer_classes = set(module.model._no_split_modules or ())
        for child in list(module.modules()):
            if type(child).__name__ in layer_classes:
                fully_shard(child, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshards)
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshards)
        return module

    @property
    def adapters(self) -> Adapters | None:
        return self.module.adapters

    @property
    def offloads(self) -> bool:
        """Whether weights or optimizer are in CPU memory between uses."""
        return self.offloads_params or self._offloads_optimizer

    # ------------------------------------------------------------------------------------------ computing

    @torch.no_grad()
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        for micro_batch in micro_batches:
            yield micro_batch, self._forward(micro_batch, options)

    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, share_of: ShareOf, **options: Any
    ) -> list[Share]:
        shares = []
        for number, micro_batch in enumerate(islice(micro_batches, count)):
            share = share_of(micro_batch, self._forward(micro_batch, options))
            self._backward(share.loss, is_last=number == count - 1)
            shares.append(share.detach())
        return shares

    def _forward(self, micro_batch: PackedMicroBatch, options: Mapping[str, Any]) -> Outputs:
        group = self.layout.sequence
        sharded = None if group is None else shard_micro_batch(micro_batch, group)
        with self._autocast():
            outputs: Outputs = self.module(micro_batch if sharded is None else sharded.own, **options)
        return outputs if sharded is None else sharded.gather(outputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        low = self.precision.compute in (torch.bfloat16, torch.float16)
        mixed = low and self.world_size == 1 and self._casts
        return torch.autocast(self.device.type, self.precision.compute) if mixed else nullcontext()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's share of the loss.

        With `reshard_after_forward` ranks exchange gradients in every micro-batch, so that none holds more
        than its shard of them; groups that hold the same shards (hybrid sharding) add theirs up in the last
        one. Without, weights stay gathered from the first micro-batch to the last, and gradients are
        exchanged in the last one only. Gradients of adapters are small, so they wait as well.
        """
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(is_last)
            self.module.set_requires_gradient_sync(is_last or (self.reshards and self.adapters is None))
            self.module.set_reshard_after_backward(is_last or self.reshards)
            self.module.set_is_last_backward(is_last)
            loss = loss * self.world_size  # FSDP averages over ranks
        loss.backward()

    def step(self, discard: bool = False) -> tuple[float, bool]:
        assert self.optimizer is not None
        self.wait_for_snapshot()
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        applied = norm < float("inf") and not discard  # false for NaN too
        if applied:
            if norm > self.grad_clip:
                torch._foreach_mul_(gradients, self.grad_clip / (norm + 1e-6))
            self.optimizer.step()
            self.weights_version += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm, applied

    @property
    def peers(self) -> dist.ProcessGroup | None:
        return self.layout.peers

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        params = self.offloads_params and not self._params_needed
        state = optimizer and self._offloads_optimizer and not self._optimizer_needed
        if params:
            self.module.to(self.device)
        if state:
            self._move_optimizer(self.device)
        self._params_needed += 1
        self._optimizer_needed += optimizer
        try:
            yield
        finally:
            self._params_needed -= 1
            self._optimizer_needed -= optimizer
            if not self._params_needed:
                self._reshard()
            self._offload(params=params, optimizer=state)

    def _reshard(self) -> None:
        """Frees gathered weights that were kept over several passes."""
        if not self.reshards:
            for module in self.module.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def _offload(self, params: bool, optimizer: bool) -> None:
        if params:
            self.module.to("cpu")
        if optimizer:
            self._move_optimizer(torch.device("cpu"))
        if params or optimizer:
            torch.cuda.empty_cache()

    def _move_optimizer(self, device: torch.device) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter, tied ones once, in a fixed order.

        With one process the tensors are the parameters' own storage, but for those that LoRA adapters are
        merged into: these are new. With several each is gathered when it is asked for, so all ranks must go
        through the stream together.
        """
        yield from plain_parameters(self.module.model, self.adapters)


def num_parameters(module: nn.Module) -> int:
    """Parameters of the whole model, tied ones once."""
    return sum(p.numel() for p in module.parameters())
