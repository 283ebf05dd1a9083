"""Decoder layers compiled for CUDA: everything between two matrix products becomes one kernel.

A layer of plain torch operations passes over memory five to fifteen times for a norm, a rotation or an
activation. torch.compile (Ansel et al., 2024) fuses these operations. Attention stays a call between two
compiled parts, because its sequences differ from pass to pass. The number of tokens differs as well, so
shapes are dynamic.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
import shutil
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from verl.packing.attention import PACKED_ATTENTION, packed_attention_forward
from verl.packing.linear_logprob import linear_log_prob
from verl.utils.device import compiled
from verl.workers.engine.loading import PolicyModel, ValueModel, set_forward

logger = logging.getLogger(__name__)
FEWEST_PARAMETERS = 100_000_000  # for a smaller model, a step gains less than compiling takes


def is_large_enough_to_compile(num_parameters: int) -> bool:
    """Return whether a model of this size is compiled, where that is possible."""
    return num_parameters >= FEWEST_PARAMETERS and os.environ.get("TORCH_COMPILE_DISABLE") != "1"


def can_compile() -> bool:
    """Return whether Triton and a C compiler, which compiling for CUDA needs, are installed.

    Log a warning if one of them is missing.
    """
    compiler = next(filter(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang")), None)
    if importlib.util.find_spec("triton") is not None and compiler is not None:
        return True
    logger.warning("layers are not compiled, so slower: that needs Triton and a C compiler (apt install gcc)")
    return False


def use_cuda_layers(module: PolicyModel | ValueModel) -> bool:
    """Compile the model's layers and the arithmetic on its logits.

    The layers are compiled when they first compute, which takes about half a minute.

    Returns:
        Whether the model is compiled. Nothing is changed and False is returned for a small model, for a model
        whose backbone has no list of layers, where Triton or a C compiler is missing, and if
        TORCH_COMPILE_DISABLE=1.
    """
    backbone: Any = module.model.base_model
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return False
    if not is_large_enough_to_compile(sum(p.numel() for p in module.parameters())) or not can_compile():
        return False
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention_forward))
    for layer in list(layers)[: -1 if module.is_short else None]:  # a shortened layer computes few tokens
        _compile(layer)
    if isinstance(module, PolicyModel):
        module.log_prob = partial(linear_log_prob, compiles=True)
    return True


def _compile(layer: Any) -> None:
    """Compile a layer's forward pass. Fused operations round where single operations do, as in rollouts."""
    fast = compiled(
        MethodType(inspect.unwrap(type(layer).forward), layer), options={"emulate_precision_casts": True}
    )
    set_forward(layer, fast)
