"""Megatron-core on a CPU: replacements for the parts of `torch.cuda` that it uses, in its own modules alone.

Megatron creates its buffers with `device="cuda"` or `torch.cuda.current_device()`, keeps CUDA's random state
and waits for streams. `install` gives its modules another `torch`. It has the same names, but factories make
CPU tensors, the current device is the CPU, streams do nothing, and "CUDA's" random state is a generator of
its own. No other code sees a difference.

Megatron also calls two methods of tensors, `.type()` and `.cuda()`. `cuda_names` replaces these while a block
lasts. In a process that trains on CUDA none of this happens.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")
USED_MODULES = (  # the parts of Megatron that models and engines here use
    "megatron.core.models.gpt",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.random",
)
FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")


def install(device: torch.device) -> None:
    """Make Megatron work on the CPU in this process, if `device` is a CPU.

    You may call it again. It then also covers modules that were imported since.
    """
    if device.type != "cpu":
        return
    warnings.filterwarnings("ignore", message=".*CUDA_DEVICE_MAX_CONNECTIONS", category=UserWarning)
    for name in USED_MODULES:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and vars(module).get("torch") is torch:
            module.torch = _torch()  # type: ignore[attr-defined]
    random: Any = sys.modules["megatron.core.tensor_parallel.random"]
    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state


@contextmanager
def cuda_names(device: torch.device) -> Iterator[None]:
    """Make CPU tensors pass as CUDA tensors inside the block, if `device` is a CPU.

    `.type()` gives their type as if they were CUDA tensors, and `.cuda()` returns the tensor itself. Use it
    to create models and Megatron's optimizers, and for the optimizers' steps.
    """
    if device.type != "cpu":
        yield
        return
    originals = Tensor.type, Tensor.cuda

    def type_of(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = originals[0](tensor, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    Tensor.type = type_of  # type: ignore[method-assign, assignment]
    Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.type, Tensor.cuda = originals  # type: ignore[method-assign]


@cache
def _torch() -> ModuleType:
    """Return a copy of the torch module whose CUDA functions and factories work on the CPU."""
    stand_in = _copy_of(torch)
    stand_in.__dict__.update({name: _on_cpu(getattr(torch, name)) for name in FACTORIES}, cuda=_cuda())
    return stand_in


def _cuda() -> ModuleType:
    stand_in = _copy_of(torch.cuda)
    stand_in.__dict__.update(
        current_device=lambda: CPU,
        synchronize=_nothing,
        empty_cache=_nothing,
        Stream=_Stream,
        Event=_Stream,
        stream=_no_context,
        current_stream=_Stream,
        default_stream=_Stream,
        get_rng_state=_get_rng_state,
        set_rng_state=_set_rng_state,
        manual_seed=_generator().manual_seed,
    )
    return stand_in


def _copy_of(module: ModuleType) -> ModuleType:
    copy = ModuleType(module.__name__)
    copy.__dict__.update(vars(module))
    return copy


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_context(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()


class _Stream:
    """A stream, or an event, on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = record_event = record = wait = synchronize = _nothing


@cache
def _generator() -> torch.Generator:
    return torch.Generator()


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return _generator().get_state()


def _set_rng_state(state: Tensor, *_: Any, **__: Any) -> None:
    _generator().set_state(state)
