"""What to change so that a plan fits: the cheapest change that does it, tried on the plan itself.

The changes are in the order of what they cost: first those that cost nothing, then some time in a step, then
much of it, then hardware. Each is tried alone, and then together with those before it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.hardware import Hardware
from verl.trainer.dry_run.plan import Models, Plan, build_plan

MOST_NODES = 64


@dataclass(frozen=True)
class Change:
    """settings: key -> value. costs: what is lost, in words."""

    settings: dict[str, object]
    costs: str

    @property
    def words(self) -> str:
        settings = " ".join(f"{key}={_text(value)}" for key, value in self.settings.items())
        return f"{settings} ({self.costs})"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def cheapest_change(config: DictConfig, hardware: Hardware, models: Models) -> list[Change] | None:
    """The changes that make the plan fit: one if one does, else the first few that do together, else more
    nodes. None: nothing of this does.
    """
    options = list(_options(config, hardware, models))
    for option in options:
        if _plan_with(config, [option], hardware, models).fits:
            return [option]
    gathered: list[Change] = []
    for option in options:
        gathered.append(option)
        if _plan_with(config, gathered, hardware, models).fits:
            return _needed(config, gathered, hardware, models)
    if config.actor_rollout_ref.rollout.placement == "colocated" and hardware.device == "cuda":
        prefix = "actor_rollout_ref.rollout"
        servers = Change(
            {
                f"{prefix}.name": "vllm",
                f"{prefix}.placement": "apart",
                f"{prefix}.tensor_model_parallel_size": hardware.gpus_per_node,
                f"{prefix}.vllm.server_urls": "http://HOST:PORT",
            },
            "vLLM servers on GPUs of their own, which split the model",
        )
        cache_key = f"{prefix}.gpu_memory_utilization"  # of the servers' GPUs then
        gathered = [change for change in gathered if cache_key not in change.settings]
        for others in ([], gathered):
            if _plan_with(config, [servers, *others], hardware, models).fits:
                return _needed(config, [servers, *others], hardware, models)
        if any(
            load.total("rollout") > load.capacity
            for load in _plan_with(config, gathered, hardware, models).loads
        ):
            gathered = [servers, *gathered]
    nodes = config.trainer.nnodes * 2
    while nodes <= MOST_NODES:
        for others in ([], gathered):
            changes = [*others, Change({"trainer.nnodes": nodes}, "more machines")]
            if _plan_with(config, changes, hardware, models).fits:
                return _needed(config, changes, hardware, models)
        nodes *= 2
    return None


def _needed(config: DictConfig, changes: list[Change], hardware: Hardware, models: Models) -> list[Change]:
    """Without those that the others do without, the dearest left out first."""
    for change in reversed(changes):
        fewer = [other for other in changes if other is not change]
        if _plan_with(config, fewer, hardware, models).fits:
            changes = fewer
    return changes


def _plan_with(config: DictConfig, changes: list[Change], hardware: Hardware, models: Models) -> Plan:
    changed = copy.deepcopy(config)
    for change in changes:
        for key, value in change.settings.items():
            OmegaConf.update(changed, key, value)
    return build_plan(changed, hardware, models)


def _options(config: DictConfig, hardware: Hardware, models: Models) -> Iterator[Change]:
    """What this configuration leaves to be changed, cheapest first."""
    block, actor = config.actor_rollout_ref, "actor_rollout_ref.actor"
    trained = [(actor, block.actor, "actor_rollout_ref.model", block.model)]
    if models.critic is not None:
        trained.append(("critic", config.critic, "critic.model", config.critic.model))
    if not block.rollout.free_cache_engine:
        yield Change({"actor_rollout_ref.rollout.free_cache_engine": True}, "a moment at each rollout")
    if (
        models.plain_policy is not None
        and hardware.device == "cuda"
        and not block.ref.fsdp_config.param_offload
    ):
        yield Change({"actor_rollout_ref.ref.fsdp_config.param_offload": True}, "a copy in each step")
    yield from _smaller_cache(config, hardware)
    for _, _, name, model in trained:
        if not model.enable_gradient_checkpointing:
            yield Change({f"{name}.enable_gradient_checkpointing": True}, "a third more time in the update")
    for name, settings, _, _ in trained:
        yield from _smaller_passes(name, settings, config)
    if hardware.device == "cuda":
        for kind, costs in (("optimizer_offload", "a copy in each update"), ("param_offload", "the same")):
            for name, settings, model_name, model in trained:
                prefix = f"{model_name}.fsdp_config" if name == "critic" else f"{name}.fsdp_config"
                fsdp = model.fsdp_config if name == "critic" else settings.fsdp_config
                if not fsdp[kind]:
                    yield Change({f"{prefix}.{kind}": True}, costs)


def _smaller_cache(config: DictConfig, hardware: Hardware) -> Iterator[Change]:
    rollout = config.actor_rollout_ref.rollout
    if hardware.device == "cpu":
        yield Change({"actor_rollout_ref.rollout.kv_cache_gb": 1.0}, "fewer trajectories at once")
        return
    for share in (0.4, 0.3, 0.2):
        if rollout.gpu_memory_utilization > share:
            yield Change(
                {"actor_rollout_ref.rollout.gpu_memory_utilization": share}, "fewer trajectories at once"
            )


def _smaller_passes(name: str, block: DictConfig, config: DictConfig) -> Iterator[Change]:
    """Half as many tokens in a pass, and half of that, down to one trajectory."""
    longest = config.data.max_prompt_length
    if block.use_dynamic_bsz:
        budget = block.ppo_max_token_len_per_gpu // 2
        while budget >= longest:
            yield Change({f"{name}.ppo_max_token_len_per_gpu": budget}, "smaller passes")
            budget //= 2
        return
    rows = block.ppo_micro_batch_size_per_gpu // 2
    while rows >= 1:
        yield Change({f"{name}.ppo_micro_batch_size_per_gpu": rows}, "smaller passes")
        rows //= 2
