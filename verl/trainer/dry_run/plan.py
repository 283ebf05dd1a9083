"""Who goes where, and how full each device gets: the plan of a run, made from its configuration.

configuration, Hardware -> pools of processes (placement.pools_of) -> items of each process -> Plan
                        -> DeviceLoad of each device: its items, its fullest phase, what is left
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig

from verl.trainer.dry_run.hardware import GIB, Hardware
from verl.trainer.dry_run.items import (
    PHASES,
    PROCESS_BYTES,
    Item,
    Rows,
    Trained,
    actor_model,
    critic_model,
    frozen_model,
    model_items,
    overhead,
    shares_base,
)
from verl.trainer.dry_run.layout import Layout, layout_of
from verl.trainer.dry_run.rollout import RolloutMemory, rollout_memory
from verl.trainer.dry_run.shapes import ModelShapes, policy_shapes, value_shapes
from verl.trainer.placement import PoolPlan, pools_of
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.loading import load_hf_config
from verl.workers.rollout.build import CUDA_RESERVE_BYTES
from verl.workers.rollout.native.architecture import ModelSpec
from verl.workers.weight_channel import rollout_dtype


@dataclass(frozen=True)
class ProcessPlan:
    """One worker process: rank in its pool, node, device on the node (a GPU's number; -1: the node's memory),
    roles, and its place in each kind of parallelism.
    """

    pool: str
    rank: int
    node: int
    device: int
    roles: tuple[str, ...]
    position: str
    items: tuple[Item, ...]


@dataclass(frozen=True)
class DeviceLoad:
    """A GPU, or the memory of a node without any."""

    node: int
    device: int
    capacity: int
    items: tuple[Item, ...]

    def total(self, phase: str) -> int:
        return sum(item.phases.get(phase, 0) for item in self.items)

    def fullest(self, phases: Sequence[str]) -> str:
        return max(phases, key=self.total)

    @property
    def name(self) -> str:
        return f"node {self.node}" + (f", GPU {self.device}" if self.device >= 0 else "")


@dataclass(frozen=True)
class Plan:
    """problems: in words, what can't work whatever else is free (a KV cache below one trajectory);
    missing: how many bytes more those ask for.
    server: (weights, KV cache) of each GPU of the vLLM servers apart, if there are any.
    """

    hardware: Hardware
    phases: tuple[str, ...]
    processes: tuple[ProcessPlan, ...]
    loads: tuple[DeviceLoad, ...]
    problems: tuple[str, ...]
    missing: int
    parameters: Mapping[str, int]
    server: tuple[int, int] | None = None

    @cached_property
    def shortfall(self) -> tuple[DeviceLoad, str, int] | None:
        """The device that lacks most, in which phase, and how many bytes; None if everything fits."""
        load = max(self.loads, key=lambda one: one.total(one.fullest(self.phases)) - one.capacity)
        phase = load.fullest(self.phases)
        over = load.total(phase) - load.capacity
        return (load, phase, over) if over > 0 else None

    @property
    def fits(self) -> bool:
        return self.shortfall is None and not self.problems

    @property
    def lack(self) -> int:
        """Bytes that are missing in all, over devices and phases; 0 if it fits."""
        alike = Counter(id(load.items) for load in self.loads)  # devices of processes that hold the same
        missing = self.missing
        for load in {id(load.items): load for load in self.loads}.values():
            over = (load.total(phase) - load.capacity for phase in self.phases)
            missing += alike[id(load.items)] * sum(max(0, num_bytes) for num_bytes in over)
        return missing

    def host_bytes(self, node: int) -> int:
        """Of a node's memory that its processes take beside their GPUs."""
        return sum(item.host for p in self.processes if p.node == node for item in p.items)


@dataclass(frozen=True)
class Models:
    """Shapes of the models of a run. They don't depend on where it runs, so they are read once.

    plain_policy: the policy as reference, if that is a model of its own. spec: the policy as the native
    rollout engine reads it; None if it does not run it.
    """

    policy: ModelShapes
    spec: ModelSpec | None
    plain_policy: ModelShapes | None
    teacher: ModelShapes | None
    critic: ModelShapes | None

    @classmethod
    def of(cls, config: DictConfig) -> Models:
        """ValueError: a model's configuration can't be read."""
        passes, block = Passes.of(config), config.actor_rollout_ref
        policy = policy_shapes(block.model)
        own_reference = passes.reference and not shares_base(config, passes)
        try:
            spec = ModelSpec.from_config(load_hf_config(block.model))
        except ValueError:
            spec = None
        return cls(
            policy,
            spec,
            policy if own_reference else None,
            policy_shapes({"path": block.teacher.path}, with_adapters=False) if passes.teacher else None,
            value_shapes(config.critic.model) if passes.values else None,
        )


@dataclass(frozen=True)
class _Case:
    """What is planned; `problems` are gathered on the way: in words, and how many bytes are missing."""

    config: DictConfig
    hardware: Hardware
    models: Models
    passes: Passes
    phases: tuple[str, ...]
    problems: dict[str, int]

    @property
    def device(self) -> torch.device:
        return torch.device(self.hardware.device)


def build_plan(config: DictConfig, hardware: Hardware, models: Models) -> Plan:
    """The plan of a validated configuration on some hardware. Nothing is started."""
    passes = Passes.of(config)
    asked = _phases(config, passes)
    case = _Case(config, hardware, models, passes, tuple(phase for phase in PHASES if phase in asked), {})
    processes: list[ProcessPlan] = []
    taken = 0
    for pool in pools_of(config, passes):
        first_node, offset = _where(pool, hardware, taken)
        taken = max(taken, max(pool.process_on_nodes)) if hardware.device == "cuda" else 0
        processes += _processes(case, pool, first_node, offset)
    loads = _loads(processes, hardware, case.phases, driver=len(processes) > 1)
    server = _server(case)
    counts = {
        name: shapes.num_parameters
        for name in ("policy", "teacher", "critic")
        if (shapes := getattr(models, name)) is not None
    }
    return Plan(
        hardware,
        case.phases,
        tuple(processes),
        loads,
        tuple(case.problems),
        sum(case.problems.values()),
        counts,
        server,
    )


def _phases(config: DictConfig, passes: Passes) -> set[str]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if config.trainer.val_only:
        return {"rollout"}
    rows = data.train_batch_size * rollout.n * rollout.n_agent
    actor = config.actor_rollout_ref.actor
    updates = actor.ppo_epochs * -(-rows // (actor.ppo_mini_batch_size * rollout.n))
    asked = {
        "rollout": True,
        "update_actor": True,
        "log_probs": passes.old_log_probs(True, updates),
        "reference": passes.reference,
        "teacher": passes.teacher,
        "values": passes.values,
        "update_critic": passes.values,
    }
    return {phase for phase, is_asked in asked.items() if is_asked}


def _where(pool: PoolPlan, hardware: Hardware, taken: int) -> tuple[int, int]:
    """(first node, first device on it): beside the pools before, if the nodes have devices left."""
    if hardware.device == "cpu" or taken + max(pool.process_on_nodes) <= hardware.gpus_per_node:
        return 0, taken
    return pool.nodes_before, 0


def _processes(case: _Case, pool: PoolPlan, first_node: int, offset: int) -> list[ProcessPlan]:
    layout = layout_of(case.config, pool)
    planned: dict[Any, tuple[Item, ...]] = {}  # processes of one kind hold the same
    found = []
    for rank, (node, local) in enumerate(pool.places):
        kind = layout.kind(rank)
        if kind not in planned:
            planned[kind] = _items(case, pool, layout, rank)
        found.append(
            ProcessPlan(
                pool.name,
                rank,
                first_node + node,
                offset + local if case.hardware.device == "cuda" else -1,
                tuple(role.value for role in pool.roles),
                layout.position(rank),
                planned[kind],
            )
        )
    return found


def _items(case: _Case, pool: PoolPlan, layout: Layout, rank: int) -> tuple[Item, ...]:
    rollout, data, phases = case.config.actor_rollout_ref.rollout, case.config.data, case.phases
    step_rows = data.train_batch_size * rollout.n * rollout.n_agent
    items: list[Item] = []
    if pool.trains:
        for model, mini_batch in _trained(case):
            replicas = layout.replicas if model.sequence is None else pool.world_size // model.sequence
            step, mini = (
                Rows(-(-count // replicas), data.max_prompt_length)
                for count in (step_rows, min(mini_batch, step_rows))
            )
            resident = [*model.phases, *([model.update_phase] if model.update_phase else [])]
            if model.owner == "actor":
                resident.append("rollout")  # they are read, or sent, before it generates
            needed = [phase for phase in phases if phase in resident]
            items += model_items(model, layout, rank, step, mini, case.hardware, phases, needed)
    items += overhead(case.hardware, pool.world_size, phases)
    if pool.rolls_out:
        most_rows = max(step_rows, data.val_batch_size or 0)
        items += _rollout_items(case, pool, -(-most_rows // pool.world_size), items)
    return tuple(item for item in items if any(item.phases.values()) or item.host)


def _trained(case: _Case) -> list[tuple[Trained, int]]:
    """(model, trajectories of its mini-batch) of every engine of a training process."""
    config, models, device = case.config, case.models, case.device
    block, n = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n
    whole = config.data.train_batch_size * n * block.rollout.n_agent
    actor = actor_model(config, models.policy, device, case.passes)
    if config.trainer.val_only:
        return [(replace(actor, update_phase=None, forward_limits={}), whole)]
    found = [(actor, block.actor.ppo_mini_batch_size * n)]
    if models.plain_policy is not None:
        found.append((frozen_model(config, "reference", models.plain_policy, device), whole))
    if models.teacher is not None:
        found.append((frozen_model(config, "teacher", models.teacher, device), whole))
    if models.critic is not None:
        critic = critic_model(config, models.critic, device)
        found.append((critic, config.critic.ppo_mini_batch_size * n))
    return found


def _rollout_items(case: _Case, pool: PoolPlan, num_rows: int, others: Sequence[Item]) -> list[Item]:
    """The engine in this process; its cache takes what the others leave, within its limits."""
    memory = _rollout_memory(case, pool, num_rows)
    if memory is None:
        return []
    hardware, phases = case.hardware, case.phases
    block = case.config.actor_rollout_ref
    beside = sum(item.phases.get("rollout", 0) for item in others)
    cache = memory.cache(hardware.device_bytes - beside if hardware.device == "cuda" else None)
    if cache < memory.sequence:
        words = (
            f"the KV cache of a rollout process may take {cache / GIB:.2f} GiB, but one trajectory of "
            f"{block.rollout.prompt_length} tokens needs {memory.sequence / GIB:.2f} GiB"
        )
        case.problems[words] = memory.sequence - cache
    offloads = hardware.device == "cuda" and bool(block.actor.fsdp_config.param_offload)
    sleeps = bool(block.rollout.free_cache_engine) or offloads
    is_vllm = block.rollout.name == "vllm"
    cache_phases = ["rollout"] if sleeps or not pool.trains else list(phases)
    weight_phases = ["rollout"] if offloads or (sleeps and is_vllm) else list(phases)
    if not pool.trains:
        weight_phases = list(phases)
    in_host = memory.weights if sleeps and is_vllm and block.rollout.vllm.sleep_level == 1 else 0
    return [
        Item("rollout: weights of its own", dict.fromkeys(weight_phases, memory.weights), in_host),
        Item("rollout: KV cache", dict.fromkeys(cache_phases, cache)),
        Item("rollout: a step's work, weights arriving", {"rollout": max(memory.reserve, memory.arrival)}),
    ]


def _rollout_memory(case: _Case, pool: PoolPlan, num_rows: int) -> RolloutMemory | None:
    block, models, hardware = case.config.actor_rollout_ref, case.models, case.hardware
    if block.rollout.placement == "apart":
        return None  # servers that are no processes of this run's pools
    actor = actor_model(case.config, models.policy, case.device, case.passes)
    precision, dtype = actor.precision, rollout_dtype(block, case.device)
    adapted = any(p.is_adapter for p in models.policy.parameters)
    is_sent = pool.world_size > 1 or not pool.trains
    is_copy = is_sent or adapted or dtype != precision.model
    numel, stream = models.policy.num_parameters, precision.model
    if block.actor.strategy == "megatron":
        stream = precision.compute
    if not pool.trains:
        stream = dtype  # the sender casts
    arriving = numel * stream.itemsize
    if dtype != stream:
        arriving = numel * dtype.itemsize + (arriving if is_sent or adapted else 0)
    return rollout_memory(
        block.rollout,
        models.spec,
        models.policy,
        hardware.device,
        hardware.device_bytes,
        dtype,
        num_rows,
        is_copy,
        stream.itemsize,
        arriving,
    )


def _server(case: _Case) -> tuple[int, int] | None:
    """What a GPU of a vLLM server holds: its slice of the weights, and a cache in the rest of its share."""
    block, hardware = case.config.actor_rollout_ref, case.hardware
    if block.rollout.placement != "apart" or hardware.device != "cuda":
        return None
    numel, size = case.models.policy.num_parameters, block.rollout.tensor_model_parallel_size
    weights = numel * rollout_dtype(block, case.device).itemsize // size
    cache = int(block.rollout.gpu_memory_utilization * hardware.device_bytes) - weights - CUDA_RESERVE_BYTES
    if cache <= 0:
        words = (
            f"a GPU of the vLLM servers would hold {weights / GIB:.2f} GiB of weights, which leaves no KV "
            "cache within actor_rollout_ref.rollout.gpu_memory_utilization="
            f"{block.rollout.gpu_memory_utilization:g} of it; raise that, or tensor_model_parallel_size"
        )
        case.problems[words] = 1 - cache
    return weights, max(cache, 0)


def _loads(
    processes: Sequence[ProcessPlan], hardware: Hardware, phases: Sequence[str], driver: bool
) -> tuple[DeviceLoad, ...]:
    """Each device with the items of its processes; those of several processes with one name are summed."""
    together: dict[tuple[int, int], list[tuple[Item, ...]]] = {}
    for process in processes:
        together.setdefault((process.node, process.device), []).append(process.items)
    if driver and (0, -1) in together:
        together[0, -1].append((Item("driver process", dict.fromkeys(phases, PROCESS_BYTES)),))
    return tuple(
        DeviceLoad(node, device, hardware.device_bytes, _summed(several))
        for (node, device), several in sorted(together.items(), key=lambda one: one[0])
    )


def _summed(several: Sequence[tuple[Item, ...]]) -> tuple[Item, ...]:
    """Items of a device's processes; those of one name are one."""
    if len(several) == 1:
        return several[0]
    items: dict[str, Item] = {}
    for item in (item for one in several for item in one):
        before = items.get(item.name, Item(item.name, {}))
        summed = {
            phase: before.phases.get(phase, 0) + item.phases.get(phase, 0)
            for phase in {*before.phases, *item.phases}
        }
        items[item.name] = Item(item.name, summed, before.host + item.host)
    return tuple(items.values())
