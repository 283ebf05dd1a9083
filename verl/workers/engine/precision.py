"""The dtypes that a model is kept, computed and reduced in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from verl.workers.engine.loading import parse_dtype


@dataclass(frozen=True)
class Precision:
    """dtypes of the stored weights, of the computation, and of gradients on their way between processes."""

    model: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype

    @classmethod
    def from_config(
        cls, fsdp_config: Mapping[str, Any], device: torch.device, trained: bool = True
    ) -> Precision:
        """Null means: computation in bf16 on CUDA and fp32 on CPU; weights fp32 if trained, else like
        computation.
        """
        default = torch.bfloat16 if device.type == "cuda" else torch.float32
        mixed = fsdp_config["mixed_precision"]
        compute = parse_dtype(mixed["param_dtype"], default, "fsdp_config.mixed_precision.param_dtype")
        model = parse_dtype(
            fsdp_config["model_dtype"], torch.float32 if trained else compute, "fsdp_config.model_dtype"
        )
        reduce = parse_dtype(mixed["reduce_dtype"], torch.float32, "fsdp_config.mixed_precision.reduce_dtype")
        return cls(model, compute, reduce)
