"""Convert between a run's checkpoints and Hugging Face folders, and show what is in a checkpoint.

    python scripts/convert_checkpoint.py to-hf   RUN/global_step_100 OUT     weights, config, tokenizer
    python scripts/convert_checkpoint.py from-hf HF_FOLDER OUT               OUT/global_step_0, to start from
    python scripts/convert_checkpoint.py show    RUN/global_step_100

Checkpoints have one format, whatever trained them (FSDP2 or Megatron, any number of processes). A run can
continue with other processes, or with the other trainer, without conversion.

`to-hf` writes the weights bit by bit. LoRA adapters are merged into their base. The run's lengths, max_turns
and topk go into OUT/config.yaml, where infer.py finds them. `from-hf` writes a folder without an optimizer's
state. With these settings a run starts at step 0 with its weights: trainer.resume_mode=from_path
trainer.resume_from_path=OUT/global_step_0. `to-hf` returns them bit by bit.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import torch  # noqa: E402
import yaml  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from data_prep.files import run_command  # noqa: E402
from verl.checkpoints.run_state import STATE_FILE, RunState  # noqa: E402
from verl.utils.durable import link_or_copy  # noqa: E402
from verl.utils.file_sums import damage_in, write_sums  # noqa: E402
from verl.utils.hub import use_cache_if_hub_is_away  # noqa: E402
from verl.workers.engine.checkpoint import (  # noqa: E402
    ADAPTER_FOLDER,
    MODEL_PREFIX,
    save_tensors,
    saved_tensors,
    tensor_names,
    write_hf_weights,
)
from verl.workers.engine.loading import load_policy  # noqa: E402
from verl.workers.engine.lora import plain_parameters  # noqa: E402
from verl.workers.engine.model_files import stored_dtype  # noqa: E402

HUGGING_FACE = "huggingface"
WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json")
PARTS = ("actor", "critic", "worker")
RUN_CONFIG = "config.yaml"
# The settings of a run that infer.py uses, by block. The others may hold addresses and passwords.
INFERENCE_KEYS = {
    "": "max_turns",
    "retriever": "topk",
    "data": "max_start_length max_prompt_length max_response_length max_obs_length",
}


def parts_of(folder: Path) -> dict[str, Path]:
    """Return the folder of each model in a step's folder; the folder of a model may be passed itself.

    Raises:
        ValueError: it is neither.
    """
    if folder.name.endswith(".incomplete"):
        raise ValueError(f"{folder} was being written when its run ended; take one without .incomplete.")
    checkpoint = folder.parent if (folder / "dcp").is_dir() else folder
    damage = damage_in(checkpoint)
    if damage is not None:
        raise ValueError(f"{checkpoint} is damaged: {damage}; take another checkpoint.")
    if (folder / "dcp" / ".metadata").is_file():
        return {folder.name: folder}
    parts = {name: folder / name for name in PARTS if (folder / name / "dcp" / ".metadata").is_file()}
    if not parts:
        run = folder if folder.exists() else folder.parent
        steps = ", ".join(sorted(map(str, run.glob("global_step_*[0-9]"))))
        raise ValueError(
            f"{folder} holds no checkpoint: found no dcp/.metadata in it, nor in {', '.join(PARTS)} below it;"
            f" expected a run's global_step_N folder, or the folder actor in it."
            + (f" There are {steps}." if steps else "")
        )
    return parts


def new_folder(path: Path) -> Path:
    """Make a folder and return it. Raises ValueError if there is something at `path` already."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is there already, and not empty; name a folder that is to be made.")
    path.mkdir(parents=True, exist_ok=True)
    return path


def copy_files(source: Path, target: Path, weights: bool = False) -> None:
    """Copy the files of a Hugging Face folder.

    With `weights`, the files with weights are included, as links where that is possible.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHTS):
            shutil.copyfile(file, target / file.name)
        elif file.is_file() and weights:
            link_or_copy(file, target / file.name)


def to_hf(step: Path, out: Path, like: Path | None) -> None:
    """Write a policy's checkpoint as a Hugging Face folder.

    `like` is a folder with its config and tokenizer. None stands for the folder huggingface in the
    checkpoint. Raises ValueError if there is no policy or no config.
    """
    parts = {name: path for name, path in parts_of(step).items() if name != "critic"}
    if not parts:
        raise ValueError(f"{step} is a critic, which has a value head and no words; give a policy (actor).")
    (model_folder,) = parts.values()
    source = like or model_folder / HUGGING_FACE
    if not (source / "config.json").is_file():
        raise ValueError(
            f"{source} has no config.json; name a Hugging Face folder of the same model with --like."
        )
    copy_files(source, new_folder(out))
    if any(".lora_A." in name for name in saved_tensors(model_folder / "dcp", MODEL_PREFIX)):
        adapter = model_folder / ADAPTER_FOLDER  # it is merged into its base, in the dtype of the training
        base = json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
        use_cache_if_hub_is_away({"base_model_name_or_path": base})
        dtype = stored_dtype(source) or AutoConfig.from_pretrained(source).dtype or torch.float32
        policy = load_policy({"path": base, "lora_adapter_path": str(adapter)}, dtype)
        policy.model.save_pretrained(out, state_dict=dict(plain_parameters(policy.model, policy.adapters)))
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
        if (source / "generation_config.json").is_file():
            model.generation_config = type(model.generation_config).from_pretrained(source)
        dcp_folder = model_folder / "dcp"
        write_hf_weights(model, tensor_names(model), dcp_folder, out, stored_dtype(source))
    write_inference_settings(model_folder, out)


def write_inference_settings(part: Path, out: Path) -> None:
    """Write OUT/config.yaml with the run's INFERENCE_KEYS, if the checkpoint is in its run's folder."""
    step = part.absolute().parent
    if not re.fullmatch(r"global_step_\d+", step.name) or not (step.parent / RUN_CONFIG).is_file():
        return
    run = yaml.safe_load((step.parent / RUN_CONFIG).read_text(encoding="utf-8"))
    blocks = {block: run if block == "" else run.get(block, {}) for block in INFERENCE_KEYS}
    inference_settings = {
        block: {name: blocks[block][name] for name in names.split() if name in blocks[block]}
        for block, names in INFERENCE_KEYS.items()
    }
    settings = inference_settings.pop("") | {
        block: values for block, values in inference_settings.items() if values
    }
    if settings:  # supervised runs have other settings
        (out / RUN_CONFIG).write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def from_hf(source: Path, out: Path) -> None:
    """Write a Hugging Face folder as the folder of step 0, without optimizer.

    Raises ValueError if it is no Hugging Face folder.
    """
    if not (source / "config.json").is_file():
        candidates = [str(path.parent) for path in source.glob("**/huggingface/config.json")]
        raise ValueError(
            f"{source} has no config.json; expected a Hugging Face folder"
            + (f", such as {', '.join(candidates[:5])}." if candidates else ".")
        )
    dtype = stored_dtype(source) or AutoConfig.from_pretrained(source).dtype or torch.float32
    policy = load_policy({"path": str(source)}, dtype)
    step = new_folder(out / "global_step_0")
    actor = step / "actor"
    actor.mkdir()
    save_tensors({"model": dict(policy.state_dict())}, actor / "dcp")
    schedule = {"last_epoch": 0, "_step_count": 1, "lr_lambdas": []}
    torch.save({"scheduler": schedule, "weights_version": 0}, actor / "schedule.pt")
    copy_files(source, actor / HUGGING_FACE, weights=True)
    RunState().save(step)
    write_sums(step)


def describe(part: Path) -> list[str]:
    """Return lines on one model of a checkpoint."""
    tensors = saved_tensors(part / "dcp")
    weights = {name: t for name, t in tensors.items() if name.startswith("model.")}
    state = Counter(name.rpartition(".")[2] for name in tensors if name.startswith("optimizer.state."))
    dtypes = Counter(str(t.dtype).removeprefix("torch.") for t in weights.values())
    size = sum(file.stat().st_size for file in part.rglob("*") if file.is_file())
    schedule = torch.load(part / "schedule.pt", weights_only=True)
    kind = "LoRA adapters" if any(".lora_A." in name for name in weights) else "whole weights"
    critic = ", a value head" if any(".value_head." in name for name in weights) else ""
    lines = [
        f"{kind}{critic}: {len(weights)} tensors of {sum(t.numel() for t in weights.values()):,} numbers ("
        + ", ".join(f"{count} {name}" for name, count in dtypes.most_common())
        + ")",
        "optimizer: " + (", ".join(f"{n} {name}" for name, n in sorted(state.items())) or "none"),
        f"training steps {schedule['scheduler']['last_epoch']}, updates {schedule['weights_version']}, "
        f"random states of {len(list(part.glob('rng_rank*.pt')))} processes",
        f"{size / 2**20:,.1f} MB on disk",
    ]
    config = part / HUGGING_FACE / "config.json"
    if config.is_file():
        hf_config: dict[str, Any] = json.loads(config.read_text())
        lines.append(f"Hugging Face folder: {', '.join(hf_config.get('architectures') or ['unknown'])}")
    return lines


def show(folder: Path) -> None:
    """Print what is in a step's folder, or in one model's."""
    parts = parts_of(folder)
    if (folder / STATE_FILE).is_file():
        print(f"{folder}: step {json.loads((folder / STATE_FILE).read_text())['step']}")
    for name, model_folder in parts.items():
        print(name, *describe(model_folder), sep="\n  ")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("to-hf", "from-hf", "show"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        if name != "show":
            command.add_argument("out", type=Path)
        if name == "to-hf":
            command.add_argument("--like", type=Path, help="Hugging Face folder with config and tokenizer")

    def program(options: argparse.Namespace) -> None:
        if options.command == "to-hf":
            to_hf(options.source, options.out, options.like)
            print(f"{options.out}: a Hugging Face folder")
        elif options.command == "from-hf":
            from_hf(options.source, options.out)
            step = options.out.absolute() / "global_step_0"  # absolute: a run may start in another folder
            print(f"start from it: trainer.resume_mode=from_path trainer.resume_from_path={step}")
        else:
            show(options.source)

    return run_command(parser, program, arguments)


if __name__ == "__main__":
    sys.exit(main())
