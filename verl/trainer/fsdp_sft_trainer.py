"""Supervised training: `python -m verl.trainer.fsdp_sft_trainer key=value ...`.

    parquet rows -> SFTDataset -> FSDPSFTTrainer (verl/trainer/sft_trainer.py) -> <run folder>/huggingface

One process by default; with trainer.n_gpus_per_node (and nnodes) as many on Ray, started by the same command.
The model in the end is a Hugging Face folder, ready for reinforcement learning:

    BASE_MODEL=<run folder>/huggingface bash train_grpo.sh

What needs torch is imported inside of the functions, so that `--help` and a mistake are answered at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import SFTConfig
from verl.config.checks import check_sft_config
from verl.config.command_line import read_arguments
from verl.config.loading import absolute_folders

if TYPE_CHECKING:
    from verl.trainer.ppo.run_state import StopRequest
    from verl.trainer.sft_trainer import FSDPSFTTrainer


def build_trainer(config: SFTConfig, stop_request: StopRequest | None = None) -> FSDPSFTTrainer:
    """Read and check all rows; no process is started and no model loaded yet. Raises ValueError."""
    from transformers import AutoTokenizer

    from verl.trainer.sft_trainer import FSDPSFTTrainer
    from verl.utils.dataset.sft_dataset import SFTDataset

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


def run(argv: list[str]) -> int:
    """The program: parse, check, train. Returns the exit status.

    A user's mistake (2) and a run that can't go on (3) are one line on stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise ValueError(
                f"Found WORLD_SIZE={world_size}, as torchrun sets it; expected one process, which starts "
                "the others itself: python -m verl.trainer.fsdp_sft_trainer "
                f"trainer.n_gpus_per_node={world_size} ..."
            )
        loaded = read_arguments(argv, ("sft_trainer",))
        check_sft_config(loaded.config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in loaded.notes:
        print(f"note: {line}")
    return _train(loaded.config)


def _train(config: SFTConfig) -> int:
    """`run`, from settings that can be right on."""
    from verl.preflight.preflight import start_is_sound
    from verl.single_controller.base import WorkerDiedError
    from verl.trainer.placement import place, start_ray
    from verl.trainer.ppo.run_state import RunStopped, StoppedOnRequest, StopRequest
    from verl.utils.announcing import announced

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `finally` runs
    stop_request = StopRequest().listen()
    session = trainer = None
    try:
        try:
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
