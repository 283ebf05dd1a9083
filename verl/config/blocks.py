"""Blocks of keys that several models or programs have: optimizer, sharding, adapters, the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.keys import (
    Block,
    Count,
    FilePath,
    NotNegative,
    OrMinusOne,
    Positive,
    Share,
    Whole,
    group,
    key,
)


@dataclass(slots=True)
class Optim(Block):
    """An optimizer and its schedule."""

    name: str = key("adamw", "muon: the layers' matrices; AdamW for all else", "adamw muon")
    lr: NotNegative = key(1e-6, "peak learning rate")
    lr_warmup_steps: OrMinusOne = key(-1, "linear warm-up, in steps (-1: use the ratio)")
    lr_warmup_steps_ratio: Share = key(0.0, "linear warm-up, as a share of the run's steps")
    min_lr_ratio: Share | None = key(None, "where a decaying schedule ends, as a share of lr (null: 0)")
    warmup_style: str = key("constant", "what follows the warm-up", "constant cosine linear")
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates")
    weight_decay: NotNegative = key(0.01, "decoupled weight decay, of AdamW and of Muon")
    adamw_lr: float | None = None  # no key: muon's lr of what AdamW trains (null: lr)
    momentum: ClassVar[float] = 0.95  # muon: decay rate of the gradient's average
    total_training_steps: int = -1  # no key: length of the schedule in steps, which the trainer fills in


@dataclass(slots=True)
class MixedPrecision(Block):
    """Types of the computation. Gradients are summed over processes in fp32."""

    param_dtype: str | None = key(
        None, "type of the computation (null: bf16 on CUDA, fp32 on CPU)", "fp32 bf16"
    )
    reduce_dtype: ClassVar[str] = "fp32"


@dataclass(slots=True)
class Fsdp(Block):
    """How a trained model is kept in memory and cut over processes."""

    param_offload: bool = key(False, "CUDA: keep the weights in CPU memory between uses")
    optimizer_offload: bool = key(False, "CUDA: keep the optimizer's state in CPU memory between updates")
    reshard_after_forward: bool = key(
        True, "several processes: gather a layer's weights for each pass; false: once per optimizer step"
    )
    fsdp_size: OrMinusOne = key(-1, "shard within groups of so many processes, and replicate (-1: one group)")
    model_dtype: str = key("fp32", "type of the trained weights", "fp32 bf16")
    mixed_precision: MixedPrecision = group(MixedPrecision)


@dataclass(slots=True)
class Model(Block):
    """A model that is trained, whole or by adapters."""

    external_lib: str | None = key(None, "python module imported first, e.g. with a model class")
    override_config: dict[str, Any] = key({}, "values that replace those of the model's config.json")
    enable_gradient_checkpointing: bool = key(False, "recompute activations: less memory, slower")
    trust_remote_code: bool = key(False, "allow the model folder's own python code")
    lora_rank: Whole = key(0, "train LoRA adapters of this rank, not the model itself (0: the model)")
    lora_alpha: Positive = key(16, "an adapter's product counts lora_alpha / lora_rank times")
    target_modules: str | list[str] = key(
        "all-linear",
        "layers with adapters: all-linear (but the output matrix), names, or a regular expression",
    )
    exclude_modules: ClassVar[None] = None  # target_modules as a regular expression leaves out what it likes


@dataclass(slots=True)
class ModelWithAdapters(Model):
    """A model that may go on from adapters."""

    lora_adapter_path: FilePath | None = key(
        None, "PEFT folder to go on from; its settings win. A KL is to the model without it"
    )


@dataclass(slots=True)
class RunSettings(Block):
    """Keys of `trainer` that reinforcement learning and supervised training share."""

    total_epochs: Count = key(30, "passes over the training rows; gives the number of steps")
    total_training_steps: Count | None = key(None, "stop after this many steps instead")
    project_name: str = key("verl_examples", "names of the run in the loggers and in default_local_dir")
    experiment_name: str = key("gsm8k", "as project_name")
    logger: list[str] = key(["console"], "any of console, wandb, tensorboard, mlflow")
    nnodes: Count = key(1, "machines")
    n_gpus_per_node: Count = key(1, "training processes per machine; it may have more GPUs, for other runs")
    backend: str = key("auto", "local: in this process; auto: local for one process", "auto local ray")
    device: str = key(
        "auto", "auto: cuda if there is one; several processes need a GPU each", "auto cpu cuda"
    )
    seed: Whole = key(0, "of everything random in the run")
    save_freq: OrMinusOne = key(-1, "checkpoint every this many steps (-1: only the last)")
    test_freq: OrMinusOne = key(-1, "validate every this many steps (-1: only the first and the last)")
    default_local_dir: FilePath = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "the run's folder"
    )
    resume_mode: str = key(
        "auto",
        "auto: the newest checkpoint, if any; latest: it must exist; none: an earlier run is renamed",
        "auto none latest from_path",
    )
    resume_from_path: FilePath | None = key(
        None, "with resume_mode=from_path: folder of a step; later ones are renamed"
    )
    max_ckpt_to_keep: Count | None = key(3, "older checkpoints are deleted (null: keep all)")
    async_checkpoint: bool = key(True, "write checkpoints while the next step runs, from a copy")
    doctor_skip: list[str] = key([], "checks of verl.preflight that the start leaves out")
    progress: str = key("auto", "live is a display, plain lines; auto: live on a terminal", "auto live plain")
    max_skipped_updates: Count = key(10, "the run stops after so many updates in a row without a finite loss")
