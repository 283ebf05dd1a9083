"""The interface of a training engine, however a model's weights are spread over processes.

    micro-batches --infer--> outputs                                log-probs, values: no gradient
    micro-batches --forward_backward(loss_of)--> losses; gradients add up in the engine
          --step--> weights of the next version                     next_lr() once per training step

The actor, the critic and the update loop know nothing else of an engine. `TrainEngine` (fsdp_engine.py) is an
engine over FSDP2, `MegatronEngine` (verl/workers/megatron) one over megatron-core.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase

from verl.packing.packs import PackedMicroBatch
from verl.single_controller.base import DataPosition
from verl.workers.engine.loading import Precision
from verl.workers.engine.lora import Adapters
from verl.workers.engine.snapshot import Snapshot

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

Outputs = tuple[Tensor, ...]
"""The outputs of a policy, (log_probs, entropy, sum_pi_squared), or of a critic, (values,).

Each tensor is [U] float32 and has one number for each distinct loss token of a micro-batch.
`PackedMicroBatch.unpack` makes rows of them."""


class MicroBatchLoss(NamedTuple):
    """The loss and the metrics that a micro-batch adds to its mini-batch.

    Attributes:
        loss: a scalar with gradient.
        metrics: name -> scalar without gradient. The metrics of the micro-batches are summed, except that the
            minimum is taken of `*/min` and the maximum of `*/max`. (For these, a micro-batch without tokens
            gives inf and -inf.)
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]

    def detach(self) -> MicroBatchLoss:
        """Return the same numbers without gradient."""
        return MicroBatchLoss(
            self.loss.detach(), {name: figure.detach() for name, figure in self.metrics.items()}
        )


MicroBatchLossOf = Callable[[PackedMicroBatch, Outputs], MicroBatchLoss]


class Engine(ABC):
    """One process's part of a model, with the optimizer and the schedule if the model is trained.

    All processes call each method together. The processes of a replica give it the same micro-batches.
    Processes of different replicas give it the same number of micro-batches. Losses are sums divided by
    counts of all replicas, so gradients are summed over replicas, not averaged.

    Attributes:
        device: the device of this process.
        precision: the dtypes of the weights and of the computation.
        world_size: the number of processes.
        data: the replica that this process is a part of.
        scheduler: the schedule of the learning rate, or None if the model is not trained.
        weights_version: the number of updates that have been applied.
        adapters: the LoRA adapters, or None. If there are adapters, nothing else of the model is trained.
        offloads_params: whether the weights are in CPU memory outside of `loaded`.
    """

    device: torch.device
    precision: Precision
    world_size: int
    data: DataPosition
    scheduler: LambdaLR | None
    weights_version: int
    offloads_params: bool
    _snapshot = Snapshot()  # the last snapshot; an empty one has nothing to wait for

    @property
    @abstractmethod
    def adapters(self) -> Adapters | None: ...

    # ------------------------------------------------------------------------------------------- computing

    @abstractmethod
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        """Yield each micro-batch with its outputs, computed without gradient.

        The outputs are the same on every process of the replica. The iterator must be read to its end.

        Args:
            micro_batches: the micro-batches.
            options: what a policy computes (`temperature`, `with_entropy`, `with_sum_pi_squared`). A critic
                takes no options.
        """

    @abstractmethod
    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, loss_of: MicroBatchLossOf, **options: Any
    ) -> list[MicroBatchLoss]:
        """Add the gradient of the next `count` micro-batches of `micro_batches`.

        Args:
            micro_batches: the micro-batches.
            count: how many of them are computed.
            loss_of: maps a micro-batch and its outputs to its loss. It is called in at least one process of
                the replica.
            options: see `infer`.

        Returns:
            The losses without gradient, which are the same on every process of the replica.
        """

    @abstractmethod
    def step(self, discard: bool = False) -> tuple[float, bool]:
        """Clip and apply the gradient, and clear it.

        All processes throw the gradient away if it has an infinity or NaN in any of them. They also do so
        with `discard`, which must be the same in all processes.

        Returns:
            (the norm of the gradient before clipping, whether the gradient was applied).
        """

    @abstractmethod
    def trained_weights(self) -> list[Tensor]:
        """Return the tensors that the optimizer changes in this process: its share of the trained weights.

        Values that are written into them reach the model's passes with `publish_trained_weights`.
        """

    @abstractmethod
    def publish_trained_weights(self) -> None:
        """Bring values written into `trained_weights` to every process that computes with them."""

    @property
    def lr(self) -> float:
        """Return the learning rate of the coming update."""
        assert self.scheduler is not None
        return float(self.scheduler.get_last_lr()[0])

    @property
    def num_training_steps(self) -> int:
        """Return the number of training steps done so far (calls of `next_lr`), over restarts."""
        assert self.scheduler is not None
        return int(self.scheduler.last_epoch)

    def next_lr(self) -> None:
        """End a training step for the schedule."""
        assert self.scheduler is not None
        self.scheduler.step()

    # -------------------------------------------------------------------------------------- over replicas

    @property
    @abstractmethod
    def peers(self) -> dist.ProcessGroup | None:
        """Return the group of the processes with this one's position, one from each replica.

        None means that there are no others.
        """

    def reduce(self, values: Sequence[float], op: str) -> list[float]:
        """Return the element-wise "sum", "min" or "max" over the replicas, computed in float64.

        The result is the same in every process.
        """
        if self.data.size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.peers)
        reduced: list[float] = tensor.tolist()
        return reduced

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the replicas' tensors in the replicas' order.

        The tensors have one shape and dtype, and are on the engine's device.
        """
        if self.data.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.data.size)]
        dist.all_gather(gathered, tensor, group=self.peers)
        return gathered

    # --------------------------------------------------------------------------------------------- weights

    @abstractmethod
    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Keep the weights on the device inside the block and, with `optimizer`, the optimizer's state.

        Blocks may be nested.
        """

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) of every parameter, in a fixed order.

        Tied parameters come once. Each tensor is gathered when the iterator reaches it. Adapters are merged.

        Args:
            dtype: the dtype to which the tensors are cast before they are gathered. None keeps the engine's
                own.
        """

    @abstractmethod
    def copy_weights(self, source: Engine) -> None:
        """Copy the weights of another engine of the same kind and model into this frozen engine."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Write only the weights of a frozen engine: whole tensors, under the names of `snapshot`."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Load weights that `save_weights` of any kind of engine wrote into this frozen engine."""

    @abstractmethod
    def snapshot(self, path: str | Path) -> Snapshot:
        """Return a snapshot of everything that the next update depends on, to be written into a folder.

        The folder is created. Another thread may write the snapshot: `step` waits until it has copied the
        state.
        """

    def wait_for_snapshot(self) -> None:
        """Wait until the last snapshot is copied, so that the weights may change."""
        self._snapshot.wait_until_taken()

    @abstractmethod
    def load(self, path: str | Path) -> None:
        """Restore the state of a snapshot of any kind of engine, taken on any number of processes.

        Raises ValueError if the folder is no such snapshot, or one of another model or optimizer.
        """

    @abstractmethod
    def snapshot_hf(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase | None,
        base: str | Path,
        checkpoint_folder: str | Path,
    ) -> Snapshot:
        """Return a snapshot that writes a Hugging Face folder, with adapters merged.

        The folder has the config, safetensors in the weights' dtype, and the tokenizer.

        Args:
            path: the folder to write.
            tokenizer: the model's tokenizer, or None.
            base: the folder that the model came from.
            checkpoint_folder: the folder of a snapshot of the same moment, which must be written before this
                one.
        """
