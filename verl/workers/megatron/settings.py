"""What a model on Megatron is made of, and how it is cut; refused here if it can't be, before anything is
read. Imports nothing of Megatron.

    config.json --ModelShape.of--> sizes of the model    ParallelSizes: sizes of the cut
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

ARCHITECTURES = ("qwen2", "qwen3", "llama")  # `model_type` in config.json
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that don't depend on the length


@dataclass(frozen=True)
class ParallelSizes:
    """Processes that share one replica: tensor x pipeline x context of them."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def replica(self) -> int:
        """Processes of one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def words(self) -> str:
        return (
            f"tensor_model_parallel_size={self.tensor}, pipeline_model_parallel_size={self.pipeline}, "
            f"context_parallel_size={self.context}"
        )

    def check(self, world_size: int) -> None:
        """Raises ValueError unless so many processes can be dealt out."""
        if min(self.tensor, self.pipeline, self.context) < 1:
            raise ValueError(f"Parallel sizes: found {self.words}, expected each to be at least 1.")
        if world_size % self.replica:
            raise ValueError(
                f"{self.words} make {self.replica} processes for one replica of the model, but there are "
                f"{world_size} in all, which is no multiple; change trainer.nnodes, trainer.n_gpus_per_node "
                "or these sizes."
            )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder of the Llama family, with tied embeddings or not, biased q, k, v or not (Qwen2),
    normed queries and keys or not (Qwen3).
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_key_heads: int
    head_width: int
    feed_forward: int
    vocabulary: int
    tied: bool
    biased_qkv: bool
    normed_qk: bool
    norm_epsilon: float

    @classmethod
    def of(cls, config: PretrainedConfig) -> ModelShape:
        """Raises ValueError for an architecture, or a setting of one, that is not built here."""
        kind = config.model_type
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"strategy=megatron: found model_type {kind!r}, expected one of {', '.join(ARCHITECTURES)} "
                "(Qwen2, Qwen2.5, Qwen3 and Llama 3); use strategy=fsdp for others."
            )
        for setting, found, expected in _settings(config):
            if found != expected:
                raise ValueError(
                    f"strategy=megatron: found {setting}={found!r} in the model's config.json, expected "
                    f"{expected!r}; use strategy=fsdp for this model."
                )
        rope_type = config.rope_parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"strategy=megatron: found rope_type {rope_type!r} in the model's config.json, expected one "
                f"of {', '.join(ROPE_TYPES)}; use strategy=fsdp for this model."
            )
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            num_heads=heads,
            num_key_heads=config.num_key_value_heads or heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            feed_forward=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=bool(config.tie_word_embeddings),
            biased_qkv=kind == "qwen2",
            normed_qk=kind == "qwen3",
            norm_epsilon=config.rms_norm_eps,
        )

    def padded_vocabulary(self, tensor: int) -> int:
        """Rows of the embedding, with those of zeros that are added so that `tensor` divides."""
        return -(-self.vocabulary // tensor) * tensor

    def check(self, sizes: ParallelSizes) -> None:
        """Raises ValueError unless the model can be cut so."""
        heads_here = self.num_heads // sizes.tensor
        for what, count, size, key in (
            ("attention heads", self.num_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("key and value heads", self.num_key_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("feed-forward columns", self.feed_forward, sizes.tensor, "tensor_model_parallel_size"),
            ("attention heads on each tensor rank", heads_here, sizes.context, "context_parallel_size"),
            ("layers", self.num_layers, sizes.pipeline, "pipeline_model_parallel_size"),
        ):
            if count % size:
                raise ValueError(
                    f"The model has {count} {what}, which {key}={size} does not divide; expected a divisor."
                )
        if (sizes.tensor - 1) * (self.padded_vocabulary(sizes.tensor) // sizes.tensor) >= self.vocabulary:
            raise ValueError(
                f"A vocabulary of {self.vocabulary} tokens can't be dealt out to "
                f"tensor_model_parallel_size={sizes.tensor} ranks; expected fewer."
            )


def _settings(config: PretrainedConfig) -> list[tuple[str, object, object]]:
    """(name, value found, the only value that is built here) of what these architectures may vary in."""
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    return [
        ("hidden_act", config.hidden_act, "silu"),
        ("attention_bias", bool(getattr(config, "attention_bias", False)), False),
        ("mlp_bias", bool(getattr(config, "mlp_bias", False)), False),
        ("use_sliding_window", bool(getattr(config, "use_sliding_window", False)), False),
        ("layer_types", sorted(layer_types), ["full_attention"]),
        ("partial_rotary_factor", config.rope_parameters.get("partial_rotary_factor", 1.0), 1.0),
        ("quantization_config", getattr(config, "quantization_config", None), None),
    ]
