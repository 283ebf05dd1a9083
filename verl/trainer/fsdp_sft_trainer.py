"""Supervised training: `python -m verl.trainer.fsdp_sft_trainer key=value ...`.

    parquet rows -> SFTDataset -> FSDPSFTTrainer (verl/trainer/sft_trainer.py) -> <run folder>/huggingface

The run has one process by default; with trainer.n_gpus_per_node (and nnodes) it has as many on Ray, started
by the same command. The trained model is a Hugging Face folder, ready for reinforcement learning:

    BASE_MODEL=<run folder>/huggingface bash train_grpo.sh

Modules that need torch are imported inside the functions, so that `--help` and mistakes are answered at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import SFTConfig
from verl.config.checks import check_sft_config
from verl.config.command_line import read_arguments
from verl.config.loading import absolute_folders
from verl.data.remote_rows import with_local_rows
from verl.utils.announcing import announce, gc_paused
from verl.utils.early_signals import end_on_signals
from verl.utils.logs import start_logging
from verl.utils.text import printable

if TYPE_CHECKING:
    from verl.trainer.ppo.stop_request import StopRequest
    from verl.trainer.sft_trainer import FSDPSFTTrainer


def build_trainer(config: SFTConfig, stop_request: StopRequest | None = None) -> FSDPSFTTrainer:
    """Read and check all rows, and build the trainer; no process is started and no model is loaded yet.

    Raises ValueError if the rows can't be used.
    """
    with gc_paused():
        from verl.data.sft_dataset import SFTDataset
        from verl.planning.batch_sizes import fit_sft_batch_size
        from verl.trainer.sft_trainer import FSDPSFTTrainer
        from verl.utils import check_token_ids, hf_tokenizer
        from verl.workers.engine.loading import load_hf_config

    config = absolute_folders(config, ("model.partial_pretrain", "model.lora_adapter_path"))
    model = config.model
    data = config.data
    tokenizer = hf_tokenizer(
        model.partial_pretrain, correct_pad_token=False, trust_remote_code=model.trust_remote_code
    )
    vocab_size = load_hf_config(model).get_text_config().vocab_size
    check_token_ids(tokenizer, vocab_size, str(model.partial_pretrain))
    if data.chat_template is not None:
        file = Path(data.chat_template) if len(data.chat_template) < 1024 else None
        is_file = file is not None and file.is_file()
        tokenizer.chat_template = file.read_text(encoding="utf-8") if is_file and file else data.chat_template
    train = SFTDataset(data.train_files, tokenizer, data, vocab_size)
    val = SFTDataset(data.val_files, tokenizer, data, vocab_size) if data.val_files else None
    for name, dataset in (("training", train), ("validation", val)):
        if dataset is not None:
            tokens = sum(map(len, dataset.input_ids))
            trained = sum(int(row.sum()) for row in dataset.trained)
            cut = f"; {dataset.num_cut_away} rows left out (cut)" if dataset.num_cut_away else ""
            print(
                f"{name}: {len(dataset)} rows, {tokens} tokens, of which {trained} are trained{cut}",
                flush=True,
            )
    config, notes = fit_sft_batch_size(config, len(train))
    for note in notes:
        print(f"note: {note}", flush=True)
    return FSDPSFTTrainer(config, tokenizer, train, val, stop_request)


def run(argv: list[str]) -> int:
    """Run the program: parse the arguments, check them and train.

    Returns:
        The exit status. A user's mistake (2) and a run that can't go on (3) print one line on stderr.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        if os.environ.get("WORLD_SIZE", "1") != "1":
            if os.environ.get("RANK", "0") != "0":
                return 2  # the first one says it
            raise ValueError(
                f"Found WORLD_SIZE={os.environ['WORLD_SIZE']}, as torchrun sets it; expected one process, "
                f"which starts the others itself: {_without_torchrun(argv)}"
            )
        module = "verl.trainer.fsdp_sft_trainer"
        loaded = with_local_rows(read_arguments(argv, ("sft_trainer",), module=module))
        check_sft_config(loaded.config)
    except ValueError as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    for line in loaded.notes:
        print(f"note: {printable(line)}")
    return _train(loaded.config)


def _without_torchrun(argv: list[str]) -> str:
    """Return the command that starts what a torchrun was to start, with the same processes on each node."""
    world_size = int(os.environ["WORLD_SIZE"])
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    sizes = [f"trainer.n_gpus_per_node={processes}"]
    if world_size > processes:
        sizes.insert(0, f"trainer.nnodes={world_size // processes}")
    others = [word for word in argv if not word.startswith(("trainer.nnodes=", "trainer.n_gpus_per_node="))]
    return shlex.join(["python", "-m", "verl.trainer.fsdp_sft_trainer", *others, *sizes])


def _train(config: SFTConfig) -> int:
    """Train with settings that have passed the first checks; return the exit status."""
    with gc_paused():
        from verl.planning.placement import decide_machine_settings, start_ray
        from verl.preflight.preflight import passes_quick_checks
        from verl.trainer.restarts import run_program

    def start(closing: ExitStack, stop_request: StopRequest) -> FSDPSFTTrainer | int:
        if not passes_quick_checks(config):
            return 2
        closing.enter_context(start_ray(config))
        trainer = build_trainer(decide_machine_settings(config), stop_request)
        closing.callback(trainer.shutdown)
        with announce("starting the processes and loading the model"):
            trainer.init_workers()
        return trainer

    return run_program(start)


def main() -> None:
    end_on_signals(sys.argv[1:])
    start_logging("sft")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
