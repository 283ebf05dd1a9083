"""What training needs of a model, however its weights are spread over processes.

    micro-batches --infer--> outputs                                log-probs, values: no gradient
    micro-batches --forward_backward(share_of)--> shares; gradients add up in the engine
          --step--> weights of the next version                     next_lr() once per training step

The actor, the critic and the update loop know nothing else of an engine. `TrainEngine` (fsdp_engine.py) is
one over FSDP2, `MegatronEngine` (verl/workers/megatron) one over megatron-core.
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

from verl.single_controller.base import DataPosition
from verl.utils.packing import PackedMicroBatch
from verl.workers.engine.loading import Precision
from verl.workers.engine.lora import Adapters
from verl.workers.engine.snapshot import Snapshot

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

Outputs = tuple[Tensor, ...]
"""Of a policy (log_probs, entropy, sum_pi_squared), of a critic (values,): each [U] float32, one number for
each distinct loss token of a micro-batch (`PackedMicroBatch.unpack` makes rows of them)."""


class Share(NamedTuple):
    """What a micro-batch adds to its mini-batch.

    loss: scalar, with gradient. metrics: name -> scalar without; those of the micro-batches are summed, but
    of `*/min` the least is taken and of `*/max` the greatest (so no token means inf and -inf).
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]

    def detach(self) -> Share:
        """The same numbers without gradient."""
        return Share(self.loss.detach(), {name: figure.detach() for name, figure in self.metrics.items()})


ShareOf = Callable[[PackedMicroBatch, Outputs], Share]


class Engine(ABC):
    """One process's part of a model, with optimizer and schedule if it is trained.

    All processes call each method together. The processes of a replica give it the same micro-batches; those
    of different replicas the same number of them. Losses are sums divided by counts of all replicas, so
    gradients are summed over replicas, not averaged.

    Attributes:
        device: of this process. precision: dtypes. world_size: number of processes.
        data: which replica this process is a part of.
        scheduler: of the learning rate; None if the model is not trained.
        weights_version: number of updates that have been applied.
        adapters: the LoRA adapters, if the module has any; then nothing else of its model is trained.
        offloads_params: whether the weights are in CPU memory outside of `loaded`.
    """

    device: torch.device
    precision: Precision
    world_size: int
    data: DataPosition
    scheduler: LambdaLR | None
    weights_version: int
    offloads_params: bool
    _snapshot = Snapshot()  # the last one; at first there is nothing to wait for

    @property
    @abstractmethod
    def adapters(self) -> Adapters | None: ...

    # ------------------------------------------------------------------------------------------- computing

    @abstractmethod
    def infer(
        self, micro_batches: Iterable[PackedMicroBatch], **options: Any
    ) -> Iterator[tuple[PackedMicroBatch, Outputs]]:
        """Each micro-batch with its outputs, without gradient, the same on every process of the replica.

        options: what a policy computes (`temperature`, `with_entropy`, `with_sum_pi_squared`); nothing for a
        critic. The iterator must be read to its end.
        """

    @abstractmethod
    def forward_backward(
        self, micro_batches: Iterable[PackedMicroBatch], count: int, share_of: ShareOf, **options: Any
    ) -> list[Share]:
        """Adds the gradient of the `count` micro-batches that come next from `micro_batches`.

        share_of: called with each micro-batch and its outputs, in some process of the replica at least.
        Returns the shares without gradient, the same on every process of the replica.
        """

    @abstractmethod
    def step(self, discard: bool = False) -> tuple[float, bool]:
        """Clips and applies the gradient, and clears it. Returns (its norm before, whether it was applied).

        A gradient with an infinity or NaN in it, in any process, is thrown away in all of them; so is any
        with `discard` (which must be the same in all processes).
        """

    @abstractmethod
    def trained_weights(self) -> list[Tensor]:
        """Return the tensors that the optimizer changes in this process: its share of the trained weights.

        What is written into them reaches the model's passes with `publish_trained_weights`.
        """

    @abstractmethod
    def publish_trained_weights(self) -> None:
        """Bring what was written into `trained_weights` to every process that computes with it."""

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

    # -------------------------------------------------------------------------------------- over replicas

    @property
    @abstractmethod
    def peers(self) -> dist.ProcessGroup | None:
        """The processes that stand where this one does, one of each replica; None: there are no others."""

    def reduce(self, values: Sequence[float], op: str) -> list[float]:
        """Element-wise "sum", "min" or "max" over the replicas, in float64; the same in every process."""
        if self.data.size == 1 or not values:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, _REDUCE_OPS[op], group=self.peers)
        reduced: list[float] = tensor.tolist()
        return reduced

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The replicas' tensors, of one shape and dtype on the engine's device, in the replicas' order."""
        if self.data.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.data.size)]
        dist.all_gather(gathered, tensor, group=self.peers)
        return gathered

    # --------------------------------------------------------------------------------------------- weights

    @abstractmethod
    def loaded(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Inside of the block weights (and the optimizer's state) are on the device. Blocks may be nested."""

    @abstractmethod
    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter, tied ones once, in a fixed order; each is
        gathered when it is asked for. Adapters are merged. dtype: of the tensors, which are cast before they
        are gathered; None: as the engine has them.
        """

    @abstractmethod
    def copy_weights(self, source: Engine) -> None:
        """Takes the weights of another engine of its kind and model; this one is frozen."""

    @abstractmethod
    def save_weights(self, folder: Path) -> None:
        """Writes the weights alone, of a frozen engine: whole tensors, under the names of `snapshot`."""

    @abstractmethod
    def load_weights(self, folder: Path) -> None:
        """Takes the weights that `save_weights` wrote, of any kind of engine, into a frozen engine."""

    @abstractmethod
    def snapshot(self, path: str | Path) -> Snapshot:
        """Everything that the next update depends on, to be written into a folder, which is made; maybe by
        another thread: `step` waits until that has copied it.
        """

    def wait_for_snapshot(self) -> None:
        """Returns when the last snapshot is copied, so that the weights may change."""
        self._snapshot.wait_until_taken()

    @abstractmethod
    def load(self, path: str | Path) -> None:
        """Puts the engine where a snapshot was taken of one, of any kind and with any number of processes.
        ValueError: it is not such a folder, or one of another model or optimizer.
        """

    @abstractmethod
    def snapshot_hf(
        self, path: str | Path, tokenizer: PreTrainedTokenizerBase | None, base: str | Path, saved: str | Path
    ) -> Snapshot:
        """A Hugging Face folder: config, safetensors in the weights' dtype, tokenizer; adapters are merged.
        To be written after the snapshot in the folder `saved`, which is of the same moment. `base` is the
        folder that the model came from.
        """
