"""The `Engine` (training_engine.py) over FSDP2: a module, its optimizer, schedule, checkpoints, weights.

With one process the module stays plain. With several processes FSDP2 (`fully_shard`) shards it: each decoder
layer is a unit, and the rest is the root. `ProcessLayout` says which processes shard it. Losses are sums
divided by the whole world's counts, so gradients are summed over processes, not averaged. With sequence
parallelism a process computes its share of each micro-batch's tokens (`verl/packing/ulysses.py`), and
gradients are summed all the same.

The processes of an FSDP2 run hold shards of the weights and shares of the tokens:

    world 8, fsdp_size 4, sequence parallel 2:

    weights sharded over   [0 1 2 3] [4 5 6 7]     the two groups hold the same (hybrid sharding)
    packs shared by        [0 1] [2 3] [4 5] [6 7] four replicas, each with rows of its own

The two are independent: a gradient is summed over all processes, whichever of them hold the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from verl.config.policy import Optim
from verl.config.schema import AnyFsdp
from verl.packing.packs import PackedMicroBatch, shard_micro_batch
from verl.single_controller.base import DataPosition
from verl.utils.device import return_free_memory
from verl.workers.engine.checkpoint import (
    ADAPTER_FOLDER,
    check_fits,
    copy_tensors,
    has_optimizer,
    load_progress,
    load_tensors,
    save_progress,
    save_tensors,
    tensor_names,
    write_hf_folder,
)
from verl.workers.engine.cuda_layers import use_cuda_layers
from verl.workers.engine.loading import PolicyModel, Precision, ValueModel, keep_stream_in_float32
from verl.workers.engine.lora import Adapters, plain_parameters, save_adapter
from verl.workers.engine.optim import build_optimizer, build_scheduler, hidden_matrices
from verl.workers.engine.snapshot import Snapshot, copied_to_cpu
from verl.workers.engine.training_engine import Engine, MicroBatchLoss, MicroBatchLossOf, Outputs


@dataclass(frozen=True)
class ProcessLayout:
    """The division of a model's processes, as one of them sees it.

    A single process has no mesh and no groups.

    Attributes:
        mesh: the mesh for `fully_shard`, of one dimension (shard) or two (replicate, shard).
        data: the replica that the process is a part of.
        sequence: the group of the processes of its replica.
        peers: the group of the processes with its position in each replica.
    """

    mesh: DeviceMesh | None
    data: DataPosition
    sequence: dist.ProcessGroup | None
    peers: dist.ProcessGroup | None

    @classmethod
    def build(
        cls, device: torch.device, world_size: int, fsdp_size: int = -1, sequence_parallel_size: int = 1
    ) -> ProcessLayout:
        """Build the layout; all processes call it together.

        Args:
            device: the device of this process.
            world_size: the number of processes.
            fsdp_size: how many processes shard the weights among them. With -1, or more than there are, all
                do.
            sequence_parallel_size: how many processes share a pack's tokens.

        Raises:
            ValueError: one of the two sizes does not divide the number of processes.
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
        replica, rank_in_replica = divmod(dist.get_rank(), sequence_parallel_size)
        if sequence_parallel_size == 1:
            return cls(mesh, DataPosition(replica, num_replicas), None, dist.group.WORLD)
        groups = init_device_mesh(
            device.type, (num_replicas, sequence_parallel_size), mesh_dim_names=("replica", "sequence")
        )
        data = DataPosition(replica, num_replicas, leads=rank_in_replica == 0)
        return cls(mesh, data, groups["sequence"].get_group(), groups["replica"].get_group())


class TrainEngine(Engine):
    """The engine of a PolicyModel or a ValueModel on this rank.

    Args:
        module: the model on CPU, of dtype precision.model, the same on every rank. Its weights may be unread.
        precision: the dtypes of the stored weights and of the computation.
        fsdp_config: on CUDA, `param_offload` and `optimizer_offload` keep the weights and the optimizer's
            state in CPU memory between uses. For `reshard_after_forward` see `_backward`, for `fsdp_size` see
            `ProcessLayout`.
        device: the device of this rank.
        world_size: the number of processes. With more than 1, torch.distributed must be initialised.
        optim: the configuration's `optim` block. With None the engine is frozen (a reference model).
        grad_clip: the largest norm of the gradient over all ranks.
        sequence_parallel_size: how many processes share a pack's tokens.
    """

    def __init__(
        self,
        module: PolicyModel | ValueModel,
        precision: Precision,
        fsdp_config: AnyFsdp,
        device: torch.device,
        world_size: int = 1,
        optim: Optim | None = None,
        grad_clip: float = 1.0,
        sequence_parallel_size: int = 1,
    ):
        self.device = device
        self.world_size = world_size
        self.precision = precision
        self.grad_clip = grad_clip
        fsdp_size = fsdp_config.fsdp_size
        self.layout = ProcessLayout.build(device, world_size, fsdp_size, sequence_parallel_size)
        self.data = self.layout.data
        if optim is None:
            module.requires_grad_(False)
        self.reshards = bool(fsdp_config.reshard_after_forward)
        stored_dtypes = {p.dtype for p in module.parameters()}  # LoRA adapters are float32 in any model
        self._casts = stored_dtypes != {precision.compute}
        if precision.compute == torch.bfloat16:
            keep_stream_in_float32(module.model.base_model)
        if device.type == "cpu" and precision.compute == torch.bfloat16:
            from verl.workers.engine.cpu_layers import use_cpu_layers  # numba is slow to import

            use_cpu_layers(module)
        elif device.type == "cuda":
            use_cuda_layers(module)
        mesh = self.layout.mesh
        self.module = module.to(device) if mesh is None else self._shard(module, mesh)
        if module.unread is not None:
            module.unread.fill(module.model, device)
        self.optimizer: torch.optim.Optimizer | None = None
        self.scheduler = None
        if optim is not None:
            matrices = hidden_matrices(self.module.model.base_model)
            self.optimizer = build_optimizer(self.module.parameters(), optim, matrices)
            self.scheduler = build_scheduler(self.optimizer, optim)
        self.weights_version = 0
        self._writing_group: dist.ProcessGroup | None = None  # for the threads that write snapshots
        on_cuda = device.type == "cuda"
        self.offloads_params = on_cuda and bool(fsdp_config.param_offload)
        self._offloads_optimizer = (
            on_cuda and self.optimizer is not None and bool(fsdp_config.optimizer_offload)
        )
        self._params_needed = self._optimizer_needed = 0  # number of open blocks of `loaded` that need them
        self._offload(params=self.offloads_params, optimizer=self._offloads_optimizer)

    def _shard(self, module: PolicyModel | ValueModel, mesh: DeviceMesh) -> PolicyModel | ValueModel:
        policy = MixedPrecisionPolicy(
            param_dtype=self.precision.compute if self._casts else None,
            reduce_dtype=torch.float32,
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

    # ------------------------------------------------------------------------------------------ computing

    @torch.no_grad()
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        for micro_batch in micro_batches:
            yield micro_batch, self._forward(micro_batch, options)

    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, loss_of: MicroBatchLossOf, **options: Any
    ) -> list[MicroBatchLoss]:
        losses = []
        for number, micro_batch in enumerate(islice(micro_batches, count)):
            micro_batch_loss = loss_of(micro_batch, self._forward(micro_batch, options))
            self._backward(micro_batch_loss.loss, is_last=number == count - 1)
            losses.append(micro_batch_loss.detach())
        return losses

    def _forward(self, micro_batch: PackedMicroBatch, options: Mapping[str, Any]) -> Outputs:
        group = self.layout.sequence
        sharded = None if group is None else shard_micro_batch(micro_batch, group)
        with self._autocast():
            outputs: Outputs = self.module(micro_batch if sharded is None else sharded.local, **options)
        return outputs if sharded is None else sharded.gather(outputs)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass.

        In 16-bit computation it makes products in 16 bits, also with weights that FSDP2 has cast already.
        """
        mixed = self.precision.compute != torch.float32
        return torch.autocast(self.device.type, self.precision.compute) if mixed else nullcontext()

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of a micro-batch's share of the loss.

        With `reshard_after_forward` ranks exchange gradients in every micro-batch, so that none holds more
        than its shard of them. Groups that hold the same shards (hybrid sharding) add their gradients up in
        the last micro-batch.

        Without `reshard_after_forward` weights stay gathered from the first micro-batch to the last, and
        gradients are exchanged only in the last one. Gradients of adapters are small, so they also wait for
        the last one.
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

    def trained_weights(self) -> list[Tensor]:
        assert self.optimizer is not None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return [p.to_local().detach() if isinstance(p, DTensor) else p.detach() for p in parameters]

    def publish_trained_weights(self) -> None:
        """Free weights that were gathered before, so that the next pass gathers them again."""
        self._reshard()

    @property
    def peers(self) -> dist.ProcessGroup | None:
        return self.layout.peers

    # ------------------------------------------------------------------------------------------- memory

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        brings_params = self.offloads_params and not self._params_needed
        brings_optimizer = optimizer and self._offloads_optimizer and not self._optimizer_needed
        if brings_params:
            self.module.to(self.device)
        if brings_optimizer:
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
            self._offload(params=brings_params, optimizer=brings_optimizer)

    def _reshard(self) -> None:
        """Free gathered weights that were kept over several passes."""
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
        if self.device.type == "cpu" and not self._params_needed:
            return_free_memory()

    def _move_optimizer(self, device: torch.device) -> None:
        assert self.optimizer is not None
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)

    # ------------------------------------------------------------------------------------------ weights

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors as `Engine.weights` does.

        With one process the tensors are the parameters' own storage, except for tensors that are cast or that
        LoRA adapters are merged into.
        """
        yield from plain_parameters(self.module.model, self.adapters, dtype)

    def _frozen_tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    def copy_weights(self, source: Engine) -> None:
        assert isinstance(source, TrainEngine)
        copy_tensors(dict(source.module.named_parameters()), dict(self.module.named_parameters()))

    def save_weights(self, folder: Path) -> None:
        save_tensors(self._frozen_tensors(), folder)

    def load_weights(self, folder: Path) -> None:
        load_tensors(self._frozen_tensors(), folder)

    # --------------------------------------------------------------------------------------- checkpoints

    @property
    def _rank(self) -> int:
        return dist.get_rank() if self.world_size > 1 else 0

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return (the trained weights, the optimizer's state with its settings as `param_groups`)."""
        assert self.optimizer is not None
        model = get_model_state_dict(self.module)
        if self.adapters is not None:
            trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
            model = {name: tensor for name, tensor in model.items() if name in trained}
        return model, get_optimizer_state_dict(self.module, self.optimizer)

    def snapshot(self, path: str | Path) -> Snapshot:
        """Return a snapshot that writes the tensors; everything else is written at once.

        Adapters are also written as a PEFT folder, at once.
        """
        assert self.scheduler is not None
        if self._writing_group is None and self.world_size > 1:
            self._writing_group = dist.new_group(backend="gloo")
        folder = Path(path)
        offloads = self.offloads_params or self._offloads_optimizer
        folder.mkdir(parents=True, exist_ok=True)
        with self.loaded(optimizer=True):
            model, optimizer = self._state()
            held: list[Any] = [{"model": model, "optimizer": {"state": optimizer["state"]}}]
            if offloads:  # otherwise the snapshot would keep all of it on the device
                held.append(copied_to_cpu(held.pop()))
            if self.adapters is not None:
                save_adapter(self.adapters, folder / ADAPTER_FOLDER, writes=self._rank == 0)
        save_progress(folder, self.scheduler, self.weights_version, self.device, self._rank)

        def copy() -> None:
            held.append(copied_to_cpu(held.pop()))

        def write() -> None:
            save_tensors(held.pop(), folder / "dcp", self._writing_group)

        self._snapshot = Snapshot(None if offloads else copy, write)
        return self._snapshot

    def load(self, path: str | Path) -> None:
        assert self.scheduler is not None and self.optimizer is not None
        folder = Path(path)
        resumes = has_optimizer(folder)
        groups = self.optimizer.param_groups
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        with self.loaded(optimizer=True):
            model, optimizer = self._state()
            saved: dict[str, Any] = {"model": model}
            expected = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.items()}
            if resumes:
                saved["optimizer"] = {"state": optimizer["state"]}
                for name, state in optimizer["state"].items():
                    shapes = {f"optimizer.state.{name}.{key}": tuple(x.shape) for key, x in state.items()}
                    expected |= shapes
            check_fits(expected, folder)
            load_tensors(saved, folder / "dcp")
            options = StateDictOptions(strict=self.adapters is None)  # with LoRA there are no base weights
            set_model_state_dict(self.module, model, options=options)
            if resumes:
                set_optimizer_state_dict(self.module, self.optimizer, optimizer)
        for group, settings_of_group in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(settings_of_group)
        self.weights_version = load_progress(folder, self.scheduler, self.device, self._rank)
        if self.world_size > 1:
            dist.barrier()

    def snapshot_hf(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        base: str | Path,
        checkpoint_folder: str | Path,
    ) -> Snapshot:
        """Return a snapshot that writes a Hugging Face folder, as `Engine.snapshot_hf` does.

        With adapters the merged weights are gathered now, because a checkpoint has only the adapters.
        """
        model = self.module.model
        weights: Sequence[str] | dict[str, Tensor] = tensor_names(model)
        if self.adapters is not None:
            buffers = {name: t for name, t in model.named_buffers() if name in model.state_dict()}
            with self.loaded():
                named_tensors = chain(self.weights(), buffers.items())
                weights = {name: tensor.cpu() for name, tensor in named_tensors if self._rank == 0}
        if self._rank > 0:
            return Snapshot()
        return Snapshot(
            write=partial(write_hf_folder, model, weights, Path(path), tokenizer, base, checkpoint_folder)
        )


def num_parameters(module: nn.Module) -> int:
    """Return the number of parameters of the whole model; tied ones count once."""
    return sum(p.numel() for p in module.parameters())
