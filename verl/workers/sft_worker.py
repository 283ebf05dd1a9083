"""One rank of supervised training: the mean negative log-likelihood of the trained tokens.

    rows -> micro-batches (packed, within a token budget) -> log-probs of trained tokens -> one optimizer step

A micro-batch's share of the loss is a sum divided by the trained tokens of all rows over all ranks, so loss
and gradient are the same for every way of splitting the rows. Logits are made for trained tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import SFTConfig
from verl.protocol import DataProto
from verl.single_controller.base import Dispatch, register
from verl.utils.packing import CPU_TOKENS_PER_PACK, PackedMicroBatch
from verl.workers.engine.base import Outputs, Share
from verl.workers.engine.fsdp_engine import TrainEngine
from verl.workers.engine.loading import Precision, load_policy
from verl.workers.engine.update_loop import (
    MicroBatchLimits,
    MiniBatch,
    UpdateLoop,
    pack_micro_batches,
    tensors_of,
)
from verl.workers.fsdp_workers import TrainingWorker

ASKED = {"temperature": 1.0, "with_entropy": False}


class SFTWorker(TrainingWorker):
    """Trains a causal language model on rows of `SFTDataset.batch`.

    Args:
        config: the whole configuration of supervised training, validated.
        tokenizer: saved with the model.
        total_steps: length of the learning-rate schedule.
    """

    def __init__(self, config: SFTConfig, tokenizer: PreTrainedTokenizerBase, total_steps: int):
        super().__init__(config.trainer.device)
        self.config, self.tokenizer, self.total_steps = config, tokenizer, total_steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model. Raises ValueError for a folder that is missing or does not fit."""
        config = self.config
        precision = Precision.from_config(config.model.fsdp_config, self.device)
        self.engine = TrainEngine(
            load_policy(config.model, precision.model),
            precision,
            config.model.fsdp_config,
            self.device,
            self.world_size,
            replace(config.optim, total_training_steps=self.total_steps),
            config.optim.clip_grad,
        )
        self.limits = self._limits()
        block = {"ppo_mini_batch_size": config.data.train_batch_size, "ppo_epochs": 1, "shuffle": False}
        self.loop = UpdateLoop("train", block, self.engine, self.limits, rollout_n=1, seed=0)

    def _limits(self) -> MicroBatchLimits:
        data, max_tokens = self.config.data, self.config.data.max_token_len_per_gpu
        if self.device.type == "cpu":  # smaller passes are faster there, and the loss is the same
            max_tokens = min(max_tokens, CPU_TOKENS_PER_PACK)
        return MicroBatchLimits(data.micro_batch_size_per_gpu, max_tokens, not self.config.use_remove_padding)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        """One optimizer step on these rows of all ranks. meta_info `metrics`: train/loss (nats per trained
        token), train/grad_norm, train/lr and the count of skipped steps, the same on every rank.
        """
        metrics = self.loop.run(data, tensors_of(data), lambda mini_batch: NegativeLogLikelihood(mini_batch))
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def evaluate(self, data: DataProto) -> DataProto:
        """meta_info `metrics`: the summed negative log-likelihood of the rows of all ranks, and their trained
        tokens.
        """
        batch, total = tensors_of(data), 0.0
        with self.engine.loaded():
            _, micro_batches = pack_micro_batches(batch, range(len(data)), self.engine, self.limits)
            for micro_batch, outputs in self.engine.infer(micro_batches, **ASKED):
                total -= float(micro_batch.unpack(outputs[0]).double().sum())
        sums = self.engine.reduce([total, float(batch["response_mask"].sum())], "sum")
        return DataProto(meta_info={"metrics": dict(zip(("nll", "tokens"), sums, strict=True))})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """All that training goes on from, in `path`; the weights as a Hugging Face folder in
        `path`/huggingface. background: the files may be incomplete until `checkpoint_is_written`.
        """
        hugging_face, base = Path(path) / "huggingface", self.config.model.partial_pretrain
        snapshots = [
            self.engine.snapshot(path),
            self.engine.snapshot_hf(hugging_face, self.tokenizer, base, path),
        ]
        self.checkpoint_writer.write(snapshots, Path(path), background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Goes on from a folder of save_checkpoint, made with any number of processes."""
        self.engine.load(path)


@dataclass
class NegativeLogLikelihood:
    """The loss of one optimizer step; an `Objective` of the update loop."""

    mini_batch: MiniBatch
    idle_rows: Sequence[int] = ()

    @property
    def options(self) -> dict[str, Any]:
        return ASKED

    def share(self, micro_batch: PackedMicroBatch, outputs: Outputs) -> Share:
        """The micro-batch's share of the loss."""
        loss = -micro_batch.unpack(outputs[0]).sum() / self.mini_batch.denominator.num_tokens
        return Share(loss, {"train/loss": loss.detach()})
