"""Supervised training's configuration: where each key of `sft_trainer.yaml` is read, what it may hold.

    overrides -> `load_sft_config` -> `validate_sft` -> the trainer

The tables are those of `keys.py` and `limits.py`, for the other program; a test holds each key to them.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.checks import (
    KeyTables,
    check_adapters,
    check_betas,
    check_loggers,
    check_model,
    check_parquet,
    check_processes,
    check_resume,
)
from verl.trainer.config.loading import as_int, expand_paths, flat, load_config

CONFIG_NAME = "sft_trainer"
_OFFLOAD = "A layer's weights stay on the device; use lora_rank, gradient checkpointing or more processes."
_CUSTOM = "Rows come as prompt and response, as messages, or as segments; write them so."
_SHM = "Models and data are read where they are."

FIXED: dict[str, str] = {
    "data.use_shm": _SHM,
    "data.custom_cls.path": _CUSTOM,
    "data.custom_cls.name": _CUSTOM,
    "model.use_liger": "Logits are made for trained tokens only and in chunks already.",
    "model.use_shm": _SHM,
    "model.fsdp_config.wrap_policy.min_num_params": "FSDP2 shards each decoder layer on its own.",
    "model.fsdp_config.cpu_offload": _OFFLOAD,
    "model.fsdp_config.offload_params": _OFFLOAD,
    "ulysses_sequence_parallel_size": "Supervised rows are short: each process trains on whole ones.",
    "trainer.default_hdfs_dir": "Nothing is copied to HDFS; a run's folder is default_local_dir.",
}

NO_EFFECT: dict[str, str] = {
    "data.balance_dp_token": "the loss is always a mean over the trained tokens of all processes.",
    "model.strategy": "fsdp and fsdp2 both mean FSDP2.",
}

_TRAINER = "verl/trainer/fsdp_sft_trainer.py:FSDPSFTTrainer"
_RECORDER = "verl/utils/records/loss_recorder.py:LossRecorder.start"
_WORKER = "verl/workers/sft_worker.py:SFTWorker"
_DATASET = "verl/utils/dataset/sft_dataset.py"
_LOADING = "verl/workers/engine/loading.py"
_LORA = "verl/workers/engine/lora.py:adapter_config"
_ENGINE = "verl/workers/engine/engine.py"
_PRECISION = "verl/workers/engine/precision.py"
_OPTIM = "verl/workers/engine/optim.py"
_RESOLVE = "verl/trainer/config/sft_keys.py:resolve"

_READERS: dict[str, tuple[str, ...]] = {
    "verl/trainer/fsdp_sft_trainer.py:build_trainer": (
        "data.train_files",
        "data.val_files",
        "data.chat_template",
    ),
    f"{_TRAINER}.__init__": (
        "data.train_batch_size",
        "data.shuffle",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.default_local_dir",
        "trainer.seed",
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.max_ckpt_to_keep",
        "trainer.async_checkpoint",
    ),
    f"{_TRAINER}.fit": ("trainer.save_freq", "trainer.test_freq"),
    f"{_TRAINER}._check_skipped": ("trainer.max_skipped_updates",),
    "verl/doctor/start.py:start_is_sound": ("trainer.doctor_skip",),
    "verl/trainer/placement.py:num_processes": ("trainer.nnodes", "trainer.n_gpus_per_node"),
    "verl/trainer/placement.py:place": ("trainer.backend", "trainer.device"),
    _RECORDER: (
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
        "trainer.progress",
    ),
    f"{_DATASET}:row_reader": (
        "data.segments_key",
        "data.multiturn.enable",
        "data.multiturn.messages_key",
        "data.multiturn.tools_key",
        "data.multiturn.enable_thinking_key",
        "data.prompt_key",
        "data.response_key",
        "data.prompt_dict_keys",
        "data.response_dict_keys",
        "data.apply_chat_template_kwargs",
    ),
    f"{_DATASET}:SFTDataset.__init__": (
        "data.observation_tag",
        "data.max_length",
        "data.truncation",
    ),
    f"{_WORKER}._limits": (
        "data.micro_batch_size_per_gpu",
        "data.max_token_len_per_gpu",
        "use_remove_padding",
    ),
    f"{_WORKER}.init_model": ("model.partial_pretrain", "optim.clip_grad", "optim.lr_scheduler"),
    _RESOLVE: (
        "data.micro_batch_size",
        "optim.warmup_steps_ratio",
        "trainer.resume_path",
    ),
    f"{_LOADING}:_load": ("model.enable_gradient_checkpointing",),
    f"{_LOADING}:load_hf_config": ("model.external_lib", "model.override_config", "model.trust_remote_code"),
    _LORA: (
        "model.lora_rank",
        "model.lora_alpha",
        "model.target_modules",
        "model.exclude_modules",
        "model.lora_adapter_path",
    ),
    f"{_ENGINE}:TrainEngine.__init__": ("model.fsdp_config.reshard_after_forward",),
    f"{_PRECISION}:Precision.from_config": (
        "model.fsdp_config.model_dtype",
        "model.fsdp_config.mixed_precision.param_dtype",
        "model.fsdp_config.mixed_precision.reduce_dtype",
    ),
    f"{_OPTIM}:build_optimizer": (
        "optim.name",
        "optim.lr",
        "optim.betas",
        "optim.weight_decay",
        "optim.momentum",
        "optim.adamw_lr",
    ),
    f"{_OPTIM}:build_scheduler": (
        "optim.lr_warmup_steps",
        "optim.lr_warmup_steps_ratio",
        "optim.min_lr_ratio",
    ),
}
# key -> "file:function" that acts on it
READ_IN: dict[str, str] = {key: place for place, keys in _READERS.items() for key in keys}

NULLABLE: dict[str, tuple[type, ...]] = {
    "data.train_files": (str, list),
    "data.val_files": (str, list),
    "data.micro_batch_size": (int,),
    "data.micro_batch_size_per_gpu": (int,),
    "data.prompt_dict_keys": (list,),
    "data.response_dict_keys": (list,),
    "data.segments_key": (str,),
    "data.observation_tag": (str,),
    "data.chat_template": (str,),
    "data.custom_cls.path": (str,),
    "data.custom_cls.name": (str,),
    "model.partial_pretrain": (str,),
    "model.external_lib": (str,),
    "model.exclude_modules": (str, list),
    "model.lora_adapter_path": (str,),
    "model.fsdp_config.mixed_precision.param_dtype": (str,),
    "optim.adamw_lr": (float,),
    "optim.warmup_steps_ratio": (float,),
    "optim.min_lr_ratio": (float,),
    "trainer.default_hdfs_dir": (str,),
    "trainer.total_training_steps": (int,),
    "trainer.max_ckpt_to_keep": (int,),
    "trainer.resume_from_path": (str,),
    "trainer.resume_path": (str,),
}
TYPES: dict[str, tuple[type, ...]] = {"model.target_modules": (str, list)}

CHOICES: dict[str, tuple[Any, ...]] = {
    "data.truncation": ("error", "left", "right"),
    "model.strategy": ("fsdp", "fsdp2"),
    "model.fsdp_config.model_dtype": ("fp32", "bf16"),
    "model.fsdp_config.mixed_precision.param_dtype": ("fp32", "bf16", None),
    "model.fsdp_config.mixed_precision.reduce_dtype": ("fp32", "bf16"),
    "optim.name": ("adamw", "muon"),
    "optim.lr_scheduler": ("constant", "cosine", "linear"),
    "trainer.backend": ("auto", "local", "ray"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.resume_mode": ("auto", "none", "latest", "from_path"),
    "trainer.progress": ("auto", "live", "plain"),
}

_POSITIVE = (1, inf, "a whole number of at least 1")
_NOT_NEGATIVE = (0, inf, "0 or more")
_ABOVE_ZERO = (1e-12, inf, "a number above 0")
_SHARE = (0, 1, "a number from 0 to 1")
RANGES: dict[str, tuple[float, float, str]] = {
    "data.train_batch_size": _POSITIVE,
    "data.micro_batch_size": _POSITIVE,
    "data.micro_batch_size_per_gpu": _POSITIVE,
    "data.max_token_len_per_gpu": _POSITIVE,
    "data.max_length": (2, inf, "a whole number of at least 2"),
    "model.lora_rank": _NOT_NEGATIVE,
    "model.lora_alpha": _ABOVE_ZERO,
    "optim.lr": _NOT_NEGATIVE,
    "optim.adamw_lr": _NOT_NEGATIVE,
    "optim.weight_decay": _NOT_NEGATIVE,
    "optim.momentum": (0, 1 - 1e-9, "a number of at least 0 and below 1"),
    "optim.lr_warmup_steps_ratio": _SHARE,
    "optim.lr_warmup_steps": (-1, inf, "-1 or more"),
    "optim.min_lr_ratio": _SHARE,
    "optim.clip_grad": _ABOVE_ZERO,
    "trainer.total_epochs": _POSITIVE,
    "trainer.total_training_steps": _POSITIVE,
    "trainer.nnodes": _POSITIVE,
    "trainer.n_gpus_per_node": _POSITIVE,
    "trainer.seed": _NOT_NEGATIVE,
    "trainer.save_freq": (-1, inf, "-1 (only the last) or a number of steps"),
    "trainer.test_freq": (-1, inf, "-1 (only the first and the last) or a number of steps"),
    "trainer.max_ckpt_to_keep": _POSITIVE,
    "trainer.max_skipped_updates": _POSITIVE,
}


def load_sft_config(overrides: Sequence[str]) -> DictConfig:
    """`load_config` for supervised training."""
    return load_config(overrides, CONFIG_NAME, resolve)


TABLES = KeyTables(load_sft_config, NULLABLE, CHOICES, RANGES, FIXED, NO_EFFECT, types=TYPES)


def resolve(config: DictConfig) -> None:
    """Fill in, in place, what is written under another name or follows other keys."""
    OmegaConf.resolve(config)
    data, optim, trainer = config.data, config.optim, config.trainer
    if data.micro_batch_size_per_gpu is None and isinstance(data.micro_batch_size, int):
        processes = as_int(trainer.nnodes) * as_int(trainer.n_gpus_per_node)
        data.micro_batch_size_per_gpu = max(1, data.micro_batch_size // max(1, processes))
    if optim.warmup_steps_ratio is not None:
        optim.lr_warmup_steps_ratio = optim.warmup_steps_ratio
    if trainer.resume_path is not None:
        trainer.resume_mode, trainer.resume_from_path = "from_path", trainer.resume_path
    expand_paths(
        config,
        (
            "data.train_files",
            "data.val_files",
            "data.chat_template",
            "model.partial_pretrain",
            "model.lora_adapter_path",
            "trainer.default_local_dir",
            "trainer.resume_from_path",
        ),
    )


def validate_sft(config: DictConfig) -> None:
    """Check a configuration made by `load_sft_config`; raises ValueError with the first mistake found."""
    TABLES.check(flat(config))
    check_betas("optim.betas", config.optim.betas)
    check_loggers(config.trainer.logger)
    check_parquet(config, "data.train_files")
    if config.data.val_files is not None:
        check_parquet(config, "data.val_files")
    elif config.trainer.test_freq > 0:
        raise ValueError(
            f"Found trainer.test_freq={config.trainer.test_freq} without data.val_files; expected both or "
            "none."
        )
    check_model("model.partial_pretrain", config.model.partial_pretrain)
    check_adapters("model", config.model)
    if config.data.multiturn.enable and config.data.segments_key is not None:
        raise ValueError(
            f"Found data.multiturn.enable=true and data.segments_key={config.data.segments_key}, two forms "
            "of rows; expected one of them."
        )
    check_resume(config.trainer)
    check_processes(config.trainer)
