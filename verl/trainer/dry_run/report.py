"""A plan in words: who goes where, and a table of memory for each kind of device."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from omegaconf import DictConfig

from verl.trainer.dry_run.changes import Change
from verl.trainer.dry_run.hardware import GIB
from verl.trainer.dry_run.plan import DeviceLoad, Plan, ProcessPlan

TITLES = {
    "rollout": "rollout",
    "log_probs": "log-probs",
    "reference": "reference",
    "teacher": "teacher",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}
MOST_LISTED = 16  # processes of a pool that are listed one by one


def report(plan: Plan, config: DictConfig) -> Iterator[str]:
    """The lines of a dry run, without its verdict."""
    hardware = plan.hardware
    kind = "GPU" if hardware.device == "cuda" else "node, CPU only"
    yield f"hardware: {gib(hardware.device_bytes)} GiB for each {kind} ({hardware.source})"
    yield f"driver: this process, on {socket.gethostname()}; it holds token ids and scores, no weights"
    counts = ", ".join(f"{name} {count / 1e6:,.1f} M" for name, count in plan.parameters.items())
    yield f"parameters: {counts}"
    yield ""
    yield from _places(plan)
    yield from _servers(plan, config)
    for group in _alike(plan.loads, plan.phases):
        yield ""
        yield from _table(group, plan.phases)
    if hardware.device == "cuda":
        yield ""
        host = max(plan.host_bytes(node) for node in {process.node for process in plan.processes})
        yield f"CPU memory of a node, for what is offloaded and the processes: {gib(host)} GiB"


def verdict(plan: Plan, changes: Sequence[Change] | None, config: DictConfig) -> Iterator[str]:
    """Whether it fits; if not: where, by how much, and what to change (None: nothing that is known helps)."""
    if plan.fits:
        tightest = min(plan.loads, key=lambda load: _left(load, plan))
        yield f"fits: {tightest.name} has {gib(_left(tightest, plan))} GiB left in its fullest phase"
        return
    if plan.shortfall is not None:
        load, phase, over = plan.shortfall
        yield (
            f"{load.name} would need {gib(load.total(phase))} GiB in the phase {TITLES[phase]!r} and has "
            f"{gib(load.capacity)}: {gib(over)} GiB too much"
        )
    yield from plan.problems
    if changes is None:
        yield _no_way_out(config)
    else:
        yield "the cheapest way out: " + " and ".join(change.words for change in changes)


def _no_way_out(config: DictConfig) -> str:
    block = config.actor_rollout_ref
    is_megatron = block.actor.strategy == "megatron"
    tried = ["no offloading", "no smaller passes"]
    if is_megatron:
        tried.append("no more tensor or pipeline parallelism")
    expected = "more memory on each device or a smaller model"
    if not is_megatron and block.model.lora_rank == 0 and block.model.lora_adapter_path is None:
        expected = "more memory on each device, a smaller model, or LoRA (actor_rollout_ref.model.lora_rank)"
    return f"{', '.join(tried)} and no more machines of this kind make room: expected {expected}"


def gib(num_bytes: int) -> str:
    """1.5 -> 1.50, 0.003 -> 0.003"""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def _left(load: DeviceLoad, plan: Plan) -> int:
    return load.capacity - load.total(load.fullest(plan.phases))


def _places(plan: Plan) -> Iterator[str]:
    pools: dict[str, list[ProcessPlan]] = {}
    for process in plan.processes:
        pools.setdefault(process.pool, []).append(process)
    for name, processes in pools.items():
        nodes = sorted({process.node for process in processes})
        yield (
            f"{name}: {len(processes)} process{'es' if len(processes) > 1 else ''} on "
            f"node{'s' if len(nodes) > 1 else ''} {_span(nodes)}; each: {', '.join(processes[0].roles)}"
        )
        shown = processes if len(processes) <= MOST_LISTED else [*processes[:8], *processes[-4:]]
        for number, process in enumerate(shown):
            if number == 8 and shown is not processes:
                yield "  ..."
            where = f"GPU {process.device}" if process.device >= 0 else "CPU"
            yield f"  rank {process.rank}: node {process.node}, {where}, {process.position}"


def _span(numbers: Sequence[int]) -> str:
    is_run = len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))


def _servers(plan: Plan, config: DictConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.placement != "apart":
        return
    if rollout.vllm.server_urls is not None:
        yield f"vLLM servers: those that run at {rollout.vllm.server_urls}"
    else:
        yield (
            f"vLLM servers: {rollout.vllm.num_servers} of {rollout.tensor_model_parallel_size} GPUs each, "
            "started by rank 0 on GPUs of its node that it does not train on"
        )
    if plan.server is not None:
        weights, cache = plan.server
        yield (
            f"  each of their GPUs, with tensor_model_parallel_size={rollout.tensor_model_parallel_size}: "
            f"weights {gib(weights)} GiB, KV cache {gib(cache)} GiB"
        )


def _alike(loads: Sequence[DeviceLoad], phases: Sequence[str]) -> list[list[DeviceLoad]]:
    """Devices that hold the same, together."""
    groups: dict[object, list[DeviceLoad]] = {}
    for load in loads:
        key = tuple((item.name, tuple(item.phases.get(phase, 0) for phase in phases)) for item in load.items)
        groups.setdefault(key, []).append(load)
    return list(groups.values())


def _table(loads: Sequence[DeviceLoad], phases: Sequence[str]) -> Iterator[str]:
    load = loads[0]
    rows = [
        (item.name, [item.phases.get(phase, 0) for phase in phases])
        for item in load.items
        if any(item.phases.values())
    ]
    rows.append(("in all", [load.total(phase) for phase in phases]))
    width = max(len(name) for name, _ in rows)
    columns = [max(len(TITLES[phase]), 8) for phase in phases]
    names = load.name if len(loads) == 1 else f"{load.name} to {loads[-1].name}, {len(loads)} alike"
    yield f"memory of {names}, GiB of {gib(load.capacity)}:"
    header = "  ".join(TITLES[phase].rjust(size) for phase, size in zip(phases, columns, strict=True))
    yield f"  {'':{width}}  {header}"
    for name, values in rows:
        cells = "  ".join(
            (gib(value) if value else "-").rjust(size) for value, size in zip(values, columns, strict=True)
        )
        yield f"  {name:{width}}  {cells}"
