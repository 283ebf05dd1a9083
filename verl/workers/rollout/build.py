"""From the configuration to a rollout engine: the only place that knows which engines there are.

    rollout.name=native                     NativeEngine         the actor's own weights, one device
      ... an architecture it does not run   TransformersEngine   slower, any Hugging Face model
    rollout.name=vllm, placement=colocated  VllmEngine           vLLM in the trainer's process
    rollout.name=vllm, placement=apart      RemoteVllmEngine     vLLM servers of their own

Each is imported when it is asked for, so that a run needs no package of another engine.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import PretrainedConfig

from verl.workers.rollout.engine import RolloutEngine

logger = logging.getLogger(__name__)

MIN_SEQUENCES = 128  # so that a small first batch does not make a small engine
MAX_DEFAULT_KV_BYTES = 4 << 30  # on CPU, where nobody says how much of the memory is free for it


@dataclass(frozen=True)
class Place:
    """Where an engine runs: its device and its process among those of the run."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def build_engine(
    rollout: DictConfig,
    model: DictConfig,
    model_config: PretrainedConfig,
    tokenizer: Any,
    *,
    place: Place,
    dtype: torch.dtype,
    max_model_len: int,
    num_rows: int,
) -> RolloutEngine:
    """The engine that `rollout` asks for. It has no weights yet: `update_weights` comes first.

    Args:
        rollout, model: the blocks `actor_rollout_ref.rollout` and `actor_rollout_ref.model`.
        model_config: of the policy, overrides included.
        dtype: of the engine's computation and KV cache.
        max_model_len: most tokens of a session, prompt and observations included.
        num_rows: sessions that are wanted at once; the engine has room for `max_num_seqs` of them at most.

    Raises:
        ValueError: the engine can't run this model, or not within its memory.
    """
    max_num_seqs = min(rollout.max_num_seqs, max(MIN_SEQUENCES, num_rows))
    if rollout.name == "native":
        return _native(rollout, model_config, place.device, dtype, max_model_len, max_num_seqs)
    arguments = _vllm_arguments(rollout, model, place.device, dtype, max_model_len, max_num_seqs)
    if rollout.placement == "apart":
        from verl.workers.rollout.vllm.remote_engine import RemoteVllmEngine  # type: ignore[import-not-found]

        servers = _servers(rollout.vllm)
        transfer = rollout.vllm.weight_transfer
        return RemoteVllmEngine(arguments, tokenizer=tokenizer, place=place, transfer=transfer, **servers)
    from verl.workers.rollout.vllm.engine import VllmEngine  # type: ignore[import-not-found]

    return VllmEngine(**arguments)


def _native(
    rollout: DictConfig,
    model_config: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
) -> RolloutEngine:
    from verl.workers.rollout.native import NativeEngine

    return NativeEngine(
        model_config,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        kv_budget_bytes=_kv_budget(rollout, device),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        block_size=rollout.block_size,
    )


def _kv_budget(rollout: DictConfig, device: torch.device) -> int | None:
    """Bytes that the KV cache may take; None: as much as max_num_seqs sequences need."""
    if device.type == "cuda":
        return int(rollout.gpu_memory_utilization * torch.cuda.get_device_properties(device).total_memory)
    return None if rollout.kv_cache_gb is None else int(rollout.kv_cache_gb * (1 << 30))


def _vllm_arguments(
    rollout: DictConfig,
    model: DictConfig,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
) -> dict[str, Any]:
    """What vLLM's engine is started with, by the names of vLLM's `EngineArgs`; `vllm.engine_args` wins."""
    arguments = {
        "model": model.path,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, max_model_len),
        "block_size": rollout.block_size,
        "enforce_eager": rollout.enforce_eager,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": OmegaConf.to_container(model.override_config),
    }
    if device.type == "cuda":
        arguments["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    else:
        arguments["kv_cache_memory_bytes"] = _kv_budget(rollout, device) or MAX_DEFAULT_KV_BYTES
    extra = OmegaConf.to_container(rollout.vllm.engine_args)
    assert isinstance(extra, dict)
    return arguments | extra


def _servers(vllm: DictConfig) -> dict[str, Any]:
    """Which servers a RemoteVllmEngine talks to: some that run, or how many to start by which interpreter."""
    urls = [vllm.server_urls] if isinstance(vllm.server_urls, str) else list(vllm.server_urls or ())
    return {"server_urls": urls, "num_servers": vllm.num_servers, "python": vllm.python or sys.executable}
