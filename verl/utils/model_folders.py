"""Locations of a trained model: RUN/global_step_N/actor/huggingface, or any Hugging Face folder."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from verl.utils.file_sums import damage_in

# The settings of a run with which its model wants to be asked.
ASKED_WITH = (
    "max_turns",
    "do_search",
    "retriever.topk",
    "data.max_prompt_length",
    "data.max_start_length",
    "data.max_response_length",
    "data.max_obs_length",
)
LOCAL_SEARCH = "http://127.0.0.1:8000/retrieve"
CHECKPOINT_ROOTS = ("verl_checkpoints", "checkpoints")


def search_address(url_of_run: str | Sequence[str] | None, is_running: bool) -> tuple[str, str]:
    """Return the address of the search servers of a model that is asked now, and where it is from.

    It is that of RETRIEVER_URL, else that of the model's run while it trains, else that of a server which
    `bash retrieval_launch.sh` has started. The server that a run started for itself ended with the run.

    Args:
        url_of_run: The address, or addresses, in the settings of the model's run.
        is_running: Whether the run still trains.
    """
    if os.environ.get("RETRIEVER_URL"):
        return os.environ["RETRIEVER_URL"], "RETRIEVER_URL"
    if url_of_run is not None and is_running:
        urls = [url_of_run] if isinstance(url_of_run, str) else url_of_run
        return ",".join(urls), "the run's server, as it still trains"
    return LOCAL_SEARCH, "that of bash retrieval_launch.sh; RETRIEVER_URL names another"


def run_folder(model: Path) -> Path | None:
    """Return RUN if the model is RUN/global_step_N/actor/huggingface of a finished checkpoint, else None."""
    parents = model.resolve().parents
    is_checkpoint = len(parents) > 2 and re.fullmatch(r"global_step_\d+", parents[1].name)
    return parents[2] if is_checkpoint and parents[0].name == "actor" else None


def run_settings(model: Path) -> dict[str, Any]:
    """Return the values of ASKED_WITH in the configuration of a model's run, or {} if it is of no run."""
    import yaml  # it is only needed for models of runs

    run = run_folder(model)
    file = (model if run is None else run) / "config.yaml"
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{file} can't be read: {problem}; expected the config.yaml of a run") from error
    found = {}
    for name in ASKED_WITH:
        block, _, key = name.rpartition(".")
        values = config.get(block) if block and isinstance(config, dict) else config
        if isinstance(values, dict) and values.get(key) is not None:
            found[name] = values[key]
    return found


@cache
def check_model_is_whole(model: Path) -> None:
    """Raise ValueError if the model of a run's checkpoint is damaged, by the checkpoint's sums.

    Other folders have no sums, and pass.
    """
    if run_folder(model) is None:
        return
    checkpoint = model.resolve().parents[1]
    damage = damage_in(checkpoint, below="actor/huggingface/")
    if damage is not None:
        raise ValueError(f"{checkpoint} is damaged: {damage}. Take the model of another checkpoint.")


def find_model(model: str | None) -> str:
    """Return a folder with config.json, or a hub name.

    For a folder of a run, or for None, this is the model of the newest checkpoint. Raises ValueError if there
    is no model, or a damaged one; the message says what to give.
    """
    folder = None if model is None else Path(model).expanduser()
    if folder is not None and (folder / "config.json").is_file():
        check_model_is_whole(folder)
        return str(folder)
    if folder is not None and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"--model: {folder} holds a LoRA adapter, not a model; give the folder huggingface beside it: "
            "the model with the adapter merged in"
        )
    if model is None or (folder is not None and folder.is_dir()):
        roots = [Path(root) for root in CHECKPOINT_ROOTS] if folder is None else [folder]
        configs = [path for root in roots for path in root.glob("**/huggingface/config.json")]
        configs = [path for path in configs if run_folder(path.parent)]
        if configs:
            newest = max(configs, key=lambda path: path.stat().st_mtime).parent
            check_model_is_whole(newest)
            return str(newest)
        raise ValueError(
            f"no trained model below {' or '.join(CHECKPOINT_ROOTS)}: make one with `bash train_grpo.sh`, or "
            "give one with --model"
            if folder is None
            else f"--model: {folder} holds no config.json and no global_step_N/actor/huggingface"
        )
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) or Path(model).parent.exists():
        raise ValueError(f"--model: there is no folder {model}, and it is no hub name (organisation/model)")
    return model
