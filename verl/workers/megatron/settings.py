"""The sizes of a model on Megatron, and of its cut.

    config.json --ModelShape.of--> sizes of the model    ParallelSizes: sizes of the cut

A model that can't be built or cut is refused here, before anything is read. This module imports nothing of
Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

ARCHITECTURES = ("qwen2", "qwen3", "llama")  # `model_type` in config.json
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that don't depend on the length


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of a replica, which takes tensor x pipeline x context processes."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    @property
    def replica(self) -> int:
        """Return the number of processes of one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def description(self) -> str:
        return (
            f"tensor_model_parallel_size={self.tensor}, pipeline_model_parallel_size={self.pipeline}, "
            f"context_parallel_size={self.context}"
        )

    def check(self, world_size: int) -> None:
        """Check that so many processes can be divided into replicas.

        Raises ValueError if they can't.
        """
        if min(self.tensor, self.pipeline, self.context) < 1:
            raise ValueError(f"Parallel sizes: found {self.description}, expected each to be at least 1.")
        if world_size % self.replica:
            raise ValueError(
                f"{self.description} make {self.replica} processes for one replica of the model, but "
                f"there are {world_size} in all, which is no multiple; change trainer.nnodes, "
                "trainer.n_gpus_per_node or these sizes."
            )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder of the Llama family.

    Embeddings may be tied. q, k and v may be biased (Qwen2), and queries and keys may be normed (Qwen3).
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
        """Read the sizes from a model's configuration.

        Raises ValueError for an architecture, or a setting of one, that is not supported here.
        """
        kind = config.model_type
        if kind not in ARCHITECTURES:
            raise ValueError(
                f"strategy=megatron: found model_type {kind!r}, expected one of {', '.join(ARCHITECTURES)} "
                "(Qwen2, Qwen2.5, Qwen3 and Llama 3); use strategy=fsdp for others."
            )
        for setting, value, expected in _restricted_settings(config):
            if value != expected:
                raise ValueError(
                    f"strategy=megatron: found {setting}={value!r} in the model's config.json, expected "
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
        """Return the number of rows of the embedding, padded so that `tensor` divides it.

        The added rows are zeros.
        """
        return -(-self.vocabulary // tensor) * tensor

    def check(self, sizes: ParallelSizes) -> None:
        """Check that the model can be cut into these sizes.

        Raises ValueError if it can't.
        """
        heads_per_rank = self.num_heads // sizes.tensor
        for things, count, size, key in (
            ("attention heads", self.num_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("key and value heads", self.num_key_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("feed-forward columns", self.feed_forward, sizes.tensor, "tensor_model_parallel_size"),
            ("attention heads on each tensor rank", heads_per_rank, sizes.context, "context_parallel_size"),
            ("layers", self.num_layers, sizes.pipeline, "pipeline_model_parallel_size"),
        ):
            if count % size:
                raise ValueError(
                    f"The model has {count} {things}, which {key}={size} does not divide; expected a divisor."
                )
        if (sizes.tensor - 1) * (self.padded_vocabulary(sizes.tensor) // sizes.tensor) >= self.vocabulary:
            raise ValueError(
                f"A vocabulary of {self.vocabulary} tokens can't be dealt out to "
                f"tensor_model_parallel_size={sizes.tensor} ranks; expected fewer."
            )


def _restricted_settings(config: PretrainedConfig) -> list[tuple[str, object, object]]:
    """Return (name, value in the model, the only supported value) of the settings that may vary."""
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
