"""Gradients and AdamW on Megatron: summed over replicas, the optimizer's state spread over them.

    backward passes --main gradients, added up--> finalize_model_grads (schedule.py): summed over processes
    that hold the same parameters --step--> each updates its shard of them in fp32; they exchange weights

A shard is a range of a parameter's elements. AdamW, its settings and its arithmetic are those of `optim.py`:
every parameter decays, and main weights are fp32 whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from verl.config.policy import Optim
from verl.workers.engine.optim import adamw, adamw_state
from verl.workers.megatron import cpu_support
from verl.workers.megatron.model import BuiltModel
from verl.workers.megatron.storage import ParkedStorage

KINDS = ("param", "exp_avg", "exp_avg_sq")  # tensors of each parameter in fp32: the weights and two averages


class ShardedAdamW:
    """The optimizer of the parameters of a process's stage.

    Args:
        built: the stage. Its parameters move into memory of Megatron's.
        optim: the configuration's `optim` block.
        grad_clip: the largest norm of the gradient.
        device: the device of this process.

    Attributes:
        model: the stage, wrapped so that gradients add up. Megatron's schedule takes it.
        inner: torch's optimizer of this process's shards, for a schedule of the learning rate.
    """

    def __init__(self, built: BuiltModel, optim: Optim, grad_clip: float, device: torch.device):
        self.device = device
        self.grad_clip = grad_clip
        # the processes that hold the same parameters
        self._group = mpu.get_data_parallel_group(with_context_parallel=True)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=True
        )
        self.inner = adamw(built.stage.parameters(), optim)
        with cpu_support.cuda_names(device):
            self.model: Any = DistributedDataParallel(built.config, settings, built.stage)
            self._optimizer = self._sharded(built)
        built.config.no_sync_func = self.model.no_sync  # gradients are summed in the last micro-batch
        # by this group the optimizer recognises copies on tensor ranks
        self._optimizer.tp_group = mpu.get_tensor_model_parallel_group()
        for shard in self._shards():
            self.inner.state[shard] = adamw_state(shard)

    @torch.no_grad()  # shards of fp32 weights are views of them, and must be leaves
    def _sharded(self, built: BuiltModel) -> DistributedOptimizer:
        return DistributedOptimizer(
            self.inner,
            OptimizerConfig(
                optimizer="adam",
                bf16=built.config.bf16,
                params_dtype=built.config.params_dtype,
                use_distributed_optimizer=True,
            ),
            None,
            None,
            model_chunks=[self.model],
            per_model_buffers={0: self.model.buffers},
            data_parallel_group=self._group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )

    def shards(self) -> list[Tensor]:
        """Return the fp32 main weights that this process updates: flat tensors, one for each parameter."""
        return [shard.detach() for shard in self._shards()]

    @torch.no_grad()
    def publish_shards(self) -> None:
        """Copy the main weights into the model's parameters, and exchange them with the other processes."""
        with cpu_support.cuda_names(self.device):
            self._optimizer._copy_main_params_to_model_params()
            self.model.start_param_sync()

    def _shards(self) -> Iterator[Tensor]:
        for group in self.inner.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def step(self, discard: bool) -> tuple[float, bool]:
        """Make a step as `Engine.step` does, with the gradients of `model`.

        They are already summed over processes.
        """
        with cpu_support.cuda_names(self.device):
            self._optimizer.prepare_grads()  # gives each shard its part of the summed gradients
            norm = float(get_grad_norm_fp32(self._optimizer.get_main_grads_for_grad_norm()))
            applied = norm < float("inf") and not discard  # false for NaN too
            if applied:
                gradients = [shard.grad for shard in self._shards() if shard.grad is not None]
                if norm > self.grad_clip and gradients:  # a process may have no shards
                    torch._foreach_mul_(gradients, self.grad_clip / (norm + 1e-6))
                self._optimizer.step_with_ready_grads()
            self._optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad_buffer()
        return norm, applied

    # ----------------------------------------------------------------------------------------------- state

    @torch.no_grad()
    def gather(self, parameter: Tensor, kind: str) -> Tensor:
        """Return one of KINDS of a model's parameter, in the parameter's shape.

        It is gathered from the processes that hold the same parameters, which call it together.
        """
        gathered = torch.zeros(parameter.numel(), dtype=torch.float32, device=self.device)
        shard = self._shard_of(parameter, kind)
        if shard is not None:
            gathered[shard[0]] = shard[1]
        if self._group.size() > 1:
            dist.all_reduce(gathered, group=self._group)
        return gathered.view(parameter.shape)

    @torch.no_grad()
    def set_shard(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Set what `gather` returns.

        Each process takes its shard. If the tensor is the weights, it also updates the model's own copy.
        """
        shard = self._shard_of(parameter, kind)
        if shard is not None:
            shard[1].copy_(value.reshape(-1)[shard[0]])
        if kind == "param":
            parameter.copy_(value)

    def put_num_steps(self, count: int) -> None:
        """Set the number of optimizer steps made so far."""
        for shard in self._shards():
            self.inner.state[shard]["step"].fill_(count)

    def _shard_of(self, parameter: Tensor, kind: str) -> tuple[slice, Tensor] | None:
        """Return the shard of a parameter that this process updates, or None if it updates nothing of it.

        Returns:
            (the range of the parameter's elements, one of KINDS of these elements).
        """
        if parameter not in self._optimizer.model_param_gbuf_map:
            return None
        elements = self._optimizer._get_model_param_range_map(parameter)["param"]
        states = self._optimizer._get_main_param_and_optimizer_states(parameter)
        return slice(elements.start, elements.end), states[kind]

    # ---------------------------------------------------------------------------------------------- memory

    def parameter_storage(self) -> ParkedStorage:
        """Return the memory of the model's parameters."""
        return ParkedStorage(buffer.param_data for buffer in self.model.buffers)

    def gradient_storage(self) -> ParkedStorage:
        """Return the memory of the gradients, which are zeros between optimizer steps."""
        return ParkedStorage((buffer.grad_data for buffer in self.model.buffers), keeps=False)

    def state_storage(self) -> ParkedStorage:
        """Return the memory of the optimizer's state.

        It includes the fp32 main weights where they are not the parameters themselves.
        """
        main = (shard for group in self._optimizer.shard_fp32_from_float16_groups for shard in group)
        averages = (self.inner.state[s][kind] for s in self._shards() for kind in ("exp_avg", "exp_avg_sq"))
        return ParkedStorage([*main, *averages])
