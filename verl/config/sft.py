"""Every key of `python -m verl.trainer.fsdp_sft_trainer` (supervised training). The names are verl's.

Lengths are tokens, batch sizes are rows, times are seconds. "process" is one training process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from verl.config.keys import (
    Block,
    Count,
    FilePath,
    NotNegative,
    Positive,
    Range,
    Share,
    Whole,
    group,
    key,
    same_as,
)
from verl.config.policy import Fsdp, MixedPrecision, ModelWithAdapters, Optim
from verl.config.schema import RunSettings


@dataclass(slots=True)
class Multiturn(Block):
    """Rows that are whole conversations."""

    enable: bool = key(False, "true: rows are whole conversations; assistant messages are trained")
    messages_key: str = key(
        "messages", "their column: [{role, content}, ...]; `trained: false` leaves one out"
    )
    tools_key: str = key("tools", "column with the tools that the chat template shows, where there is one")
    enable_thinking_key: str = key("enable_thinking", "column for the chat template's enable_thinking")


@dataclass(slots=True)
class SFTData(Block):
    """Rows of text, and which of it is trained."""

    train_files: FilePath | list[str] = key(None, 'parquet file or [list of files]; "~" is expanded')
    val_files: FilePath | list[str] | None = key(None, "the same, for the validation loss (null: none)")
    train_batch_size: Count = key(256, "rows per optimizer step, whole run")
    micro_batch_size_per_gpu: Count | None = key(None, "most rows per pass of one process (null: no limit)")
    max_token_len_per_gpu: Count = key(16384, "most tokens per pass; a longer row stands alone")
    prompt_key: str = key("question", "column with the prompt: text (one user message), or chat messages")
    response_key: str = key("answer", "column with the response: text, or the last of its messages")
    prompt_dict_keys: list[str] | None = key(None, "[names] that lead to the prompt inside of the column")
    response_dict_keys: list[str] | None = key(None, "the same for the response")
    multiturn: Multiturn = group(Multiturn)
    segments_key: str | None = key(None, "column with rows in pieces, [{text, trained}, ...]")
    observation_tag: str | None = key("information", "text between these tags is never trained (null: none)")
    max_length: Annotated[int, Range(2)] = key(1024, "longest row")
    truncation: str = key("error", "longer row: stop, or cut there", "error left right")
    chat_template: FilePath | None = key(None, "Jinja text, or a file with it, in place of the tokenizer's")
    apply_chat_template_kwargs: dict[str, Any] = key({}, "further arguments of the chat template")
    shuffle: bool = key(True, "new order of the rows each epoch (seeded by trainer.seed)")


@dataclass(slots=True)
class SFTFsdp(Block):
    """How the model is kept in memory and cut over processes."""

    model_dtype: str = same_as(Fsdp, "model_dtype", "fp32")
    mixed_precision: MixedPrecision = group(MixedPrecision)
    reshard_after_forward: bool = same_as(Fsdp, "reshard_after_forward", True)
    param_offload: ClassVar[bool] = False
    optimizer_offload: ClassVar[bool] = False
    fsdp_size: ClassVar[int] = -1


@dataclass(slots=True)
class SFTModel(ModelWithAdapters):
    """The model."""

    partial_pretrain: FilePath = key(None, "Hugging Face folder or hub name to start from")
    fsdp_config: SFTFsdp = group(SFTFsdp)

    @property
    def path(self) -> str:
        """As models are called elsewhere."""
        return self.partial_pretrain


@dataclass(slots=True)
class SFTOptim(Optim):
    """The optimizer and its schedule."""

    lr: NotNegative = same_as(Optim, "lr", 1e-5)
    lr_warmup_steps_ratio: Share = same_as(Optim, "lr_warmup_steps_ratio", 0.1)
    warmup_style: str = same_as(Optim, "warmup_style", "cosine")
    betas: list[float] = same_as(Optim, "betas", [0.9, 0.95])
    clip_grad: Positive = key(1.0, "largest norm of the gradient")


@dataclass(slots=True)
class SFTTrainer(RunSettings):
    """The run; the trained model is in <default_local_dir>/huggingface at the end."""

    project_name: str = same_as(RunSettings, "project_name", "search-r1-sft")
    experiment_name: str = same_as(RunSettings, "experiment_name", "test")
    total_epochs: Count = same_as(RunSettings, "total_epochs", 4)
    seed: Whole = same_as(RunSettings, "seed", 1)


@dataclass(slots=True)
class SFTConfig(Block):
    """The whole configuration of supervised training."""

    data: SFTData = group(SFTData)
    model: SFTModel = group(SFTModel)
    optim: SFTOptim = group(SFTOptim)
    use_remove_padding: bool = key(True, "sequences end to end; false: padded (the loss is the same)")
    trainer: SFTTrainer = group(SFTTrainer)
