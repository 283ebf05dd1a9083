"""The memory plan of a run: who goes where, and how full each device gets in each phase of a step.

    configuration -> Passes, roles_of (as the run) -> engines of a process -> DeviceLoad: bytes in each phase
                  -> Plan: it fits, or which device lacks what in which phase

A phase is a pass of the step. Offloaded tensors take memory of the node instead (`host_bytes`), and memory of
the device only while they are needed. The last part of this module puts a plan into words.

The loads of a run on CPU have what the models keep for the whole run. There the kernel pages, shares and
maps memory, and the allocator keeps some of it, so what rollouts take is not predicted. What the largest pass
takes at most is said beside the loads (`Plan.largest_pass`), and does not decide whether the run fits.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from verl.config import Config, get_value
from verl.config.keys import as_list
from verl.packing.packs import tokens_allowed
from verl.planning.hardware import GIB, Hardware
from verl.planning.model_memory import Layout, ModelSize, forward_pass, held_memory, size_of, update_pass
from verl.planning.passes import Passes, num_mini_batches
from verl.planning.placement import processes_on_nodes, roles_of, samples_apart
from verl.workers.engine.cuda_layers import can_compile, is_large_enough_to_compile
from verl.workers.engine.loading import Precision
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout import build

PHASES = {  # the phases with their names in a report
    "loading": "loading",
    "rollout": "rollout",
    "log_probs": "log-probs",
    "reference": "reference",
    "teacher": "teacher",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}
# The measured RSS of a worker without its tensors after two steps. It holds the interpreter, torch,
# transformers, numba and compiled kernels.
PROCESS_BYTES = int(0.63 * GIB)
CUDA_CONTEXT_BYTES = int(0.8 * GIB)  # the driver, kernels, and workspaces of cuBLAS
NCCL_BYTES = int(0.7 * GIB)  # the channels of one communicator and its sub-groups


@dataclass
class DeviceLoad:
    """The load of a GPU, or of the memory of a node without GPUs.

    Attributes:
        name: The devices that are meant, in words.
        capacity: The bytes of the device.
        items: The bytes of each item in each phase, as "owner: what" -> phase -> bytes.
        host_bytes: The bytes in the node's memory beside a GPU.
    """

    name: str
    capacity: int
    items: dict[str, dict[str, int]] = field(default_factory=dict)
    host_bytes: int = 0

    def add(self, item: str, phases: Iterable[str], num_bytes: int, host_bytes: int = 0) -> None:
        """Add `num_bytes` to an item in some phases, and `host_bytes` to the node's memory in all phases."""
        self.host_bytes += host_bytes
        for phase in phases:
            if num_bytes:
                bytes_in_phase = self.items.setdefault(item, {})
                bytes_in_phase[phase] = bytes_in_phase.get(phase, 0) + num_bytes

    def total(self, phase: str) -> int:
        return sum(phases.get(phase, 0) for phases in self.items.values())


class LargestPass(NamedTuple):
    """The pass that takes most memory: its phase, its tokens, and its bytes, which are an upper bound."""

    phase: str
    tokens: int
    num_bytes: int


class LoadInPhase(NamedTuple):
    """The load of a device, one of its phases, and the bytes that are left in that phase."""

    load: DeviceLoad
    phase: str
    num_bytes_left: int


@dataclass(frozen=True)
class EngineUse:
    """One model of a training process, as its engine is configured.

    Attributes:
        owner: "actor", "critic", "reference" or "teacher".
        size: The size of the model.
        precision: The types of weights and computation.
        fsdp: The block `fsdp_config`.
        passes: The limits of the micro-batches and the number of trajectories of the whole run, by phase. In
            phases whose names begin with "update" the model is trained.
        checkpointing: Whether activations are computed again in the backward pass.
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
    """Return the phases of a step of the run, and loading, in the order of PHASES."""
    if config.trainer.val_only:
        return ("loading", "rollout")
    actor = config.actor_rollout_ref.actor
    updates = actor.ppo_epochs * num_mini_batches(config, rows_of_step(config), actor)
    happens = {
        "loading": True,
        "rollout": True,
        "update_actor": True,
        "log_probs": passes.old_log_probs(True, updates),
        "reference": passes.needs_reference,
        "teacher": passes.needs_teacher,
        "values": passes.needs_values,
        "update_critic": passes.needs_values,
    }
    return tuple(phase for phase in PHASES if happens[phase])


def rows_of_step(config: Config) -> int:
    """Return the number of trajectories of one step."""
    rollout = config.actor_rollout_ref.rollout
    return int(config.data.train_batch_size * rollout.n * rollout.n_agent)


def engines_of(config: Config, passes: Passes, device: torch.device) -> list[EngineUse]:
    """Return the engines of a training process, with the actor's first.

    Raises ValueError if a model can't be read.
    """
    block = config.actor_rollout_ref
    critic = config.critic
    rows = rows_of_step(config)
    actor = block.actor
    frozen = block.ref.fsdp_config
    n = block.rollout.n

    def limits(part: Any, prefix: str) -> MicroBatchLimits:
        return MicroBatchLimits.from_config(part, prefix, device, not block.model.use_remove_padding)

    size = size_of(block.model)
    precision = Precision.from_config(actor.fsdp_config, device)
    if config.trainer.val_only:
        return [EngineUse("actor", size, precision, actor.fsdp_config, {})]
    of_actor = {
        "log_probs": (limits(block.rollout, "log_prob"), rows),
        "update_actor": (limits(actor, "ppo"), min(rows, actor.ppo_mini_batch_size * n)),
    }
    others = {}
    if passes.needs_reference and size.adapters:  # The reference is the policy without its adapters.
        of_actor["reference"] = limits(block.ref, "log_prob"), rows
    elif passes.needs_reference:
        others["reference"] = size
    if passes.needs_teacher:
        others["teacher"] = size_of({"path": block.teacher.path}, with_adapters=False)
    checkpointing = block.model.enable_gradient_checkpointing
    engines = [EngineUse("actor", size, precision, actor.fsdp_config, of_actor, checkpointing)]
    for owner, its_size in others.items():  # The phase has the name of the owner.
        its_precision = Precision.from_config(frozen, device, trained=False)
        its_passes = {owner: (limits(block.ref, "log_prob"), rows)}
        engines.append(EngineUse(owner, its_size, its_precision, frozen, its_passes))
    if passes.needs_values:
        of_critic = {
            "values": (limits(critic, "ppo"), rows),
            "update_critic": (limits(critic, "ppo"), min(rows, critic.ppo_mini_batch_size * n)),
        }
        size = size_of(critic.model, is_critic=True)
        fsdp = critic.model.fsdp_config
        checkpointing = critic.model.enable_gradient_checkpointing
        precision = Precision.from_config(fsdp, device)
        engines.append(EngineUse("critic", size, precision, fsdp, of_critic, checkpointing))
    return engines


def tokens_of(limits: MicroBatchLimits, rows: int, longest: int, num_token_sharing: int = 1) -> int:
    """Return the most tokens of one pass on each of the processes that share its tokens.

    Args:
        limits: The limits of the micro-batches. A budget of tokens holds for each process, and a trajectory
            may be longer than the budget.
        rows: The number of trajectories of one process.
        longest: The number of tokens of the longest trajectory.
        num_token_sharing: The number of processes that share the tokens of a pass.
    """
    tokens = (rows if limits.max_rows is None else min(limits.max_rows, rows)) * longest
    if limits.preferred_tokens is not None:
        preferred_tokens = limits.preferred_tokens * num_token_sharing
        if limits.padded:  # Padded rows share nothing.
            tokens = min(tokens, max(preferred_tokens, longest))
        else:
            tokens = min(tokens, tokens_allowed(preferred_tokens, longest))
    if limits.max_tokens is not None:
        tokens = min(tokens, max(limits.max_tokens * num_token_sharing, longest))
    return -(-tokens // num_token_sharing)


class Plan:
    """The memory plan of a validated configuration on some hardware.

    Making a plan starts nothing.

    Attributes:
        loads: The load of one device of each kind.
        problems: What can't work, no matter how much other memory is free, such as a KV cache below one
            trajectory.
        largest_pass: On CPU the pass that takes most memory beside the models. None on GPUs, where passes are
            items of the loads.
        tightest: The load with the least room, the phase in which that is, and the bytes that are left. If
            they are below 0, they are missing.
        taken_beside_rollouts: The bytes of a GPU that training takes while there is a KV cache on the GPU.
            They include the optimizer's state, which comes with the first update, but not what is lost to
            fragmentation.

    Raises:
        ValueError: If a model's config.json can't be read, or if the processes can't be dealt out.
    """

    def __init__(self, config: Config, hardware: Hardware) -> None:
        passes = Passes(config)
        nodes = processes_on_nodes(config)
        self.config = config
        self.hardware = hardware
        self.on_cuda = hardware.device == "cuda"
        self.layout = Layout.of(config)
        self.phases = phases_of(config, passes)
        self.engines = engines_of(config, passes, torch.device(hardware.device))
        roles = ", ".join(role.value for role in roles_of(passes))
        self.who_goes_where = f"processes: {len(nodes)} x {nodes[0]}, {self.layout}; each: {roles}"
        self.problems: list[str] = []
        self.taken_beside_rollouts = 0
        self.largest_pass: LargestPass | None = None
        self.loads: list[DeviceLoad] = []
        stages = self.layout.pipeline
        count = self.layout.num_processes // stages if self.on_cuda else len(nodes)
        article = f"each of the {count}" if count > 1 else "the"
        kind = "GPU" if self.on_cuda else "node"
        for stage in range(stages):
            name = f"{article} {kind}{'s' * (count > 1)}" + f" of pipeline stage {stage}" * (stages > 1)
            load = DeviceLoad(name, hardware.device_bytes)
            for _ in range(1 if self.on_cuda else nodes[0]):
                if self.on_cuda:
                    self._add_process(load)
                models = [self._add_engine(load, use, stage) for use in self.engines]
                if self.on_cuda:
                    load.add("what is offloaded", ["loading"], while_loading(models))
                self._add_rollout(load)
            # Several processes would read only their own parts.
            if self.on_cuda and self.layout.num_processes == 1:
                load.host_bytes += max(
                    use.size.num_parameters * use.precision.model.itemsize for use in self.engines
                )
            self.loads.append(load)
        self.problems = list(dict.fromkeys(self.problems))
        room = [
            LoadInPhase(device, phase, device.capacity - device.total(phase))
            for device in self.loads
            for phase in self.phases
        ]
        self.tightest = min(room, key=lambda entry: entry.num_bytes_left)

    @property
    def fits(self) -> bool:
        return self.tightest.num_bytes_left >= 0 and not self.problems

    @property
    def samples_with_vllm(self) -> bool:
        """Return whether vLLM samples.

        If the machine that a dry run is for has a GPU, it is taken to have vLLM.
        """
        rollout = self.config.actor_rollout_ref.rollout
        is_assumed = rollout.name == "auto" and self.on_cuda and not torch.cuda.is_available()
        return is_assumed or build.engine_name(rollout, self.hardware.device) == "vllm"

    @property
    def devices_apart(self) -> int:
        """Return the number of devices of each engine apart that is not on servers of others."""
        block = self.config.actor_rollout_ref
        if not self.samples_with_vllm:
            return 1
        return build.model_parallel_size(block.rollout, block.model, build.GPUS_OF_A_NODE)

    def _add_process(self, load: DeviceLoad) -> None:
        """Add what a process takes of its GPU before it holds any model."""
        total = CUDA_CONTEXT_BYTES + int(build.FRAGMENTATION * load.capacity)
        total += NCCL_BYTES * (self.layout.num_processes > 1)
        load.add("CUDA, NCCL, fragmentation", self.phases, total, PROCESS_BYTES)

    def _add_engine(self, load: DeviceLoad, use: EngineUse, stage: int) -> tuple[int, int, int]:
        """Add what a model keeps, and what its passes take of a GPU.

        Returns:
            The figures of the model that `while_loading` asks for.
        """
        owner = use.owner
        fsdp = use.fsdp
        layout = self.layout
        phases = self.phases
        held = held_memory(use.size, layout, stage, use.precision, use.is_trained, fsdp)
        at_work = [phase for phase in use.passes if phase in phases]
        updates = [phase for phase in at_work if phase.startswith("update")]
        offloads = self.on_cuda and fsdp.param_offload
        compiles = (
            self.on_cuda and not layout.is_megatron and is_large_enough_to_compile(use.size.num_parameters)
        )
        # A machine other than this one is taken to compile.
        compiles = compiles and (can_compile() or not torch.cuda.is_available())
        # The actor's weights are read, or sent, before it generates.
        with_weights = [*at_work, *["rollout"] * (owner == "actor")] if offloads else phases
        load.add(f"{owner}: weights", with_weights, held.weights, held.weights * offloads)
        offloads_state = self.on_cuda and use.is_trained and fsdp.optimizer_offload
        if use.is_trained:  # also if the run only validates
            gradients_stay = held.keeps_gradients and not offloads_state
            with_state = updates if offloads_state else phases
            load.add(f"{owner}: gradients", phases[1:] if gradients_stay else updates, held.gradients)
            load.add(f"{owner}: optimizer state", with_state, held.optimizer, held.optimizer * offloads_state)
            if self.config.trainer.async_checkpoint and updates:  # The copy is in the node's memory.
                load.host_bytes += held.optimizer + (held.gradients if use.size.adapters else held.weights)
        for phase in at_work:
            limits, rows = use.passes[phase]
            longest = self.config.data.max_prompt_length
            tokens = tokens_of(limits, -(-rows // layout.replicas), longest, layout.context)
            gathered = held.gathered
            is_update = phase in updates
            if is_update:
                activations, head = update_pass(
                    use.size, held, use.precision, tokens, use.checkpointing, compiles
                )
                gathered += held.exchanged + held.unreduced_gradients
            else:
                activations, head = forward_pass(use.size, held, use.precision, tokens, compiles)
            if not self.on_cuda:
                num_bytes = gathered + activations + head
                if self.largest_pass is None or num_bytes > self.largest_pass.num_bytes:
                    self.largest_pass = LargestPass(phase, tokens, num_bytes)
                continue
            load.add(f"{owner}: weights and gradients of layers at work", [phase], gathered)
            load.add(f"{owner}: activations", [phase], activations)
            load.add(f"{owner}: chunk of logits", [phase], head)
            if is_update and owner == "actor" and self.config.actor_rollout_ref.actor.max_step_kl is not None:
                # The copy is there from the end of the passes on, when their activations are gone.
                beyond = max(0, held.before_a_step - activations - head)
                load.add(f"{owner}: copy of the weights before a step", [phase], beyond)
        state = held.optimizer * offloads_state
        return held.weights * (not offloads), held.weights * offloads + state, held.optimizer - state

    def _add_rollout(self, load: DeviceLoad) -> None:
        """Add the rollout engine of a process.

        On a GPU its KV cache takes the memory that the others leave.
        """
        config = self.config
        actor = self.engines[0]
        on_cuda = self.on_cuda
        block = config.actor_rollout_ref
        rollout = config.actor_rollout_ref.rollout
        size = actor.size
        dtype = build.rollout_dtype(rollout, actor.precision.compute)
        num_processes = self.layout.num_processes
        reserve = build.CUDA_RESERVE_BYTES
        weights = size.num_parameters * dtype.itemsize
        if rollout.name == "remote":  # Servers of others have their own devices.
            return
        if samples_apart(config):  # A GPU of an engine holds its slice of the weights, and a cache.
            shard = weights // self.devices_apart
            share = build.gpu_share(rollout, 1, None)
            if on_cuda and shard + reserve >= int(share * load.capacity):
                self.problems.append(
                    f"a GPU of the rollout processes would hold {shard / GIB:.2f} GiB of weights, which "
                    "leaves no KV cache within actor_rollout_ref.rollout.gpu_memory_utilization="
                    f"{share:g} of it"
                )
            return
        is_vllm = self.samples_with_vllm
        per_node = config.trainer.n_gpus_per_node
        sharing = build.model_parallel_size(rollout, block.model, per_node) if is_vllm else 1
        most_rows = max(rows_of_step(config), config.data.val_batch_size)
        slots = build.sequences_at_once(rollout.max_num_seqs, -(-most_rows * sharing // num_processes))
        heads = -(-size.key_heads // sharing)  # each process has at least one
        position = 2 * size.num_layers * size.key_width // size.key_heads * heads * dtype.itemsize
        weights //= sharing
        sequence = -(-rollout.prompt_length // rollout.block_size) * rollout.block_size * position
        # Whether the weights are gathered, merged or cast for the engine, which makes a copy of them.
        is_copy = num_processes > 1 or size.adapters > 0 or dtype != actor.precision.model
        arriving = size.embedding * dtype.itemsize
        offloads = on_cuda and block.actor.fsdp_config.param_offload
        sleeps = rollout.free_cache_engine or offloads
        if not on_cuda:
            self._check_cache(build.max_kv_bytes_on_cpu(rollout.kv_cache_gb), sequence)
            return
        weights = weights if is_vllm or is_copy else 0
        arriving = max(reserve, arriving)
        held = max(load.total(phase) for phase in (["rollout"] if sleeps else self.phases))
        free = load.capacity - held - arriving - weights
        taken_bytes = held - int(build.FRAGMENTATION * load.capacity) + arriving - reserve
        self.taken_beside_rollouts = max(taken_bytes, self.taken_beside_rollouts)
        share = int(build.gpu_share(rollout, load.capacity, taken_bytes) * load.capacity)
        cache = min(free, share - weights - reserve if is_vllm else min(share, slots * sequence))
        cache = max(0, cache)
        self._check_cache(cache, sequence)
        with_weights = ["rollout"] if offloads or (sleeps and is_vllm) else self.phases[1:]
        load.add("rollout: weights of its own", with_weights, weights)
        load.add("rollout: KV cache", ["rollout"] if sleeps else self.phases[1:], cache)
        load.add("rollout: a step's work, weights arriving", ["rollout"], arriving)

    def _check_cache(self, cache: int, sequence: int) -> None:
        """Note a KV cache of fewer bytes than one trajectory needs as a problem."""
        if cache < sequence:
            self.problems.append(
                f"the KV cache of a rollout process may take {cache / GIB:.2f} GiB, but one trajectory of "
                f"{self.config.actor_rollout_ref.rollout.prompt_length} tokens needs {sequence / GIB:.2f} GiB"
            )


def while_loading(models: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes that loading takes of a GPU above what is held at its end.

    Args:
        models: The models in the order in which they are loaded, as (weights that stay, what is offloaded
            once the model is whole, optimizer state that comes with the first update).
    """
    held = 0
    most = 0
    for weights, offloaded, state in models:
        most = max(most, held + weights + offloaded)
        held += weights + state
    return max(0, most - held)


def taken_beside_rollouts(config: Config) -> int:
    """Return `Plan.taken_beside_rollouts`, which is the same for GPUs of any size, or 0 on CPU."""
    return (
        0
        if config.trainer.device == "cpu"
        else Plan(config, Hardware("cuda", 80 * GIB, "any")).taken_beside_rollouts
    )


# ---------------------------------------------------------------------------------------------- in words


def report(plan: Plan) -> Iterator[str]:
    """Yield the lines of a dry run, without its verdict."""
    hardware = plan.hardware
    config = plan.config
    rollout = plan.config.actor_rollout_ref.rollout
    kind = "GPU" if hardware.device == "cuda" else "node, CPU only"
    yield f"hardware: {gib(hardware.device_bytes)} GiB for each {kind} ({hardware.source})"
    yield f"driver: this process, on {socket.gethostname()}; it holds token ids and scores, no weights"
    counts = {use.owner: use.size.num_parameters for use in plan.engines if use.owner != "reference"}
    yield "parameters: " + ", ".join(f"{owner} {count / 1e6:,.1f} M" for owner, count in counts.items())
    yield plan.who_goes_where
    if rollout.name == "remote":
        yield f"rollouts on servers of others: {', '.join(as_list(rollout.remote.urls))}"
    elif samples_apart(config):
        size = plan.devices_apart
        devices = f"{size} devices, over which it is split" if size > 1 else "1 device"
        yield f"rollout processes: {rollout.num_processes}, each with the policy and a KV cache on {devices}"
    for load in plan.loads:
        yield ""
        yield from _table(load, plan.phases)
    if hardware.device == "cuda":
        host = max(load.host_bytes for load in plan.loads) * config.trainer.n_gpus_per_node
        yield ""
        yield f"CPU memory of a node, for what is loaded, offloaded or copied, and processes: {gib(host)} GiB"
    else:
        yield ""
        if (largest := plan.largest_pass) is not None:
            yield (
                f"a pass takes at most {gib(largest.num_bytes)} GiB beside the models: "
                f"{largest.tokens:,} tokens in the {PHASES[largest.phase]}"
            )
        yield "what rollouts and processes take beside the models is not planned on CPU"


def _table(load: DeviceLoad, phases: tuple[str, ...]) -> Iterator[str]:
    rows = {**load.items, "in all": {phase: load.total(phase) for phase in phases}}
    width = max(map(len, rows))
    titles = [PHASES[phase].rjust(8) for phase in phases]
    yield f"memory of {load.name}, GiB of {gib(load.capacity)}:"
    yield f"  {'':{width}}  {'  '.join(titles)}"
    for name, bytes_in_phase in rows.items():
        cells = [gib(bytes_in_phase[phase]) if bytes_in_phase.get(phase) else "-" for phase in phases]
        padded = (cell.rjust(len(title)) for cell, title in zip(cells, titles, strict=True))
        yield f"  {name:{width}}  {'  '.join(padded)}"


def verdict(plan: Plan) -> list[str]:
    """Return lines that say whether the run fits.

    If it does not, they also say where and by how much, and which keys lower that phase.
    """
    load, phase, num_bytes_left = plan.tightest
    if plan.fits:
        beside = "in its fullest phase" if plan.on_cuda else "for all but its models"
        return [f"fits: {load.name} has {gib(num_bytes_left)} GiB left {beside}"]
    lines = list(plan.problems)
    if num_bytes_left < 0:
        need = f'{load.name} would need {gib(load.total(phase))} GiB in the phase "{PHASES[phase]}" and has '
        lines.insert(0, f"{need}{gib(load.capacity)}: {gib(-num_bytes_left)} GiB too much")
    return [
        *lines,
        f"what to change: {'; '.join(_what_lowers(plan, phase if num_bytes_left < 0 else 'rollout'))}",
    ]


def _what_lowers(plan: Plan, phase: str) -> list[str]:
    """Return the settings that lower a phase."""
    config = plan.config
    on_cuda = plan.on_cuda
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    name = "critic" if phase in ("values", "update_critic") else "actor_rollout_ref.actor"
    if phase == "rollout":
        key = "gpu_memory_utilization" if on_cuda else "kv_cache_gb"
        changes = ["actor_rollout_ref.rollout.tensor_model_parallel_size (vLLM)"] * on_cuda
        now = "" if rollout[key] is None else f"{key} (now {rollout[key]}) and "
        changes.append(f"actor_rollout_ref.rollout.{now}max_num_seqs")
    elif actor.use_dynamic_bsz:
        changes = [
            f"{name}.ppo_max_token_len_per_gpu below {get_value(config, name).ppo_max_token_len_per_gpu}"
        ]
    else:
        rows = get_value(config, name).ppo_micro_batch_size_per_gpu
        changes = [
            "actor_rollout_ref.actor.use_dynamic_bsz=true (passes of so many tokens)",
            f"or {name}.ppo_micro_batch_size_per_gpu and log_prob_... below {rows} trajectories",
        ]
    model = name.removesuffix(".actor") + ".model"
    fsdp = f"{model if name == 'critic' else name}.fsdp_config"
    switches = [f"{model}.enable_gradient_checkpointing"] * phase.startswith("update")
    switches += [f"{fsdp}.optimizer_offload", f"{fsdp}.param_offload"] * on_cuda
    switches += ["actor_rollout_ref.rollout.free_cache_engine"] * on_cuda
    changes += [f"{key}=true" for key in switches if not get_value(config, key)]
    if actor.strategy == "megatron":
        changes.append("actor_rollout_ref.actor.megatron's parallel sizes")
    return [*changes, "LoRA, a smaller model, or more trainer.n_gpus_per_node or trainer.nnodes"]


def gib(num_bytes: int) -> str:
    """Format bytes in GiB, such as 1.5 as 1.50 and 0.003 as 0.003."""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
