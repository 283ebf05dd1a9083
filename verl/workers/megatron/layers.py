"""Megatron's building blocks as the models here use them: its configuration, norm, attention, a layer.

    ModelShape, ParallelSizes --transformer_config--> TransformerConfig;  layer_spec --> a decoder layer
    q [t, 1, H, D], k and v [t, 1, G, D] --rotate, packed attention--> [t, 1, H x D]

Legend: t tokens of this process, H query heads and G key heads of this tensor rank.
`verl.packing.attention` keeps sequences apart, shares beginnings, and with context parallelism exchanges
tokens for heads (`Packing.share`). No kernel of Transformer Engine is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from verl.packing.attention import Packing, packed_attention_forward
from verl.utils.device import compiled
from verl.workers.megatron.settings import ModelShape, ParallelSizes


class RMSNorm(nn.Module):
    """The norm x / sqrt(mean x^2 + eps) * weight (Zhang and Sennrich 2019, arXiv:1910.07467).

    It is computed in float32. Megatron's own norm falls back to torch's, which does not know sequence
    parallelism. With sequence parallelism each tensor rank norms tokens of its own, and the weight's gradient
    is summed over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6):
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps
        self._norm = _fused(_norm) if config.bias_activation_fusion else _norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self._norm(x, self.weight, self.eps)
        return normed


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@cache
def _fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the function as one kernel that rounds where single operations round."""
    return compiled(function, options={"emulate_precision_casts": True})


@dataclass
class PackedTokens(PackedSeqParams):
    """A micro-batch, as the layers see it.

    `qkv_format` stays None, so that Megatron leaves layout and rotation to this module.

    Attributes:
        packing: where the sequences lie.
        cos: the rotary embedding's cosines, [t, D].
        sin: the rotary embedding's sines, [t, D].
    """

    packing: Packing | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [t, H, D] by cos and sin [t, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


class PackedCoreAttention(nn.Module):
    """The attention that Megatron's `SelfAttention` calls between its projections."""

    def __init__(self, config: TransformerConfig, **_: Any):
        super().__init__()
        self._rotate = _fused(_rotate) if config.bias_activation_fusion else _rotate

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedTokens, **__: Any
    ) -> Tensor:
        tokens = packed_seq_params
        assert tokens.cos is not None and tokens.sin is not None
        query, key = (self._rotate(x[:, 0], tokens.cos, tokens.sin) for x in (query, key))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value[:, 0]))
        out, _weights = packed_attention_forward(self, q, k, v, None, packing=tokens.packing)
        return out.squeeze(0).flatten(1).unsqueeze(1)


def transformer_config(
    shape: ModelShape,
    sizes: ParallelSizes,
    device: torch.device,
    dtype: torch.dtype,
    recompute: bool,
    compiles: bool,
) -> TransformerConfig:
    """Return Megatron's configuration of a model.

    Weights are read, not drawn, and nothing is dropped at random. Stages send each other tensors of any
    length. Gradients of micro-batches and of replicas are summed.

    Args:
        shape: the model's sizes.
        sizes: the sizes of the cut.
        device: the device of parameters and computation.
        dtype: the dtype of parameters and computation.
        recompute: keep only each layer's input for the backward pass (gradient checkpointing).
        compiles: compile the operations between two matrix products, both Megatron's and those of this
            module.
    """
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_key_heads,
        kv_channels=shape.head_width,
        ffn_hidden_size=shape.feed_forward,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        add_bias_linear=False,
        add_qkv_bias=shape.biased_qkv,
        qk_layernorm=shape.normed_qk,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        sequence_parallel=sizes.tensor > 1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # no experts, but the default refuses variable lengths
        calculate_per_token_loss=True,
        cuda_graph_scope=[],
        bias_activation_fusion=compiles,
        bias_dropout_fusion=compiles,
        apply_rope_fusion=False,  # rotation and attention are those of this module
        masked_softmax_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def layer_spec(shape: ModelShape) -> ModuleSpec:
    """Return the specification of a decoder layer: norm, attention, norm, gated feed-forward network."""
    qk_norm: Callable[..., nn.Module] = RMSNorm if shape.normed_qk else IdentityOp
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    feed_forward = ModuleSpec(
        module=MLP,
        params={"ffn_hidden_size": shape.feed_forward},
        submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
