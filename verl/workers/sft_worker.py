"""One rank of supervised training on the mean negative log-likelihood of the trained tokens.

    rows -> micro-batches (packed, within a token budget) -> log-probs of trained tokens -> one optimizer step

A micro-batch's share of the loss is a sum divided by the number of trained tokens in all rows on all ranks.
The loss and the gradient are therefore the same for every way of splitting the rows. Logits are computed for
trained tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from verl.config import SFTConfig
from verl.packing.packs import PackedMicroBatch
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, register
from verl.workers.engine.training_engine import MicroBatchLoss, Outputs
from verl.workers.engine.update_loop import (
    MicroBatchLimits,
    MiniBatch,
    UpdateLoop,
    UpdateSchedule,
    pack_micro_batches,
    tensors_of,
)
from verl.workers.fsdp_workers import TrainingWorker

MODEL_OPTIONS = {"temperature": 1.0, "with_entropy": False}


class SFTWorker(TrainingWorker):
    """A worker that trains a causal language model on rows of `SFTDataset.batch`.

    Args:
        config: the whole, validated configuration of supervised training.
        tokenizer: the model's tokenizer, which is saved with it.
        total_steps: the length of the learning-rate schedule.
    """

    def __init__(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, total_steps: int):
        super().__init__(config, config.trainer.device)
        self.tokenizer = tokenizer
        self.total_steps = total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model.

        Raises ValueError if its folder is missing or does not fit.
        """
        config = self.config
        optim = replace(config.optim, total_training_steps=self.total_steps)
        self.engine = self.build_engine(
            config.model, config.model.fsdp_config, optim=optim, grad_clip=optim.clip_grad
        )
        data = config.data
        padded = not config.use_remove_padding
        self.micro_batch_limits = MicroBatchLimits.on_device(
            self.device, data.micro_batch_size_per_gpu, data.max_token_len_per_gpu, padded
        )
        schedule = UpdateSchedule(config.data.train_batch_size)
        self.loop = UpdateLoop("train", schedule, self.engine, self.micro_batch_limits, rollout_n=1, seed=0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        """Make one optimizer step on these rows of all ranks.

        The result has meta_info `metrics`: train/loss (nats per trained token), train/grad_norm, train/lr and
        the numbers of skipped updates. They are the same on every rank.
        """
        metrics = self.loop.run(data, tensors_of(data), lambda mini_batch: NegativeLogLikelihood(mini_batch))
        return DataProto(meta_info={"metrics": metrics, **self.rate()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def evaluate(self, data: DataProto) -> DataProto:
        """Compute the negative log-likelihood of these rows of all ranks.

        The result has meta_info `metrics`: `nll`, the summed negative log-likelihood (nats) over all ranks,
        and `tokens`, the number of its tokens.
        """
        batch = tensors_of(data)
        total = 0.0
        with self.engine.loaded():
            _, micro_batches = pack_micro_batches(
                batch, range(len(data)), self.engine, self.micro_batch_limits
            )
            for micro_batch, outputs in self.engine.infer(micro_batches, **MODEL_OPTIONS):
                total -= float(micro_batch.unpack(outputs[0]).double().sum())
        sums = self.engine.reduce([total, float(batch["response_mask"].sum())], "sum")
        return DataProto(meta_info={"metrics": dict(zip(("nll", "tokens"), sums, strict=True))})


@dataclass
class NegativeLogLikelihood:
    """The loss of one optimizer step; an `Objective` of the update loop."""

    step_bound: ClassVar[None] = None  # the optimizer's steps have no limit
    mini_batch: MiniBatch
    rows_without_gradient: Sequence[int] = ()

    @property
    def options(self) -> dict[str, Any]:
        return MODEL_OPTIONS

    def loss_of(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> MicroBatchLoss:
        """Return the micro-batch's share of the loss."""
        loss = -micro_batch.unpack(outputs[0]).sum() / self.mini_batch.denominator.num_tokens
        return MicroBatchLoss(loss, {"train/loss": loss.detach()})
