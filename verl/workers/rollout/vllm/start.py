"""Starting and ending vLLM inside a process that belongs to somebody else: the trainer.

vLLM expects a process of its own. It seeds the random generators, replaces `torch.set_num_threads`, makes a
process group, and destroys it at the end. This module restores the trainer's state when vLLM has started. An
existing process group is used, and it outlives vLLM.
"""

from __future__ import annotations

import difflib
import os
import random
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from verl.utils.announcing import gc_paused
from verl.utils.extras import install_command
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

INSTALL = f"{install_command('vllm')} (CUDA) or scripts/test_vllm.sh (CPU)"

# Set before vLLM is imported, where the user has not set them.
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM pins the trainer's process to some cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # If a model is split, these look at the GPUs of other processes, but each process sees only its own.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, and perhaps CUDA
}
# The engine relies on these settings.
_REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `sampler.py` extends the sampler of the V1 runner
}
# Arguments that `engine_args` can't change.
_FIXED = {
    "load_format": "dummy",  # weights are set by load_weights
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # no sampling defaults or eos ids out of the model's folder
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": WORKER_EXTENSION,
}

_live_engines = 0  # the engines of a process share vLLM's groups, which end with the last engine


@gc_paused()
def start(arguments: dict[str, Any], *, worker_processes: bool = False) -> Any:
    """Start vLLM's `LLMEngine` with random weights. On CPU it has no graphs and compiles nothing.

    Args:
        arguments: Arguments of vLLM's `EngineArgs`. Of the folder or name in "model" only the configuration
            is read.
        worker_processes: Whether vLLM computes in processes that it starts, one for each slice of the model.

    Raises:
        ValueError: If vLLM is not installed, or an argument is unknown or one that the engine has to set.
    """
    global _live_engines
    prepare_environment()
    from vllm import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    arguments = {
        "dtype": "float32",
        "block_size": 32,
        "enable_prefix_caching": True,
        "enable_sleep_mode": not on_cpu,
        "disable_log_stats": True,
        "disable_custom_all_reduce": True,  # it looks at other processes' GPUs, too
        "async_scheduling": False,
        "seed": 0,
        **arguments,
    } | ({"enforce_eager": True} if on_cpu else {})
    arguments["dtype"] = str(arguments["dtype"]).removeprefix("torch.")
    known_names = set(EngineArgs.__dataclass_fields__)
    for name in arguments:
        if name in _FIXED or name in ("speculative_config", "distributed_executor_backend"):
            raise ValueError(f"engine_args has {name}, which the engine sets itself; leave it out")
        if name not in known_names:
            close_names = difflib.get_close_matches(name, known_names, 1)
            hint = f"; the nearest is {close_names[0]}" if close_names else ""
            raise ValueError(f"engine_args has {name}, which vLLM's EngineArgs don't know{hint}")
    with _process_state_kept(), _own_modules(), _launcher(worker_processes) as backend:
        args = EngineArgs(distributed_executor_backend=backend, **_FIXED, **arguments)
        llm = LLMEngine.from_engine_args(args)
    _live_engines += 1
    return llm


def end(llm: Any, *, keep_process_group: bool) -> None:
    """End an engine and everything that it has started.

    Args:
        llm: The engine.
        keep_process_group: Whether the default process group was there before vLLM, and stays.
    """
    global _live_engines
    from vllm.v1.engine import core

    _live_engines -= 1
    stop_groups = core.cleanup_dist_env_and_memory

    def clean_up() -> None:
        if _live_engines:  # other engines still use the groups
            return
        is_initialized = (lambda: False) if keep_process_group else dist.is_initialized
        with mock.patch.object(dist, "is_initialized", is_initialized):
            stop_groups()

    with mock.patch.object(core, "cleanup_dist_env_and_memory", clean_up):
        llm.engine_core.shutdown()
    llm.renderer.shutdown()


def prepare_environment() -> None:
    """Set what vLLM reads from the environment.

    Raises:
        ValueError: If vLLM is not installed, or the environment has settings with which the engine can't
            work.
    """
    for name, value in _REQUIRED.items():
        if os.environ.setdefault(name, value) != value:
            raise ValueError(
                f"{name}={os.environ[name]} in the environment; the colocated vLLM engine needs {value}"
            )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ValueError(f"rollout.name=vllm needs vLLM, which is not installed: {INSTALL}") from None


@contextmanager
def _process_state_kept() -> Iterator[None]:
    """Restore the random generators and `torch.set_num_threads`."""
    set_num_threads = torch.set_num_threads
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python_state)
            np.random.set_state(numpy_state)


class _VllmModules:
    """A replacement for `sys` that shows only vLLM's own modules."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}


@contextmanager
def _own_modules() -> Iterator[None]:
    """Let vLLM see only its own modules while it starts.

    On CPU it looks into all modules of the process, and fails at those of llvmlite (numba).
    """
    from vllm.triton_utils import dispatcher

    with mock.patch.object(dispatcher, "sys", _VllmModules()):
        yield


@contextmanager
def _launcher(worker_processes: bool) -> Iterator[str]:
    """Yield the name of vLLM's executor.

    With `worker_processes` vLLM computes in other processes. Without, this process either has vLLM alone, or
    is one of several processes that are in a group already. In the group, `tensor_parallel_size` neighbours
    share a model.
    """
    if worker_processes:
        yield "mp"
        return
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield "uni"
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
    # On CPU vLLM names shared memory by the end of the first argument, which must differ between two runs.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    distributed_args = (f"env://:{name[0]}", dist.get_rank(), local_rank)
    with mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", lambda _: distributed_args):
        yield "external_launcher"
    # All processes have opened it by now, and a process that is killed would leave it.
    for file in Path("/dev/shm").glob(f"*{name[0]}*"):
        file.unlink(missing_ok=True)
