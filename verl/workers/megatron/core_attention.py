"""Attention of packed sequences inside of Megatron's layers, and the rotary embedding that goes with it.

    q [t, 1, H, D], k and v [t, 1, G, D] --rotate, packed attention--> [t, 1, H x D]

t tokens of this process, H query and G key heads of this tensor rank. `verl.utils.packed_attention` does
the rest: sequences apart, shared beginnings, and with context parallelism the exchange of tokens for heads
(`Packing.share`). No kernel of Transformer Engine is needed. What all layers need to know of a micro-batch
travels as Megatron's `packed_seq_params`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from verl.utils.packed_attention import Packing, packed_attention_forward


@dataclass
class PackedTokens(PackedSeqParams):
    """A micro-batch, as the layers see it. packing: where sequences lie; cos, sin [t, D]: rotary embedding.

    `qkv_format` stays None: Megatron leaves layout and rotation to us then.
    """

    packing: Packing | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


class RotaryEmbedding:
    """Angles of positions as Hugging Face has them, with the scaling of the model's `rope_parameters`."""

    def __init__(self, config: PretrainedConfig, device: torch.device):
        rotary_class: Any = LlamaRotaryEmbedding  # the same in Qwen2 and Qwen3
        hugging_face = rotary_class(config)
        self._frequencies = hugging_face.inv_freq.to(device=device, dtype=torch.float32)  # [D / 2]
        self._scaling = float(hugging_face.attention_scaling)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [t, D], of positions [t]."""
        angles = positions[:, None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [t, H, D]; cos, sin [t, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class PackedCoreAttention(nn.Module):
    """What Megatron's `SelfAttention` calls between its projections."""

    def __init__(self, **_: Any):
        super().__init__()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedTokens, **__: Any
    ) -> Tensor:
        tokens = packed_seq_params
        assert tokens.cos is not None and tokens.sin is not None
        query, key = (_rotate(x[:, 0], tokens.cos, tokens.sin) for x in (query, key))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value[:, 0]))
        out, _weights = packed_attention_forward(self, q, k, v, None, packing=tokens.packing)
        return out.squeeze(0).flatten(1).unsqueeze(1)
