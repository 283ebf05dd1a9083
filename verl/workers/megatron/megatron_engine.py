"""The `Engine` over megatron-core: a model cut over processes, and replicas of it.

    micro-batches --Pipeline--> outputs, shares; gradients add up --ShardedAdamW--> the next weights
    parameters or the optimizer's state --WeightMap--> Hugging Face's names: weight stream, checkpoints

The processes of a replica work on the same micro-batches. They compute with weights of `precision.compute`.
Main weights and the optimizer's state are fp32 shards.

A checkpoint is in the format of `verl.workers.engine.checkpoint`, so a run can resume over FSDP2 or
megatron-core, on any number of processes:

    shards --gathered one tensor at a time--> (name, whole tensor) --each kept by one process--> <folder>/dcp
    <folder>/dcp --each read by one process--> sent to all, one at a time --> every process takes its shard
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from verl.config.policy import Optim
from verl.config.schema import AnyFsdp
from verl.packing.packs import PackedMicroBatch
from verl.workers.engine.checkpoint import (
    check_fits,
    has_optimizer,
    load_progress,
    load_tensors,
    save_progress,
    save_tensors,
    tensor_names,
    write_hf_folder,
)
from verl.workers.engine.loading import Precision
from verl.workers.engine.optim import build_scheduler
from verl.workers.engine.snapshot import Snapshot
from verl.workers.engine.training_engine import Engine, MicroBatchLoss, MicroBatchLossOf, Outputs
from verl.workers.megatron.model import BuiltModel, initial_weights
from verl.workers.megatron.optimizer import KINDS, ShardedAdamW
from verl.workers.megatron.parallel_state import data_position
from verl.workers.megatron.schedule import Pipeline, as_outputs
from verl.workers.megatron.storage import ParkedStorage
from verl.workers.megatron.weights import Piece

EMBEDDING = "model.model.embed_tokens.weight"  # the embedding's name in a checkpoint


class MegatronEngine(Engine):
    """The engine of a process's stage of a policy or a value model.

    Args:
        built: the process's part of the model, in dtype precision.compute, on the device.
        model: the configuration's `model` block that it was built from.
        precision: the dtypes of the stored weights and of the computation.
        fsdp_config: on CUDA, `param_offload` and `optimizer_offload` keep the weights and the optimizer's
            state in CPU memory between uses. The latter also frees the gradients' memory between updates.
        device: the device of this process.
        optim: the configuration's `optim` block. With None the engine is frozen (a reference model).
        grad_clip: the largest norm of the gradient over all processes.
    """

    adapters = None

    def __init__(
        self,
        built: BuiltModel,
        model: Mapping[str, Any],
        precision: Precision,
        fsdp_config: AnyFsdp,
        device: torch.device,
        optim: Optim | None = None,
        grad_clip: float = 1.0,
    ):
        self.built = built
        self.precision = precision
        self.device = device
        self.world_size = dist.get_world_size()
        self.data = data_position()
        self.weights_version = 0
        self.optimizer: ShardedAdamW | None = None
        self.scheduler = None
        trained: torch.nn.Module = built.stage
        if optim is None:
            built.stage.requires_grad_(False)
        else:
            self.optimizer = ShardedAdamW(built, optim, grad_clip, device)
            self.scheduler = build_scheduler(self.optimizer.inner, optim)
            trained = self.optimizer.model
            # the parameters are rounded, so the main weights are read from the folder again
            if precision.compute != torch.float32:
                read = initial_weights(model, built)
                for parameter in built.weights.local_parameters:
                    local_tensor = built.weights.local_tensor(parameter, read).to(device)
                    self.optimizer.set_shard(built.parameter(parameter.name), "param", local_tensor)
        self._pipeline = Pipeline(trained, built.config, num_outputs=3 if built.weights.has_head else 1)
        self._writing_group: dist.ProcessGroup | None = None  # for the threads that write snapshots
        self._set_up_offloading(fsdp_config)

    # ------------------------------------------------------------------------------------------ computing

    @torch.no_grad()
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        if self._pipeline.num_stages == 1:
            for micro_batch in micro_batches:
                yield micro_batch, as_outputs(self.built.stage(micro_batch, **options))
            return
        micro_batch_list = list(micro_batches)  # stages work on several at a time
        if micro_batch_list:
            yield from zip(micro_batch_list, self._pipeline.forward(micro_batch_list, options), strict=True)

    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, loss_of: MicroBatchLossOf, **options: Any
    ) -> list[MicroBatchLoss]:
        return self._pipeline.forward_backward(list(islice(micro_batches, count)), loss_of, options)

    def step(self, discard: bool = False) -> tuple[float, bool]:
        assert self.optimizer is not None
        norm, applied = self.optimizer.step(discard)
        self.weights_version += applied
        return norm, applied

    def trained_weights(self) -> list[Tensor]:
        assert self.optimizer is not None
        return self.optimizer.shards()

    def publish_trained_weights(self) -> None:
        assert self.optimizer is not None
        self.optimizer.publish_shards()

    @property
    def peers(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup = mpu.get_data_parallel_group()
        return group

    # ------------------------------------------------------------------------------------------- memory

    def _set_up_offloading(self, fsdp_config: AnyFsdp) -> None:
        """Note which memory the configuration offloads between uses, and offload it."""
        on_cuda = self.device.type == "cuda"
        optimizer = self.optimizer
        self.offloads_params = on_cuda and bool(fsdp_config.param_offload)
        self._parameters: list[ParkedStorage] = []  # memory that every pass needs
        self._update_state: list[ParkedStorage] = []  # memory that only updates need
        if self.offloads_params:
            self._parameters.append(
                ParkedStorage(self.built.stage.parameters())
                if optimizer is None
                else optimizer.parameter_storage()
            )
        if on_cuda and optimizer is not None and fsdp_config.optimizer_offload:
            self._update_state += [optimizer.state_storage(), optimizer.gradient_storage()]
        self._params_needed = self._optimizer_needed = 0  # number of open blocks of `loaded` that need them
        self._park()

    @contextmanager
    def loaded(self, optimizer: bool = False) -> Iterator[None]:
        self._params_needed += 1
        self._optimizer_needed += optimizer
        for storage in self._parameters:
            storage.restore()
        for storage in self._update_state if optimizer else ():
            storage.restore()
        try:
            yield
        finally:
            self._params_needed -= 1
            self._optimizer_needed -= optimizer
            self._park()

    def _park(self) -> None:
        """Give back the memory that no open block needs."""
        unneeded = [] if self._params_needed else list(self._parameters)
        unneeded += [] if self._optimizer_needed else self._update_state
        for storage in unneeded:
            storage.park()
        if unneeded:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------- weights

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors as `Engine.weights` does, by default in the dtype of the computation.

        A parameter that a process holds whole is yielded itself, not as a copy.
        """
        dtype = self.precision.compute if dtype is None else dtype

        def local(name: str) -> Tensor:
            return self.built.parameter(name).to(dtype)

        yield from self.built.weights.whole_tensors(local, dtype, self.device)

    def whole_tensors(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor in fp32) in the order of `weights`.

        Args:
            kind: "param" for the main weights, "exp_avg" or "exp_avg_sq" for AdamW's averages. A frozen
                engine has only its parameters.
        """
        optimizer = self.optimizer
        if optimizer is None:
            assert kind == "param"
            yield from ((name, whole.float()) for name, whole in self.weights())
            return

        def local(name: str) -> Tensor:
            return optimizer.gather(self.built.parameter(name), kind)

        yield from self.built.weights.whole_tensors(local, torch.float32, self.device)

    def copy_weights(self, source: Engine) -> None:
        assert isinstance(source, MegatronEngine)
        with source.loaded(optimizer=True):  # main weights belong to the optimizer's state
            self._set_parameters(source.whole_tensors("param"))

    def save_weights(self, folder: Path) -> None:
        with self.loaded():
            share = {self._saved_name(name): whole for name, whole in self._own_share("param")}
        save_tensors(share, folder)

    def load_weights(self, folder: Path) -> None:
        self._set_parameters(self._read_whole_tensors(folder))

    @torch.no_grad()
    def _set_parameters(self, stream: Iterator[tuple[str, Tensor]]) -> None:
        """Set a frozen engine's parameters from whole tensors in the order of `weights`."""
        assert self.optimizer is None
        with self.loaded():
            for name, local_tensor in self._local_tensors(stream):
                self.built.parameter(name).copy_(local_tensor)

    # ------------------------------------------------------------------------------------------- checkpoints

    def snapshot(self, path: str | Path) -> Snapshot:
        """Return a snapshot that writes this process's share of the tensors.

        The share is in CPU memory when the method returns.
        """
        assert self.optimizer is not None and self.scheduler is not None
        if self._writing_group is None:
            self._writing_group = dist.new_group(backend="gloo")
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        model: dict[str, Tensor] = {}
        state: dict[str, dict[str, Tensor]] = {}
        with self.loaded(optimizer=True):
            for kind in KINDS:
                for name, whole in self._own_share(kind):
                    name = self._saved_name(name)
                    if kind == "param":
                        model |= dict.fromkeys(self._with_tied_name(name), whole)
                        state[name] = {"step": torch.tensor(float(self.weights_version))}
                    else:
                        state[name][kind] = whole
        save_progress(folder, self.scheduler, self.weights_version, self.device, dist.get_rank())
        share = {"model": model, "optimizer": {"state": state}}
        return Snapshot(write=partial(save_tensors, share, folder / "dcp", self._writing_group))

    def load(self, path: str | Path) -> None:
        assert self.optimizer is not None and self.scheduler is not None
        folder = Path(path)
        kinds = KINDS if has_optimizer(folder) else KINDS[:1]
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in self.built.weights.shapes().items():
            name = self._saved_name(name)
            expected |= dict.fromkeys([f"model.{saved}" for saved in self._with_tied_name(name)], shape)
            if kinds == KINDS:
                state = f"optimizer.state.{name}"
                expected |= {f"{state}.step": (), f"{state}.exp_avg": shape, f"{state}.exp_avg_sq": shape}
        check_fits(expected, folder)
        with self.loaded(optimizer=True):
            for kind in kinds:
                prefix, ending = ("model.", "") if kind == "param" else ("optimizer.state.", f".{kind}")
                for name, local_tensor in self._local_tensors(
                    self._read_whole_tensors(folder / "dcp", prefix, ending)
                ):
                    self.optimizer.set_shard(self.built.parameter(name), kind, local_tensor)
            self.weights_version = load_progress(folder, self.scheduler, self.device, dist.get_rank())
            if kinds == KINDS:
                self.optimizer.put_num_steps(self.weights_version)
        dist.barrier()

    def snapshot_hf(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        base: str | Path,
        checkpoint_folder: str | Path,
    ) -> Snapshot:
        if dist.get_rank() > 0:
            return Snapshot()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.built.hugging_face)
        names = tensor_names(model)
        return Snapshot(
            write=partial(write_hf_folder, model, names, Path(path), tokenizer, base, checkpoint_folder)
        )

    def _saved_name(self, name: str) -> str:
        """Return a parameter's name in a checkpoint.

        A checkpoint has the names of `TrainEngine`'s module, which has a policy's model as `model`.
        """
        return f"model.{name}" if self.built.weights.has_head else name

    def _with_tied_name(self, saved: str) -> list[str]:
        """Return a saved name and, for a tied embedding, its other name in a checkpoint."""
        is_tied = self.built.weights.has_head and self.built.shape.tied
        return [saved, *(["model.lm_head.weight"] if is_tied and saved == EMBEDDING else [])]

    def _own_share(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor in CPU memory) of the tensors that this process saves.

        All processes iterate together.
        """
        for number, (name, whole) in enumerate(self.whole_tensors(kind)):
            if number % self.world_size == dist.get_rank():
                yield name, whole.to("cpu", copy=True)

    def _read_whole_tensors(
        self, folder: Path, prefix: str = "", ending: str = ""
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor in fp32 on the device) of a folder of `save_tensors`.

        The order is that of `whole_tensors`. All processes iterate together, and each tensor is read by one
        of them.
        """
        names = {name: f"{prefix}{self._saved_name(name)}{ending}" for name in self.built.weights.shapes()}
        shapes = list(self.built.weights.shapes().items())
        tensors = {
            names[name]: torch.empty(shape) for name, shape in shapes[dist.get_rank() :: self.world_size]
        }
        load_tensors(tensors, folder)
        for number, (name, shape) in enumerate(shapes):
            tensor = tensors.pop(names[name], None)
            whole = torch.empty(shape, device=self.device) if tensor is None else tensor.to(self.device)
            dist.broadcast(whole, number % self.world_size)
            yield name, whole

    def _local_tensors(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter's name here, this process's tensor for it) of every parameter of the process.

        `stream` gives whole tensors in the order of `whole_tensors`.
        """
        weights = self.built.weights
        pieces = dict[str, Tensor]()
        for parameter in weights.parameters:
            # A copy comes right after its original, and has the same pieces.
            if not parameter.is_embedding_copy:
                pieces = {name: whole for _, (name, whole) in zip(parameter.pieces, stream, strict=False)}
            if parameter in weights.local_parameters:
                yield parameter.name, weights.local_tensor(parameter, partial(_region_of, pieces))


def _region_of(pieces: Mapping[str, Tensor], piece: Piece, region: tuple[slice, ...]) -> Tensor:
    """Return a region of the whole tensor of a piece."""
    return pieces[piece.name][region]
