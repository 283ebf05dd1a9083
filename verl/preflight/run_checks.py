"""The checks of a run by its settings and the files that it reads.

No machine but this one is asked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from verl.checkpoints.run_state import CheckpointStore
from verl.config import Config, SFTConfig, get_value
from verl.config.checks import FORMAT_SCORES, check_sft_config
from verl.config.keys import as_list
from verl.data.controls import question_of
from verl.data.rl_dataset import RLHFDataset, first_rows, row_settings
from verl.data.row_environments import check_environments, searches
from verl.environments.registry import SEARCH
from verl.planning.config_validation import settings_without_effect, validate
from verl.planning.hardware import Hardware, memory_of_machine
from verl.planning.memory_plan import Plan, engines_of, rows_of_step, verdict
from verl.planning.model_memory import Layout
from verl.planning.passes import Passes, num_mini_batches
from verl.preflight.target import (
    Finding,
    Target,
    error,
    existing_parent,
    warning,
)
from verl.utils.hub import is_offline, leave_hub_alone, local_folder, look_at_hub
from verl.utils.logs import without_keys
from verl.utils.text import format_bytes
from verl.utils.tracking import wandb_key, wandb_problem
from verl.workers.engine.loading import load_hf_config
from verl.workers.engine.update_loop import mini_batches

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_WORD = re.compile(r"[^\W\d_]+")
# Pretrained models have 3 to 5. The shipped tiny model has 1.9 for questions on Wikipedia, and 4.6 for those
# on the microworld.
_FEWEST_BYTES_PER_TOKEN = 2.5
_QUESTIONS_READ = 64
_END = "the run would end before its first step"


def mistake_of(target: Target) -> str | None:
    """Return the mistake that validation finds in the run's settings, or None.

    A run that starts has validated them already, so the result is None.
    """
    config = None if target.at_start else target.config
    try:
        if isinstance(config, SFTConfig):
            check_sft_config(config)
        elif config is not None:
            validate(config, format_reward=any(config.reward_model[name] for name in FORMAT_SCORES))
            check_environments(config)
    except ValueError as problem:
        return str(problem)
    return None


def find_mistakes(target: Target) -> Iterator[Finding]:
    """Find what validation refuses: types, ranges, missing files, parallel sizes, contradicting keys.

    dp x tp x pp, the sizes of data, tensor and pipeline parallelism, must fit the number of processes.
    """
    if (mistake := mistake_of(target)) is not None:
        yield error(mistake.rstrip("."))


def find_settings_without_effect(target: Target) -> Iterator[Finding]:
    """Find keys that are set and change nothing, and a loss with an aggregation that it is not meant for."""
    if target.at_start or mistake_of(target) is not None:
        return
    notes = list(target.notes)
    if isinstance(target.config, Config):
        notes += settings_without_effect(target.config)
    yield from (warning(note.rstrip(".")) for note in notes)


def find_uneven_batches(target: Target) -> Iterator[Finding]:
    """Find batch sizes that don't divide: mini-batches of a step, processes of a mini-batch."""
    config = target.config
    if not isinstance(config, Config) or config.trainer.val_only:
        return
    rows = rows_of_step(config)
    n = config.actor_rollout_ref.rollout.n
    blocks = (
        ["actor_rollout_ref.actor", "critic"] if Passes(config).needs_values else ["actor_rollout_ref.actor"]
    )
    try:
        replicas = Layout.of(config).replicas
    except ValueError:  # the check of settings says why
        return
    for block in blocks:
        key = f"{block}.ppo_mini_batch_size"
        size = get_value(config, key)
        mini = size * n
        parts = mini_batches(rows, num_mini_batches(config, rows, get_value(config, block)))
        largest = len(parts[0])
        smallest = len(parts[-1])
        sizes = str(largest) if largest == smallest else f"{largest} or {smallest}"
        if mini < rows and rows % mini:
            divisor = next(size for size in range(mini, 0, -1) if rows % size == 0)
            yield warning(
                f"a step has {rows} trajectories, no multiple of {key}={size}"
                + (f" (times rollout.n: {mini})" if n > 1 else ""),
                f"each of the {len(parts)} updates of a step has {sizes} of them, not {mini}",
                f"{key}={max(1, divisor // n)}",
            )
        if largest % replicas or smallest % replicas:
            num_copies = max(-largest % replicas, -smallest % replicas)
            yield warning(
                f"{key} gives updates of {sizes} trajectories for {replicas} replicas of the model",
                f"such updates are filled up with {num_copies} or fewer copies that teach nothing",
                f"set {key} to a multiple of {replicas}",
            )


def find_lengths_that_do_not_fit(target: Target) -> Iterator[Finding]:
    """Find contexts longer than the model's positions, and turns that leave no room for a search."""
    config = target.config
    if not isinstance(config, Config):
        return
    data = config.data
    longest = config.data.max_prompt_length + config.data.max_response_length
    blocks: dict[str, Any] = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model}
    if Passes(config).needs_values:
        blocks["critic.model.path"] = config.critic.model
    for key, block in blocks.items():
        positions = _max_positions(block) if block.path and local_folder(block.path) else None
        if positions is not None and longest > positions:
            yield error(
                f"a trajectory may get {longest} tokens (data.max_prompt_length={data.max_prompt_length} and "
                f"a last turn of max_response_length={data.max_response_length}), {key}={block.path} knows "
                f"{positions}",
                "past its last position a model writes nonsense, or fails",
                f"data.max_prompt_length={max(1, positions - data.max_response_length)}, or a model with "
                "more positions (RoPE scaling in its config.json)",
            )
    one_search = data.max_start_length + data.max_response_length + data.max_obs_length
    if searches(config) and config.max_turns > 0 and one_search > data.max_prompt_length:
        yield warning(
            f"data.max_start_length={data.max_start_length}, max_response_length={data.max_response_length} "
            f"and max_obs_length={data.max_obs_length} make {one_search} tokens, data.max_prompt_length is "
            f"{data.max_prompt_length}",
            "a trajectory may be full before it has read what its first search found",
            f"data.max_prompt_length={one_search + data.max_response_length}, or shorter parts",
        )


def _max_positions(block: Any) -> int | None:
    """Return the number of positions of a model, including those of a stretched RoPE (YaRN, linear, ...)."""
    try:
        fields = load_hf_config(block).get_text_config().to_dict()
    except ValueError:  # the check of models says why
        return None
    positions = fields.get("max_position_embeddings")
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if positions is None or not isinstance(factor := scaling.get("factor"), int | float):
        return positions
    return max(positions, int(factor * scaling.get("original_max_position_embeddings", positions)))


def find_broken_models(target: Target) -> Iterator[Finding]:
    """Find models that are not whole, or without a tokenizer."""
    for key, path in target.models_of_job.items():
        folder = local_folder(path)
        if folder is None:
            continue
        missing = [] if (folder / "config.json").exists() else ["config"]
        files = sorted(folder.glob("*.safetensors"))
        if not files and not any(folder.glob("pytorch_model*.bin")):
            missing.append("weights")
        if not any((folder / name).exists() for name in TOKENIZERS):
            missing.append("tokenizer")
        index = folder / "model.safetensors.index.json"
        if index.exists():
            try:
                shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                missing += [name for name in sorted(shards) if not (folder / name).exists()]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
                reason = f"{index.name}: {type(failure).__name__}: {failure}"
                yield error(f"{key}={path} can't be read: {reason}", _END, f"copy {index} again")
        if missing:
            names = ", ".join(missing)
            do = f"copy {names} into {path}" if Path(path).is_dir() else f"hf download {path}"
            yield error(f"{key}={path} is not whole: no {names}", _END, do)
        for file in files:
            if (problem := _problem_of_file(file)) is not None:
                yield error(f"{key}={path} can't be read: {file.name}: {problem}", _END, f"copy {file} again")


def _problem_of_file(path: Path) -> str | None:
    """Return what is wrong with an existing file of a model or of data, or None."""
    if not os.access(path, os.R_OK):
        return "it can't be read by this user"
    with path.open("rb") as file:
        start = file.read(16)
    if start.startswith(b"version https://"):
        return "it is a git-lfs pointer; fetch the file with `git lfs pull`"
    if path.suffix == ".parquet" and not start.startswith(b"PAR1"):
        return "it is no parquet file"
    if path.suffix == ".safetensors":
        try:
            safe_open(path, framework="pt").__enter__()
        except SafetensorError as problem:
            return f"it was cut short, or is no such file ({problem})"
    return None


def find_uncached_models(target: Target) -> Iterator[Finding]:
    """Find a model that is not in the cache while the hub is switched off."""
    if not is_offline() or (trouble := look_at_hub(target.models_of_job)) is None:
        return
    for key, path in trouble.missing.items():
        problem = f"{trouble.problem}, and {key}={path} is not in the cache"
        do = f"on a machine with network: hf download {path} (same HF_HOME), or unset the variable"
        yield error(problem, "it can't be loaded, and nothing may be fetched", do)


def find_unreachable_hub(target: Target) -> Iterator[Finding]:
    """Find models with hub names that the hub does not give within two seconds.

    If all models are in the cache, neither the checks nor the run ask the hub again.
    """
    if is_offline() or (trouble := look_at_hub(target.models_of_job)) is None:
        return
    if trouble.missing:
        names = ", ".join(f"{key}={path}" for key, path in trouble.missing.items())
        yield error(f"{trouble.problem}, and {names} is not in the cache", _END, trouble.remedy)
        return
    leave_hub_alone()
    yield warning(
        f"{trouble.problem}; the models are in the cache",
        "each of their files would be asked for and waited for: a run goes on as with HF_HUB_OFFLINE=1",
        "export HF_HUB_OFFLINE=1",
    )


def find_uv_hook(target: Target) -> Iterator[Finding]:
    """Find that Ray is told to start its workers in an environment that uv makes."""
    if os.environ.get("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0").lower() not in ("", "0", "false"):
        yield warning(
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV is set",
            "under `uv run` workers would start in an environment of their own, with other packages, or none",
            "unset RAY_ENABLE_UV_RUN_RUNTIME_ENV",
        )
    if hook := os.environ.get("RAY_RUNTIME_ENV_HOOK"):
        yield warning(
            f"RAY_RUNTIME_ENV_HOOK={hook} changes the environment of each worker",
            "workers may start with other packages than the driver has",
            "unset RAY_RUNTIME_ENV_HOOK",
        )


def find_broken_data(target: Target) -> Iterator[Finding]:
    """Find data files that are broken or can't be read."""
    if target.config is None:
        return
    for key in ("train_files", "val_files", "extra_val_files"):
        for path in as_list(target.config.data.get(key)):
            is_file = path is not None and Path(path).is_file()
            if is_file and (problem := _problem_of_file(Path(path))) is not None:
                yield error(f"data.{key}={path}: {problem}", _END, f"data.{key}=<file>")


def find_unknown_words(target: Target) -> Iterator[Finding]:
    """Find a model whose tokenizer cuts the words of the questions into single letters and short pieces."""
    config = target.config
    if not isinstance(config, Config) or not searches(config):
        return
    model = config.actor_rollout_ref.model.path
    folder = None if model is None else local_folder(model)
    questions = list(_first_questions(config))
    words = [word for question in questions for word in _WORD.findall(question)]
    if folder is None or not (folder / "tokenizer.json").is_file() or not words:
        return
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises nothing else; the check of models says why
        return
    encodings = tokenizer.encode_batch([f" {word}" for word in words], add_special_tokens=False)
    num_tokens = [max(1, len(encoding.ids)) for encoding in encodings]
    bytes_per_token = sum(len(word.encode()) for word in words) / sum(num_tokens)
    if bytes_per_token >= _FEWEST_BYTES_PER_TOKEN:
        return
    count, word = max(zip(num_tokens, words, strict=True))
    yield warning(
        f"the tokenizer of {model} does not know the words of the questions: a token has "
        f"{bytes_per_token:.1f} letters of them ({word!r} is {count} tokens)",
        "the model reads pieces that it has hardly seen, and its answers will be wrong; the shipped tiny "
        "model knows the names of the microworld alone",
        "BASE_MODEL=<a pretrained model>; `search-r1 gemma` makes one that a CPU can train "
        "(docs/your_own_questions.md)",
    )


def _first_questions(config: Config) -> Iterator[str]:
    """Yield the questions of the first rows of each file that are searched for."""
    data = config.data
    files = as_list(data.train_files) * (data.mixture is None) + as_list(data.val_files)
    for file in (file for file in files if file is not None):
        with suppress(ValueError, OSError):  # another check says which row can't be read
            rows = first_rows(file, _QUESTIONS_READ)
            dataset = RLHFDataset(rows, None, row_settings(config))
            yield from (question_of(dataset, row) for row in rows if dataset.env_class_of(row) == SEARCH)


def find_missing_key(target: Target) -> Iterator[Finding]:
    """Find wandb among the loggers without an API key."""
    if _reports_to_wandb(target) and not os.environ.get("WANDB_MODE") and wandb_key() is None:
        yield warning(
            "trainer.logger has wandb, and there is no WANDB_API_KEY and no `wandb login`",
            "the run is kept on disk only, and nobody sees its curves while it goes",
            "export WANDB_API_KEY=..., or WANDB_MODE=offline to mean it",
        )


def find_unreachable_wandb(target: Target) -> Iterator[Finding]:
    """Find wandb among the loggers that does not answer within two seconds, or refuses the key."""
    is_online = os.environ.get("WANDB_MODE") in (None, "online")
    if not _reports_to_wandb(target) or not is_online or wandb_key() is None:
        return
    if (problem := wandb_problem()) is not None:
        yield warning(
            f"trainer.logger has wandb, and {problem}",
            "the run goes on, is kept on disk, and says what uploads it (`wandb sync ...`)",
            "WANDB_MODE=offline to mean it; WANDB_BASE_URL, WANDB_API_KEY and the proxies say what is asked",
        )


def _reports_to_wandb(target: Target) -> bool:
    return target.config is not None and "wandb" in target.config.trainer.logger


def find_little_memory(target: Target) -> Iterator[Finding]:
    """Find a run that does not fit into its GPUs, or a machine with less memory than the models take."""
    config = target.config
    if not isinstance(config, Config) or not target.has_models:
        return
    cluster_gpus = sum(node.num_gpus for node in target.cluster.alive) if target.cluster is not None else 0
    on_gpus_elsewhere = config.trainer.device != "cpu" and (target.num_gpus_asked or cluster_gpus)
    if on_gpus_elsewhere and not torch.cuda.is_available():  # the size of those GPUs is not known here
        return
    try:
        plan = Plan(config, Hardware.of(config))
    except ValueError:  # A model can't be read, or the sizes are impossible. Other checks say why.
        return
    if plan.hardware.device == "cuda":
        if not plan.fits:
            what, *do = verdict(plan)
            do.append("trainer.doctor_skip=[memory] starts it all the same")
            yield error(what, "the run would end with out of memory", "; ".join(do))
        return
    # On CPUs much memory is paged and shared. Only what the models keep for the whole run is certain.
    kept_kinds = ("weights", "gradients", "optimizer state")
    items = [phases for name, phases in plan.loads[0].items.items() if name.endswith(kept_kinds)]
    needed = max(sum(phases.get(phase, 0) for phases in items) for phase in plan.phases)
    if needed > memory_of_machine():
        yield error(
            f"this machine (or its control group) has {format_bytes(memory_of_machine())} of memory, "
            f"weights, gradients and optimizer states need {format_bytes(needed)}",
            "the kernel would kill the processes, without a word in their log",
            "ask for more memory (sbatch --mem=...) or more nodes; trainer.dry_run=true shows the plan; "
            "trainer.doctor_skip=[memory] starts it all the same",
        )
    elif (largest := plan.largest_pass) and needed + largest.num_bytes > memory_of_machine():
        yield warning(
            f"this machine (or its control group) has {format_bytes(memory_of_machine())} of memory, the "
            f"models need {format_bytes(needed)}, and a pass of {largest.tokens:,} tokens up to "
            f"{format_bytes(largest.num_bytes)} more",
            "passes have fewer tokens if trajectories are shorter than data.max_prompt_length",
            "if the kernel ends the run: smaller passes (actor_rollout_ref.actor.use_dynamic_bsz=true and "
            "ppo_max_token_len_per_gpu), actor_rollout_ref.model.enable_gradient_checkpointing=true",
        )


def find_no_room_for_checkpoints(target: Target) -> Iterator[Finding]:
    """Find a file system that is too small for the checkpoints that the run keeps."""
    config = target.config
    if not isinstance(config, Config) or not target.has_models or config.trainer.val_only:
        return
    try:
        size = _checkpoint_bytes(config)
    except ValueError:  # A model can't be read. Another check says why.
        return
    trainer = config.trainer
    num_present = len(CheckpointStore(target.run_folder, None).steps())
    steps = trainer.total_training_steps
    frequency = trainer.save_freq
    max_kept = trainer.max_ckpt_to_keep
    if frequency <= 0:
        num_written = 1
    elif steps is not None:
        num_written = -(-steps // frequency)
    else:
        num_written = (max_kept or 1) + 1
    # While one is written, one more is on disk, because the oldest goes afterwards.
    at_once = min((max_kept or num_written) + 1, num_written)
    sizes = os.statvfs(existing_parent(target.run_folder))
    free = sizes.f_bavail * sizes.f_frsize
    if max(1, at_once - num_present) * size > free:
        present = f", {num_present} are there" if num_present else ""
        yield error(
            f"{target.run_folder} has {format_bytes(free)} free, {at_once} checkpoints of about "
            f"{format_bytes(size)} need {format_bytes(at_once * size)} "
            f"(trainer.max_ckpt_to_keep={trainer.max_ckpt_to_keep}, and one being written{present})",
            "the run would end when the disk is full, hours from now",
            f"trainer.max_ckpt_to_keep={max(1, free // size - 1)}"
            if free >= 2 * size and at_once > 2
            else "trainer.default_local_dir=<folder on a file system with room>",
        )


def _checkpoint_bytes(config: Config) -> int:
    """Return about how many bytes one checkpoint takes.

    A checkpoint has the weight and AdamW's two averages of each trained parameter, and the policy's weights
    once more in a Hugging Face folder.
    """
    total = 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for engine in engines_of(config, Passes(config), device):
        if engine.is_trained:
            width = engine.precision.model.itemsize
            total += 3 * engine.size.trained * (4 if engine.size.adapters else width)
            total += engine.size.num_parameters * width * (engine.owner == "actor")
    return total


def find_unfit_index(target: Target) -> Iterator[Finding]:
    """Find an index (--index_path) that is not whole, or larger than the memory in which it is searched."""
    if target.index_path is None:
        return
    name = f"--index_path {target.index_path}"
    try:
        index = target.probe.index(target.index_path)
    except (OSError, ValueError) as problem:
        yield error(f"{name}: {problem}", "the retrieval server would not start")
        return
    if index.problem:
        yield error(f"{name}: {index.problem.rstrip('.')}", "the retrieval server would not start")
    elif not index.on_gpus and index.num_bytes > memory_of_machine():
        sizes = f"{format_bytes(index.num_bytes)}, this machine {format_bytes(memory_of_machine())} of memory"
        yield warning(
            f"{name} has {sizes}",
            "the retrieval server would read from disk for each search",
            "serve it where there is more (retriever.url=http://<machine>:8000/retrieve), or build a smaller "
            "one",
        )


# They are made before all others, which may load the models: the hub is then asked no more if it is away.
HUB_CHECKS: dict[str, Callable[[Target], Iterator[Finding]]] = {
    "hub-offline": find_uncached_models,
    "hub-reachable": find_unreachable_hub,
}


def find_wrong_retrieval_flags(target: Target) -> Iterator[Finding]:
    """Find flags of the job's retrieval servers (RETRIEVAL_ARGS, --login) that can't be served."""
    if target.probe is None or not target.retrieval_args:
        return
    problem = target.probe.problem_of_flags(target.retrieval_args, target.retrieval_python)
    if problem is not None:
        shown = shlex.join(without_keys(target.retrieval_args))
        yield error(f"RETRIEVAL_ARGS={shown!r}: {problem}", "the job's retrieval servers would not start")


RUN_CHECKS: dict[str, Callable[[Target], Iterator[Finding]]] = {
    "settings": find_mistakes,
    "no-effect": find_settings_without_effect,
    "batches": find_uneven_batches,
    "lengths": find_lengths_that_do_not_fit,
    "model": find_broken_models,
    "uv-hook": find_uv_hook,
    "data": find_broken_data,
    "words": find_unknown_words,
    "wandb-key": find_missing_key,
    "wandb-reachable": find_unreachable_wandb,
    "memory": find_little_memory,
    "checkpoints": find_no_room_for_checkpoints,
    "index": find_unfit_index,
    "retrieval-flags": find_wrong_retrieval_flags,
}
