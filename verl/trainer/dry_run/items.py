"""What a worker process holds, phase by phase of a step.

    configuration -> items: ("actor: gradients", {"update_actor": bytes}), ...

A phase is a pass of the step; an item takes memory of the process's device in some of them. What is offloaded
takes memory of the node instead (`host`), and of the device only while it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from omegaconf import DictConfig

from verl.trainer.dry_run.hardware import GIB, Hardware
from verl.trainer.dry_run.layout import Layout, Part
from verl.trainer.dry_run.shapes import ModelShapes
from verl.trainer.dry_run.training import PassMemory, forward_pass, update_pass
from verl.trainer.ppo.passes import Passes
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.engine.precision import Precision

PHASES = ("rollout", "log_probs", "reference", "teacher", "values", "update_critic", "update_actor")
PROCESS_BYTES = int(0.6 * GIB)  # interpreter, torch, transformers: RSS of a worker before it loads a model
CUDA_CONTEXT_BYTES = int(0.8 * GIB)  # driver, kernels, cuBLAS workspaces
NCCL_BYTES = int(0.7 * GIB)  # channels of one communicator and its sub-groups
FRAGMENTATION = 0.03  # of a GPU: what torch's allocator holds and cannot use


@dataclass(frozen=True)
class Item:
    """name: "owner: what". phases: bytes on the device. host: bytes in the node's memory beside a GPU."""

    name: str
    phases: Mapping[str, int]
    host: int = 0


@dataclass(frozen=True)
class Trained:
    """One model of a process, as its engine is configured.

    Attributes:
        owner: "actor", "critic", "reference", "teacher".
        precision, optimizer (None: frozen), fsdp: from its block. update_limits: of its update.
            forward_limits: of its passes without gradient, by phase.
        sequence: processes that share its tokens, where that is not as for the actor.
    """

    owner: str
    shapes: ModelShapes
    precision: Precision
    optimizer: str | None
    fsdp: DictConfig
    checkpointing: bool
    update_limits: MicroBatchLimits | None
    forward_limits: Mapping[str, MicroBatchLimits]
    update_phase: str | None = None
    sequence: int | None = None

    @property
    def phases(self) -> tuple[str, ...]:
        """Of passes without gradient."""
        return tuple(self.forward_limits)


@dataclass(frozen=True)
class Rows:
    """Trajectories of a step, or of a mini-batch: those of one process, and the longest one's tokens."""

    per_process: int
    longest: int


def tokens_of(limits: MicroBatchLimits, rows: Rows, num_sharing: int = 1) -> int:
    """Most tokens of one pass on each of the `num_sharing` processes that share its tokens; so is the budget
    of each. A single trajectory may be longer than the budget.
    """
    count = rows.per_process if limits.max_rows is None else min(limits.max_rows, rows.per_process)
    tokens = count * rows.longest
    if limits.max_tokens is not None:
        tokens = min(tokens, max(limits.max_tokens * num_sharing, rows.longest))
    return -(-tokens // num_sharing)


def model_items(
    model: Trained,
    layout: Layout,
    rank: int,
    step: Rows,
    mini_batch: Rows,
    hardware: Hardware,
    phases: Sequence[str],
    resident_in: Sequence[str],
) -> list[Item]:
    """Items of one engine on one rank.

    Args:
        step: what passes without gradient are made of. mini_batch: what an update is made of.
        phases: those of the run. resident_in: those in which its weights are needed.
    """
    part = layout.part(model.shapes, model.precision, model.optimizer, model.fsdp, rank)
    if model.sequence is not None:
        part = replace(part, token_share=model.sequence)
    memory, on_cuda = part.memory, hardware.device == "cuda"
    offloads = on_cuda and bool(model.fsdp.param_offload)
    items = [
        Item(
            f"{model.owner}: weights",
            dict.fromkeys(resident_in if offloads else phases, memory.weights),
            memory.weights if offloads else 0,
        )
    ]
    items += _optimizer_items(model, part, phases, on_cuda)
    return items + _pass_items(model, part, step, mini_batch, phases)


def _optimizer_items(model: Trained, part: Part, phases: Sequence[str], on_cuda: bool) -> list[Item]:
    if model.update_phase is None:
        return []
    memory = part.memory
    offloads = on_cuda and bool(model.fsdp.optimizer_offload)
    offloads_gradients = on_cuda and bool(model.fsdp.grad_offload)
    stay = part.keeps_gradients and not offloads_gradients
    sums = memory.gradients if offloads_gradients and not part.keeps_gradients else 0
    needed = [phase for phase in phases if phase == model.update_phase]
    return [
        Item(
            f"{model.owner}: gradients",
            dict.fromkeys(phases if stay else needed, memory.gradients),
            sums,
        ),
        Item(
            f"{model.owner}: optimizer state",
            dict.fromkeys(needed if offloads else phases, memory.optimizer),
            memory.optimizer if offloads else 0,
        ),
    ]


def _pass_items(
    model: Trained, part: Part, step: Rows, mini_batch: Rows, phases: Sequence[str]
) -> list[Item]:
    passes: dict[str, PassMemory] = {}
    gathered: dict[str, int] = {}
    for phase, limits in model.forward_limits.items():
        if phase in phases:
            tokens = tokens_of(limits, step, part.token_share)
            passes[phase] = forward_pass(part.shapes, model.precision, tokens)
            gathered[phase] = part.memory.gathered
    if model.update_phase in phases and model.update_limits is not None:
        phase = str(model.update_phase)
        tokens = tokens_of(model.update_limits, mini_batch, part.token_share)
        passes[phase] = update_pass(
            part.shapes, model.precision, part.autocasts, tokens, model.checkpointing, part.in_flight
        )
        gathered[phase] = part.memory.gathered + part.memory.exchanged
    return [
        Item(f"{model.owner}: weights and gradients of layers at work", gathered),
        Item(f"{model.owner}: activations", {phase: p.activations for phase, p in passes.items()}),
        Item(f"{model.owner}: chunk of logits", {phase: p.head for phase, p in passes.items()}),
    ]


# ------------------------------------------------------------------------------------ from the configuration


def actor_model(config: DictConfig, shapes: ModelShapes, device: torch.device, passes: Passes) -> Trained:
    """The policy's engine; with LoRA it is the reference too."""
    block = config.actor_rollout_ref
    limits = {"log_probs": _limits(block.rollout, "log_prob", device, block.model)}
    if shares_base(config, passes):
        limits["reference"] = _limits(block.ref, "log_prob", device, block.model)
    return Trained(
        "actor",
        shapes,
        Precision.from_config(block.actor.fsdp_config, device),
        block.actor.optim.name,
        block.actor.fsdp_config,
        bool(block.model.enable_gradient_checkpointing),
        _limits(block.actor, "ppo", device, block.model),
        limits,
        "update_actor",
    )


def frozen_model(config: DictConfig, owner: str, shapes: ModelShapes, device: torch.device) -> Trained:
    """The reference's or the teacher's engine (owner, which is the phase's name too)."""
    block = config.actor_rollout_ref
    return Trained(
        owner,
        shapes,
        Precision.from_config(block.ref.fsdp_config, device, trained=False),
        None,
        block.ref.fsdp_config,
        False,
        None,
        {owner: _limits(block.ref, "log_prob", device, block.model)},
    )


def critic_model(config: DictConfig, shapes: ModelShapes, device: torch.device) -> Trained:
    """The critic's engine."""
    block = config.critic
    return Trained(
        "critic",
        shapes,
        Precision.from_config(block.model.fsdp_config, device),
        block.optim.name,
        block.model.fsdp_config,
        bool(block.model.enable_gradient_checkpointing),
        _limits(block, "ppo", device, block.model),
        {"values": _limits(block, "forward", device, block.model)},
        "update_critic",
        None if block.strategy == "megatron" else block.ulysses_sequence_parallel_size,
    )


def shares_base(config: DictConfig, passes: Passes) -> bool:
    """With LoRA the reference is the policy without its adapters: no second model."""
    model = config.actor_rollout_ref.model
    return passes.reference and (bool(model.lora_rank) or model.lora_adapter_path is not None)


def _limits(block: DictConfig, prefix: str, device: torch.device, model: DictConfig) -> MicroBatchLimits:
    return MicroBatchLimits.from_config(block, prefix, prefix, device, model.use_remove_padding)


def overhead(hardware: Hardware, num_processes: int, phases: Sequence[str]) -> list[Item]:
    """What a process takes before it holds any model."""
    if hardware.device == "cpu":
        return [Item("process (python, torch)", dict.fromkeys(phases, PROCESS_BYTES))]
    shared = NCCL_BYTES if num_processes > 1 else 0
    total = CUDA_CONTEXT_BYTES + shared + int(FRAGMENTATION * hardware.device_bytes)
    return [Item("CUDA, NCCL, fragmentation", dict.fromkeys(phases, total), PROCESS_BYTES)]
