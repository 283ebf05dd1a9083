"""Checks for mistakes that the schema can't see: missing files, and keys that contradict each other.

Each check raises ValueError with what was found, what was expected and what to do. Nothing here needs torch.
Checks that ask the estimator or the loss are in `verl.planning.config_validation`.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from verl.config.keys import as_list, check_values, config_error, get_value
from verl.config.mixture import evals_of, sources_of
from verl.config.policy import ACTOR, ROLLOUT
from verl.config.prompt_selection import check_prompt_selection
from verl.config.schema import Config, SFTConfig
from verl.utils.extras import check_packages, install_command

FORMAT_SCORES = ("structure_format_score", "final_format_score", "retrieval_score")
LOGGERS = ("console", "wandb", "tensorboard", "mlflow")
_WRITING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # endings of classes of causal models
VAL_MODES = ("greedy", "sampled")
REMOTE_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # scheme of trainer.remote_dir -> module


def check_config(config: Config, *, format_reward: bool | None = None, with_data: bool = True) -> None:
    """Check everything about a configuration of reinforcement learning that can be checked at once.

    Args:
        config: the configuration.
        format_reward: whether the program is `main_ppo_format`, which reads the format scores. None: unknown.
        with_data: whether the files of rows must exist.

    Raises:
        ValueError: there is a mistake.
    """
    check_values(config)
    data = config.data
    modes = config.trainer.val_modes
    if data.max_start_length >= data.max_prompt_length:
        raise config_error(
            config,
            "data.max_start_length data.max_prompt_length",
            "; expected the first to be smaller: max_prompt_length bounds the whole context, the prompt and "
            "everything after it. A good value is max_start_length + max_response_length * (max_turns + 1) + "
            "max_obs_length * max_turns.",
        )
    check_prompt_selection(config)
    if with_data and not config.trainer.dry_run:  # in a dry run the data may be missing, or elsewhere
        names = ["train_files"] * (data.mixture is None) + ["val_files"]
        for name in names + ["extra_val_files"] * (data.extra_val_files is not None):
            _check_files(f"data.{name}", data[name])
    sources_of(config, with_data and not config.trainer.dry_run)
    evals_of(config, with_data and not config.trainer.dry_run)
    _check_rollout(config)
    _check_losses(config)
    _check_rewards(config, format_reward)
    if not modes or any(mode not in VAL_MODES for mode in modes):
        raise config_error(config, "trainer.val_modes", f"; expected one or both of {', '.join(VAL_MODES)}.")
    _check_run(config, [ACTOR, "critic"], ["actor_rollout_ref.model", "critic.model"])
    check_layout(config)
    check_model("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)


def check_sft_config(config: SFTConfig, *, with_data: bool = True) -> None:
    """Check a configuration of supervised training.

    `with_data` says whether the files of rows must exist. Raises ValueError if there is a mistake.
    """
    check_values(config)
    if with_data:
        _check_files("data.train_files", config.data.train_files)
        if config.data.val_files is not None:
            _check_files("data.val_files", config.data.val_files)
        elif config.trainer.test_freq > 0:
            raise config_error(config, "trainer.test_freq", " without data.val_files; expected both or none.")
    check_model("model.partial_pretrain", config.model.partial_pretrain)
    if config.data.multiturn.enable and config.data.segments_key is not None:
        keys = "data.multiturn.enable data.segments_key"
        raise config_error(config, keys, ", two forms of rows; expected one of them.")
    _check_run(config, [""], ["model"])


def _check_run(config: Config | SFTConfig, trained: list[str], models: list[str]) -> None:
    """Check what both programs have.

    `trained` names the blocks with an `optim`, `models` the blocks of models.
    """
    trainer = config.trainer
    for block in trained:
        key = f"{block}.optim.betas".lstrip(".")
        betas = get_value(config, key)
        if len(betas) != 2 or not all(isinstance(beta, float | int) and 0 <= beta < 1 for beta in betas):
            raise config_error(config, key, "; expected two numbers in [0, 1).")
    for block in models:  # LoRA needs its package, and the adapter to go on from must exist
        path = get_value(config, block).lora_adapter_path
        rank = get_value(config, block).lora_rank
        if path is not None and not (Path(path) / "adapter_config.json").is_file():
            raise ValueError(
                f"Found no adapter_config.json at {block}.lora_adapter_path={path}; expected the folder of a "
                "PEFT adapter, such as <default_local_dir>/global_step_100/actor/adapter."
            )
        if path is not None or rank > 0:
            check_packages(f"{block}.lora_rank", "peft")
    for name in trainer.logger:
        check_logger(name)
    if trainer.remote_dir is not None:
        file_system = REMOTE_PACKAGES.get(trainer.remote_dir.partition("://")[0])
        check_packages(f"trainer.remote_dir={trainer.remote_dir}", "fsspec", *filter(None, [file_system]))
    path = trainer.resume_from_path
    if trainer.resume_mode != "from_path" and path is not None:
        keys = "trainer.resume_from_path trainer.resume_mode"
        raise config_error(config, keys, "; expected resume_mode=from_path.")
    if trainer.resume_mode == "from_path" and (path is None or not Path(path).is_dir()):
        expected = ", not a folder; expected that of one step, such as <default_local_dir>/global_step_100."
        raise config_error(config, "trainer.resume_from_path", expected)
    if trainer.backend == "local" and trainer.nnodes * trainer.n_gpus_per_node > 1:
        keys = "trainer.backend trainer.nnodes trainer.n_gpus_per_node"
        raise config_error(config, keys, "; expected trainer.backend=ray, or one process.")


def _check_files(key: str, files: str | list[str] | None) -> None:
    """Check a key that names a file of rows, or a list of them."""
    for path in as_list(files):
        if path is None:
            raise ValueError(f"Found no {key}; expected a parquet or jsonl file. Set {key}=<path>.parquet.")
        if not Path(path).is_file():
            raise ValueError(f"Found no file at {key}={path}; expected a parquet or jsonl file.")


def check_model(key: str, path: str | None, *, writes: bool = True) -> None:
    """Check that a path is a folder with a config.json, or a name on the Hugging Face hub (`owner/name`).

    Args:
        key: the key of the model.
        path: its value.
        writes: whether the model has to write text from left to right, which a critic has not.

    Raises:
        ValueError: it is neither, or the folder's model is of another kind.
    """
    if path is None:
        raise ValueError(f"Found no {key}; expected a Hugging Face model folder. Set {key}=<folder>.")
    folder = Path(path)
    looks_like_hub_name = path.count("/") == 1 and path[0] not in "./" and not folder.parent.is_dir()
    if folder.is_dir() and not (folder / "config.json").is_file():
        is_adapter = (folder / "adapter_config.json").is_file()
        hint = " A LoRA adapter goes into model.lora_adapter_path." if is_adapter else ""
        raise ValueError(f"Found {key}={path} without a config.json; expected a Hugging Face folder.{hint}")
    if not folder.is_dir() and not looks_like_hub_name:
        raise ValueError(
            f"Found no folder at {key}={path}; expected a Hugging Face model folder, or a model's name "
            "on the hub such as Qwen/Qwen2.5-3B."
        )
    if writes and folder.is_dir():
        _check_writes(key, folder)


def _check_writes(key: str, folder: Path) -> None:
    """Raise ValueError if the model in a folder is no causal language model, by its config.json."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names = [str(name) for name in fields.get("architectures") or []]
        own_classes = fields.get("auto_map") or {}
        is_encoder_decoder = bool(fields.get("is_encoder_decoder"))
        is_decoder = bool(fields.get("is_decoder"))
        model_type = fields.get("model_type")
    except (OSError, ValueError, AttributeError, TypeError):  # loading says what is wrong
        return
    can_write = any(name.endswith(_WRITING) and (is_decoder or "Bert" not in name) for name in names)
    if is_encoder_decoder or (names and not can_write and "AutoModelForCausalLM" not in own_classes):
        raise ValueError(
            f"Found {key}={folder}, a model of the type {model_type} ({', '.join(names)}), which does not "
            "write text from left to right; expected a causal language model such as Qwen/Qwen2.5-3B or "
            "google/gemma-3-270m."
        )


def _check_rollout(config: Config) -> None:
    """Check that the keys of the rollout go together."""
    rollout = config.actor_rollout_ref.rollout
    is_apart = rollout.placement == "apart"
    name = f"{ROLLOUT}.name"
    _check_async(config)
    sharing = rollout.tensor_model_parallel_size or 1
    if sharing > 1 and rollout.name == "native":
        expected = f", which keeps a whole model in each process; expected 1, or {name}=vllm."
        raise config_error(config, f"{ROLLOUT}.tensor_model_parallel_size {name}", expected)
    per_node = config.trainer.n_gpus_per_node
    is_native = rollout.name == "native" or (rollout.name == "auto" and config.trainer.device == "cpu")
    if not is_apart and not is_native and per_node % sharing:
        expected = ": processes of one node share a model; expected a divisor of their number."
        raise config_error(config, f"{ROLLOUT}.tensor_model_parallel_size trainer.n_gpus_per_node", expected)
    urls = f"{ROLLOUT}.remote.urls"
    if (rollout.name == "remote") != (rollout.remote.urls is not None):
        expected = f"; expected both, for example {name}=remote {urls}=[http://host:8001]."
        raise config_error(config, f"{name} {urls}", expected)
    for url in as_list(rollout.remote.urls):
        if url is not None and not str(url).startswith(("http://", "https://")):
            raise ValueError(f"Found {urls}={url}; expected http://host:port.")
    if is_apart and rollout.name == "remote" and len(as_list(rollout.remote.urls)) < rollout.num_processes:
        expected = ": servers are shared out to processes; expected at least as many servers."
        raise config_error(config, f"{urls} {ROLLOUT}.num_processes", expected)
    is_client = rollout.name == "remote" and is_apart  # it has no GPU
    if rollout.weight_backend == "nccl" and (config.trainer.device == "cpu" or is_client):
        keys = f"{ROLLOUT}.weight_backend {ROLLOUT}.{'placement' if is_client else 'name'} trainer.device"
        expected = ", where no GPU takes part; expected gloo or auto."
        raise config_error(config, keys, expected)


def _check_async(config: Config) -> None:
    """Check that rollouts can go on beside training, and that what is learnt from them is corrected."""
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    algorithm = config.algorithm
    block = "trainer.async_training"
    processes = f"{ROLLOUT}.num_processes"
    placement = f"{ROLLOUT}.placement"
    is_apart = rollout.placement == "apart"
    if rollout.num_processes != 1 and not is_apart:
        expected = f", where there are none; expected {placement}=apart."
        raise config_error(config, f"{processes} {placement}", expected)
    if rollout.weight_transfer != "ray":
        transfer = f"{ROLLOUT}.weight_transfer"
        if not is_apart:
            expected = f", where nothing takes them; expected ray, or {placement}=apart."
            raise config_error(config, f"{transfer} {placement}", expected)
        if rollout.weight_transfer in ("filesystem", "delta"):
            check_packages(f"{transfer}={rollout.weight_transfer}", "zstandard")
    if is_apart and trainer.backend == "local":
        keys = f"trainer.backend {placement}"
        raise config_error(config, keys, ": processes apart need backend=ray.")
    if is_apart and rollout.straggler_factor is not None:
        expected = f", where a step waits for no group; {block}.group_deadline bounds them instead."
        raise config_error(config, f"{ROLLOUT}.straggler_factor {placement}", expected)
    if rollout.vllm.engine_args.get("async_scheduling") and not trainer.async_training.recompute_kv:
        keys = f"{block}.recompute_kv {ROLLOUT}.vllm.engine_args"
        expected = (
            ", which schedule a step ahead, and nobody knows which weights sample it; expected "
            "recompute_kv=true, or no async_scheduling."
        )
        raise config_error(config, keys, expected)
    if trainer.async_training.max_staleness == 0:
        return
    staleness = f"{block}.max_staleness"
    if not is_apart:
        expected = f", where nothing samples beside training; expected {placement}=apart."
        raise config_error(config, f"{staleness} {placement}", expected)
    if algorithm.adv_estimator == "remax":
        expected = ", whose baseline is a greedy rollout with the weights of the step; expected 0."
        raise config_error(config, f"{staleness} algorithm.adv_estimator", expected)
    correction = algorithm.rollout_correction
    if correction.rollout_is is None and not correction.bypass_mode:
        expected = (
            ": what older weights have sampled must be weighted by its ratio; set "
            "algorithm.rollout_correction.bypass_mode=true (the loss clips the ratio to the rollout's "
            "probabilities), or algorithm.rollout_correction.rollout_is=token."
        )
        raise config_error(config, staleness, expected)


def check_logger(name: str) -> None:
    """Raise ValueError if there is no logger of a name, or if its package is not installed."""
    if name not in LOGGERS:
        raise ValueError(f"Found {name!r} in trainer.logger; expected any of: {', '.join(LOGGERS)}.")
    if name != "console":
        check_packages(f"{name!r} in trainer.logger", name)


def check_vllm_installed(config: Config) -> None:
    """Check that this interpreter has vLLM, if the configuration names it.

    Raises ValueError if it does not.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm":
        return
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:  # without an origin it is only a folder of that name
        raise ValueError(
            f"Found {ROLLOUT}.name=vllm, but vLLM is not installed for this interpreter; run "
            f"`{install_command('vllm')}` (without a GPU: `bash scripts/test_vllm.sh`), or set "
            f"{ROLLOUT}.name=native."
        )


def _check_losses(config: Config) -> None:
    """Check the keys of KL, entropy and rollout correction."""
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    control = algorithm.kl_ctrl
    entropy = actor.entropy_ctrl
    kl_coef = actor.kl_loss_coef if actor.use_kl_loss else control.kl_coef
    if config.actor_rollout_ref.ref.reset_every is not None and kl_coef == 0:
        expected = ", but no KL to a reference is asked for; expected null, or actor.use_kl_loss=true with "
        raise config_error(
            config, "actor_rollout_ref.ref.reset_every", f"{expected}actor.kl_loss_coef above 0."
        )
    if control.type == "adaptive" and (control.target_kl is None or control.horizon is None):
        keys = "algorithm.kl_ctrl.type algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon"
        raise config_error(config, keys, "; expected both, for example target_kl=0.1 and horizon=10000.")
    if actor.use_kl_loss and actor.kl_loss_coef > 0 and actor.kl_loss_type in ("kl", "k1"):
        expected = (
            " in the loss, where its gradient is 0 on average: it adds noise and holds nothing; expected k2, "
            "or k1+ (the same value with k2's gradient). In the reward "
            f"({ACTOR}.use_kl_loss=false algorithm.kl_penalty=k1) k1 is right."
        )
        raise config_error(config, f"{ACTOR}.kl_loss_type", expected)
    if entropy.target_entropy is not None and not 0 <= actor.entropy_coeff <= entropy.max_coeff:
        expected = f", where the adaptive weight starts; expected a number from 0 to {entropy.max_coeff}."
        raise config_error(config, f"{ACTOR}.entropy_coeff", expected)
    prefix = "algorithm.rollout_correction"
    correction = algorithm.rollout_correction
    if correction.bypass_mode and (correction.rollout_is or correction.rollout_rs):
        expected = (
            "; expected one or the other: with bypass_mode the policy loss has the ratio of the trainer to "
            "the rollout engine already, and there is nothing to compare it with."
        )
        raise config_error(config, f"{prefix}.bypass_mode {prefix}.rollout_is {prefix}.rollout_rs", expected)
    if (correction.rollout_rs is None) != (correction.rollout_rs_threshold is None):
        expected = "; expected both or none, for example rollout_rs=token and rollout_rs_threshold=2.0."
        raise config_error(config, f"{prefix}.rollout_rs {prefix}.rollout_rs_threshold", expected)
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        expected = f" without weights; expected {prefix}.rollout_is=token or sequence."
        raise config_error(config, f"{prefix}.rollout_is_batch_normalize", expected)


def _check_rewards(config: Config, format_reward: bool | None) -> None:
    path = config.custom_reward_function.path
    buffer = config.reward_model.overlong_buffer
    longest = config.data.max_response_length
    if path is not None and not Path(path).is_file():
        raise ValueError(f"Found no file at custom_reward_function.path={path}; expected a python file.")
    if format_reward and path is not None:
        expected = " in main_ppo_format, which has a reward of its own; run verl.trainer.main_ppo with it."
        raise config_error(config, "custom_reward_function.path", expected)
    for name in FORMAT_SCORES:
        if config.reward_model[name] and format_reward is False:
            expected = (
                ", but this program scores exact match alone; run `python -m verl.trainer.main_ppo_format`."
            )
            raise config_error(config, f"reward_model.{name}", expected)
    if buffer.enable and buffer.len >= longest:
        expected = f", so that every last turn would be near it; expected less, for example {longest // 4}."
        raise config_error(config, "reward_model.overlong_buffer.len data.max_response_length", expected)


def check_layout(config: Config) -> None:
    """Check fsdp_size and ulysses_sequence_parallel_size against the number of processes.

    Raises ValueError if they don't fit.
    """
    actor = config.actor_rollout_ref.actor
    num_processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    fsdp_size = actor.fsdp_config.fsdp_size
    if actor.strategy == "megatron":
        if fsdp_size != -1:
            expected = ", which does not shard weights so; expected -1, or strategy=fsdp."
            raise config_error(config, f"{ACTOR}.fsdp_config.fsdp_size {ACTOR}.strategy", expected)
        return
    sizes: dict[str, Any] = {"ulysses_sequence_parallel_size": actor.ulysses_sequence_parallel_size}
    if -1 != fsdp_size < num_processes:
        sizes["fsdp_config.fsdp_size"] = fsdp_size
    for name, size in sizes.items():
        if size < 1 or num_processes % size:
            expected = f" with {num_processes} processes; expected a number that divides them."
            raise config_error(config, f"{ACTOR}.{name}", expected)
