"""The driver of supervised training: its loop, from the rows to `<run folder>/huggingface`.

SFTDataset (token ids, which are trained) -> PromptSampler -> SFTWorker.update -> loss, checkpoints
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from verl.checkpoints.run_state import RunStopped, SavedState
from verl.config import SFTConfig
from verl.data.rl_dataset import PromptSampler
from verl.data.sft_dataset import SFTDataset
from verl.planning.placement import run_names
from verl.protocol import DataProto
from verl.records import LossRecorder
from verl.single_controller import build_worker_groups
from verl.single_controller.base import ClassWithInitArgs, ResourcePool
from verl.single_controller.names import TRAINER
from verl.trainer.ppo.batching import arrange_for_workers
from verl.trainer.ppo.metric_utils import utilization
from verl.trainer.ppo.resuming import CheckpointedRun
from verl.trainer.ppo.stop_request import StoppedOnRequest, StopRequest
from verl.utils.durable import link_or_copy
from verl.workers.engine.flops import PEAK_FLOPS
from verl.workers.engine.loading import load_hf_config
from verl.workers.engine.lora import wants_adapters
from verl.workers.sft_worker import SFTWorker

MODEL_FOLDER = "huggingface"
WORKER = "worker"  # folder in a checkpoint for what the worker needs


@dataclass
class SFTState(SavedState):
    """The position and the totals of a run; everything in it survives a restart."""

    step: int = 0  # finished steps
    sampler: dict[str, Any] = field(default_factory=dict)  # data position
    wall_seconds: float = 0.0  # up to the last finished step, pauses left out
    trained_tokens: int = 0  # trained tokens among those that went through the updates
    tokens: int = 0  # tokens that went through the updates
    losses: dict[str, float] = field(default_factory=dict)  # "before" and "after" -> loss of the validation


class FSDPSFTTrainer(CheckpointedRun):
    """The driver of supervised training: it holds the rows and the loop, while the workers hold the model.

    Args:
        config: the whole configuration, validated and placed.
        tokenizer: the model's tokenizer, which is saved with the model.
        train_dataset: the rows to train on.
        val_dataset: the rows of the validation; None for no validation.
        stop_request: says whether the run shall end after the present step, with a checkpoint.
    """

    config: SFTConfig
    recorder: LossRecorder

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: SFTDataset,
        val_dataset: SFTDataset | None,
        stop_request: StopRequest | None = None,
    ) -> None:
        super().__init__(config, stop_request)
        self.tokenizer = tokenizer
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        trainer = config.trainer
        self.sampler = PromptSampler(
            len(train_dataset), config.data.train_batch_size, config.data.shuffle, trainer.seed
        )
        self.total_steps = trainer.total_training_steps or len(self.sampler) * trainer.total_epochs
        self.state = SFTState()
        self.recorder = LossRecorder(config, self.total_steps)

    def init_workers(self) -> None:
        """Take the run folder, start the processes and load the model into them."""
        self._lock_folder()
        trainer = self.config.trainer
        pool = ResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=trainer.device == "cuda")
        pool.names = run_names(self.config)
        pool.role = TRAINER
        worker = ClassWithInitArgs(SFTWorker, self.config, self.tokenizer, self.total_steps)
        self.worker_groups = build_worker_groups(trainer.backend, pool, {WORKER: worker})
        self.workers = self.worker_groups[WORKER]
        self.workers.init_model()

    def fit(self) -> dict[str, Any]:
        """Run to `total_steps` from where the last checkpoint stands.

        Returns:
            The contents of `summary.json`.

        Raises:
            RunStopped: if the run can't go on.
            StoppedOnRequest: if the run was asked to stop.
        """
        trainer = self.config.trainer
        self._resume()
        state = self.state
        started = time.perf_counter() - state.wall_seconds
        if state.step == 0 and self.val_dataset is not None:
            state.losses["before"] = self._validation_loss(self.val_dataset)
            self.recorder.log_step(0, {"val/loss": state.losses["before"]})
        with self._finishing_run():
            while state.step < self.total_steps:
                self.checkpoint_writing.commit_if_written()
                step_started = time.perf_counter()
                self.stop_request.step = state.step + 1
                metrics = self._update(self.sampler.take(self.sampler.batch_size))
                state.step += 1
                last = state.step == self.total_steps
                due = last or (trainer.test_freq > 0 and state.step % trainer.test_freq == 0)
                if self.val_dataset is not None and due:
                    metrics["val/loss"] = self._validation_loss(self.val_dataset)
                    if last:
                        state.losses["after"] = metrics["val/loss"]
                metrics["timing_s/step"] = time.perf_counter() - step_started
                state.wall_seconds = time.perf_counter() - started
                self.recorder.log_step(state.step, metrics)
                if metrics["train/num_skipped_in_a_row"] >= trainer.max_skipped_updates:
                    raise RunStopped(
                        f"step {state.step}: the last {trainer.max_skipped_updates} updates were skipped, "
                        "because the loss or the gradient was not finite (the log says where first); lower "
                        "optim.lr, or look at the rows."
                    )
                stop = self.stop_request.asked and not last
                if last or stop or (trainer.save_freq > 0 and state.step % trainer.save_freq == 0):
                    self._save_checkpoint()
                if stop:
                    raise StoppedOnRequest(state.step)
        summary = {
            "val_loss_before": state.losses.get("before"),
            "val_loss_after": state.losses.get("after"),
            "steps": state.step,
            "tokens": state.tokens,
            "trained_tokens": state.trained_tokens,
            "wall_seconds": state.wall_seconds,
            "seed": trainer.seed,
        }
        self.recorder.finish(summary, self._export())
        return summary

    def _update(self, rows: Sequence[int]) -> dict[str, float]:
        data = self._arranged(self.train_dataset, rows)
        started = time.perf_counter()
        update = self.workers.update(data).meta_info
        metrics: dict[str, float] = dict(update["metrics"])
        seconds = time.perf_counter() - started
        metrics |= self._utilization(data, seconds, update[PEAK_FLOPS])
        num_tokens = sum(len(self.train_dataset.input_ids[row]) for row in rows)
        num_trained = sum(int(self.train_dataset.trained[row].sum()) for row in rows)
        self.state.tokens += num_tokens
        self.state.trained_tokens += num_trained
        return metrics | {
            "train/epoch": float(self.sampler.epoch),
            "train/trained_tokens": float(num_trained),
            "perf/tokens_per_second": num_tokens / seconds,
            "timing_s/update": seconds,
        }

    def _utilization(self, data: DataProto, seconds: float, rate: float | None) -> dict[str, float]:
        """Return the MFU of an update, where the rate of its devices (FLOPs per second of one) is known."""
        if rate is None:
            return {}
        model = self.config.model
        peak_flops = rate * self.workers.world_size
        adapters = wants_adapters(model)
        return utilization("train", self._hf_config, data, seconds, peak_flops, has_adapters=adapters)

    @cached_property
    def _hf_config(self) -> PretrainedConfig:
        """Return the model's configuration, which is read once."""
        return load_hf_config(self.config.model)

    def _arranged(self, dataset: SFTDataset, rows: Sequence[int]) -> DataProto:
        """Return the rows as one mini-batch, balanced over the workers."""
        data, _ = arrange_for_workers(dataset.batch(rows), self.workers.world_size, num_mini_batches=1)
        data.meta_info["num_mini_batches"] = 1
        return data

    def _validation_loss(self, dataset: SFTDataset) -> float:
        """Return the mean loss over all trained tokens of the rows, in nats."""
        size = self.config.data.train_batch_size
        sums = {"nll": 0.0, "tokens": 0.0}
        for start in range(0, len(dataset), size):
            rows = range(start, min(start + size, len(dataset)))
            metrics = self.workers.evaluate(self._arranged(dataset, rows)).meta_info["metrics"]
            sums = {name: sums[name] + metrics[name] for name in sums}
        return sums["nll"] / sums["tokens"]

    def _load_checkpoint(self, folder: Path) -> int:
        self.state = SFTState.load(folder)
        self.sampler.load_state_dict(self.state.sampler)
        self.workers.load_checkpoint(str(folder / WORKER))
        return self.state.step

    def _save_checkpoint(self) -> None:
        self.state.sampler = self.sampler.state_dict()
        self.checkpoint_writing.save(self.state.step, {WORKER: self.workers}, self.state.save)

    def _export(self) -> Path:
        """Make `<run folder>/huggingface`, which holds the files of the last checkpoint's model; return it.

        The files are the same ones under a second name.
        """
        target = self.checkpoints.run_dir / MODEL_FOLDER
        incomplete = target.with_name(f"{MODEL_FOLDER}.incomplete")
        shutil.rmtree(incomplete, ignore_errors=True)
        source = self.checkpoints.folder(self.state.step)
        if not source.is_dir():  # the checkpoint of a finished run is elsewhere (trainer.resume_from_path)
            source = self.resume_folder or source
        shutil.copytree(source / WORKER / MODEL_FOLDER, incomplete, copy_function=link_or_copy)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(incomplete, target)
        return target
