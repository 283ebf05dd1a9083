"""The parameters of a model by name and shape, from its configuration alone.

    config.json -> a skeleton on torch's meta device (no memory, no weights) -> ModelShapes

The skeleton is the class that training loads, with the LoRA adapters that the configuration asks for, so that
the numbers are those of the real model, whichever it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.workers.engine.loading import load_hf_config
from verl.workers.engine.lora import adapter_config, add_adapters, wants_adapters
from verl.workers.engine.muon import hidden_matrices


@dataclass(frozen=True)
class Parameter:
    """One tensor. trained: it has a gradient. is_adapter: of LoRA, float32 whatever the model's dtype is.
    is_matrix: of a linear layer of the decoder (what Muon trains).
    """

    name: str
    shape: tuple[int, ...]
    trained: bool
    is_adapter: bool
    is_matrix: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Dims:
    """Widths of a decoder: D, per token of the MLP (of all experts that a token takes), of queries and of
    keys; vocabulary; qk_norm: queries and keys are normed.
    """

    hidden: int
    intermediate: int
    queries: int
    keys: int
    vocab: int
    qk_norm: bool


@dataclass(frozen=True)
class ModelShapes:
    """layers: the parameters of each decoder layer (a unit of sharding). root: all others, tied ones once.
    has_vocab_head: hidden states become log-probs of tokens, not values.
    """

    layers: tuple[tuple[Parameter, ...], ...]
    root: tuple[Parameter, ...]
    dims: Dims
    has_vocab_head: bool

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*(p for layer in self.layers for p in layer), *self.root)

    @property
    def num_parameters(self) -> int:
        """Without adapters; tied ones once."""
        return sum(p.numel for p in self.parameters if not p.is_adapter)


def policy_shapes(model: Mapping[str, Any], with_adapters: bool = True) -> ModelShapes:
    """Of the policy that a block `actor_rollout_ref.model` describes. ValueError: it can't be read."""
    return _shapes(model, AutoModelForCausalLM, with_adapters)


def value_shapes(model: Mapping[str, Any]) -> ModelShapes:
    """Of the critic that a model block (`critic.model`) describes: the backbone and a scalar head."""
    shapes = _shapes(model, AutoModel, with_adapters=True)
    head = (
        Parameter("value_head.weight", (1, shapes.dims.hidden), True, wants_adapters(model), False),
        Parameter("value_head.bias", (1,), True, wants_adapters(model), False),
    )
    return ModelShapes(shapes.layers, (*shapes.root, *head), shapes.dims, has_vocab_head=False)


def _shapes(block: Mapping[str, Any], auto_class: Any, with_adapters: bool) -> ModelShapes:
    config = load_hf_config(block)
    with torch.device("meta"):
        skeleton: PreTrainedModel = auto_class.from_config(
            config, trust_remote_code=block.get("trust_remote_code", False)
        )
    if with_adapters and wants_adapters(block):
        add_adapters(skeleton, adapter_config(block), str(block["path"]))
    matrices = {id(p) for p in hidden_matrices(skeleton.base_model)}
    in_layers: list[tuple[Parameter, ...]] = []
    seen: set[int] = set()

    def described(named: list[tuple[str, torch.nn.Parameter]]) -> tuple[Parameter, ...]:
        found = []
        for name, parameter in named:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_adapter = ".lora_" in name
            sizes = tuple(parameter.shape)
            found.append(
                Parameter(name, sizes, parameter.requires_grad, is_adapter, id(parameter) in matrices)
            )
        return tuple(found)

    layer_classes = set(skeleton._no_split_modules or ())
    for prefix, module in skeleton.named_modules():
        if type(module).__name__ in layer_classes:
            in_layers.append(described([(f"{prefix}.{name}", p) for name, p in module.named_parameters()]))
    root = described(list(skeleton.named_parameters()))
    return ModelShapes(tuple(in_layers), root, _dims(config), auto_class is AutoModelForCausalLM)


def _dims(config: PretrainedConfig) -> Dims:
    fields = config.get_text_config().to_dict()
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or hidden // heads
    intermediate = fields.get("intermediate_size") or 4 * hidden
    if fields.get("num_experts_per_tok"):
        intermediate = fields["num_experts_per_tok"] * (fields.get("moe_intermediate_size") or intermediate)
    return Dims(
        hidden=hidden,
        intermediate=intermediate,
        queries=heads * head_dim,
        keys=(fields.get("num_key_value_heads") or heads) * head_dim,
        vocab=fields["vocab_size"],
        qk_norm=fields["model_type"].startswith(("qwen3", "gemma3")),
    )
