"""The `Engine` over megatron-core: a model cut over processes, and replicas of it.

    parts --Pipeline--> outputs, shares; gradients add up --ShardedAdamW--> the next weights
    parameters or the optimizer's state --WeightMap--> Hugging Face's names: weight stream, checkpoints

The processes of a replica work on the same micro-batches. What they compute with is of `precision.compute`;
main weights and the optimizer's state are fp32 shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.utils.packing import PackedMicroBatch
from verl.workers.engine.base import Engine, Outputs, Share, ShareOf
from verl.workers.engine.loading import Precision
from verl.workers.engine.optim import build_scheduler
from verl.workers.engine.snapshot import Snapshot
from verl.workers.megatron import checkpoint
from verl.workers.megatron.model import BuiltModel, initial_weights
from verl.workers.megatron.optimizer import ShardedAdamW
from verl.workers.megatron.parallel_state import data_position
from verl.workers.megatron.schedule import Pipeline, as_outputs
from verl.workers.megatron.storage import ParkedStorage


class MegatronEngine(Engine):
    """Owns a process's chunks of a policy or a value model.

    Args:
        built: in dtype precision.compute, on the device. model: the configuration's `model` block that it was
            built from.
        fsdp_config: `param_offload`, `optimizer_offload`: on CUDA, keep them in CPU memory between uses;
            `grad_offload`: on CUDA, free the gradients' memory between updates.
        optim: the configuration's `optim` block; None makes the engine frozen (a reference model). grad_clip:
            largest norm of the gradient over all processes.
    """

    adapters = None

    def __init__(
        self,
        built: BuiltModel,
        model: Mapping[str, Any],
        precision: Precision,
        fsdp_config: Mapping[str, Any],
        device: torch.device,
        optim: Mapping[str, Any] | None = None,
        grad_clip: float = 1.0,
    ):
        self.built, self.precision, self.device = built, precision, device
        self.world_size, self.data = dist.get_world_size(), data_position()
        self.weights_version = 0
        self.optimizer: ShardedAdamW | None = None
        self.scheduler = None
        models: Sequence[torch.nn.Module] = built.chunks
        if optim is None:
            for chunk in built.chunks:
                chunk.requires_grad_(False)
        else:
            self.optimizer = ShardedAdamW(built, optim, grad_clip, precision.reduce, device)
            self.scheduler = build_scheduler(self.optimizer.inner, optim)
            models = self.optimizer.models
            if precision.compute != torch.float32:
                self._fill_main_weights(model)
        self._pipeline = Pipeline(models, built.config, num_outputs=3 if built.weights.has_head else 1)
        self._writing_group: dist.ProcessGroup | None = None  # of threads that write snapshots
        self._set_offloads(fsdp_config)

    def _fill_main_weights(self, model: Mapping[str, Any]) -> None:
        """In fp32 from the folder, not from the parameters, which are rounded."""
        assert self.optimizer is not None
        read = initial_weights(model, self.built)
        for parameter in self.built.weights.here:
            local = self.built.weights.local(parameter, read).to(self.device)
            self.optimizer.put(self.built.parameter(parameter.chunk, parameter.name), "param", local)

    # ------------------------------------------------------------------------------------------ computing

    @torch.no_grad()
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        if self._pipeline.num_stages == 1:
            for micro_batch in micro_batches:
                yield micro_batch, as_outputs(self.built.chunks[0](micro_batch, **options))
            return
        listed = list(micro_batches)  # stages work on several at a time
        if listed:
            yield from zip(listed, self._pipeline.forward(listed, options), strict=True)

    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, share_of: ShareOf, **options: Any
    ) -> list[Share]:
        return self._pipeline.forward_backward(list(islice(micro_batches, count)), share_of, options)

    def step(self, discard: bool = False) -> tuple[float, bool]:
        assert self.optimizer is not None
        norm, applied = self.optimizer.step(discard)
        self.weights_version += applied
        return norm, applied

    def num_updates(self) -> int:
        """Optimizer steps made so far, over restarts; all processes call it together."""
        assert self.optimizer is not None
        steps = torch.tensor(float(self.optimizer.num_steps), device=self.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)  # one may have no shard of anything
        return int(steps)

    @property
    def peers(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = mpu.get_data_parallel_group()
        return group

    # ------------------------------------------------------------------------------------------- memory

    def _set_offloads(self, fsdp_config: Mapping[str, Any]) -> None:
        on_cuda, optimizer = self.device.type == "cuda", self.optimizer
        self.offloads_params = on_cuda and bool(fsdp_config["param_offload"])
        self._parameters: list[ParkedStorage] = []  # needed for every pass
        self._update_state: list[ParkedStorage] = []  # needed for updates besides
        if self.offloads_params:
            frozen = (p for chunk in self.built.chunks for p in chunk.parameters())
            self._parameters.append(
                ParkedStorage(frozen) if optimizer is None else optimizer.parameter_storage()
            )
        if on_cuda and optimizer is not None:
            if fsdp_config["optimizer_offload"]:
                self._update_state.append(optimizer.state_storage())
            if fsdp_config["grad_offload"]:
                self._update_state.append(optimizer.gradient_storage())
        self._params_needed = self._optimizer_needed = 0  # blocks of `loaded` that are open
        self._park()

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        self._params_needed += 1
        self._optimizer_needed += optimizer
        for storage in self._parameters:
            storage.bring()
        for storage in self._update_state if optimizer else ():
            storage.bring()
        try:
            yield
        finally:
            self._params_needed -= 1
            self._optimizer_needed -= optimizer
            self._park()

    def _park(self) -> None:
        """Gives back what no open block needs."""
        unneeded = [] if self._params_needed else list(self._parameters)
        unneeded += [] if self._optimizer_needed else self._update_state
        for storage in unneeded:
            storage.give_back()
        if unneeded:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------- weights

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `Engine.weights`, in the dtype of the computation; tensors are the parameters themselves where
        these are whole.
        """
        yield from self.built.weights.whole_tensors(self.built.parameter, self.precision.compute, self.device)

    def whole_tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor in fp32) of the main weights ("param") or of AdamW's averages
        ("exp_avg", "exp_avg_sq"), in the order of `weights`. A frozen engine has its parameters alone.
        """
        optimizer = self.optimizer
        if optimizer is None:
            assert kind == "param"
            yield from ((name, whole.float()) for name, whole in self.weights())
            return

        def local(chunk: int, name: str) -> Tensor:
            return optimizer.whole(self.built.parameter(chunk, name), kind)

        yield from self.built.weights.whole_tensors(local, torch.float32, self.device)

    def copy_weights(self, source: Engine) -> None:
        assert isinstance(source, MegatronEngine)
        with source.loaded(optimizer=True):  # main weights are of its state
            self._take(source.whole_tensors("param"))

    def save_weights(self, folder: Path) -> None:
        checkpoint.save_weights(self, folder)

    def load_weights(self, folder: Path) -> None:
        self._take(checkpoint.read_whole(self, folder, prefix=""))

    @torch.no_grad()
    def _take(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Sets a frozen engine's parameters from whole tensors in the order of `weights`."""
        assert self.optimizer is None
        with self.loaded():
            for parameter, local in checkpoint.local_tensors(self.built.weights, stream):
                self.built.parameter(parameter.chunk, parameter.name).copy_(local)

    def save(self, path: str | Path) -> None:
        checkpoint.save_checkpoint(self, path)

    def snapshot(self, path: str | Path) -> Snapshot:
        if self._writing_group is None:
            self._writing_group = dist.new_group(backend="gloo")
        return checkpoint.take_snapshot(self, path, self._writing_group)

    def snapshot_hf(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path, saved: str | Path
    ) -> Snapshot:
        return checkpoint.hf_snapshot(self, path, tokenizer, base, saved)

    def load(self, path: str | Path) -> None:
        checkpoint.load_checkpoint(self, path)

    def save_hf(self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path) -> None:
        checkpoint.save_hf(self, path, tokenizer, base)
