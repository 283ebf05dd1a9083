"""Every key of `python -m verl.trainer.fsdp_sft_trainer` (supervised training). The names are verl's.

Lengths are tokens, batch sizes are rows, times are seconds. "process" is one training process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.blocks import Fsdp, MixedPrecision, ModelWithAdapters, Optim, RunSettings
from verl.config.keys import Block, group, key, same_as


@dataclass(slots=True)
class Multiturn(Block):
    """Rows that are whole conversations."""

    enable: bool = key(False, "true: rows are whole conversations; assistant messages are trained")
    messages_key: str = key(
        "messages", "their column: [{role, content}, ...], with `trained: false` to leave one out"
    )
    tools_key: str = key("tools", "column with the tools that the chat template shows, where there is one")
    enable_thinking_key: str = key(
        "enable_thinking", "column with the chat template's enable_thinking, where there is one"
    )


@dataclass(slots=True)
class SFTData(Block):
    """Rows of text, and which of it is trained."""

    train_files: str | list[str] = key(None, 'parquet file or [list of files]; "~" is expanded', is_path=True)
    val_files: str | list[str] | None = key(
        None, "the same, for the validation loss (null: none is measured)", is_path=True
    )
    train_batch_size: int = key(
        256,
        "rows per optimizer step, whole run; rows left over at an epoch's end wait for the next one's order",
        ge=1,
    )
    micro_batch_size_per_gpu: int | None = key(
        None, "most rows per forward pass of one process (null: no limit)", ge=1
    )
    max_token_len_per_gpu: int = key(
        16384, "most tokens per forward pass of one process; a longer row stands alone", ge=1
    )
    prompt_key: str = key("question", "column with the prompt: text (one user message), or chat messages")
    response_key: str = key(
        "answer", "column with the response: text, or chat messages of which the last is meant"
    )
    prompt_dict_keys: list[str] | None = key(
        None, "[names] that lead to the prompt inside of the column, if it holds a dictionary"
    )
    response_dict_keys: list[str] | None = key(None, "the same for the response")
    multiturn: Multiturn = group(Multiturn)
    segments_key: str | None = key(
        None,
        "column with rows as pieces of text, [{text, trained}, ...] (or content for text, role for trained: "
        "assistant is trained), as search trajectories are",
    )
    observation_tag: str | None = key(
        "information", "text between these tags is never trained, whatever holds it (null: no such tags)"
    )
    max_length: int = key(1024, "longest row", ge=2)
    truncation: str = key(
        "error",
        "longer row: error (stop before the start) | left | right (cut there)",
        choices=("error", "left", "right"),
    )
    chat_template: str | None = key(
        None, "Jinja text, or a file with it, in place of the tokenizer's own; saved with it", is_path=True
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the chat template")
    shuffle: bool = key(True, "new order of the rows each epoch (seeded by trainer.seed)")


@dataclass(slots=True)
class SFTFsdp(Block):
    """How the model is kept in memory and cut over processes."""

    model_dtype: str = same_as(Fsdp, "model_dtype", "fp32")
    mixed_precision: MixedPrecision = group(MixedPrecision)
    reshard_after_forward: bool = same_as(Fsdp, "reshard_after_forward", True)
    param_offload: ClassVar[bool] = False
    grad_offload: ClassVar[bool] = False
    optimizer_offload: ClassVar[bool] = False
    fsdp_size: ClassVar[int] = -1


@dataclass(slots=True)
class SFTModel(ModelWithAdapters):
    """The model."""

    partial_pretrain: str = key(
        None, "Hugging Face folder to start from (weights, config, tokenizer), or a hub name", is_path=True
    )
    fsdp_config: SFTFsdp = group(SFTFsdp)

    @property
    def path(self) -> str:
        """As models are called elsewhere."""
        return self.partial_pretrain


@dataclass(slots=True)
class SFTOptim(Optim):
    """The optimizer and its schedule."""

    lr: float = same_as(Optim, "lr", 1e-5)
    lr_warmup_steps_ratio: float = same_as(Optim, "lr_warmup_steps_ratio", 0.1)
    warmup_style: str = same_as(Optim, "warmup_style", "cosine")
    betas: list[float] = same_as(Optim, "betas", [0.9, 0.95])
    clip_grad: float = key(1.0, "largest norm of the gradient", gt=0)


@dataclass(slots=True)
class SFTTrainer(RunSettings):
    """The run; the trained model is in <default_local_dir>/huggingface at the end."""

    project_name: str = same_as(RunSettings, "project_name", "search-r1-sft")
    experiment_name: str = same_as(RunSettings, "experiment_name", "test")
    total_epochs: int = same_as(RunSettings, "total_epochs", 4)
    seed: int = same_as(RunSettings, "seed", 1)


@dataclass(slots=True)
class SFTConfig(Block):
    """The whole configuration of supervised training."""

    data: SFTData = group(SFTData)
    model: SFTModel = group(SFTModel)
    optim: SFTOptim = group(SFTOptim)
    use_remove_padding: bool = key(
        True,
        "sequences end to end in a forward pass; false: each padded to the longest one beside it. Loss and "
        "gradient are the same",
    )
    trainer: SFTTrainer = group(SFTTrainer)
