"""Who goes where, and how full each device gets in each phase of a step: a run's memory plan, and its words.

    configuration -> Passes, roles_of (as the run) -> engines of a process -> DeviceLoad: bytes in each phase
                  -> Plan: it fits, or which device lacks what in which phase

A phase is a pass of the step. What is offloaded takes memory of the node instead (`host`), and of the device
only while it is needed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.config import Config, at
from verl.preflight.cpu_memory import fullest_moment, mapped, while_loading
from verl.preflight.memory import Layout, ModelSize, forward_pass, hold, size_of, update_pass
from verl.preflight.target import GIB, Hardware
from verl.trainer.placement import processes_on_nodes, roles_of, samples_apart
from verl.trainer.ppo.batching import num_mini_batches
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.cuda_layers import can_compile, is_compiled
from verl.workers.engine.loading import Precision
from verl.workers.engine.update_loop import MicroBatchLimits
from verl.workers.rollout import build

PHASES = {  # their names in a report
    "loading": "loading",
    "rollout": "rollout",
    "log_probs": "log-probs",
    "reference": "reference",
    "teacher": "teacher",
    "values": "values",
    "update_critic": "critic's update",
    "update_actor": "actor's update",
}
# RSS of a worker without its tensors, as measured: interpreter, torch, transformers, numba, when models are
# loaded; what compiled kernels, and what torch imports for them, add in the first two steps
PROCESS_BYTES = int(0.5 * GIB)
KERNEL_BYTES = int(0.13 * GIB)
BF16_KERNEL_BYTES = int(0.07 * GIB)  # of oneDNN, for products in bfloat16 on CPU
CUDA_CONTEXT_BYTES = int(0.8 * GIB)  # driver, kernels, cuBLAS workspaces
NCCL_BYTES = int(0.7 * GIB)  # channels of one communicator and its sub-groups


@dataclass
class DeviceLoad:
    """What a GPU, or the memory of a node without any, holds."""

    name: str  # which devices are meant, in words
    capacity: int
    items: dict[str, dict[str, int]] = field(default_factory=dict)  # "owner: what" -> phase -> bytes
    host: int = 0  # bytes in the node's memory beside a GPU

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
    """One model of a training process, as its engine is configured."""

    owner: str  # "actor", "critic", "reference", "teacher"
    size: ModelSize
    precision: Precision
    fsdp: Any  # the block `fsdp_config`
    # phase ("update...": it trains) -> limits of its micro-batches, trajectories of the whole run
    passes: Mapping[str, tuple[MicroBatchLimits, int]]
    checkpointing: bool = False

    @property
    def is_trained(self) -> bool:
        return self.owner in ("actor", "critic")


def phases_of(config: Config, passes: Passes) -> tuple[str, ...]:
    """Loading and the phases that a step of the run has, in the order of PHASES."""
    if config.trainer.val_only:
        return ("loading", "rollout")
    actor = config.actor_rollout_ref.actor
    updates = actor.ppo_epochs * num_mini_batches(config, rows_of_step(config), actor)
    happens = {
        "loading": True,
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
    block = config.actor_rollout_ref
    critic = config.critic
    rows = rows_of_step(config)
    actor = block.actor
    frozen = block.ref.fsdp_config
    n = block.rollout.n

    def limits(part: Any, prefix: str) -> MicroBatchLimits:
        return MicroBatchLimits.from_config(part, prefix, device, block.model.use_remove_padding)

    size = size_of(block.model)
    precision = Precision.from_config(actor.fsdp_config, device)
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
            "values": (limits(critic, "ppo"), rows),
            "update_critic": (limits(critic, "ppo"), min(rows, critic.ppo_mini_batch_size * n)),
        }
        size = size_of(critic.model, is_critic=True)
        fsdp = critic.model.fsdp_config
        checkpointing = critic.model.enable_gradient_checkpointing
        precision = Precision.from_config(fsdp, device)
        engines.append(EngineUse("critic", size, precision, fsdp, of_critic, checkpointing))
    return engines


def tokens_of(limits: MicroBatchLimits, rows: int, longest: int, num_sharing: int = 1) -> int:
    """Most tokens of one pass on each of the `num_sharing` processes that share its tokens; a budget is of
    each, and a trajectory may be longer. rows: trajectories of one process. longest: tokens of the longest.
    """
    tokens = (rows if limits.max_rows is None else min(limits.max_rows, rows)) * longest
    if limits.max_tokens is not None:
        tokens = min(tokens, max(limits.max_tokens * num_sharing, longest))
    return -(-tokens // num_sharing)


class Plan:
    """The memory plan of a validated configuration on some hardware. Nothing is started. ValueError: a
    model's config.json can't be read, or the processes can't be dealt out.

    loads: one of each kind of device. problems: what can't work whatever else is free (a KV cache below one
    trajectory). tightest: (device with the least room, in which phase, bytes left; below 0 they lack).
    taken_beside_rollouts: bytes of a GPU for training while there is a KV cache on it, the optimizer's state
    included, which comes with the first update; without what is lost to fragmentation.
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
        self.loads: list[DeviceLoad] = []
        stages = self.layout.pipeline
        count = self.layout.num_processes // stages if self.on_cuda else len(nodes)
        each = f"each of the {count}" if count > 1 else "the"
        kind = "GPU" if self.on_cuda else "node"
        for stage in range(stages):
            name = f"{each} {kind}{'s' * (count > 1)}" + f" of pipeline stage {stage}" * (stages > 1)
            load = DeviceLoad(name, hardware.device_bytes)
            for _ in range(1 if self.on_cuda else nodes[0]):
                self._add_process(load)
                models = [self._add_engine(load, use, stage) for use in self.engines]
                load.add("files that are read, what is offloaded", ["loading"], while_loading(models))
                self._add_rollout(load)
            if self.on_cuda and self.layout.num_processes == 1:  # several read their own parts
                load.host += max(
                    use.size.num_parameters * use.precision.model.itemsize for use in self.engines
                )
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
            dtypes = [use.precision.compute for use in self.engines]
            dtypes.append(build.rollout_dtype(self.config.actor_rollout_ref.rollout, dtypes[0]))
            in_bf16 = torch.bfloat16 in dtypes
            load.add("compiled kernels", self.phases[1:], KERNEL_BYTES + in_bf16 * BF16_KERNEL_BYTES)
            return
        total = CUDA_CONTEXT_BYTES + int(build.FRAGMENTATION * load.capacity)
        total += NCCL_BYTES * (self.layout.num_processes > 1)
        load.add("CUDA, NCCL, fragmentation", self.phases, total, PROCESS_BYTES + KERNEL_BYTES)

    def _add_engine(self, load: DeviceLoad, use: EngineUse, stage: int) -> tuple[int, int, int]:
        """What a model keeps, and what its passes take. Returns what `while_loading` asks for."""
        owner = use.owner
        fsdp = use.fsdp
        layout = self.layout
        phases = self.phases
        held = hold(use.size, layout, stage, use.precision, use.is_trained, fsdp)
        at_work = [phase for phase in use.passes if phase in phases]
        updates = [phase for phase in at_work if phase.startswith("update")]
        offloads = self.on_cuda and fsdp.param_offload
        compiles = self.on_cuda and not layout.is_megatron and is_compiled(use.size.num_parameters)
        compiles = compiles and (can_compile() or not torch.cuda.is_available())  # of another machine: yes
        # the actor's weights are read, or sent, before it generates
        with_weights = [*at_work, *["rollout"] * (owner == "actor")] if offloads else phases
        is_mapped = not self.on_cuda and mapped(use.size, use.precision, layout.num_processes)
        with_weights = phases[1:] if is_mapped else with_weights
        load.add(f"{owner}: weights", with_weights, held.weights, held.weights * offloads)
        offloads_state = self.on_cuda and use.is_trained and fsdp.optimizer_offload
        if use.is_trained:  # also where the run only validates
            stay = held.keeps_gradients and not offloads_state
            with_state = updates if offloads_state else phases
            load.add(f"{owner}: gradients", phases[1:] if stay else updates, held.gradients)
            load.add(f"{owner}: optimizer state", with_state, held.optimizer, held.optimizer * offloads_state)
            copied = held.optimizer + (held.gradients if use.size.adapters else held.weights)
            copied *= self.config.trainer.async_checkpoint and bool(updates)
            where = () if self.on_cuda else phases[1:]
            load.add(f"{owner}: copy for a background checkpoint", where, copied, copied * self.on_cuda)
        for phase in at_work:
            limits, rows = use.passes[phase]
            longest = self.config.data.max_prompt_length
            tokens = tokens_of(limits, -(-rows // layout.replicas), longest, layout.context)
            gathered = held.gathered
            is_update = phase in updates
            if not self.on_cuda:
                gathered, activations, head = fullest_moment(
                    use.size, held, use.precision, tokens, longest, is_update, use.checkpointing
                )
            elif is_update:
                activations, head = update_pass(
                    use.size, held, use.precision, tokens, use.checkpointing, compiles
                )
                gathered += held.exchanged + held.waiting
            else:
                activations, head = forward_pass(use.size, held, use.precision, tokens, compiles)
            load.add(f"{owner}: weights and gradients of layers at work", [phase], gathered)
            load.add(f"{owner}: activations", [phase], activations)
            load.add(f"{owner}: chunk of logits", [phase], head)
            if is_update and owner == "actor" and self.config.actor_rollout_ref.actor.max_step_kl is not None:
                # There from the end of the passes on, when their activations are gone.
                beyond = max(0, held.before_a_step - activations - head)
                load.add(f"{owner}: copy of the weights before a step", [phase], beyond)
        if self.on_cuda:
            state = held.optimizer * offloads_state
            return held.weights * (not offloads), held.weights * offloads + state, held.optimizer - state
        stored = use.size.stored or use.precision.model
        read = use.size.num_parameters * stored.itemsize // layout.num_processes
        return (0, 0, held.optimizer) if is_mapped else (held.weights, read, held.optimizer)

    def _add_rollout(self, load: DeviceLoad) -> None:
        """The rollout engine of a process; on a GPU its KV cache takes what the others leave."""
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
        if samples_apart(config):  # each in a process of its own, with the whole model
            return
        if rollout.placement == "apart":  # a GPU of a server holds its slice of the weights, and a cache
            sharing = build.model_parallel_size(rollout, block.model, build.GPUS_OF_A_NODE)
            here = weights // sharing
            share = build.gpu_share(rollout, 1, None)
            if on_cuda and here + reserve >= int(share * load.capacity):
                self.problems.append(
                    f"a GPU of the vLLM servers would hold {here / GIB:.2f} GiB of weights, which leaves no "
                    "KV cache within actor_rollout_ref.rollout.gpu_memory_utilization="
                    f"{share:g} of it"
                )
            return
        # the machine that a dry run is for has vLLM, if it has a GPU
        is_vllm = build.engine_name(rollout, self.hardware.device) == "vllm" or (
            rollout.name == "auto" and on_cuda and not torch.cuda.is_available()
        )
        per_node = config.trainer.n_gpus_per_node
        sharing = build.model_parallel_size(rollout, block.model, per_node) if is_vllm else 1
        most_rows = max(rows_of_step(config), config.data.val_batch_size)
        slots = build.sequences_at_once(rollout.max_num_seqs, -(-most_rows * sharing // num_processes))
        heads = -(-size.key_heads // sharing)  # each process has one at least
        position = 2 * size.num_layers * size.keys // size.key_heads * heads * dtype.itemsize
        weights //= sharing
        sequence = -(-rollout.prompt_length // rollout.block_size) * rollout.block_size * position
        # weights are gathered, merged or cast for the engine
        is_copy = num_processes > 1 or size.adapters > 0 or dtype != actor.precision.model
        arriving = size.embedding * dtype.itemsize
        offloads = on_cuda and block.actor.fsdp_config.param_offload
        sleeps = rollout.free_cache_engine or offloads
        if on_cuda:
            weights = weights if is_vllm or is_copy else 0
            arriving = max(reserve, arriving)
            held = max(load.total(phase) for phase in (["rollout"] if sleeps else self.phases))
            left = load.capacity - held - arriving - weights
            taken = held - int(build.FRAGMENTATION * load.capacity) + arriving - reserve
            self.taken_beside_rollouts = max(taken, self.taken_beside_rollouts)
            share = int(build.gpu_share(rollout, load.capacity, taken) * load.capacity)
            cache = min(left, share - weights - reserve if is_vllm else min(share, slots * sequence))
        else:
            cache = min(build.most_on_cpu(rollout.kv_cache_gb), slots * sequence)
            if not is_vllm:  # its packed weights have an output matrix of their own
                # memory of the cache is touched when it is used; rows of the largest batch
                cache = min(cache, -(-most_rows // num_processes) * sequence)
                matrix = size.embedding * dtype.itemsize
                weights += matrix * size.ties_embeddings
                # what arrives is packed layer by layer in its own place, after embedding and head
                arriving = (2 - size.ties_embeddings) * matrix * is_copy
                arriving = max(0, arriving - cache)
        cache = max(0, cache)
        if cache < sequence:
            self.problems.append(
                f"the KV cache of a rollout process may take {cache / GIB:.2f} GiB, but one trajectory of "
                f"{rollout.prompt_length} tokens needs {sequence / GIB:.2f} GiB"
            )
        with_weights = ["rollout"] if offloads or (sleeps and is_vllm) else self.phases[1:]
        load.add("rollout: weights of its own", with_weights, weights)
        load.add("rollout: KV cache", ["rollout"] if sleeps else self.phases[1:], cache)
        load.add("rollout: a step's work, weights arriving", ["rollout"], arriving)


def taken_beside_rollouts(config: Config) -> int:
    """`Plan.taken_beside_rollouts`, which is the same for GPUs of any size; 0 on CPU."""
    return (
        0
        if config.trainer.device == "cpu"
        else Plan(config, Hardware("cuda", 80 * GIB, "any")).taken_beside_rollouts
    )


# ---------------------------------------------------------------------------------------------- in words


def report(plan: Plan) -> Iterator[str]:
    """The lines of a dry run, without its verdict."""
    hardware = plan.hardware
    config = plan.config
    rollout = plan.config.actor_rollout_ref.rollout
    kind = "GPU" if hardware.device == "cuda" else "node, CPU only"
    yield f"hardware: {gib(hardware.device_bytes)} GiB for each {kind} ({hardware.source})"
    yield f"driver: this process, on {socket.gethostname()}; it holds token ids and scores, no weights"
    counts = {use.owner: use.size.num_parameters for use in plan.engines if use.owner != "reference"}
    yield "parameters: " + ", ".join(f"{owner} {count / 1e6:,.1f} M" for owner, count in counts.items())
    yield plan.who_goes_where
    if samples_apart(config):
        yield f"rollout processes: {rollout.num_processes}, each with the whole policy and a KV cache"
    elif rollout.placement == "apart":
        own = f"{rollout.vllm.num_servers}, started by the run on GPUs that it does not train on"
        size = build.model_parallel_size(rollout, config.actor_rollout_ref.model, build.GPUS_OF_A_NODE)
        yield f"vLLM servers of {size} GPUs each: {rollout.vllm.server_urls or own}"
    for load in plan.loads:
        yield ""
        yield from _table(load, plan.phases)
    if hardware.device == "cuda":
        host = max(load.host for load in plan.loads) * config.trainer.n_gpus_per_node
        yield ""
        yield f"CPU memory of a node, for what is loaded, offloaded or copied, and processes: {gib(host)} GiB"


def _table(load: DeviceLoad, phases: tuple[str, ...]) -> Iterator[str]:
    rows = {**load.items, "in all": {phase: load.total(phase) for phase in phases}}
    width = max(map(len, rows))
    titles = [PHASES[phase].rjust(8) for phase in phases]
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
        need = f'{load.name} would need {gib(load.total(phase))} GiB in the phase "{PHASES[phase]}" and has '
        lines.insert(0, f"{need}{gib(load.capacity)}: {gib(-left)} GiB too much")
    return [*lines, f"what to change: {'; '.join(_what_lowers(plan, phase if left < 0 else 'rollout'))}"]


def _what_lowers(plan: Plan, phase: str) -> list[str]:
    """The settings that lower a phase."""
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
    switches += ["actor_rollout_ref.rollout.free_cache_engine"] * on_cuda
    changes += [f"{key}=true" for key in switches if not at(config, key)]
    if actor.strategy == "megatron":
        changes.append("actor_rollout_ref.actor.megatron's parallel sizes")
    return [*changes, "LoRA, a smaller model, or more trainer.n_gpus_per_node or trainer.nnodes"]


def gib(num_bytes: int) -> str:
    """1.5 -> 1.50, 0.003 -> 0.003"""
    value = num_bytes / GIB
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"
