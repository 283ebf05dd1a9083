"""Who goes where, and how full each device gets in each phase of a step: the memory plan of a run.

    configuration -> Passes, roles_of (as the run) -> engines of a process -> DeviceLoad: bytes in each phase
                  -> Plan: it fits, or which device lacks what in which phase

A phase is a pass of the step. What is offloaded takes memory of the node instead (`host`), and of the device
only while it is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.config import Config
from verl.preflight.machine import memory_of_machine
from verl.preflight.memory import Layout, ModelSize, forward_pass, hold, size_of, update_pass
from verl.trainer.placement import processes_on_nodes, roles_of
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.loading import Precision
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout import build

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


@dataclass
class DeviceLoad:
    """What a GPU, or the memory of a node without any, holds. name: which devices are meant, in words.

    items: "owner: what" -> phase -> bytes. host: bytes in the node's memory beside a GPU.
    """

    name: str
    capacity: int
    items: dict[str, dict[str, int]] = field(default_factory=dict)
    host: int = 0

    def add(self, item: str, phases: Iterable[str], num_bytes: int, host: int = 0) -> None:
        """The item takes so many bytes more in these phases, and `host` in all."""
        self.host += host
        for phase in phases:
            if num_bytes:
                taken = self.items.setdefault(item, {})
                taken[phase] = taken.get(phase, 0) + num_bytes

    def total(self, phase: str) -> int:
        return sum(phases.get(phase, 0) for phases in self.items.values())


@dataclass(frozen=True)
class EngineUse:
    """One model of a training process, as its engine is configured.

    Attributes:
        owner: "actor", "critic", "reference", "teacher". fsdp: the block `fsdp_config`.
        passes: phase -> (limits of its micro-batches, trajectories of the whole run). A phase
            that begins with "update" trains it.
    """

    owner: str
    size: ModelSize
    precision: Precision
    fsdp: Any
    passes: Mapping[str, tuple[MicroBatchLimits, int]]
    checkpointing: bool = False

    @property
    def is_trained(self) -> bool:
        return self.owner in ("actor", "critic")


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


def engines_of(config: Config, passes: Passes, device: torch.device) -> list[EngineUse]:
    """The engines of a training process, the actor's first. ValueError: a model can't be read."""
    block, critic, rows = config.actor_rollout_ref, config.critic, rows_of_step(config)
    actor, frozen, n = block.actor, block.ref.fsdp_config, block.rollout.n

    def limits(part: Any, prefix: str) -> MicroBatchLimits:
        return MicroBatchLimits.from_config(part, prefix, prefix, device, block.model.use_remove_padding)

    size, precision = size_of(block.model), Precision.from_config(actor.fsdp_config, device)
    if config.trainer.val_only:
        return [EngineUse("actor", size, precision, actor.fsdp_config, {})]
    of_actor = {
        "log_probs": (limits(block.rollout, "log_prob"), rows),
        "update_actor": (limits(actor, "ppo"), min(rows, actor.ppo_mini_batch_size * n)),
    }
    others = {}
    if passes.reference and size.adapters:  # the reference is the policy without its adapters
        of_actor["reference"] = limits(block.ref, "log_prob"), rows
    elif passes.reference:
        others["reference"] = size
    if passes.teacher:
        others["teacher"] = size_of({"path": block.teacher.path}, with_adapters=False)
    checkpointing = block.model.enable_gradient_checkpointing
    engines = [EngineUse("actor", size, precision, actor.fsdp_config, of_actor, checkpointing)]
    for owner, its_size in others.items():  # the owner's name is the phase's too
        its_precision = Precision.from_config(frozen, device, trained=False)
        its_passes = {owner: (limits(block.ref, "log_prob"), rows)}
        engines.append(EngineUse(owner, its_size, its_precision, frozen, its_passes))
    if passes.values:
        of_critic = {
            "values": (limits(critic, "forward"), rows),
            "update_critic": (limits(critic, "ppo"), min(rows, critic.ppo_mini_batch_size * n)),
        }
        size, fsdp = size_of(critic.model, is_critic=True), critic.model.fsdp_config
        checkpointing = critic.model.enable_gradient_checkpointing
        precision = Precision.from_config(fsdp, device)
        engines.append(EngineUse("critic", size, precision, fsdp, of_critic, checkpointing))
    return engines


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


class Plan:
    """The memory plan of a validated configuration on some hardware. Nothing is started.

    Attributes:
        phases: that a step has. who_goes_where: in words. loads: one of each kind of device.
        problems: what can't work whatever else is free (a KV cache below one trajectory).
        tightest: (device with the least room, in which phase, bytes left; below 0 they lack).

    Raises:
        ValueError: a model's config.json can't be read, or the processes can't be dealt out.
    """

    def __init__(self, config: Config, hardware: Hardware) -> None:
        passes, nodes = Passes.of(config), processes_on_nodes(config)
        self.config, self.hardware, self.on_cuda = config, hardware, hardware.device == "cuda"
        self.layout, self.phases = Layout.of(config), phases_of(config, passes)
        self.engines = engines_of(config, passes, torch.device(hardware.device))
        roles = ", ".join(role.value for role in roles_of(passes))
        self.who_goes_where = f"processes: {len(nodes)} x {nodes[0]}, {self.layout}; each: {roles}"
        self.problems: list[str] = []
        self.loads: list[DeviceLoad] = []
        stages = self.layout.pipeline
        count = self.layout.num_processes // stages if self.on_cuda else len(nodes)
        each, kind = f"each of the {count}" if count > 1 else "the", "GPU" if self.on_cuda else "node"
        for stage in range(stages):
            name = f"{each} {kind}{'s' * (count > 1)}" + f" of pipeline stage {stage}" * (stages > 1)
            load = DeviceLoad(name, hardware.device_bytes)
            for _ in range(1 if self.on_cuda else nodes[0]):
                self._add_process(load)
                for use in self.engines:
                    self._add_engine(load, use, stage)
                self._add_rollout(load)
            self.loads.append(load)
        self.problems = list(dict.fromkeys(self.problems))
        left = [(one, p, one.capacity - one.total(p)) for one in self.loads for p in self.phases]
        self.tightest = min(left, key=lambda each: each[2])

    @property
    def fits(self) -> bool:
        return self.tightest[2] >= 0 and not self.problems

    def _add_process(self, load: DeviceLoad) -> None:
        """What a process takes before it holds any model."""
        if not self.on_cuda:
            load.add("process (python, torch)", self.phases, PROCESS_BYTES)
            return
        total = CUDA_CONTEXT_BYTES + int(FRAGMENTATION * load.capacity)
        total += NCCL_BYTES * (self.layout.num_processes > 1)
        load.add("CUDA, NCCL, fragmentation", self.phases, total, PROCESS_BYTES)

    def _add_engine(self, load: DeviceLoad, use: EngineUse, stage: int) -> None:
        """One model of a process: what it keeps, and what its passes take."""
        owner, fsdp, layout, phases = use.owner, use.fsdp, self.layout, self.phases
        held = hold(use.size, layout, stage, use.precision, use.is_trained, fsdp)
        at_work = [phase for phase in use.passes if phase in phases]
        updates = [phase for phase in at_work if phase.startswith("update")]
        offloads = self.on_cuda and fsdp.param_offload
        # the actor's weights are read, or sent, before it generates
        with_weights = [*at_work, *["rollout"] * (owner == "actor")] if offloads else phases
        load.add(f"{owner}: weights", with_weights, held.weights, held.weights * offloads)
        if updates:
            offloads_state = fsdp.optimizer_offload and self.on_cuda
            stay = held.keeps_gradients and not offloads_state
            with_state = updates if offloads_state else phases
            load.add(f"{owner}: gradients", phases if stay else updates, held.gradients)
            load.add(f"{owner}: optimizer state", with_state, held.optimizer, held.optimizer * offloads_state)
        for phase in at_work:
            limits, rows = use.passes[phase]
            longest = self.config.data.max_prompt_length
            tokens = tokens_of(limits, -(-rows // layout.replicas), longest, layout.context)
            gathered = held.gathered
            if phase in updates:
                activations, head = update_pass(use.size, held, use.precision, tokens, use.checkpointing)
                gathered += held.exchanged
            else:
                activations, head = forward_pass(use.size, held, use.precision, tokens)
            load.add(f"{owner}: weights and gradients of layers at work", [phase], gathered)
            load.add(f"{owner}: activations", [phase], activations)
            load.add(f"{owner}: chunk of logits", [phase], head)

    def _add_rollout(self, load: DeviceLoad) -> None:
        """The rollout engine of a process; on a GPU its KV cache takes what the others leave."""
        config, actor, on_cuda = self.config, self.engines[0], self.on_cuda
        block, rollout, size = config.actor_rollout_ref, config.actor_rollout_ref.rollout, actor.size
        dtype, num_processes = (
            build.rollout_dtype(rollout, actor.precision.compute),
            self.layout.num_processes,
        )
        share, reserve = int(rollout.gpu_memory_utilization * load.capacity), build.CUDA_RESERVE_BYTES
        weights = size.num_parameters * dtype.itemsize
        if rollout.placement == "apart":  # a GPU of a server holds its slice of the weights, and a cache
            here = weights // rollout.tensor_model_parallel_size
            if on_cuda and here + reserve >= share:
                self.problems.append(
                    f"a GPU of the vLLM servers would hold {here / GIB:.2f} GiB of weights, which leaves no "
                    "KV cache within actor_rollout_ref.rollout.gpu_memory_utilization="
                    f"{rollout.gpu_memory_utilization:g} of it"
                )
            return
        # the machine that a dry run is for has vLLM, if it has a GPU
        is_vllm = build.engine_name(rollout, self.hardware.device) == "vllm" or (
            rollout.name == "auto" and on_cuda and not torch.cuda.is_available()
        )
        most_rows = max(rows_of_step(config), config.data.val_batch_size)
        slots = build.sequences_at_once(rollout.max_num_seqs, -(-most_rows // num_processes))
        position = 2 * size.num_layers * size.keys * dtype.itemsize
        sequence = -(-rollout.prompt_length // rollout.block_size) * rollout.block_size * position
        sent_as = actor.precision.compute if self.layout.is_megatron else actor.precision.model
        # weights are gathered, merged or cast for the engine
        is_copy = num_processes > 1 or size.adapters > 0 or dtype != actor.precision.model
        arriving = size.embedding * sent_as.itemsize
        if on_cuda:
            weights = weights if is_vllm or is_copy else 0
            left = load.capacity - load.total("rollout") - reserve - weights
            cache = min(left, share - weights - reserve if is_vllm else min(share, slots * sequence))
            arriving = max(reserve, arriving)
        else:
            cache = min(build.most_on_cpu(rollout.kv_cache_gb), slots * sequence)
            if not is_vllm:  # its packed weights have an output matrix of their own
                weights += size.embedding * dtype.itemsize * size.ties_embeddings
                arriving = size.num_parameters * sent_as.itemsize * is_copy
        cache = max(0, cache)
        if cache < sequence:
            self.problems.append(
                f"the KV cache of a rollout process may take {cache / GIB:.2f} GiB, but one trajectory of "
                f"{rollout.prompt_length} tokens needs {sequence / GIB:.2f} GiB"
            )
        offloads = on_cuda and block.actor.fsdp_config.param_offload
        sleeps = rollout.free_cache_engine or offloads
        with_weights = ["rollout"] if offloads or (sleeps and is_vllm) else self.phases
        load.add("rollout: weights of its own", with_weights, weights, weights * (sleeps and is_vllm))
        load.add("rollout: KV cache", ["rollout"] if sleeps else self.phases, cache)
        load.add("rollout: a step's work, weights arriving", ["rollout"], arriving)
