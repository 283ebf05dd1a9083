"""The step from the configuration to a rollout engine: the only place that knows which engines there are.

    rollout.name=native    NativeEngine        ours, on one device
    rollout.name=vllm      VllmEngine          vLLM, on one device or split over several
    rollout.name=remote    RemoteEngine        servers that run already

Each of them may live in the processes that train (rollout.placement=colocated) or in processes of its own
(apart: verl/workers/rollout_worker.py). Each engine is imported only when it is asked for, so that a run
needs no package of another engine.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from verl.config.keys import as_list
from verl.config.policy import Policy, Rollout
from verl.sessions.engine_contract import RolloutEngine
from verl.workers.engine.loading import DTYPES, load_hf_config, load_hf_config_as_stored

if TYPE_CHECKING:
    from verl.workers.rollout.native.architecture import ModelSpec

MIN_SEQUENCES = 128  # so that a small first batch does not make a small engine
MAX_DEFAULT_KV_BYTES = 4 << 30  # on CPU, where no setting says how much memory is free for the KV cache
CUDA_RESERVE_BYTES = 2 << 30  # left free beside the KV cache for activations and logits of a step
FRAGMENTATION = 0.03  # share of a GPU that torch's allocator holds and cannot use
SHARE_APART = 0.9  # share of a GPU that nobody trains on, vLLM's own default
MAX_WEIGHT_BYTES = 20 << 30  # 16-bit weights on one GPU; a model with more is split
GPUS_OF_A_NODE = 8  # maximum number of GPUs of an engine apart


@dataclass(frozen=True)
class EngineRequest:
    """The run's requirements for an engine of any kind.

    Attributes:
        device: The device of this process.
        dtype: The dtype of the engine's computation and KV cache.
        max_model_len: Maximum number of tokens of a session, prompt and observations included.
        num_sessions: Number of sessions wanted at once, over all processes that share the engine's model. An
            engine has room for `max_num_seqs` of them at most.
        rank: The rank of this process among the run's processes.
        world_size: The number of the run's processes.
        copies_weights: Whether the engine needs memory of its own for weights. It does if the weights that it
            gets have another dtype, or are gathered or merged for it.
        training_bytes: Number of bytes of the GPU that training holds (`taken_beside_rollouts`). None means
            that nobody trains on it.
        tensor_parallel_size: Number of devices that one model of vLLM is split over. Colocated, they belong
            to as many processes that train; apart, to processes that vLLM starts.
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    num_sessions: int
    rank: int = 0
    world_size: int = 1
    copies_weights: bool = True
    training_bytes: int | None = None
    tensor_parallel_size: int = 1


def engine_name(rollout: Rollout, device: torch.device | str) -> str:
    """Return `rollout.name`, or the name of the engine that `auto` stands for.

    `auto` means vllm on CUDA and native on CPU. On CUDA without vLLM it means native.

    Args:
        rollout: The rollout block of the configuration.
        device: The device of the engine: "cpu", "cuda" or "cuda:N".
    """
    if rollout.name != "auto":
        return str(rollout.name)
    if torch.device(device).type == "cpu":
        return "native"
    return "vllm" if importlib.util.find_spec("vllm") is not None else "native"


def model_parallel_size(rollout: Rollout, model: Policy, num_available: int) -> int:
    """Return the number of processes (or devices, for rollouts apart) that share one model of vLLM.

    This is `tensor_model_parallel_size`. If that is null, it is the smallest number that divides
    `num_available` and the attention heads and leaves at most MAX_WEIGHT_BYTES of weights to each process
    (twice as many for rollouts apart). If none does, it is the largest of these divisors.

    Args:
        rollout: The rollout block of the configuration.
        model: The model block of the configuration.
        num_available: Number of processes or devices that are available.
    """
    if rollout.tensor_model_parallel_size is not None:
        return rollout.tensor_model_parallel_size
    config = load_hf_config(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    num_bytes = 2 * sum(parameter.numel() for parameter in skeleton.parameters())
    text = config.get_text_config()
    limit = MAX_WEIGHT_BYTES * (2 if rollout.placement == "apart" else 1)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    divisor = math.gcd(num_available, text.num_attention_heads)
    sizes = [n for n in range(1, divisor + 1) if divisor % n == 0 and (heads % n == 0 or n % heads == 0)]
    return next((size for size in sizes if num_bytes <= size * limit), sizes[-1])


def devices_per_engine(rollout: Rollout, model: Policy, device: torch.device | str) -> int:
    """Return the number of devices that each engine apart takes, or 0 if it is a client of servers.

    Args:
        rollout: The rollout block of the configuration.
        model: The model block of the configuration.
        device: "cpu" or "cuda", where the engine runs.
    """
    name = engine_name(rollout, device)
    if name == "vllm":
        return model_parallel_size(rollout, model, GPUS_OF_A_NODE)
    return 0 if name == "remote" else 1


def weight_backend(rollout: Rollout, device: torch.device | str) -> str:
    """Return "nccl" or "gloo", by which weights are broadcast to those that only sample.

    Args:
        rollout: The rollout block of the configuration.
        device: The device of the process that sends.

    Raises:
        ValueError: If `weight_backend` is nccl, and a side has no GPU.
    """
    is_client = rollout.name == "remote" and rollout.placement == "apart"  # it has no device
    can_use_nccl = torch.device(device).type == "cuda" and not is_client
    if rollout.weight_backend == "auto":
        return "nccl" if can_use_nccl else "gloo"
    if rollout.weight_backend == "nccl" and not can_use_nccl:
        raise ValueError(
            f"Found rollout.weight_backend=nccl, and weights are sent from {torch.device(device).type}"
            f"{' to a client of servers' * is_client}; expected GPUs on both sides. Set it to gloo or auto."
        )
    return rollout.weight_backend


def rollout_dtype(rollout: Rollout, computed_in: torch.dtype) -> torch.dtype:
    """Return the dtype of the engine's weights and computation.

    This is `rollout.dtype`, or `computed_in`, the dtype in which the actor computes, if that is auto.
    """
    return computed_in if rollout.dtype == "auto" else DTYPES[rollout.dtype]


def build_rollout_engine(rollout: Rollout, model: Policy, request: EngineRequest) -> RolloutEngine:
    """Build the engine that the configuration asks for. It has no weights until `load_weights` is called.

    Args:
        rollout: The block `actor_rollout_ref.rollout`.
        model: The block `actor_rollout_ref.model`.
        request: The run's requirements.

    Raises:
        ValueError: If the engine can't run this model, or not within its memory.
        EngineUnavailable: If a server does not answer.
    """
    max_num_seqs = sequences_at_once(rollout.max_num_seqs, request.num_sessions)
    model_config = load_hf_config(model)
    name = engine_name(rollout, request.device)
    if name == "remote":
        return _remote_engine(rollout, model_config, request)
    if name == "native":
        from verl.workers.rollout.native import NativeEngine
        from verl.workers.rollout.native.architecture import ModelSpec

        return NativeEngine(
            model_config,
            max_num_seqs,
            request.max_model_len,
            request.dtype,
            request.device,
            kv_budget_bytes=_kv_bytes(rollout, ModelSpec.from_config(model_config), request, max_num_seqs),
            max_prefill_tokens=rollout.max_num_batched_tokens,
            block_size=rollout.block_size,
        )
    from verl.workers.rollout.vllm.colocated_engine import VllmEngine

    arguments = _vllm_arguments(rollout, model, model_config, request)
    is_apart = rollout.placement == "apart"
    return VllmEngine(**arguments, worker_processes=is_apart and request.tensor_parallel_size > 1)


def gpu_share(rollout: Rollout, total: int, training_bytes: int | None) -> float:
    """Return the share of a GPU that the engine may take.

    This is `gpu_memory_utilization`. If that is null, it is the share that training leaves, or
    SHARE_APART where nobody trains.

    Args:
        rollout: The rollout block of the configuration.
        total: Number of bytes of the GPU.
        training_bytes: Number of bytes that training has taken. None means that nobody trains on the GPU.

    Returns:
        The share, or 0 if training leaves nothing.
    """
    if rollout.gpu_memory_utilization is not None:
        return rollout.gpu_memory_utilization
    if rollout.placement == "apart" or training_bytes is None:
        return SHARE_APART
    return max(0.0, 1 - FRAGMENTATION - (training_bytes + CUDA_RESERVE_BYTES) / total)


def _kv_bytes(rollout: Rollout, spec: ModelSpec, request: EngineRequest, max_num_seqs: int) -> int:
    """Return the size of the native engine's KV cache: enough for all sequences, within its limit.

    Raises ValueError if one sequence does not fit.
    """
    position_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * request.dtype.itemsize
    sequence_bytes = -(-request.max_model_len // rollout.block_size) * rollout.block_size * position_bytes
    if request.device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(request.device)
        free_bytes += torch.cuda.memory_reserved(request.device) - torch.cuda.memory_allocated(request.device)
        free_bytes -= CUDA_RESERVE_BYTES
        is_set = rollout.gpu_memory_utilization is not None
        max_bytes = int(gpu_share(rollout, total_bytes, request.training_bytes) * total_bytes)
        if request.copies_weights:  # the copies are made after the engine, and before its first step
            shapes = spec.parameter_shapes().values()
            copied_bytes = sum(math.prod(shape) for shape in shapes) * request.dtype.itemsize
            free_bytes -= copied_bytes
            max_bytes -= 0 if is_set else copied_bytes
        remedy = "free GPU memory, for example by offloading the trainer's"
        if is_set and max_bytes <= free_bytes:
            remedy = "raise rollout.gpu_memory_utilization"
        max_bytes = max(min(free_bytes, max_bytes), 0)
    else:
        max_bytes = max_kv_bytes_on_cpu(rollout.kv_cache_gb)
        remedy = "raise rollout.kv_cache_gb"
    if max_bytes < sequence_bytes:
        raise ValueError(
            f"the KV cache may take {max_bytes / (1 << 30):.3g} GiB, but one trajectory of "
            f"{request.max_model_len} tokens needs {sequence_bytes / (1 << 30):.3g}: {remedy}, or lower "
            "data.max_prompt_length"
        )
    return min(max_bytes, max_num_seqs * sequence_bytes)


def max_kv_bytes_on_cpu(kv_cache_gb: float | None) -> int:
    """Return the maximum number of bytes of the KV cache on CPU."""
    return MAX_DEFAULT_KV_BYTES if kv_cache_gb is None else int(kv_cache_gb * (1 << 30))


def sequences_at_once(max_num_seqs: int, num_sessions: int) -> int:
    """Return the number of sessions that an engine has room for.

    Args:
        max_num_seqs: The limit `rollout.max_num_seqs`.
        num_sessions: Number of sessions wanted.
    """
    return min(max_num_seqs, max(MIN_SEQUENCES, num_sessions))


def _vllm_arguments(
    rollout: Rollout, model: Policy, model_config: PretrainedConfig, request: EngineRequest
) -> dict[str, Any]:
    """Return the arguments that vLLM is started with, by the names of vLLM's `EngineArgs`.

    `vllm.engine_args` of the configuration takes precedence.
    """
    max_num_seqs = sequences_at_once(rollout.max_num_seqs, request.num_sessions)
    tensor_parallel_size = request.tensor_parallel_size
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": str(request.dtype).removeprefix("torch."),
        "max_model_len": request.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_num_seqs),
        "block_size": rollout.block_size,
        "tensor_parallel_size": tensor_parallel_size,
        "trust_remote_code": model.trust_remote_code,
    }
    overrides = dict(model.override_config or {})
    if (Path(model.path) / "config.json").is_file():  # vLLM reads it by itself
        stored = load_hf_config_as_stored(model)
        if stored.tie_word_embeddings != model_config.tie_word_embeddings:
            overrides["tie_word_embeddings"] = model_config.tie_word_embeddings
    if overrides:
        arguments["hf_overrides"] = overrides
    if request.device.type == "cuda":
        total = 1 if request.training_bytes is None else torch.cuda.mem_get_info(request.device)[1]
        arguments["gpu_memory_utilization"] = share = round(
            gpu_share(rollout, total, request.training_bytes), 3
        )
        if not share:
            taken_gib = (request.training_bytes or 0) / (1 << 30)
            gpu_gib = total / (1 << 30)
            raise ValueError(
                f"training holds {taken_gib:.1f} GiB of the GPU's {gpu_gib:.1f}, which "
                "leaves no room for rollouts. Set actor_rollout_ref.actor.fsdp_config.optimizer_offload=true "
                "(and param_offload), or train on more GPUs."
            )
    elif rollout.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = max_kv_bytes_on_cpu(rollout.kv_cache_gb)
    else:
        config = model_config.get_text_config()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = -(-config.num_key_value_heads // tensor_parallel_size)  # each process has at least one
        width = config.num_hidden_layers * heads * head_dim
        block_bytes = 2 * width * request.dtype.itemsize * rollout.block_size
        # vLLM keeps one block for itself.
        num_blocks = max_num_seqs * -(-request.max_model_len // rollout.block_size) + 1
        arguments["kv_cache_memory_bytes"] = min(num_blocks * block_bytes, MAX_DEFAULT_KV_BYTES)
    key = "rollout.tensor_model_parallel_size"
    parallel_size = rollout.tensor_model_parallel_size
    if "tensor_parallel_size" in rollout.vllm.engine_args:
        raise ValueError(f"rollout.vllm.engine_args has tensor_parallel_size; set {key} in its place")
    if rollout.placement == "colocated" and parallel_size not in (None, tensor_parallel_size):
        raise ValueError(
            f"Found {key}={parallel_size}; expected null or {tensor_parallel_size}, the number of processes "
            "that sample from this model here."
        )
    return arguments | rollout.vllm.engine_args


def _remote_engine(rollout: Rollout, model_config: PretrainedConfig, request: EngineRequest) -> RolloutEngine:
    """Build the engine on servers that run already.

    Processes that train share all servers. Each process that samples apart has its share of them.
    """
    from verl.workers.rollout.remote.remote_engine import RemoteEngine
    from verl.workers.rollout.remote.weights import WeightSender

    urls = as_list(rollout.remote.urls)
    weight_dir = None if rollout.weight_dir is None else Path(rollout.weight_dir).absolute()
    rank = request.rank
    world_size = request.world_size
    if rollout.placement == "apart":
        urls = urls[rank::world_size]
        rank = 0
        world_size = 1
    backend = weight_backend(rollout, request.device)
    return RemoteEngine(
        urls,
        max_model_len=request.max_model_len,
        vocab_size=model_config.get_text_config().vocab_size,
        sender=WeightSender(backend, request.device, request.dtype),
        weight_dir=weight_dir,
        rank=rank,
        world_size=world_size,
        max_requests=max(rollout.max_num_seqs, request.num_sessions),
    )
