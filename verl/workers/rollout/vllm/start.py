"""Starting and ending vLLM inside a process that is somebody else's: the trainer's.

vLLM expects a process of its own: it seeds the random generators, replaces `torch.set_num_threads`, makes a
process group, and destroys it at the end. Here the trainer's state is as before when vLLM has started, its
process group is used where there is one, and outlives vLLM.
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

from verl.utils.announcing import without_collections
from verl.workers.rollout.vllm.weight_transfer import WORKER_EXTENSION

INSTALL = "pip install -c constraints-vllm.txt vllm (CUDA) or scripts/test_vllm.sh (CPU)"

# Set before vLLM is imported, where the user has not set them.
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM pins this process, the trainer's, to some cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # for a model that is split: these look at the GPUs of other processes, and each process sees its own
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
# The engine relies on these.
_REQUIRED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose sampler `sampler.py` extends
}
# What `engine_args` can't change.
_FIXED = {
    "load_format": "dummy",  # weights come by load_weights
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # no sampling defaults or eos ids out of the model's folder
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": WORKER_EXTENSION,
}

_live_engines = 0  # vLLM's groups of this process are shared by its engines, and end with the last one


@without_collections()
def start(arguments: dict[str, Any]) -> Any:
    """vLLM's `LLMEngine` with random weights. On CPU it has no graphs and compiles nothing. arguments: of
    vLLM's `EngineArgs`; of "model" only the configuration is read.

    Raises ValueError if vLLM is not installed, or an argument is unknown or one that the engine has to set.
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
        "disable_custom_all_reduce": True,  # as above
        "async_scheduling": False,
        "seed": 0,
        **arguments,
    } | ({"enforce_eager": True} if on_cpu else {})
    arguments["dtype"] = str(arguments["dtype"]).removeprefix("torch.")
    known = set(EngineArgs.__dataclass_fields__)
    for name in arguments:
        if name in _FIXED or name in ("speculative_config", "distributed_executor_backend"):
            raise ValueError(f"engine_args has {name}, which the engine sets itself; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ValueError(f"engine_args has {name}, which vLLM's EngineArgs don't know{hint}")
    with _process_state_kept(), _own_modules(), _launcher() as backend:
        args = EngineArgs(distributed_executor_backend=backend, **_FIXED, **arguments)
        llm = LLMEngine.from_engine_args(args)
    _live_engines += 1
    return llm


def end(llm: Any, *, keep_process_group: bool) -> None:
    """End an engine and everything that it has started. keep_process_group: the default process group was
    there before vLLM; it stays.
    """
    global _live_engines
    from vllm.v1.engine import core

    _live_engines -= 1
    stop_groups = core.cleanup_dist_env_and_memory

    def clean_up() -> None:
        if _live_engines:  # their groups stay
            return
        is_initialized = (lambda: False) if keep_process_group else dist.is_initialized
        with mock.patch.object(dist, "is_initialized", is_initialized):
            stop_groups()

    with mock.patch.object(core, "cleanup_dist_env_and_memory", clean_up):
        llm.engine_core.shutdown()
    llm.renderer.shutdown()


def prepare_environment() -> None:
    """Set what vLLM reads from the environment. ValueError if it is missing, or set up against the engine."""
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
    python = random.getstate()
    numpy = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python)
            np.random.set_state(numpy)


class _VllmModules:
    """Stands for `sys` where only vLLM's own modules are to be seen."""

    @property
    def modules(self) -> dict[str, Any]:
        return {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}


@contextmanager
def _own_modules() -> Iterator[None]:
    """While it starts on CPU, vLLM looks into all modules of the process, and fails at llvmlite's (numba)."""
    from vllm.triton_utils import dispatcher

    with mock.patch.object(dispatcher, "sys", _VllmModules()):
        yield


@contextmanager
def _launcher() -> Iterator[str]:
    """vLLM's executor: alone in this process, or one of several processes that are in a group already, of
    which so many neighbours as `tensor_parallel_size` says share a model."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield "uni"
        return
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    local_rank = torch.cuda.current_device() if torch.cuda.is_available() else 0
    # On CPU vLLM names shared memory by the end of its first word; two runs of a machine must not meet there.
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    place = (f"env://:{name[0]}", dist.get_rank(), local_rank)
    with mock.patch.object(ExecutorWithExternalLauncher, "_distributed_args", lambda _: place):
        yield "external_launcher"
    for file in Path("/dev/shm").glob(f"*{name[0]}*"):  # all have it; a process that is killed would leave it
        file.unlink(missing_ok=True)
