"""What a configuration leaves to be changed so that its plan needs less memory, and what each change costs.

configuration -> ladders_of: for each thing that can be changed a Ladder of Changes, the mildest first
                 servers, more_nodes: what asks for more GPUs
applied(configuration, changes) -> the configuration of a command line with these settings at its end
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.trainer.dry_run.hardware import Hardware
from verl.trainer.dry_run.plan import Models, Plan
from verl.workers.engine.loading import load_hf_config
from verl.workers.megatron.settings import ModelShape, ParallelSizes

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "ref"))
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
# (block, what its keys of passes begin with, phases in which it makes them)
PASSES = (
    (ACTOR, "ppo", ("update_actor",)),
    (ROLLOUT, "log_prob", ("log_probs",)),
    (REF, "log_prob", ("reference", "teacher")),
    ("critic", "ppo", ("update_critic",)),
    ("critic", "forward", ("values",)),
)
CACHE_SHARES: Sequence[float] = (0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9)  # of a GPU
CACHE_SIZES: Sequence[float] = (0.25, 1.0, 4.0)  # GiB, without GPUs


@dataclass(frozen=True)
class Change:
    """settings: key -> value. costs: what is lost, in words."""

    settings: dict[str, object]
    costs: str

    @property
    def words(self) -> str:
        settings = " ".join(f"{key}={_text(value)}" for key, value in self.settings.items())
        return f"{settings} ({self.costs})"


Ladder = tuple[Change, ...]  # of one thing: the mildest change first; each replaces those before it


def _text(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def applied(config: DictConfig, changes: Sequence[Change]) -> DictConfig:
    """The configuration with the settings of `changes`, the last ones counting.

    Passes that follow the number of replicas (`loading.resolve`) are as large as then or as now, whichever
    is more: whether the user set their size or left it to follow, what fits here fits there.
    """
    changed = copy.deepcopy(config)
    settings = {key: value for change in changes for key, value in change.settings.items()}
    for key, value in settings.items():
        OmegaConf.update(changed, key, value)
    before, after = _replicas(config), _replicas(changed)
    if before != after:
        for block, prefix, _ in PASSES:
            key = f"{block}.{prefix}_micro_batch_size_per_gpu"
            rows, total = (
                OmegaConf.select(config, name) for name in (key, f"{block}.{prefix}_micro_batch_size")
            )
            if key not in settings and total is not None and rows == max(1, total // before):
                OmegaConf.update(changed, key, max(rows, total // after))
    return changed


def _replicas(config: DictConfig) -> int:
    """What divides a whole run's micro-batch size."""
    actor, processes = config.actor_rollout_ref.actor, config.trainer.nnodes * config.trainer.n_gpus_per_node
    return max(1, processes // (_sizes(actor).replica if actor.strategy == "megatron" else 1))


def _sizes(actor: DictConfig) -> ParallelSizes:
    return ParallelSizes(
        actor.megatron[TENSOR], actor.megatron[PIPELINE], actor.megatron.context_parallel_size
    )


def ladders_of(config: DictConfig, hardware: Hardware, models: Models, plan: Plan) -> Iterator[Ladder]:
    """What asks for no more GPUs, cheapest first. plan: of the configuration."""
    block, on_cuda = config.actor_rollout_ref, hardware.device == "cuda"
    is_megatron, is_apart = block.actor.strategy == "megatron", block.rollout.placement == "apart"
    trained = [("actor_rollout_ref.model", block.model)]
    fsdp_blocks = [(f"{ACTOR}.fsdp_config", block.actor.fsdp_config)]  # offloads and dtypes
    if models.critic is not None:
        trained.append(("critic.model", config.critic.model))
        fsdp_blocks.append(("critic.model.fsdp_config", config.critic.model.fsdp_config))
    if not block.rollout.free_cache_engine and not is_apart:
        yield (Change({f"{ROLLOUT}.free_cache_engine": True}, "a moment at each rollout"),)
    yield from _pass_ladders(config, plan)
    if is_megatron and (wider := parallel_ladder(config, models)):
        yield wider
    has_frozen = models.plain_policy is not None or models.teacher is not None
    if has_frozen and on_cuda and not block.ref.fsdp_config.param_offload:
        yield (Change({f"{REF}.fsdp_config.param_offload": True}, "a copy in each step"),)
    if is_apart:
        yield from _server_ladders(config, hardware)
    else:
        yield from _cache_ladder(config, hardware)
    if not is_megatron:
        ref = [(f"{REF}.fsdp_config", block.ref.fsdp_config)] if has_frozen else []
        for name, fsdp in [*fsdp_blocks, *ref]:
            if not fsdp.reshard_after_forward:
                yield (Change({f"{name}.reshard_after_forward": True}, "layers are gathered more often"),)
            if fsdp.fsdp_size != -1:
                yield (Change({f"{name}.fsdp_size": -1}, "layers are gathered from all processes"),)
    for name, model in trained:
        if not model.enable_gradient_checkpointing:
            yield (
                Change({f"{name}.enable_gradient_checkpointing": True}, "a third more time in the update"),
            )
    if on_cuda:
        offloads = [("optimizer_offload", "a copy in each update"), ("param_offload", "the same")]
        if is_megatron:  # whose gradients have buffers that stay
            offloads.insert(0, ("grad_offload", "their buffers are made anew for each update"))
        for kind, costs in offloads:
            for name, fsdp in fsdp_blocks:
                if not fsdp[kind]:
                    yield (Change({f"{name}.{kind}": True}, costs),)


def _pass_ladders(config: DictConfig, plan: Plan) -> Iterator[Ladder]:
    """Smaller passes, those of the phase that lacks most first."""
    short = plan.shortfall[1] if plan.shortfall is not None else ""
    asked = [one for one in PASSES if any(phase in plan.phases for phase in one[2])]
    for block, prefix, _ in sorted(asked, key=lambda one: short not in one[2]):
        if ladder := tuple(_smaller_passes(config, block, prefix)):
            yield ladder


def _smaller_passes(config: DictConfig, name: str, prefix: str) -> Iterator[Change]:
    """Half as many rows or tokens in a pass, and half of that, down to one trajectory."""
    key, count, least = _size_of_passes(config, name, prefix)
    while count > least:
        count = max(count // 2, least)
        yield Change({key: count}, "smaller passes")


def _size_of_passes(config: DictConfig, name: str, prefix: str) -> tuple[str, int, int]:
    """(key that counts, its value, what it is for one trajectory)."""
    block, actor = OmegaConf.select(config, name), config.actor_rollout_ref.actor
    if not block["log_prob_use_dynamic_bsz" if prefix == "log_prob" else "use_dynamic_bsz"]:
        key = f"{prefix}_micro_batch_size_per_gpu"
        return f"{name}.{key}", block[key], 1
    if actor.strategy == "megatron":
        sharing = actor.megatron.context_parallel_size
    else:
        sharing = (config.critic if name == "critic" else actor).ulysses_sequence_parallel_size
    key = f"{prefix}_max_token_len_per_gpu"
    return f"{name}.{key}", block[key], -(-config.data.max_prompt_length // sharing)


def _cache_ladder(config: DictConfig, hardware: Hardware) -> Iterator[Ladder]:
    """Of an engine in the training processes: less room for it, or more."""
    rollout = config.actor_rollout_ref.rollout
    name = "gpu_memory_utilization" if hardware.device == "cuda" else "kv_cache_gb"
    sizes = CACHE_SHARES if hardware.device == "cuda" else CACHE_SIZES
    key, now = f"{ROLLOUT}.{name}", rollout[name]
    less = sorted((size for size in sizes if now is None or size < now), reverse=True)
    changes = [Change({key: size}, "fewer trajectories at once") for size in less]
    if now is not None:
        more = sorted(size for size in sizes if size > now)
        changes += [Change({key: size}, "more memory for the rollout") for size in more]
    yield tuple(changes)


def _server_ladders(config: DictConfig, hardware: Hardware) -> Iterator[Ladder]:
    """Of servers apart: a larger share of their GPUs for them."""
    now = config.actor_rollout_ref.rollout.gpu_memory_utilization
    more = [size for size in CACHE_SHARES if size > max(now, 0.5)]
    if more and hardware.device == "cuda":
        yield tuple(
            Change({f"{ROLLOUT}.gpu_memory_utilization": size}, "a larger share of the servers' GPUs")
            for size in more
        )


# ---------------------------------------------------------------------------------------- Megatron's sizes


def parallel_ladder(config: DictConfig, models: Models) -> Ladder:
    """Megatron's sizes: more processes that share each layer, up to those of a node; with as many as can be
    then more stages of the pipeline. Only what validation takes.
    """
    actor = config.actor_rollout_ref.actor
    now, on_node = _sizes(actor), config.trainer.n_gpus_per_node
    processes = config.trainer.nnodes * on_node
    shapes = _shapes(config, models)

    def can_be(sizes: ParallelSizes) -> bool:
        try:
            sizes.check(processes)
            for shape in shapes:
                shape.check(sizes, actor.megatron.num_layers_per_virtual_pipeline_stage)
        except ValueError:
            return False
        return True

    wider = [
        size
        for size in range(now.tensor + 1, on_node + 1)
        if on_node % size == 0 and can_be(ParallelSizes(size, now.pipeline, now.context))
    ]
    widest = max([now.tensor, *wider])
    deeper = [
        size
        for size in range(now.pipeline + 1, processes // widest + 1)
        if can_be(ParallelSizes(widest, size, now.context))
    ]
    blocks = [ACTOR]  # the others follow the actor's, or must be told the same if they are told anything
    if models.plain_policy is not None or models.teacher is not None:
        blocks.append(REF)
    if models.critic is not None:
        blocks.append("critic")
    tensor = {f"{block}.megatron.{TENSOR}": widest for block in blocks} if widest > now.tensor else {}
    return (
        *(
            Change({f"{block}.megatron.{TENSOR}": size for block in blocks}, "more exchange in each layer")
            for size in wider
        ),
        *(
            Change(
                {**tensor, **{f"{block}.megatron.{PIPELINE}": size for block in blocks}},
                "stages wait for each other" + (", more exchange in each layer" if tensor else ""),
            )
            for size in deeper
        ),
    )


def _shapes(config: DictConfig, models: Models) -> list[ModelShape]:
    """Of every model that is cut so."""
    block = config.actor_rollout_ref
    cut: list[Mapping[str, Any]] = [block.model]
    if models.teacher is not None:
        cut.append({"path": block.teacher.path, "trust_remote_code": block.model.trust_remote_code})
    if models.critic is not None:
        cut.append(config.critic.model)
    return [ModelShape.of(load_hf_config(model)) for model in cut]


def passes_as_now(config: DictConfig, plan: Plan) -> list[Change]:
    """Each pass as large as it is, said outright: where more processes share a replica it would grow."""
    return [
        Change({key: count}, "passes as large as now")
        for block, prefix, phases in PASSES
        for key, count, _ in [_size_of_passes(config, block, prefix)]
        if any(phase in plan.phases for phase in phases) and key.endswith("micro_batch_size_per_gpu")
    ]


# --------------------------------------------------------------------------------------------- more GPUs


def servers(config: DictConfig, hardware: Hardware, models: Models) -> Change | None:
    """The rollout on vLLM servers, as wide as a node allows; None: it is there already, or has no GPUs."""
    if config.actor_rollout_ref.rollout.placement != "colocated" or hardware.device != "cuda":
        return None
    size, spec = hardware.gpus_per_node, models.spec
    while spec is not None and (
        spec.num_heads % size or (spec.num_kv_heads % size and size % spec.num_kv_heads)
    ):
        size -= 1
    settings: dict[str, object] = {
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.placement": "apart",
        f"{ROLLOUT}.{TENSOR}": size,
        f"{ROLLOUT}.vllm.server_urls": "http://HOST:PORT",
    }
    if config.trainer.rollout_pool.n_gpus_per_node is not None:
        settings |= {"trainer.rollout_pool.n_gpus_per_node": None, "trainer.rollout_pool.nnodes": 1}
    return Change(settings, "vLLM servers on GPUs of their own, which split the model")


def more_nodes(config: DictConfig, most: int) -> Iterator[Change]:
    """Twice as many, and twice that."""
    nodes = config.trainer.nnodes * 2
    while nodes <= most:
        yield Change({"trainer.nnodes": nodes}, "more machines")
        nodes *= 2
