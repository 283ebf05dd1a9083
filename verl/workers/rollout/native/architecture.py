"""The decoder architectures that the engine runs, read from a Hugging Face config into one `ModelSpec`.

Qwen2, Qwen3, Llama, Mistral and Gemma 3 (text) are one decoder (RMSNorm, rotary positions, grouped query
heads, gated MLP). They differ in biases, in the norm on query and key heads and in sliding windows. Gemma
also scales its embeddings, multiplies in its norms by (1 + weight), norms the output of each half of a layer,
and has other rotary frequencies in its windowed layers. `ModelSpec` holds those choices and names the
parameters as Hugging Face does. `rotary_tables` makes the tables of positions. `collect_weights` checks the
parameters that arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.sessions.engine_contract import TIED_HEAD, checked_weights

SUPPORTED = ("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "gemma3")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and choices of one decoder.

    Attributes:
        windows: For each layer, the number of positions that a token sees, itself included (None = all).
        rope_kinds: For each layer, the config's name for its rotary frequencies (None = there is one set).
        scale: Factor on query-key products.
        embedding_scale: Factor on embeddings (1 = none).
        norm_offset: Whether norms multiply by (1 + weight).
        sandwich_norms: Whether attention and MLP outputs are normed before they join the residual stream.
    """

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
    rope_kinds: tuple[str | None, ...]
    scale: float
    embedding_scale: float = 1.0
    norm_offset: bool = False
    sandwich_norms: bool = False

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> ModelSpec:
        """Read a transformers config. Raises ValueError for a model that the engine does not run."""
        config = text_config(config)
        kind = config.model_type
        gemma = kind == "gemma3_text"
        attention_bias = config.attention_bias if kind in ("llama", "qwen3") or gemma else False
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        hidden_act = config.hidden_activation if gemma else config.hidden_act
        if hidden_act not in ACTIVATIONS:
            raise _unsupported(f"no activation {hidden_act!r}; it has {', '.join(ACTIVATIONS)}")
        if gemma and config.use_bidirectional_attention:
            raise ValueError("the model's attention is bidirectional; expected a causal language model")
        if gemma and (config.attn_logit_softcapping or config.final_logit_softcapping):
            raise _unsupported("no soft cap of scores or logits")
        kinds = config.layer_types if gemma else [None] * config.num_hidden_layers
        for rope_kind in set(kinds):
            _frequencies(config, head_dim, rope_kind)
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=hidden_act,
            tie_word_embeddings=config.tie_word_embeddings,
            qk_norm=kind in ("qwen3", "gemma3_text"),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and config.mlp_bias,
            windows=_windows(config),
            rope_kinds=tuple(kinds),
            scale=(config.query_pre_attn_scalar if gemma else head_dim) ** -0.5,
            embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
            norm_offset=gemma,
            sandwich_norms=gemma,
        )

    @property
    def mlp_norm(self) -> str:
        """Return the name of the norm before the MLP.

        Gemma uses the other models' name for the norm after attention.
        """
        return f"{'pre_feedforward' if self.sandwich_norms else 'post_attention'}_layernorm.weight"

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's parameters, by their names after "model.layers.N."."""
        hidden = self.hidden_size
        intermediate = self.intermediate_size
        q_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_size, hidden),
            "self_attn.k_proj.weight": (kv_size, hidden),
            "self_attn.v_proj.weight": (kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, q_size),
            "mlp.gate_proj.weight": (intermediate, hidden),
            "mlp.up_proj.weight": (intermediate, hidden),
            "mlp.down_proj.weight": (hidden, intermediate),
        }
        if self.sandwich_norms:
            shapes |= {f"{name}_feedforward_layernorm.weight": (hidden,) for name in ("pre", "post")}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        biased = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if self.qkv_bias else []
        biased += ["self_attn.o_proj"] if self.o_bias else []
        biased += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if self.mlp_bias else []
        return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in biased}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters by their Hugging Face names.

        There is no "lm_head.weight" when embeddings are tied.
        """
        matrix = self.vocab_size, self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": matrix}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[TIED_HEAD] = matrix
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()}
        return shapes


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the language model's config, which Gemma 3's multimodal config contains.

    Raises ValueError if the model is not supported.
    """
    if config.model_type not in SUPPORTED:
        raise _unsupported(f"no model_type {config.model_type!r}; it runs {', '.join(SUPPORTED)}")
    return config.text_config if config.model_type == "gemma3" else config


def text_weights(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the language model's weights out of those of Gemma 3's multimodal model.

    The names are those that the language model has by itself.
    """
    for name, tensor in weights:
        if not name.startswith(("model.vision_tower.", "model.multi_modal_projector.")):
            yield name.replace("model.language_model.", "model.", 1), tensor


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    if config.model_type == "llama":
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (config.sliding_window,) * config.num_hidden_layers
    return tuple(
        config.sliding_window if layer_type == "sliding_attention" else None
        for layer_type in config.layer_types
    )


def rotary_tables(
    config: PretrainedConfig, spec: ModelSpec, max_model_len: int
) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Return cos and sin of every position, for each kind in `spec.rope_kinds`.

    Channels i and i + head_dim // 2 of a head turn by the same angle.

    Returns:
        Kind -> (cos, sin), each float32 [max_model_len, head_dim // 2].

    Raises:
        ValueError: If the frequencies depend on the running length and `max_model_len` is long enough for it
            to matter.
    """
    config = text_config(config)
    tables = {}
    for kind in set(spec.rope_kinds):
        if _rope(config, kind)["rope_type"] == "dynamic" and max_model_len > config.max_position_embeddings:
            raise ValueError(
                f"rope_type 'dynamic' changes its frequencies beyond {config.max_position_embeddings} "
                f"positions, which a KV cache can't follow; max_model_len is {max_model_len}: lower it"
            )
        inv_freq, scaling = _frequencies(config, spec.head_dim, kind)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float), inv_freq)
        tables[kind] = angles.cos() * scaling, angles.sin() * scaling
    return tables


def _rope(config: PretrainedConfig, kind: str | None) -> dict[str, Any]:
    return config.rope_parameters if kind is None else config.rope_parameters[kind]


def _frequencies(config: PretrainedConfig, head_dim: int, kind: str | None) -> tuple[Tensor, float]:
    """Return the angle per position, float32 [head_dim // 2], and the factor on cos and sin.

    Scaled variants come from transformers' own formulas. Raises ValueError for a variant that the engine does
    not have.
    """
    rope = _rope(config, kind)
    rope_type = rope["rope_type"]
    if rope_type not in _ROPE_TYPES:
        raise _unsupported(f"no rope_type {rope_type!r}; it has {', '.join(_ROPE_TYPES)}")
    if rope_type == "default":
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    layer_choice = {} if kind is None else {"layer_type": kind}
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), **layer_choice)
    if inv_freq.numel() * 2 != head_dim:
        num_channels = inv_freq.numel() * 2
        raise _unsupported(
            f"no rotary embedding of {num_channels} of {head_dim} channels of a head, only of all"
        )
    return inv_freq.float(), scaling


def _unsupported(what: str) -> ValueError:
    return ValueError(
        f"the native rollout engine has {what}. This model needs vLLM (actor_rollout_ref.rollout.name=vllm)"
    )


@dataclass(frozen=True)
class ModelWeights:
    """All parameters of a model.

    Attributes:
        embedding: The embedding matrix.
        layers: The parameters of each layer by their names after "model.layers.N.": [out, in] matrices, norms
            and biases.
        norm: The weight of the final norm.
        lm_head: The matrix of the head, which is the embedding's when embeddings are tied.
    """

    embedding: Tensor
    layers: list[dict[str, Tensor]]
    norm: Tensor
    lm_head: Tensor


@torch.no_grad()  # not inference_mode: sharded weights are gathered in this loop, which it does not allow
def collect_weights(
    spec: ModelSpec, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device
) -> tuple[ModelWeights, int]:
    """Collect one full set of parameters.

    Parameters that have the engine's dtype and device are used as they are. A colocated engine on CUDA then
    costs no memory, and sees an optimizer step at once (its KV state does not). On CPU `CpuModel` packs
    copies of the parameters.

    Returns:
        The weights, and the number of bytes of those that had to be cast.

    Raises:
        ValueError: If parameters are unknown, missing or wrongly shaped.
    """
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in checked_weights(weights, spec.parameter_shapes()):
        tensors[name] = tensor.to(device, dtype)
        if tensor.dtype != dtype or tensor.device != device:
            num_bytes += tensors[name].nbytes
    layers = [
        {name: tensors[f"model.layers.{layer}.{name}"] for name in spec.layer_shapes()}
        for layer in range(spec.num_layers)
    ]
    embedding = tensors["model.embed_tokens.weight"]
    norm = tensors["model.norm.weight"]
    return ModelWeights(embedding, layers, norm, tensors.get(TIED_HEAD, embedding)), num_bytes
