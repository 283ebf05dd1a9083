"""Micro-batches through the stages of a pipeline, by Megatron's schedules (one stage is a pipeline too).

    micro-batches --forward--> outputs       micro-batches --forward_backward(loss_of)--> losses

Every stage gets both. Only the last stage has outputs, and it sends them to the others. These know the
micro-batches and so compute the same metrics from them, so that nothing else has to be sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from verl.packing.packs import PackedMicroBatch
from verl.workers.engine.training_engine import MicroBatchLoss, MicroBatchLossOf, Outputs


class Pipeline:
    """The stages of a replica, through which micro-batches run.

    Args:
        model: this process's stage.
        config: Megatron's configuration.
        num_outputs: how many tensors the last stage gives per micro-batch.
    """

    def __init__(self, model: nn.Module, config: TransformerConfig, num_outputs: int):
        self.model = model
        self.config = config
        self.num_outputs = num_outputs
        self.num_stages = mpu.get_pipeline_model_parallel_world_size()
        self._is_last = mpu.is_pipeline_last_stage()
        self._run = get_forward_backward_func(self.num_stages)
        config.finalize_model_grads_func = _finalize

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[PackedMicroBatch], options: Mapping[str, Any]) -> list[Outputs]:
        """Return the outputs of each micro-batch, the same on every process of the replica."""

        def step(iterator: Iterator[PackedMicroBatch], model: nn.Module) -> tuple[Any, None]:
            return model(next(iterator), **options), None

        collected = [as_outputs(output) for output in self._schedule(step, micro_batches, forward_only=True)]
        return self._broadcast_outputs(micro_batches, collected)

    def forward_backward(
        self, micro_batches: Sequence[PackedMicroBatch], loss_of: MicroBatchLossOf, options: Mapping[str, Any]
    ) -> list[MicroBatchLoss]:
        """Add the gradients of all micro-batches' losses, and return them without gradient."""
        collected: list[Outputs] = []

        def loss(micro_batch: PackedMicroBatch, result: Any) -> tuple[Tensor, Tensor, MicroBatchLoss]:
            outputs = as_outputs(result)
            no_tokens = torch.zeros((), dtype=torch.int)  # 0: the loss is not divided by a number of tokens
            collected.append(tuple(output.detach() for output in outputs))
            micro_batch_loss = loss_of(micro_batch, outputs)
            return micro_batch_loss.loss, no_tokens, micro_batch_loss.detach()

        def step(iterator: Iterator[PackedMicroBatch], model: nn.Module) -> tuple[Any, Any]:
            micro_batch = next(iterator)
            return model(micro_batch, **options), partial(loss, micro_batch)

        losses = self._schedule(step, micro_batches, forward_only=False)
        outputs = self._broadcast_outputs(micro_batches, collected)
        if self._is_last:
            return losses
        with torch.no_grad():
            return [
                loss_of(micro_batch, out).detach()
                for micro_batch, out in zip(micro_batches, outputs, strict=True)
            ]

    def _schedule(
        self, step: Any, micro_batches: Sequence[PackedMicroBatch], forward_only: bool
    ) -> list[Any]:
        """Return the results of the last stage's loss function, in order.

        If there is no loss function, they are the results of the last stage's model.
        """
        results: list[Any] = self._run(
            forward_step_func=step,
            data_iterator=iter(micro_batches),
            model=self.model,
            num_microbatches=len(micro_batches),
            seq_length=self.config.tensor_model_parallel_size
            * self.config.context_parallel_size,  # micro-batches may have any length
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results

    def _broadcast_outputs(
        self, micro_batches: Sequence[PackedMicroBatch], outputs: list[Outputs]
    ) -> list[Outputs]:
        """Return the last stage's outputs on every stage."""
        if self.num_stages == 1:
            return outputs
        sizes = [len(micro_batch.labels) for micro_batch in micro_batches]
        if self._is_last:
            flat = torch.cat([torch.cat(tensors).float() for tensors in outputs])
        else:
            flat = torch.empty(self.num_outputs * sum(sizes), device=micro_batches[0].labels.device)
        group = mpu.get_pipeline_model_parallel_group()
        if len(flat):  # it is empty if no micro-batch has a loss token
            dist.broadcast(flat, mpu.get_pipeline_model_parallel_last_rank(), group=group)
        chunks = flat.split([self.num_outputs * size for size in sizes])
        return [tuple(x.view(self.num_outputs, n)) for x, n in zip(chunks, sizes, strict=True)]


def as_outputs(result: Any) -> Outputs:
    """Return the last stage's result as `Outputs`."""
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _finalize(models: list[nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Sum gradients over the processes that hold the same parameters, or copies; nothing is divided."""
    finalize_model_grads(models, None, **options)
