"""Supervised training: `python -m verl.trainer.fsdp_sft_trainer key=value ...`.

    parquet rows -> SFTDataset (token ids, which are trained) -> PromptSampler -> SFTWorker.update
                 -> checkpoints, validation loss -> <run folder>/huggingface

One process by default; with trainer.n_gpus_per_node (and nnodes) as many on Ray, started by the same command.
The model in the end is a Hugging Face folder, ready for reinforcement learning:

    BASE_MODEL=<run folder>/huggingface bash train_grpo.sh
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.config import SFTConfig
from verl.config.checks import check_sft_config
from verl.config.command_line import read_arguments
from verl.config.loading import absolute_folders
from verl.preflight.preflight import start_is_sound
from verl.protocol import DataProto
from verl.single_controller import build_worker_groups
from verl.single_controller.base import ClassWithInitArgs, ResourcePool, WorkerDiedError, WorkerGroup
from verl.trainer.placement import place, start_ray
from verl.trainer.ppo.batching import arrange_for_workers
from verl.trainer.ppo.run_state import (
    CheckpointStore,
    CheckpointWriting,
    RunStopped,
    StoppedOnRequest,
    StopRequest,
    load_state,
    save_state,
)
from verl.utils.announcing import announced
from verl.utils.dataset.rl_dataset import PromptSampler
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.records import LossRecorder
from verl.workers.sft_worker import SFTWorker

MODEL_FOLDER = "huggingface"
WORKER = "worker"  # a checkpoint's folder of what the worker needs


@dataclass
class SFTState:
    """Position and totals of a run; everything in it survives a restart.

    Attributes:
        step: finished steps. sampler: data position. wall_seconds: up to the last finished step, pauses left
        out. trained_tokens, tokens: that went through the updates. losses: validation loss "before", "after".
    """

    step: int = 0
    sampler: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    trained_tokens: int = 0
    tokens: int = 0
    losses: dict[str, float] = field(default_factory=dict)


class FSDPSFTTrainer:
    """The driver: holds the rows and the loop; the model is in the workers.

    Args:
        config: the whole configuration (`verl/trainer/config/sft_trainer.yaml`), validated and placed.
        tokenizer: of the model; it is saved with it.
        train_dataset, val_dataset: rows; val_dataset may be None.
        stop_request: whether the run shall end after the present step, with a checkpoint.
    """

    def __init__(
        self,
        config: SFTConfig,
        tokenizer: PreTrainedTokenizerBase,
        train_dataset: SFTDataset,
        val_dataset: SFTDataset | None,
        stop_request: StopRequest | None = None,
    ) -> None:
        self.stop_request = stop_request or StopRequest()
        self.config, self.tokenizer = config, tokenizer
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        trainer = config.trainer
        self.sampler = PromptSampler(
            len(train_dataset), config.data.train_batch_size, config.data.shuffle, trainer.seed
        )
        self.total_steps = trainer.total_training_steps or len(self.sampler) * trainer.total_epochs
        self.state = SFTState()
        self.checkpoints = CheckpointStore(trainer.default_local_dir, trainer.max_ckpt_to_keep)
        self.checkpoint_writing = CheckpointWriting(self.checkpoints, trainer.async_checkpoint)
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        self.recorder = LossRecorder(config, self.total_steps)
        self.groups: dict[str, WorkerGroup] = {}

    def init_workers(self) -> None:
        """Take the run folder, start the processes and load the model into them."""
        self.checkpoints.lock()
        trainer = self.config.trainer
        # again, now that no other run can write one
        self.resume_folder = self.checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
        pool = ResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=trainer.device == "cuda")
        worker = ClassWithInitArgs(SFTWorker, self.config, self.tokenizer, self.total_steps)
        self.groups = build_worker_groups(trainer.backend, pool, {WORKER: worker})
        self.workers = self.groups[WORKER]
        self.workers.init_model()

    def shutdown(self) -> None:
        """End the workers, and close the records. Safe to call twice."""
        groups, self.groups = self.groups, {}
        try:
            self.recorder.close()
        finally:
            for group in groups.values():
                group.shutdown()
            self.checkpoints.unlock()

    def fit(self) -> dict[str, Any]:
        """Run to `total_steps` from where the last checkpoint stands; returns what `summary.json` holds."""
        self._resume()
        trainer, state = self.config.trainer, self.state
        started = time.perf_counter() - state.wall_seconds
        if state.step == 0 and self.val_dataset is not None:
            state.losses["before"] = self._validation_loss()
            self.recorder.log_step(0, {"val/loss": state.losses["before"]})
        for rows in self._batches():
            self.checkpoint_writing.commit_if_written()
            step_started = time.perf_counter()
            self.stop_request.step = state.step + 1
            metrics = self._update(rows)
            state.step += 1
            last = state.step == self.total_steps
            due = last or (trainer.test_freq > 0 and state.step % trainer.test_freq == 0)
            if self.val_dataset is not None and due:
                metrics["val/loss"] = self._validation_loss()
                if last:
                    state.losses["after"] = metrics["val/loss"]
            metrics["timing_s/step"] = time.perf_counter() - step_started
            state.wall_seconds = time.perf_counter() - started
            self.recorder.log_step(state.step, metrics)
            self._check_skipped(metrics)
            stop = self.stop_request.asked and not last
            if last or stop or (trainer.save_freq > 0 and state.step % trainer.save_freq == 0):
                self._save()
            if stop:
                self.checkpoint_writing.finish()
                raise StoppedOnRequest(
                    f"asked to stop; the checkpoint of step {state.step} is written, and the same command "
                    "goes on from it."
                )
        self.checkpoint_writing.finish()
        summary = self._summary()
        self.recorder.finish(summary, self._export())
        return summary

    # ------------------------------------------------------------------------------------------------- steps

    def _batches(self) -> Iterator[list[int]]:
        while self.state.step < self.total_steps:
            yield self.sampler.next_batch()

    def _update(self, rows: Sequence[int]) -> dict[str, float]:
        data = self._arranged(self.train_dataset, rows)
        started = time.perf_counter()
        metrics: dict[str, float] = dict(self.workers.update(data).meta_info["metrics"])
        seconds = time.perf_counter() - started
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

    def _arranged(self, dataset: SFTDataset, rows: Sequence[int]) -> DataProto:
        """The rows as one mini-batch, balanced over the workers."""
        data, _ = arrange_for_workers(dataset.batch(rows), self.workers.world_size, len(rows))
        data.meta_info["mini_batch_rows"] = -(-len(data) // self.workers.world_size)
        return data

    def _validation_loss(self) -> float:
        """Mean over all trained tokens of the validation rows (nats)."""
        assert self.val_dataset is not None
        size, sums = self.config.data.train_batch_size, {"nll": 0.0, "tokens": 0.0}
        for start in range(0, len(self.val_dataset), size):
            rows = range(start, min(start + size, len(self.val_dataset)))
            part = self.workers.evaluate(self._arranged(self.val_dataset, rows)).meta_info["metrics"]
            sums = {name: sums[name] + part[name] for name in sums}
        return sums["nll"] / sums["tokens"]

    def _check_skipped(self, metrics: dict[str, float]) -> None:
        limit = self.config.trainer.max_skipped_updates
        if metrics["train/num_skipped_in_a_row"] >= limit:
            self.checkpoint_writing.finish()
            raise RunStopped(
                f"step {self.state.step}: the last {limit} updates were skipped, because the loss or the "
                "gradient was not finite (the log says where first); lower optim.lr, or look at the rows."
            )

    # ----------------------------------------------------------------------------------------------- on disk

    def _resume(self) -> None:
        """Take up the checkpoint that `trainer.resume_mode` asks for; cut the records back to its step."""
        folder = self.resume_folder
        aside = self.checkpoints.set_aside() if self.config.trainer.resume_mode == "none" else None
        if aside is not None:
            self.checkpoints.lock()
        self.checkpoints.remove_incomplete()
        if folder is not None:
            try:
                self.state = load_state(SFTState, folder)
                self.sampler.load_state_dict(self.state.sampler)
                self.workers.load_checkpoint(str(folder / WORKER))
            except ValueError as error:
                raise RunStopped(f"{folder}: {error}") from error
            for left_behind in self.checkpoints.set_aside_after(self.state.step):
                print(f"a checkpoint of a later step is now {left_behind}")
        self.recorder.start(self.state.step, folder)
        if aside is not None:
            print(f"an earlier run stood in {self.checkpoints.run_dir}; it is now {aside}")

    def _save(self) -> None:
        self.state.sampler = self.sampler.state_dict()
        self.checkpoint_writing.save(
            self.state.step, {WORKER: self.workers}, lambda folder: save_state(self.state, folder)
        )

    def _export(self) -> Path:
        """`<run folder>/huggingface`: the last checkpoint's model, the same files under a second name."""
        target = self.checkpoints.run_dir / MODEL_FOLDER
        aside = target.with_name(f"{MODEL_FOLDER}.incomplete")
        shutil.rmtree(aside, ignore_errors=True)
        source = self.checkpoints.folder(self.state.step)
        if not source.is_dir():  # a finished run's checkpoint elsewhere, by trainer.resume_from_path
            source = self.resume_folder or source
        shutil.copytree(source / WORKER / MODEL_FOLDER, aside, copy_function=_link)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        return target

    def _summary(self) -> dict[str, Any]:
        state = self.state
        return {
            "val_loss_before": state.losses.get("before"),
            "val_loss_after": state.losses.get("after"),
            "steps": state.step,
            "tokens": state.tokens,
            "trained_tokens": state.trained_tokens,
            "wall_seconds": state.wall_seconds,
            "seed": self.config.trainer.seed,
        }


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def build_trainer(config: SFTConfig, stop_request: StopRequest | None = None) -> FSDPSFTTrainer:
    """Read and check all rows; no process is started and no model loaded yet. Raises ValueError."""
    model, data = config.model, config.data
    absolute_folders(config, ("model.partial_pretrain", "model.lora_adapter_path"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model.partial_pretrain, trust_remote_code=model.trust_remote_code
        )
    except OSError as error:
        raise ValueError(
            f"{model.partial_pretrain}: no tokenizer can be read there ({str(error).splitlines()[0]})"
        ) from error
    if data.chat_template is not None:
        file = Path(data.chat_template) if len(data.chat_template) < 1024 else None
        is_file = file is not None and file.is_file()
        tokenizer.chat_template = file.read_text(encoding="utf-8") if is_file and file else data.chat_template
    train = SFTDataset(data.train_files, tokenizer, data)
    val = SFTDataset(data.val_files, tokenizer, data) if data.val_files else None
    for name, dataset in (("training", train), ("validation", val)):
        if dataset is not None:
            print(
                f"{name}: {len(dataset)} rows, {dataset.num_tokens} tokens, of which "
                f"{dataset.num_trained_tokens} are trained"
                + (f"; {dataset.num_cut_away} rows left out (cut)" if dataset.num_cut_away else ""),
                flush=True,
            )
    return FSDPSFTTrainer(config, tokenizer, train, val, stop_request)


def _check_alone() -> None:
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size != "1":
        raise ValueError(
            f"Found WORLD_SIZE={world_size}, as torchrun sets it; expected one process, which starts the "
            f"others itself: python -m verl.trainer.fsdp_sft_trainer trainer.n_gpus_per_node={world_size} ..."
        )


def run(argv: list[str]) -> int:
    """The program: parse, check, train. Returns the exit status.

    A user's mistake (2) and a run that can't go on (3) are one line on stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` runs
    stop_request = StopRequest().listen()
    session = trainer = None
    try:
        try:
            _check_alone()
            loaded = read_arguments(argv, ("sft_trainer",))
            config: SFTConfig = loaded.config
            check_sft_config(config)
            for line in loaded.notes:
                print(f"note: {line}")
            if not start_is_sound(config):
                return 2
            session = start_ray(config)
            place(config)
            trainer = build_trainer(config, stop_request)
            with announced("starting the processes and loading the model"):
                trainer.init_workers()
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        trainer.fit()
    except (RunStopped, WorkerDiedError) as error:
        print(f"{'stopped' if isinstance(error, StoppedOnRequest) else 'error'}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"interrupted: {stop_request.what_is_kept()}", file=sys.stderr)
        return 130
    finally:
        try:
            if trainer is not None:
                trainer.shutdown()
        finally:
            if session is not None:
                session.shutdown()
    return 0


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
