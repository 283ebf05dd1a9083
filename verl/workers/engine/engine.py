"""A module that is trained: sharded over processes or not, with optimizer, schedule, checkpoints and a
weight stream.

    for micro-batch: with engine.autocast(): loss = ...;  engine.backward(loss, last)     gradients add up
    engine.step()     clip, skip if not finite, update;    engine.next_lr()     once per training step

With one process the module stays plain. With several it is sharded by FSDP2 (`fully_shard`): each decoder
layer is a unit, the rest is the root. Losses are sums divided by the whole world's counts, so gradients
are summed over processes, not averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from verl.workers.engine.host_gradients import HostGradients
from verl.workers.engine.loading import PolicyModel, ValueModel, parse_dtype
from verl.workers.engine.lora import Adapters, plain_parameters
from verl.workers.engine.muon import hidden_matrices
from verl.workers.engine.optim import build_optimizer, build_scheduler

Module = TypeVar("Module", PolicyModel, ValueModel)


@dataclass(frozen=True)
class Precision:
    """dtypes of the stored weights, of the computation, and of gradients on their way between processes."""

    model: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def from_config(
        cls, fsdp_config: Mapping[str, Any], device: torch.device, trained: bool = True
    ) -> Precision:
        """Null means: computation in bf16 on CUDA and fp32 on CPU; weights fp32 if trained, else like
        computation.
        """
        default = torch.bfloat16 if device.type == "cuda" else torch.float32
        mixed = fsdp_config["mixed_precision"]
        compute = parse_dtype(mixed["param_dtype"], default, "fsdp_config.mixed_precision.param_dtype")
        model = parse_dtype(
            fsdp_config["model_dtype"], torch.float32 if trained else compute, "fsdp_config.model_dtype"
        )
        reduce = parse_dtype(mixed["reduce_dtype"], torch.float32, "fsdp_config.mixed_precision.reduce_dtype")
        return cls(model, compute, reduce)


class TrainEngine(Generic[Module]):
    """Owns a PolicyModel or ValueModel on this rank. `optim=None` makes it frozen (a reference model).

    Args:
        module: on CPU, of dtype precision.model, the same on every rank.
        fsdp_config: `param_offload`, `optimizer_offload`: on CUDA, keep them in CPU memory between uses;
            `grad_offload`: see `HostGradients`. `reshard_after_forward`: see `backward`.
        world_size: number of processes; more than 1 needs torch.distributed to be initialised.
        optim: the configuration's `optim` block. grad_clip: largest norm of the gradient over all ranks.
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
    ):
        self.device, self.world_size, self.precision, self.grad_clip = (
            device,
            world_size,
            precision,
            grad_clip,
        )
        if optim is None:
            module.requires_grad_(False)
        self.reshards = bool(fsdp_config["reshard_after_forward"])
        stored = {p.dtype for p in module.parameters()}  # LoRA adapters are float32 in any model
        self._casts = stored != {precision.compute}
        self.module: Module = self._shard(module) if world_size > 1 else module.to(device)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler: LambdaLR | None = None
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
        self.host_gradients: HostGradients | None = None
        if on_cuda and optim is not None and fsdp_config["grad_offload"]:
            self.host_gradients = HostGradients(self.module.parameters())
        self._params_needed = self._optimizer_needed = 0  # blocks of `loaded` that are open
        self._offload(params=self.offloads_params, optimizer=self._offloads_optimizer)

    def _shard(self, module: Module) -> Module:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
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
        """The LoRA adapters, if the module has any; then nothing else of its model is trained."""
        return self.module.adapters

    # ------------------------------------------------------------------------------------------ computing

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        low = self.precision.compute in (torch.bfloat16, torch.float16)
        mixed = low and self.world_size == 1 and self._casts
        return torch.autocast(self.device.type, self.precision.compute) if mixed else nullcontext()

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds the gradient of a micro-batch's share of the loss.

        With `reshard_after_forward` ranks exchange gradients in every micro-batch, so that none holds more
        than its shard of them. Without, weights stay gathered from the first micro-batch to the last, and
        gradients are exchanged in the last one only. Gradients of adapters are small, so they wait as well.
        """
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(is_last or (self.reshards and self.adapters is None))
            self.module.set_reshard_after_backward(is_last or self.reshards)
            self.module.set_is_last_backward(is_last)
            loss = loss * self.world_size  # FSDP averages over ranks
        if self.host_gradients is not None:
            self.host_gradients.before_backward(is_last)
        loss.backward()
        if self.host_gradients is not None:
            self.host_gradients.after_backward()

    def step(self, discard: bool = False) -> tuple[float, bool]:
        """Clips and applies the gradient, and clears it. Returns (its norm before, whether it was applied).

        A gradient with an infinity or NaN in it, on any rank, is thrown away on all of them; so is any with
        `discard` (which must be the same on all ranks).
        """
        assert self.optimizer is not None
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
    def lr(self) -> float:
        """Learning rate of the coming update."""
        assert self.scheduler is not None
        return float(self.scheduler.get_last_lr()[0])

    @property
    def num_training_steps(self) -> int:
        """Training steps done so far (calls of next_lr), over restarts."""
        assert self.scheduler is not None
        return int(self.scheduler.last_epoch)

    def next_lr(self) -> None:
        """Ends a training step for the schedule."""
        assert self.scheduler is not None
        self.scheduler.step()

    def reduce(self, values: Sequence[float], op: str) -> list[float]:
        """Element-wise `sum`, `min` or `max` over the ranks, in float64."""
        if self.world_size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(
            tensor, {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[op]
        )
        return tensor.tolist()

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        """Weights (and the optimizer's state) are on the device inside of the block, wherever they live
        otherwise. Blocks may be nested.
        """
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
