"""The decoder architectures that the engine runs, read from a Hugging Face config into one `ModelSpec`.

Qwen2, Qwen3, Llama and Mistral are the same pre-norm decoder (RMSNorm, rotary positions, grouped query heads,
gated MLP); they differ in biases, in the norm on query and key heads, and in sliding windows. `ModelSpec`
holds those choices and names the parameters as Hugging Face does; `rotary_table` makes the positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and choices of one decoder. `windows` has one entry per layer: None = attends to everything."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelSpec:
        """Read a transformers config. ValueError for an architecture that the engine does not run."""
        kind = config.model_type
        if kind not in SUPPORTED:
            raise ValueError(
                f"the native rollout engine has no model_type {kind!r}; it runs {', '.join(SUPPORTED)}. "
                "Use a model of one of these architectures"
            )
        attention_bias = config.attention_bias if kind in ("llama", "qwen3") else False
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        num_layers = config.num_hidden_layers
        if kind == "llama":
            windows: tuple[int | None, ...] = (None,) * num_layers
        elif kind == "mistral":
            windows = (config.sliding_window,) * num_layers
        else:
            windows = tuple(
                config.sliding_window if layer_type == "sliding_attention" else None
                for layer_type in config.layer_types
            )
        return cls(
            num_layers=num_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=config.hidden_act,
            tie_word_embeddings=config.tie_word_embeddings,
            qk_norm=kind == "qwen3",
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and config.mlp_bias,
            windows=windows,
        )

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameters of one layer: name after "model.layers.N." -> shape."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if self.qkv_bias else []
        biased += ["self_attn.o_proj"] if self.o_bias else []
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if self.mlp_bias else []
        return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """All parameters by Hugging Face name -> shape, "lm_head.weight" too when embeddings are tied."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
            "lm_head.weight": (self.vocab_size, self.hidden_size),
        }
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()}
        return shapes


def rotary_table(
    config: PretrainedConfig, head_dim: int, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [max_model_len, head_dim], the sin's first half negated.

    With it the rotation is x * cos + swap_halves(x) * sin. Scaled variants come from transformers' own
    formulas; those that depend on the running length are refused where that would matter.
    """
    rope = config.rope_parameters
    rope_type = rope["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise ValueError(
            f"the native rollout engine has no rope_type {rope_type!r}; it has {', '.join(_ROPE_TYPES)}"
        )
    if rope_type == "dynamic" and max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"rope_type 'dynamic' changes its frequencies beyond {config.max_position_embeddings} positions, "
            f"which a KV cache can't follow; max_model_len is {max_model_len}: lower it to that"
        )
    if rope_type == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        inv_freq, scaling = 1.0 / (rope["rope_theta"] ** exponent), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
    if inv_freq.numel() * 2 != head_dim:
        raise ValueError(
            f"rotary embedding covers {inv_freq.numel() * 2} of {head_dim} channels of a head; "
            "the native rollout engine needs all of them"
        )
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float), inv_freq.float())
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    table = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return table[0].to(device, dtype), table[1].to(device, dtype)
