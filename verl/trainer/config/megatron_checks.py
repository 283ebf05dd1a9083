"""What `strategy=megatron` needs: the package, processes that can be dealt out, models that can be cut so.

Read from the configuration and the models' config.json alone, before anything starts. What only the worker
can see (a model on the hub) is checked there again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.config.keys import ACTOR
from verl.trainer.ppo.passes import Passes
from verl.workers.megatron import check_installed
from verl.workers.megatron.settings import ModelShape, ParallelSizes

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def uses_megatron(config: DictConfig) -> bool:
    """Whether the run trains on megatron-core."""
    return config.actor_rollout_ref.actor.strategy == "megatron"


def without_effect(config: DictConfig) -> dict[str, str]:
    """key -> why it changes nothing, of those that only mean something with FSDP2."""
    if not uses_megatron(config):
        return {}
    blocks = (f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.model.fsdp_config")
    return {
        f"{block}.{key}": "megatron-core cuts a model as the megatron block says, and shards no weights."
        for block in blocks
        for key in ("fsdp_size", "reshard_after_forward")
    }


def check_megatron(config: DictConfig, passes: Passes) -> None:
    """Raises ValueError for the first thing that can't work, with what was found, expected, and to do."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    if passes.values and (critic.strategy == "megatron") != uses_megatron(config):
        raise ValueError(
            f"Found {ACTOR}.strategy={actor.strategy} and critic.strategy={critic.strategy}, which share "
            f"their processes; expected both to be megatron, or none. Set critic.strategy={actor.strategy}."
        )
    if not uses_megatron(config):
        for size in SIZES:
            if actor.megatron[size] > 1:
                raise ValueError(
                    f"Found {ACTOR}.megatron.{size}={actor.megatron[size]} with {ACTOR}.strategy="
                    f"{actor.strategy}; expected {ACTOR}.strategy=megatron (and critic.strategy=megatron)."
                )
        return
    check_installed()
    group, megatron = config.actor_rollout_ref, actor.megatron
    sizes = ParallelSizes(*(megatron[size] for size in SIZES))
    sizes.check(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    _check_block(config, "actor_rollout_ref.model", ACTOR, f"{ACTOR}.fsdp_config")
    _check_shape("actor_rollout_ref.model.path", group.model, sizes, megatron)
    if passes.reference:
        _check_shape("actor_rollout_ref.model.path", group.model, sizes, group.ref.megatron)
    if passes.teacher:
        teacher = {"path": group.teacher.path, "trust_remote_code": group.model.trust_remote_code}
        _check_shape("actor_rollout_ref.teacher.path", teacher, sizes, group.ref.megatron)
    if passes.values:
        _check_block(config, "critic.model", "critic", "critic.model.fsdp_config")
        _check_shape("critic.model.path", critic.model, sizes, critic.megatron)


def _check_block(config: DictConfig, model_key: str, key: str, precision_key: str) -> None:
    """What one trained model asks for besides."""
    model, block = OmegaConf.select(config, model_key), OmegaConf.select(config, key)
    precision = OmegaConf.select(config, precision_key)
    if model.lora_rank > 0 or model.get("lora_adapter_path") is not None:
        raise ValueError(
            f"Found {model_key}.lora_rank={model.lora_rank} (or lora_adapter_path) with {key}.strategy="
            f"megatron, which trains whole models; expected lora_rank=0, or {key}.strategy=fsdp."
        )
    if block.optim.name != "adamw":
        raise ValueError(
            f"Found {key}.optim.name={block.optim.name} with {key}.strategy=megatron, whose optimizer is "
            f"spread over processes without regard to matrices; expected {key}.optim.name=adamw, or "
            f"{key}.strategy=fsdp."
        )
    if precision.model_dtype != "fp32":
        raise ValueError(
            f"Found {precision_key}.model_dtype={precision.model_dtype} with {key}.strategy=megatron, whose "
            f"optimizer keeps the weights in fp32 (beside those that it computes with, of mixed_precision."
            "param_dtype); expected fp32."
        )
    if block.ulysses_sequence_parallel_size > 1:
        raise ValueError(
            f"Found {key}.ulysses_sequence_parallel_size={block.ulysses_sequence_parallel_size} with "
            f"{key}.strategy=megatron; expected 1, and {ACTOR}.megatron.context_parallel_size instead."
        )


def _check_shape(
    key: str, model: DictConfig | dict[str, Any], sizes: ParallelSizes, layout: DictConfig
) -> None:
    """That the heads and layers of a model in a local folder can be dealt out."""
    from verl.workers.engine.loading import load_hf_config  # slow to import, and FSDP does without

    if not (Path(model["path"] or "").expanduser() / "config.json").is_file():
        return
    try:
        shape = ModelShape.of(load_hf_config(model))
        shape.check(sizes, layout.num_layers_per_virtual_pipeline_stage)
    except ValueError as error:
        raise ValueError(f"Found {key}={model['path']}, which can't be cut as asked: {error}") from error
