"""Who goes where, and how full each device gets in each phase of a step: the memory plan of a run.

    configuration -> Passes, pools_of (as the run) -> engines of each process -> items: bytes in each phase
                  -> DeviceLoad of each GPU (or node) -> Plan: fits, or which device lacks what in which phase

A phase is a pass of the step. What is offloaded takes memory of the node instead (`host`), and of the device
only while it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from verl.config import Config
from verl.preflight.engine_memory import FsdpLayout, MegatronLayout, forward_pass, update_pass
from verl.preflight.machine import memory_of_machine
from verl.preflight.shapes import ModelShapes, policy_shapes, value_shapes
from verl.trainer.placement import pools_of
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.loading import Precision, load_hf_config
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.megatron.settings import ParallelSizes
from verl.workers.rollout import build
from verl.workers.rollout.native.architecture import ModelSpec

GIB = 1 << 30
PHASES = ("rollout", "log_probs", "reference", "teacher", "values", "update_critic", "update_actor")
PROCESS_BYTES = int(0.6 * GIB)  # interpreter, torch, transformers: RSS of a worker before it loads a model
CUDA_CONTEXT_BYTES = int(0.8 * GIB)  # driver, kernels, cuBLAS workspaces
NCCL_BYTES = int(0.7 * GIB)  # channels of one communicator and its sub-groups
FRAGMENTATION = 0.03  # of a GPU: what torch's allocator holds and cannot use


@dataclass(frozen=True)
class Hardware:
    """device: "cuda" (every process has a GPU of its own) or "cpu" (a node's processes share its memory).

    device_bytes: of one GPU, or of a node's memory. source: where that number comes from, in words.
    """

    device: str
    device_bytes: int
    source: str

    @classmethod
    def of(cls, config: Config) -> Hardware:
        """What a run would have: GPUs of `trainer.dry_run_gpu_memory_gb`, else those of this machine.

        Raises:
            ValueError: GPUs are meant, none is here, and nothing says how much memory they have.
        """
        device, gpu_memory_gb = config.trainer.device, config.trainer.dry_run_gpu_memory_gb
        has_gpu = torch.cuda.is_available()
        if device == "cpu" or (device == "auto" and gpu_memory_gb is None and not has_gpu):
            return cls("cpu", memory_of_machine(), "the memory of this machine")
        if gpu_memory_gb is not None:
            return cls("cuda", int(gpu_memory_gb * GIB), "trainer.dry_run_gpu_memory_gb")
        if not has_gpu:
            raise ValueError(
                "trainer.device=cuda, but this machine has no GPU whose memory could be read; say how much "
                "the GPUs have that the run is for, for example trainer.dry_run_gpu_memory_gb=80"
            )
        properties = torch.cuda.get_device_properties(0)
        return cls("cuda", properties.total_memory, f"{properties.name} of this machine")


@dataclass(frozen=True)
class Item:
    """name: "owner: what". phases: bytes on the device. host: bytes in the node's memory beside a GPU."""

    name: str
    phases: Mapping[str, int]
    host: int = 0


@dataclass(frozen=True)
class DeviceLoad:
    """A GPU (device: its number on the node), or the memory of a node without any (device: -1), with the
    ranks that live there and what they hold; items of one name are one.
    """

    node: int
    device: int
    capacity: int
    ranks: tuple[int, ...]
    items: tuple[Item, ...]

    def total(self, phase: str) -> int:
        return sum(item.phases.get(phase, 0) for item in self.items)

    @property
    def name(self) -> str:
        return f"node {self.node}" + (f", GPU {self.device}" if self.device >= 0 else "")


@dataclass(frozen=True)
class Plan:
    """roles: of each process. positions: of each rank, in words. parameters: of each model. problems: what
    can't work whatever else is free, in words (a KV cache below one trajectory).
    """

    hardware: Hardware
    phases: tuple[str, ...]
    roles: tuple[str, ...]
    positions: tuple[str, ...]
    loads: tuple[DeviceLoad, ...]
    problems: tuple[str, ...]
    parameters: Mapping[str, int]

    @cached_property
    def tightest(self) -> tuple[DeviceLoad, str, int]:
        """The device with the least room, in which phase, and how many bytes are left; below 0 they lack."""
        loads = (
            (load, phase, load.capacity - load.total(phase)) for load in self.loads for phase in self.phases
        )
        return min(loads, key=lambda one: one[2])

    @property
    def fits(self) -> bool:
        return self.tightest[2] >= 0 and not self.problems


@dataclass(frozen=True)
class EngineUse:
    """One model of a training process, as its engine is configured.

    Attributes:
        owner: "actor", "critic", "reference", "teacher".
        optimizer: its name; None for a frozen model. fsdp: the block `fsdp_config`.
        forwards: limits of its passes without gradient, by phase.
        update: (phase, limits, trajectories of a mini-batch) of its update; None: it is not trained.
        sequence: processes that share its tokens, where that is not as for the actor.
    """

    owner: str
    shapes: ModelShapes
    precision: Precision
    optimizer: str | None
    fsdp: Any
    forwards: Mapping[str, MicroBatchLimits]
    update: tuple[str, MicroBatchLimits, int] | None = None
    checkpointing: bool = False
    sequence: int | None = None


def build_plan(config: Config, hardware: Hardware) -> Plan:
    """The plan of a validated configuration on some hardware. Nothing is started.

    Raises:
        ValueError: a model's config.json can't be read, or the processes can't be dealt out.
    """
    passes = Passes.of(config)
    pool, phases = pools_of(config, passes)[0], phases_of(config, passes)
    engines = engines_of(config, passes, torch.device(hardware.device))
    layout = layout_of(config, pool.world_size)
    on_cuda = hardware.device == "cuda"
    problems: list[str] = []
    held: dict[int, list[Item]] = {}  # processes of one kind hold the same
    for rank in range(pool.world_size):
        kind = layout.kind(rank)
        if kind not in held:
            held[kind] = [
                i for use in engines for i in _engine_items(config, use, layout, rank, on_cuda, phases)
            ]
            held[kind].append(_process_item(hardware, pool.world_size, phases))
            if config.actor_rollout_ref.rollout.placement != "apart":
                rest = held[kind]
                held[kind] = rest + _rollout_items(
                    config, engines[0], hardware, pool.world_size, rest, phases, problems
                )
    devices: dict[tuple[int, int], list[int]] = {}
    for rank, (node, local) in enumerate(pool.places):
        devices.setdefault((node, local if on_cuda else -1), []).append(rank)
    loads = []
    for (node, device), ranks in devices.items():
        items = [item for rank in ranks for item in held[layout.kind(rank)]]
        if (node, device) == (0, -1) and pool.world_size > 1:
            items.append(Item("driver process", dict.fromkeys(phases, PROCESS_BYTES)))
        loads.append(DeviceLoad(node, device, hardware.device_bytes, tuple(ranks), _added_up(items)))
    if config.actor_rollout_ref.rollout.placement == "apart" and on_cuda:
        _check_servers(config, engines[0], hardware, problems)
    return Plan(
        hardware,
        phases,
        tuple(role.value for role in pool.roles),
        tuple(map(layout.position, range(pool.world_size))),
        tuple(loads),
        tuple(dict.fromkeys(problems)),
        {e.owner: e.shapes.num_parameters for e in engines if e.owner != "reference"},
    )


def phases_of(config: Config, passes: Passes) -> tuple[str, ...]:
    """The phases that a step of the run has, in the order of PHASES."""
    if config.trainer.val_only:
        return ("rollout",)
    actor = config.actor_rollout_ref.actor
    mini_batch = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    updates = actor.ppo_epochs * -(-rows_of_step(config) // mini_batch)
    happens = {
        "rollout": True,
        "update_actor": True,
        "log_probs": passes.old_log_probs(True, updates),
        "reference": passes.reference,
        "teacher": passes.teacher,
        "values": passes.values,
        "update_critic": passes.values,
    }
    return tuple(phase for phase in PHASES if happens[phase])


def rows_of_step(config: Config) -> int:
    """Trajectories of one step."""
    rollout = config.actor_rollout_ref.rollout
    return int(config.data.train_batch_size * rollout.n * rollout.n_agent)


def layout_of(config: Config, num_processes: int) -> FsdpLayout | MegatronLayout:
    """How models lie over the processes. ValueError: they can't be dealt out."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy != "megatron":
        sequence = max(1, actor.ulysses_sequence_parallel_size)
        return FsdpLayout(num_processes, actor.fsdp_config.fsdp_size, sequence)
    block = actor.megatron
    sizes = ParallelSizes(
        block.tensor_model_parallel_size, block.pipeline_model_parallel_size, block.context_parallel_size
    )
    sizes.check(num_processes)
    return MegatronLayout(num_processes, sizes, block.num_layers_per_virtual_pipeline_stage)


def engines_of(config: Config, passes: Passes, device: torch.device) -> list[EngineUse]:
    """The engines of a training process, the actor's first. ValueError: a model can't be read."""
    block, n, critic = config.actor_rollout_ref, config.actor_rollout_ref.rollout.n, config.critic

    def limits(part: Any, prefix: str) -> MicroBatchLimits:
        return MicroBatchLimits.from_config(part, prefix, prefix, device, block.model.use_remove_padding)

    shapes, fsdp = policy_shapes(block.model), block.actor.fsdp_config
    precision = Precision.from_config(fsdp, device)
    if config.trainer.val_only:
        return [EngineUse("actor", shapes, precision, block.actor.optim.name, fsdp, {})]
    frozen, ref_fsdp = {}, block.ref.fsdp_config
    forwards = {"log_probs": limits(block.rollout, "log_prob")}
    if passes.reference and shapes.has_adapters:  # the reference is the policy without its adapters
        forwards["reference"] = limits(block.ref, "log_prob")
    elif passes.reference:
        frozen["reference"] = shapes
    if passes.teacher:
        frozen["teacher"] = policy_shapes({"path": block.teacher.path}, with_adapters=False)
    update = ("update_actor", limits(block.actor, "ppo"), block.actor.ppo_mini_batch_size * n)
    checkpointing = bool(block.model.enable_gradient_checkpointing)
    engines = [
        EngineUse("actor", shapes, precision, block.actor.optim.name, fsdp, forwards, update, checkpointing)
    ]
    for owner, its_shapes in frozen.items():  # the owner's name is the phase's too
        its_precision = Precision.from_config(ref_fsdp, device, trained=False)
        its_passes = {owner: limits(block.ref, "log_prob")}
        engines.append(EngineUse(owner, its_shapes, its_precision, None, ref_fsdp, its_passes))
    if passes.values:
        its_fsdp = critic.model.fsdp_config
        engines.append(
            EngineUse(
                "critic",
                value_shapes(critic.model),
                Precision.from_config(its_fsdp, device),
                critic.optim.name,
                its_fsdp,
                {"values": limits(critic, "forward")},
                ("update_critic", limits(critic, "ppo"), critic.ppo_mini_batch_size * n),
                bool(critic.model.enable_gradient_checkpointing),
                None if critic.strategy == "megatron" else critic.ulysses_sequence_parallel_size,
            )
        )
    return engines


def _engine_items(
    config: Config,
    use: EngineUse,
    layout: FsdpLayout | MegatronLayout,
    rank: int,
    on_cuda: bool,
    phases: Sequence[str],
) -> list[Item]:
    """Items of one engine on one rank."""
    held = layout.hold(use.shapes, use.precision, use.optimizer, use.fsdp, rank)
    replicas = layout.replicas
    if use.sequence is not None:
        held, replicas = replace(held, num_sharing=use.sequence), layout.num_processes // use.sequence
    longest, step_rows = config.data.max_prompt_length, rows_of_step(config)
    activations, heads, gathered = {}, {}, {}
    for phase, limits in use.forwards.items():
        if phase in phases:
            tokens = tokens_of(limits, -(-step_rows // replicas), longest, held.num_sharing)
            activations[phase], heads[phase] = forward_pass(held, use.precision, tokens)
            gathered[phase] = held.gathered
    at_work, update = list(activations), []
    if use.update is not None:
        phase, limits, mini_batch = use.update
        tokens = tokens_of(limits, -(-min(mini_batch, step_rows) // replicas), longest, held.num_sharing)
        activations[phase], heads[phase] = update_pass(held, use.precision, tokens, use.checkpointing)
        gathered[phase] = held.gathered + held.exchanged
        update = [phase]
    if use.owner == "actor":
        at_work.append("rollout")  # the weights are read, or sent, before it generates
    offloads = on_cuda and bool(use.fsdp.param_offload)
    items = [
        Item(
            f"{use.owner}: weights",
            dict.fromkeys([*at_work, *update] if offloads else phases, held.weights),
            held.weights * offloads,
        ),
        Item(f"{use.owner}: weights and gradients of layers at work", gathered),
        Item(f"{use.owner}: activations", activations),
        Item(f"{use.owner}: chunk of logits", heads),
    ]
    if update:
        offloads_state = on_cuda and bool(use.fsdp.optimizer_offload)
        offloads_sums = on_cuda and bool(use.fsdp.grad_offload)
        stay = held.keeps_gradients and not offloads_sums
        sums = held.gradients * (offloads_sums and not held.keeps_gradients)
        states = dict.fromkeys(update if offloads_state else phases, held.optimizer)
        items[1:1] = [
            Item(f"{use.owner}: gradients", dict.fromkeys(phases if stay else update, held.gradients), sums),
            Item(f"{use.owner}: optimizer state", states, held.optimizer * offloads_state),
        ]
    return items


def tokens_of(limits: MicroBatchLimits, rows: int, longest: int, num_sharing: int = 1) -> int:
    """Most tokens of one pass on each of the `num_sharing` processes that share its tokens; a budget is of
    each. A single trajectory may be longer than the budget.

    Args:
        rows: trajectories of one process. longest: tokens of the longest one.
    """
    tokens = (rows if limits.max_rows is None else min(limits.max_rows, rows)) * longest
    if limits.max_tokens is not None:
        tokens = min(tokens, max(limits.max_tokens * num_sharing, longest))
    return -(-tokens // num_sharing)


def _process_item(hardware: Hardware, num_processes: int, phases: Sequence[str]) -> Item:
    """What a process takes before it holds any model."""
    if hardware.device == "cpu":
        return Item("process (python, torch)", dict.fromkeys(phases, PROCESS_BYTES))
    total = CUDA_CONTEXT_BYTES + int(FRAGMENTATION * hardware.device_bytes) + NCCL_BYTES * (num_processes > 1)
    return Item("CUDA, NCCL, fragmentation", dict.fromkeys(phases, total), PROCESS_BYTES)


def _rollout_items(
    config: Config,
    actor: EngineUse,
    hardware: Hardware,
    num_processes: int,
    others: Sequence[Item],
    phases: Sequence[str],
    problems: list[str],
) -> list[Item]:
    """Of the rollout engine in a training process; its KV cache takes what the others leave."""
    block, rollout, shapes = config.actor_rollout_ref, config.actor_rollout_ref.rollout, actor.shapes
    on_cuda, dtype = hardware.device == "cuda", build.rollout_dtype(rollout, actor.precision.compute)
    engine = build.engine_name(rollout, hardware.device)
    # the machine that a dry run is for has vLLM, if it has a GPU
    is_vllm = engine == "vllm" or (rollout.name == "auto" and on_cuda and not torch.cuda.is_available())
    most_rows = max(rows_of_step(config), config.data.val_batch_size or 0)
    slots = build.sequences_at_once(rollout.max_num_seqs, -(-most_rows // num_processes))
    position = 2 * len(shapes.layers) * shapes.dims.keys * dtype.itemsize
    page = rollout.block_size * position
    sequence = -(-rollout.prompt_length // rollout.block_size) * page
    share, reserve = int(rollout.gpu_memory_utilization * hardware.device_bytes), build.CUDA_RESERVE_BYTES
    sent_as = actor.precision.compute if block.actor.strategy == "megatron" else actor.precision.model
    arriving = max(p.numel for p in shapes.parameters) * sent_as.itemsize
    is_new = num_processes > 1 or shapes.has_adapters  # weights are gathered or merged for the engine
    is_copy = is_new or dtype != actor.precision.model
    wanted = slots * sequence
    if is_vllm:
        weights = shapes.num_parameters * dtype.itemsize
        if on_cuda:  # its share of the GPU holds its weights and activations too
            wanted, most = share, share - weights - reserve
        else:
            most = build.most_on_cpu(rollout.kv_cache_gb)
            wanted = most if rollout.kv_cache_gb else wanted + page
    else:
        spec = ModelSpec.from_config(load_hf_config(block.model))
        if on_cuda:
            weights, most = build.own_weights_bytes(spec, dtype) if is_copy else 0, share
        else:
            weights, most = packed_bytes(spec, dtype), build.most_on_cpu(rollout.kv_cache_gb) // page * page
            whole_set = shapes.num_parameters * sent_as.itemsize  # of weights that exist at once
            if dtype != sent_as:
                whole_set = shapes.num_parameters * dtype.itemsize + whole_set * is_new
            arriving = whole_set * is_copy
    if on_cuda:
        beside = sum(item.phases.get("rollout", 0) for item in others)
        most, arriving = min(most, hardware.device_bytes - beside - reserve - weights), max(reserve, arriving)
    cache = max(0, min(most, wanted))
    if cache < sequence:
        problems.append(
            f"the KV cache of a rollout process may take {cache / GIB:.2f} GiB, but one trajectory of "
            f"{rollout.prompt_length} tokens needs {sequence / GIB:.2f} GiB"
        )
    offloads = on_cuda and bool(block.actor.fsdp_config.param_offload)
    sleeps = bool(rollout.free_cache_engine) or offloads
    weight_phases = ["rollout"] if offloads or (sleeps and is_vllm) else phases
    in_host = weights if sleeps and is_vllm else 0
    return [
        Item("rollout: weights of its own", dict.fromkeys(weight_phases, weights), in_host),
        Item("rollout: KV cache", dict.fromkeys(["rollout"] if sleeps else phases, cache)),
        Item("rollout: a step's work, weights arriving", {"rollout": arriving}),
    ]


def packed_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the native engine's packed weights on CPU: the output matrix is one of its own, norms are
    float32.
    """
    sizes = spec.parameter_shapes().items()
    return sum((4 if "norm" in name else dtype.itemsize) * torch.Size(shape).numel() for name, shape in sizes)


def _check_servers(config: Config, actor: EngineUse, hardware: Hardware, problems: list[str]) -> None:
    """A GPU of a vLLM server apart holds its slice of the weights, and a cache in the rest of its share."""
    rollout = config.actor_rollout_ref.rollout
    dtype = build.rollout_dtype(rollout, actor.precision.compute)
    weights = actor.shapes.num_parameters * dtype.itemsize // rollout.tensor_model_parallel_size
    share = rollout.gpu_memory_utilization * hardware.device_bytes
    if weights + build.CUDA_RESERVE_BYTES >= share:
        problems.append(
            f"a GPU of the vLLM servers would hold {weights / GIB:.2f} GiB of weights, which leaves no KV "
            "cache within actor_rollout_ref.rollout.gpu_memory_utilization="
            f"{rollout.gpu_memory_utilization:g} of it"
        )


def _added_up(items: Sequence[Item]) -> tuple[Item, ...]:
    """Items of one name as one; those that take nothing are left out."""
    sums: dict[str, Item] = {}
    for item in items:
        before = sums.get(item.name, Item(item.name, {}))
        phases = {p: before.phases.get(p, 0) + item.phases.get(p, 0) for p in {*before.phases, *item.phases}}
        sums[item.name] = Item(item.name, phases, before.host + item.host)
    return tuple(item for item in sums.values() if any(item.phases.values()) or item.host)
