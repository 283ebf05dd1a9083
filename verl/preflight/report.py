"""A plan in words: who goes where, a table of memory for each kind of device, and what lowers a phase."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from verl.config import Config
from verl.preflight.plan import GIB, DeviceLoad, Plan

MOST_LISTED = 16  # ranks that are listed one by one
TITLES = {
    "rollout": "rollout",
    "log_probs": "log-probs",
    "reference": "reference",
    "teacher": "teacher",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}
# phase -> what its passes are sized by: block of the configuration, beginning of the keys
PASSES = {
    "log_probs": ("actor_rollout_ref.rollout", "log_prob"),
    "reference": ("actor_rollout_ref.ref", "log_prob"),
    "teacher": ("actor_rollout_ref.ref", "log_prob"),
    "values": ("critic", "forward"),
    "update_critic": ("critic", "ppo"),
    "update_actor": ("actor_rollout_ref.actor", "ppo"),
}


def report(plan: Plan, config: Config) -> Iterator[str]:
    """The lines of a dry run, without its verdict."""
    hardware, loads = plan.hardware, plan.loads
    on_cuda = hardware.device == "cuda"
    kind = "GPU" if on_cuda else "node, CPU only"
    yield f"hardware: {gib(hardware.device_bytes)} GiB for each {kind} ({hardware.source})"
    yield f"driver: this process, on {socket.gethostname()}; it holds token ids and scores, no weights"
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in plan.parameters.items())
    yield f"parameters: {counts}"
    yield ""
    num_ranks = len(plan.positions)
    yield f"{num_ranks} process{'es' if num_ranks > 1 else ''}; each: {', '.join(plan.roles)}"
    places = [(rank, load) for load in loads for rank in load.ranks]
    for rank, load in places if num_ranks <= MOST_LISTED else [*places[:8], *places[-4:]]:
        if rank == num_ranks - 4 and num_ranks > MOST_LISTED:
            yield "  ..."
        where = f"GPU {load.device}" if load.device >= 0 else "CPU"
        yield f"  rank {rank}: node {load.node}, {where}, {plan.positions[rank]}"
    rollout = config.actor_rollout_ref.rollout
    if rollout.placement == "apart":
        own = f"{rollout.vllm.num_servers}, started by rank 0 on GPUs of its node that it does not train on"
        size = rollout.tensor_model_parallel_size
        yield f"vLLM servers of {size} GPUs each: {rollout.vllm.server_urls or own}"
    groups: dict[tuple, list[DeviceLoad]] = {}
    for load in loads:  # devices that hold the same, together
        groups.setdefault(tuple((i.name, *map(i.phases.get, plan.phases)) for i in load.items), []).append(
            load
        )
    for group in groups.values():
        yield ""
        yield from _table(group, plan.phases)
    if on_cuda:
        nodes = {load.node for load in loads}
        host = max(sum(i.host for load in loads if load.node == node for i in load.items) for node in nodes)
        yield ""
        yield f"CPU memory of a node, for what is offloaded and the processes: {gib(host)} GiB"


def _table(loads: Sequence[DeviceLoad], phases: Sequence[str]) -> Iterator[str]:
    load = loads[0]
    rows = [(i.name, [i.phases.get(p, 0) for p in phases]) for i in load.items if any(i.phases.values())]
    rows.append(("in all", [load.total(phase) for phase in phases]))
    width = max(len(name) for name, _ in rows)
    titles = [TITLES[phase].rjust(8) for phase in phases]
    names = load.name if len(loads) == 1 else f"{load.name} to {loads[-1].name}, {len(loads)} alike"
    yield f"memory of {names}, GiB of {gib(load.capacity)}:"
    yield f"  {'':{width}}  {'  '.join(titles)}"
    for name, values in rows:
        cells = [(gib(v) if v else "-").rjust(len(title)) for v, title in zip(values, titles, strict=True)]
        yield f"  {name:{width}}  {'  '.join(cells)}"


def verdict(plan: Plan, config: Config) -> list[str]:
    """Whether it fits; if not: where, by how much, and the keys that lower that phase."""
    load, phase, left = plan.tightest
    if plan.fits:
        return [f"fits: {load.name} has {gib(left)} GiB left in its fullest phase"]
    lines = list(plan.problems)
    if left < 0:
        lines.insert(
            0,
            f"{load.name} would need {gib(load.total(phase))} GiB in the phase {TITLES[phase]!r} and has "
            f"{gib(load.capacity)}: {gib(-left)} GiB too much",
        )
    else:
        phase = "rollout"
    return [
        *lines,
        "what to change: " + "; ".join(what_to_change(phase, plan.hardware.device == "cuda", config)),
    ]


def what_to_change(phase: str, on_cuda: bool, config: Config) -> list[str]:
    """The settings that lower a phase and are not set yet, those that cost least first."""
    block = config.actor_rollout_ref
    actor, rollout = block.actor, block.rollout
    changes = []
    if phase in PASSES:
        name, prefix = PASSES[phase]
        part = {"critic": config.critic, "ref": block.ref, "rollout": rollout, "actor": actor}[
            name.split(".")[-1]
        ]
        switch = "log_prob_use_dynamic_bsz" if prefix == "log_prob" else "use_dynamic_bsz"
        size = f"{prefix}_max_token_len_per_gpu"
        if part[switch]:
            changes.append(f"{name}.{size} below {part[size]}")
        else:
            rows = f"{prefix}_micro_batch_size_per_gpu"
            changes.append(f"{name}.{switch}=true (a budget of {size}={part[size]} tokens for each pass)")
            changes.append(f"or {name}.{rows} (or {prefix}_micro_batch_size) below {part[rows]} trajectories")
        model = config.critic.model if name == "critic" else block.model
        if phase.startswith("update") and not model.enable_gradient_checkpointing:
            place = "critic.model" if name == "critic" else "actor_rollout_ref.model"
            changes.append(f"{place}.enable_gradient_checkpointing=true")
        if not rollout.free_cache_engine and rollout.placement != "apart":
            changes.append("actor_rollout_ref.rollout.free_cache_engine=true")
    elif rollout.placement == "apart":
        changes.append(
            "more of actor_rollout_ref.rollout.gpu_memory_utilization and tensor_model_parallel_size"
        )
    else:
        if on_cuda:
            changes.append("actor_rollout_ref.rollout.placement=apart (vLLM servers, which split the model)")
        key = "gpu_memory_utilization" if on_cuda else "kv_cache_gb"
        changes.append(f"actor_rollout_ref.rollout.{key} (now {rollout[key]}) and max_num_seqs")
    if on_cuda:
        blocks = {"actor_rollout_ref.actor.fsdp_config": actor.fsdp_config}
        if phase.endswith("critic") or phase == "values":
            blocks["critic.model.fsdp_config"] = config.critic.model.fsdp_config
        for name, fsdp in blocks.items():
            keys = [f"{kind}_offload" for kind in ("optimizer", "param") if not fsdp[f"{kind}_offload"]]
            changes += [f"{name}.{key}=true" for key in keys]
    if actor.strategy == "megatron":
        changes.append(
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size, pipeline_model_parallel_size"
        )
    elif not block.model.lora_rank:
        changes.append("LoRA (actor_rollout_ref.model.lora_rank)")
    return [*changes, "more trainer.n_gpus_per_node or trainer.nnodes", "a smaller model"]


def gib(num_bytes: int) -> str:
    """1.5 -> 1.50, 0.003 -> 0.003"""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
