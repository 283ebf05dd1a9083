"""The engine's view of the policy's parameters: references where possible, else one cast per update.

(Hugging Face name, tensor) pairs -> `WeightStore.update` -> `ModelWeights`, which the forward pass reads.
When the actor's parameters have the engine's dtype and device they are used as they are: on CUDA a colocated
engine then costs no memory, and sees an optimizer step at once (its KV state does not: see `NativeEngine`).
On CPU `CpuModel` packs copies of what it gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.workers.rollout.native.architecture import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; [out, in] matrices; biases and norms are None where the model has none.

    `attn_norm` and `mlp_norm` come before attention and MLP, `attn_out_norm` and `mlp_out_norm` (Gemma)
    after them.
    """

    attn_norm: Tensor
    attn_out_norm: Tensor | None
    mlp_norm: Tensor
    mlp_out_norm: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    o_bias: Tensor | None
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class ModelWeights:
    """All parameters in the order in which the forward pass meets them."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class WeightStore:
    """One tensor per parameter name; casts into storage of its own only where dtype or device differ.

    With `copies` every tensor goes into storage of its own: those given are made for each update (gathered,
    merged), and a CUDA graph must find the weights where they were.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, copies: bool = False
    ) -> None:
        self._spec = spec
        self._copies = copies
        self._dtype = dtype
        self._device = device
        self._shapes = spec.parameter_shapes()
        self._own: dict[str, Tensor] = {}

    @torch.no_grad()  # not inference_mode: sharded weights are gathered in this loop, which it does not allow
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> ModelWeights:
        """Take one full set of parameters. ValueError for unknown, missing or wrongly shaped ones."""
        taken: dict[str, Tensor] = {}
        unknown: list[str] = []
        for name, tensor in weights:
            if name not in self._shapes:
                unknown.append(name)
                continue
            if tuple(tensor.shape) != self._shapes[name]:
                raise ValueError(
                    f"weight {name} has shape {tuple(tensor.shape)}; "
                    f"the model's config says {self._shapes[name]}"
                )
            taken[name] = self._take(name, tensor.detach())
        if self._spec.tie_word_embeddings and "model.embed_tokens.weight" in taken:
            taken.setdefault("lm_head.weight", taken["model.embed_tokens.weight"])
        missing = [name for name in self._shapes if name not in taken]
        if unknown or missing:
            raise ValueError(
                f"the weights don't fit the model's config: {_some('unknown', unknown)}; "
                f"{_some('missing', missing)}. Send (Hugging Face name, full tensor) pairs of the whole model"
            )
        return self._assemble(taken)

    @property
    def num_bytes(self) -> int:
        """Bytes of the casts."""
        return sum(tensor.nbytes for tensor in self._own.values())

    def clear(self) -> None:
        """Give the casts' memory back."""
        self._own = {}

    def _take(self, name: str, tensor: Tensor) -> Tensor:
        if tensor.dtype == self._dtype and tensor.device == self._device and not self._copies:
            self._own.pop(name, None)
            return tensor
        if name not in self._own:
            self._own[name] = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        return self._own[name].copy_(tensor)

    def _assemble(self, taken: dict[str, Tensor]) -> ModelWeights:
        layers = []
        sandwich = self._spec.sandwich_norms
        before_mlp = "pre_feedforward_layernorm.weight" if sandwich else "post_attention_layernorm.weight"
        for index in range(self._spec.num_layers):
            prefix = f"model.layers.{index}."
            attn, mlp = prefix + "self_attn.", prefix + "mlp."
            layers.append(
                LayerWeights(
                    attn_norm=taken[prefix + "input_layernorm.weight"],
                    attn_out_norm=taken[prefix + "post_attention_layernorm.weight"] if sandwich else None,
                    mlp_norm=taken[prefix + before_mlp],
                    mlp_out_norm=taken.get(prefix + "post_feedforward_layernorm.weight"),
                    q=taken[attn + "q_proj.weight"],
                    k=taken[attn + "k_proj.weight"],
                    v=taken[attn + "v_proj.weight"],
                    o=taken[attn + "o_proj.weight"],
                    gate=taken[mlp + "gate_proj.weight"],
                    up=taken[mlp + "up_proj.weight"],
                    down=taken[mlp + "down_proj.weight"],
                    q_norm=taken.get(attn + "q_norm.weight"),
                    k_norm=taken.get(attn + "k_norm.weight"),
                    q_bias=taken.get(attn + "q_proj.bias"),
                    k_bias=taken.get(attn + "k_proj.bias"),
                    v_bias=taken.get(attn + "v_proj.bias"),
                    o_bias=taken.get(attn + "o_proj.bias"),
                    gate_bias=taken.get(mlp + "gate_proj.bias"),
                    up_bias=taken.get(mlp + "up_proj.bias"),
                    down_bias=taken.get(mlp + "down_proj.bias"),
                )
            )
        return ModelWeights(
            embedding=taken["model.embed_tokens.weight"],
            layers=tuple(layers),
            norm=taken["model.norm.weight"],
            lm_head=taken["lm_head.weight"],
        )


def _some(what: str, names: list[str], most: int = 5) -> str:
    listed = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    return f"{len(names)} {what}" + (f" ({listed})" if names else "")
