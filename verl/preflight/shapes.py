"""The parameters of a model by name and shape, from its configuration alone.

    config.json -> a skeleton on torch's meta device (no memory, no weights) -> ModelShapes

The skeleton is the class that training loads, with the LoRA adapters that the configuration asks for, so the
numbers are those of the real model, whichever it is.
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
from verl.workers.engine.optim import hidden_matrices


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
    """Widths of a decoder: hidden states; the MLP for one token (all experts that a token takes together);
    queries and keys; vocabulary. qk_norm: queries and keys are normed.
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

    @property
    def has_adapters(self) -> bool:
        return any(p.is_adapter for p in self.parameters)


def policy_shapes(model: Mapping[str, Any], with_adapters: bool = True) -> ModelShapes:
    """Of the policy that a block `actor_rollout_ref.model` describes. ValueError: it can't be read."""
    return _shapes(model, AutoModelForCausalLM, with_adapters and wants_adapters(model))


def value_shapes(model: Mapping[str, Any]) -> ModelShapes:
    """Of the critic that a model block (`critic.model`) describes: the backbone and a scalar head."""
    adapts = wants_adapters(model)
    shapes = _shapes(model, AutoModel, adapts)
    head = [("value_head.weight", (1, shapes.dims.hidden)), ("value_head.bias", (1,))]
    root = (*shapes.root, *(Parameter(name, shape, True, adapts, False) for name, shape in head))
    return ModelShapes(shapes.layers, root, shapes.dims, has_vocab_head=False)


def _shapes(block: Mapping[str, Any], auto_class: Any, adapts: bool) -> ModelShapes:
    config = load_hf_config(block)
    trusts = block.get("trust_remote_code", False)
    with torch.device("meta"):
        skeleton: PreTrainedModel = auto_class.from_config(config, trust_remote_code=trusts)
    if adapts:
        add_adapters(skeleton, adapter_config(block), str(block["path"]))
    matrices = {id(p) for p in hidden_matrices(skeleton.base_model)}
    seen: set[int] = set()

    def describe(prefix: str, module: torch.nn.Module) -> tuple[Parameter, ...]:
        new = [(name, p) for name, p in module.named_parameters(prefix) if id(p) not in seen]
        seen.update(id(p) for _, p in new)
        return tuple(
            Parameter(name, tuple(p.shape), p.requires_grad, ".lora_" in name, id(p) in matrices)
            for name, p in new
        )

    layer_classes = set(skeleton._no_split_modules or ())
    layers = [
        describe(prefix, module)
        for prefix, module in skeleton.named_modules()
        if type(module).__name__ in layer_classes
    ]
    return ModelShapes(
        tuple(layers), describe("", skeleton), _dims(config), auto_class is AutoModelForCausalLM
    )


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
