"""From the configuration to a rollout engine: the only place that knows which engines there are.

    rollout.name=native                     NativeEngine         the actor's own weights, one device
      ... a model that it does not run      TransformersEngine   slower, any Hugging Face model
    rollout.name=vllm, placement=colocated  VllmEngine           vLLM in the trainer's process
    rollout.name=vllm, placement=apart      RemoteVllmEngine     vLLM servers of their own

Each is imported when it is asked for, so that a run needs no package of another engine.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig

from verl.workers.engine.loading import load_hf_config
from verl.workers.rollout.engine import RolloutEngine

if TYPE_CHECKING:
    from verl.workers.rollout.native.architecture import ModelSpec
    from verl.workers.rollout.vllm.server import VllmServers
    from verl.workers.rollout.vllm.weight_transfer import WeightSender

logger = logging.getLogger(__name__)

MIN_SEQUENCES = 128  # so that a small first batch does not make a small engine
MAX_DEFAULT_KV_BYTES = 4 << 30  # on CPU, where nobody says how much of the memory is free for it
CUDA_RESERVE_BYTES = 2 << 30  # left free beside the KV cache: activations and logits of a step, CUDA graphs


@dataclass(frozen=True)
class Request:
    """What is asked of an engine, whichever it is.

    Attributes:
        device: of this process; rank, world_size: its place among the run's processes.
        dtype: of the engine's computation and KV cache.
        max_model_len: most tokens of a session, prompt and observations included.
        num_rows: sessions that are wanted at once; an engine has room for `max_num_seqs` of them at most.
        copies_weights: whether the engine needs memory of its own for weights (those it gets have another
            dtype, or are gathered or merged for it).
    """

    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    num_rows: int
    rank: int = 0
    world_size: int = 1
    copies_weights: bool = True


def build_engine(rollout: DictConfig, model: DictConfig, request: Request) -> RolloutEngine:
    """The engine that the configuration asks for. It has no weights yet: `update_weights` comes first.

    Args:
        rollout, model: the blocks `actor_rollout_ref.rollout` and `actor_rollout_ref.model`.

    Raises:
        ValueError: the engine can't run this model, or not within its memory.
        EngineUnavailable: servers did not start, or don't answer.
    """
    max_num_seqs = sequences_at_once(rollout.max_num_seqs, request.num_rows)
    model_config = load_hf_config(model)
    if rollout.name == "native":
        return local_engine(model_config, request, max_num_seqs, model.trust_remote_code, rollout)
    arguments = _vllm_arguments(rollout, model, request, max_num_seqs)
    if rollout.placement == "apart":  # colocated, each process has an engine for its own trajectories
        arguments = {"tensor_parallel_size": rollout.tensor_model_parallel_size} | arguments
        return _vllm_apart(rollout, model_config, arguments, request)
    from verl.workers.rollout.vllm.engine import VllmEngine

    return VllmEngine(**arguments)


def local_engine(
    model_config: PretrainedConfig,
    request: Request,
    max_num_seqs: int,
    trust_remote_code: bool = False,
    rollout: DictConfig | None = None,
) -> RolloutEngine:
    """The native engine, or transformers' for a model that it does not run; both in this process.

    Args:
        rollout: the block `actor_rollout_ref.rollout`; None: the native engine's own defaults.
    """
    from verl.workers.rollout.native import NativeEngine
    from verl.workers.rollout.native.architecture import ModelSpec

    sizes = max_num_seqs, request.max_model_len, request.dtype, request.device
    try:
        spec = ModelSpec.from_config(model_config)
    except ValueError as reason:
        from verl.workers.rollout.transformers_engine import TransformersEngine

        logger.warning("%s", reason)  # that engine says what this means
        return TransformersEngine(model_config, *sizes, trust_remote_code)
    if rollout is None:
        return NativeEngine(model_config, *sizes)
    return NativeEngine(
        model_config,
        *sizes,
        kv_budget_bytes=_kv_bytes(rollout, spec, request, max_num_seqs),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        block_size=rollout.block_size,
        enforce_eager=rollout.enforce_eager,
        compile=rollout.compile,
        copies_weights=request.copies_weights,
    )


def _kv_bytes(rollout: DictConfig, spec: ModelSpec, request: Request, max_num_seqs: int) -> int:
    """What the native engine's KV cache takes: enough for all sequences, within what it may take at most."""
    sequence = sequence_bytes(spec, request.dtype, request.max_model_len, rollout.block_size)
    if request.device.type == "cuda":
        most, remedy = _most_on_cuda(rollout.gpu_memory_utilization, spec, request)
    else:
        most, remedy = most_on_cpu(rollout.kv_cache_gb), "raise rollout.kv_cache_gb"
    if most < sequence:
        raise ValueError(
            f"the KV cache may take {_gib(most)} GiB, but one trajectory of {request.max_model_len} tokens "
            f"needs {_gib(sequence)}: {remedy}, or lower data.max_prompt_length"
        )
    return min(most, max_num_seqs * sequence)


def sequence_bytes(spec: ModelSpec, dtype: torch.dtype, max_model_len: int, block_size: int) -> int:
    """Bytes of the native engine's KV state for one trajectory of the greatest length, in whole blocks."""
    position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return -(-max_model_len // block_size) * block_size * position


def most_on_cpu(kv_cache_gb: float | None) -> int:
    """Bytes that the KV cache may take on CPU."""
    return MAX_DEFAULT_KV_BYTES if kv_cache_gb is None else int(kv_cache_gb * (1 << 30))


def sequences_at_once(max_num_seqs: int, num_rows: int) -> int:
    """Sessions that an engine has room for. max_num_seqs: `rollout.max_num_seqs`; num_rows: those wanted."""
    return min(max_num_seqs, max(MIN_SEQUENCES, num_rows))


def own_weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the native engine's copy of the weights on CUDA, where it has one."""
    shapes = spec.parameter_shapes()
    if spec.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize


def _most_on_cuda(share: float, spec: ModelSpec, request: Request) -> tuple[int, str]:
    """Bytes that the KV cache may take, and how there may be more."""
    left, total = torch.cuda.mem_get_info(request.device)
    left += torch.cuda.memory_reserved(request.device) - torch.cuda.memory_allocated(request.device)
    left -= CUDA_RESERVE_BYTES
    if request.copies_weights:  # they come after the engine is made, and before its first step
        left -= own_weights_bytes(spec, request.dtype)
    most = int(share * total)
    if left < most:
        return max(left, 0), "free GPU memory, for example by offloading the trainer's"
    return most, "raise rollout.gpu_memory_utilization"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g}"


def _vllm_arguments(
    rollout: DictConfig, model: DictConfig, request: Request, max_num_seqs: int
) -> dict[str, Any]:
    """What vLLM is started with, by the names of vLLM's `EngineArgs`; `vllm.engine_args` wins."""
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": str(request.dtype).removeprefix("torch."),
        "max_model_len": request.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_num_seqs),
        "block_size": rollout.block_size,
        "enforce_eager": rollout.enforce_eager,
        "trust_remote_code": model.trust_remote_code,
    }
    if model.override_config:
        arguments["hf_overrides"] = OmegaConf.to_container(model.override_config)
    if request.device.type == "cuda":
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    elif rollout.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(rollout.kv_cache_gb * (1 << 30))
    extra = OmegaConf.to_container(rollout.vllm.engine_args)
    assert isinstance(extra, dict)
    return arguments | {str(name): value for name, value in extra.items()}


def _vllm_apart(
    rollout: DictConfig, model_config: PretrainedConfig, arguments: dict[str, Any], request: Request
) -> RolloutEngine:
    """Rank 0 starts the servers, if any are to be started, and sends the weights; all ranks use them."""
    from verl.workers.rollout.vllm.remote_engine import RemoteVllmEngine

    servers: VllmServers | None = None
    problem: Exception | None = None
    urls = (
        [rollout.vllm.server_urls] if isinstance(rollout.vllm.server_urls, str) else rollout.vllm.server_urls
    )
    if not urls:
        if request.rank == 0:
            try:
                servers = _started_servers(rollout.vllm, model_config, arguments, request)
            except (ValueError, RuntimeError, OSError) as error:
                problem = error  # the other ranks wait to hear of it
        urls = servers.urls if servers else []
        if request.world_size > 1:
            said: list[Any] = [urls, problem]
            dist.broadcast_object_list(said, src=0)
            urls, problem = said
        if problem is not None:  # on every rank: whichever is heard first says why
            raise problem
    try:
        return RemoteVllmEngine(
            list(urls),
            max_model_len=request.max_model_len,
            vocab_size=model_config.get_text_config().vocab_size,
            sender=_sender(rollout.vllm.weight_transfer, request) if request.rank == 0 else None,
            servers=servers,
            rank=request.rank,
            max_requests=max(rollout.max_num_seqs, request.num_rows),
        )
    except BaseException:
        if servers is not None:
            servers.close()
        raise


def _started_servers(
    vllm: DictConfig, model_config: PretrainedConfig, arguments: dict[str, Any], request: Request
) -> VllmServers:
    from verl.workers.rollout.vllm.engine import default_kv_bytes
    from verl.workers.rollout.vllm.server import ServerOptions, VllmServers

    if request.device.type == "cpu":
        sizes = (arguments[name] for name in ("max_num_seqs", "max_model_len", "block_size", "dtype"))
        arguments = {"kv_cache_memory_bytes": default_kv_bytes(model_config, *sizes)} | arguments
    devices = _other_devices(request.device)
    options = ServerOptions(arguments, python=vllm.python or sys.executable, devices=devices)
    return VllmServers.start(options, vllm.num_servers)


def _sender(transfer: str, request: Request) -> WeightSender:
    from verl.workers.rollout.vllm.weight_transfer import DiskSender, GroupSender

    if transfer == "disk":  # in the temporary folder (TMPDIR), which the servers must see too
        return DiskSender(None, request.dtype)
    if transfer == "auto":
        transfer = "nccl" if request.device.type == "cuda" else "gloo"
    return GroupSender(transfer, request.device, request.dtype)


def _other_devices(device: torch.device) -> list[str] | None:
    """The CUDA devices that this process sees and does not train on; None on CPU."""
    if device.type == "cpu":
        return None
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else [str(i) for i in range(torch.cuda.device_count())]
    return [name for index, name in enumerate(names) if index != device.index]
