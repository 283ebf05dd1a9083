"""Blocks of keys that several models or programs have: optimizer, sharding, adapters, the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.keys import Block, group, key, must_follow

DTYPES = ("fp32", "bf16")


@dataclass(slots=True)
class Optim(Block):
    """An optimizer and its schedule."""

    name: str = key(
        "adamw",
        "adamw | muon (for the matrices of the layers; AdamW for all else)",
        choices=("adamw", "muon"),
    )
    lr: float = key(1e-6, "peak learning rate", ge=0)
    lr_warmup_steps: int = key(-1, "linear warm-up, in steps (-1: use the ratio)", ge=-1)
    lr_warmup_steps_ratio: float = key(0.0, "linear warm-up, as a share of the run's steps", ge=0, le=1)
    min_lr_ratio: float | None = key(
        None, "where a decaying schedule ends, as a share of lr (null: 0)", ge=0, le=1
    )
    warmup_style: str = key(
        "constant", "after the warm-up: constant | cosine | linear", choices=("constant", "cosine", "linear")
    )
    betas: list[float] = key([0.9, 0.999], "AdamW's two decay rates")
    weight_decay: float = key(0.01, "decoupled weight decay, of AdamW and of Muon", ge=0)
    adamw_lr: float | None = None  # no key: muon's lr of what AdamW trains (null: lr)
    momentum: ClassVar[float] = 0.95  # muon: decay rate of the gradient's average
    total_training_steps: int = -1  # no key: length of the schedule in steps, which the trainer fills in


@dataclass(slots=True)
class MixedPrecision(Block):
    """Types of the computation. Gradients are summed over processes in fp32."""

    param_dtype: str | None = key(
        None, "type of the computation: fp32 | bf16 (null: bf16 on CUDA, fp32 on CPU)", choices=DTYPES
    )
    reduce_dtype: ClassVar[str] = "fp32"


@dataclass(slots=True)
class Fsdp(Block):
    """How a trained model is kept in memory and cut over processes."""

    param_offload: bool = key(False, "CUDA: keep the weights in CPU memory between uses")
    grad_offload: bool = key(False, "CUDA: gradients of all micro-batches but the last add up in CPU memory")
    optimizer_offload: bool = key(False, "CUDA: keep the optimizer's state in CPU memory between updates")
    reshard_after_forward: bool = key(
        True,
        "several processes: free a layer's gathered weights after each pass; false: gather them once per "
        "optimizer step, and sum gradients over processes once",
    )
    fsdp_size: int = key(
        -1,
        "shard weights, gradients and optimizer within groups of so many processes, and replicate over the "
        "groups (-1: shard over all; 1: replicate)",
        ge=-1,
    )
    model_dtype: str = key("fp32", "type of the trained weights: fp32 | bf16", choices=DTYPES)
    mixed_precision: MixedPrecision = group(MixedPrecision)


@dataclass(slots=True)
class Model(Block):
    """A model that is trained, whole or by adapters."""

    external_lib: str | None = key(
        None, "python module imported first, e.g. one that registers a model class"
    )
    override_config: dict[str, Any] = key({}, "values that replace those of the model's config.json")
    enable_gradient_checkpointing: bool = key(
        False, "recompute activations in the backward pass: less memory, slower"
    )
    trust_remote_code: bool = key(False, "allow the model folder's own python code")
    lora_rank: int = key(0, "train LoRA adapters of this rank, not the model itself (0: the model)", ge=0)
    lora_alpha: float = key(16, "an adapter's product counts lora_alpha / lora_rank times", gt=0)
    target_modules: str | list[str] = key(
        "all-linear",
        "layers with adapters: all-linear (all but the output matrix) | name | [names] | regular expression "
        "of whole paths",
    )
    exclude_modules: ClassVar[None] = None  # target_modules as a regular expression leaves out what it likes


@dataclass(slots=True)
class ModelWithAdapters(Model):
    """A model that may go on from adapters."""

    lora_adapter_path: str | None = key(
        None,
        "PEFT folder of adapters to go on from; its settings win over those above (a KL is to the model "
        "without them; to one with them: merge them into path)",
        is_path=True,
    )


@dataclass(slots=True)
class RunSettings(Block):
    """Keys of `trainer` that reinforcement learning and supervised training share."""

    total_epochs: int = key(30, "passes over the training rows; gives the number of steps", ge=1)
    total_training_steps: int | None = key(None, "stop after this many steps instead", ge=1)
    project_name: str = key("verl_examples", "names of the run in the loggers and in default_local_dir")
    experiment_name: str = key("gsm8k", "as project_name")
    logger: list[str] = key(
        ["console"], "any of console, wandb, tensorboard, mlflow; metrics.jsonl is always written"
    )
    nnodes: int = key(1, "machines", ge=1)
    n_gpus_per_node: int = key(
        1, "training processes per machine; it may have more GPUs, for other runs", ge=1
    )
    backend: str = key(
        "auto",
        "local (in this process) | ray | auto (local for one process)",
        choices=("auto", "local", "ray"),
    )
    device: str = key(
        "auto",
        "cpu | cuda | auto (cuda if there is one; several processes need a GPU each)",
        choices=("auto", "cpu", "cuda"),
    )
    seed: int = key(0, "of everything random in the run", ge=0)
    save_freq: int = key(-1, "checkpoint every this many steps (-1: only the last)", ge=-1)
    test_freq: int = key(-1, "validate every this many steps (-1: only the first and the last)", ge=-1)
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "the run's folder", is_path=True
    )
    resume_mode: str = key(
        "auto",
        "auto (the newest checkpoint, if any) | none (an earlier run's folder becomes <folder>.old-K) | "
        "latest (must exist) | from_path",
        choices=("auto", "none", "latest", "from_path"),
    )
    resume_from_path: str | None = key(
        None,
        "folder of a step, with resume_mode=from_path; checkpoints of later steps in default_local_dir "
        "become global_step_N.old-K",
        is_path=True,
    )
    max_ckpt_to_keep: int | None = key(3, "older checkpoints are deleted (null: keep all)", ge=1)
    async_checkpoint: bool = key(
        True, "write checkpoints while the next step runs, from a copy in CPU memory"
    )
    doctor_skip: list[str] = key(
        [], "checks of verl.preflight, by name, that the start of the run leaves out"
    )
    progress: str = key(
        "auto",
        "live (a display) | plain (lines) | auto (live on a terminal)",
        choices=("auto", "live", "plain"),
    )
    max_skipped_updates: int = key(
        10,
        "an optimizer step whose loss or gradient is not finite is skipped; the run stops after this many in "
        "a row",
        ge=1,
    )


def follows_actor(path: str) -> Any:
    """A field of another model that must be as the actor's."""
    return must_follow(
        f"actor_rollout_ref.{path}", "Models that share processes are kept alike; set the actor's."
    )
