"""A plan in words: who goes where, a table of memory for each kind of device, and what lowers a phase."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from verl.config import at
from verl.preflight.plan import GIB, DeviceLoad, Plan

TITLES = {
    "rollout": "rollout",
    "log_probs": "log-probs",
    "reference": "reference",
    "teacher": "teacher",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}


def report(plan: Plan) -> Iterator[str]:
    """The lines of a dry run, without its verdict."""
    hardware, config, rollout = plan.hardware, plan.config, plan.config.actor_rollout_ref.rollout
    kind = "GPU" if hardware.device == "cuda" else "node, CPU only"
    yield f"hardware: {gib(hardware.device_bytes)} GiB for each {kind} ({hardware.source})"
    yield f"driver: this process, on {socket.gethostname()}; it holds token ids and scores, no weights"
    counts = {use.owner: use.size.num_parameters for use in plan.engines if use.owner != "reference"}
    yield "parameters: " + ", ".join(f"{owner} {count / 1e6:,.1f} M" for owner, count in counts.items())
    yield plan.who_goes_where
    if rollout.placement == "apart":
        own = f"{rollout.vllm.num_servers}, started by rank 0 on GPUs of its node that it does not train on"
        size = rollout.tensor_model_parallel_size
        yield f"vLLM servers of {size} GPUs each: {rollout.vllm.server_urls or own}"
    for load in plan.loads:
        yield ""
        yield from _table(load, plan.phases)
    if hardware.device == "cuda":
        host = max(load.host for load in plan.loads) * config.trainer.n_gpus_per_node
        yield ""
        yield f"CPU memory of a node, for what is offloaded and the processes: {gib(host)} GiB"


def _table(load: DeviceLoad, phases: tuple[str, ...]) -> Iterator[str]:
    rows = {**load.items, "in all": {phase: load.total(phase) for phase in phases}}
    width = max(map(len, rows))
    titles = [TITLES[phase].rjust(8) for phase in phases]
    yield f"memory of {load.name}, GiB of {gib(load.capacity)}:"
    yield f"  {'':{width}}  {'  '.join(titles)}"
    for name, taken in rows.items():
        cells = [gib(taken[p]) if taken.get(p) else "-" for p in phases]
        padded = (cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True))
        yield f"  {name:{width}}  {'  '.join(padded)}"


def verdict(plan: Plan) -> list[str]:
    """Whether it fits; if not: where, by how much, and the keys that lower that phase."""
    load, phase, left = plan.tightest
    if plan.fits:
        return [f"fits: {load.name} has {gib(left)} GiB left in its fullest phase"]
    lines = list(plan.problems)
    if left < 0:
        need = f'{load.name} would need {gib(load.total(phase))} GiB in the phase "{TITLES[phase]}" and has '
        lines.insert(0, f"{need}{gib(load.capacity)}: {gib(-left)} GiB too much")
    return [*lines, f"what to change: {'; '.join(_what_lowers(plan, phase if left < 0 else 'rollout'))}"]


def _what_lowers(plan: Plan, phase: str) -> list[str]:
    """The settings that lower a phase."""
    config, on_cuda = plan.config, plan.on_cuda
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    name = "critic" if phase in ("values", "update_critic") else "actor_rollout_ref.actor"
    if phase == "rollout":
        key = "gpu_memory_utilization" if on_cuda else "kv_cache_gb"
        split = ["placement=apart (vLLM servers, which split the model)", "tensor_model_parallel_size"]
        changes = [f"actor_rollout_ref.rollout.{split[rollout.placement == 'apart']}"] * on_cuda
        changes.append(f"actor_rollout_ref.rollout.{key} (now {rollout[key]}) and max_num_seqs")
    elif actor.use_dynamic_bsz:
        changes = [f"{name}.ppo_max_token_len_per_gpu below {at(config, name).ppo_max_token_len_per_gpu}"]
    else:
        rows = at(config, name).ppo_micro_batch_size_per_gpu
        changes = [
            "actor_rollout_ref.actor.use_dynamic_bsz=true (passes of so many tokens)",
            f"or {name}.ppo_micro_batch_size_per_gpu and log_prob_... below {rows} trajectories",
        ]
    model = name.removesuffix(".actor") + ".model"
    fsdp = f"{model if name == 'critic' else name}.fsdp_config"
    switches = [f"{model}.enable_gradient_checkpointing"] * phase.startswith("update")
    switches += [f"{fsdp}.optimizer_offload", f"{fsdp}.param_offload"] * on_cuda
    changes += [f"{key}=true" for key in switches if not at(config, key)]
    if actor.strategy == "megatron":
        changes.append("actor_rollout_ref.actor.megatron's parallel sizes")
    return [*changes, "LoRA, a smaller model, or more trainer.n_gpus_per_node or trainer.nnodes"]


def gib(num_bytes: int) -> str:
    """1.5 -> 1.50, 0.003 -> 0.003"""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
