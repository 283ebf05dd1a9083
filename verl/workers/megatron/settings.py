"""What a model on Megatron is made of, and how it is cut; refused here if it can't be, before anything is
read. Imports nothing of Megatron.

    config.json --ModelShape.of--> sizes of the model    ParallelSizes: sizes of the cut
    StageLayout: which layers each pipeline stage has
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
        """Rows of the embedding with those that are added, zero and without effect, so that `tensor`
        divides.
        """
        return -(-self.vocabulary // tensor) * tensor

    def check(self, sizes: ParallelSizes, layers_per_virtual_stage: int | None = None) -> None:
        """Raises ValueError unless the model can be cut so."""
        heads_here = self.num_heads // sizes.tensor
        for what, count, size, key in (
            ("attention heads", self.num_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("key and value heads", self.num_key_heads, sizes.tensor, "tensor_model_parallel_size"),
            ("feed-forward columns", self.feed_forward, sizes.tensor, "tensor_model_parallel_size"),
            ("attention heads on each tensor rank", heads_here, sizes.context, "context_parallel_size"),
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
        StageLayout.of(self.num_layers, sizes.pipeline, layers_per_virtual_stage)


@dataclass(frozen=True)
class StageLayout:
    """Layers of the pipeline's stages. A process has `chunks` of them, `layers` layers each: its chunk c is
    stage c * pipeline + (its pipeline rank).

    Worked example: 8 layers, pipeline 2, chunks of 2 layers: process 0 has layers 0, 1 and 4, 5; process 1
    has 2, 3 and 6, 7.
    """

    pipeline: int
    chunks: int
    layers: int

    @classmethod
    def of(cls, num_layers: int, pipeline: int, layers_per_virtual_stage: int | None = None) -> StageLayout:
        """Raises ValueError unless all stages get as many layers."""
        if num_layers % pipeline:
            raise ValueError(
                f"The model has {num_layers} layers, which pipeline_model_parallel_size={pipeline} does not "
                "divide; expected a divisor."
            )
        here = num_layers // pipeline
        if layers_per_virtual_stage is None:
            return cls(pipeline, 1, here)
        if pipeline == 1 or layers_per_virtual_stage < 1 or here % layers_per_virtual_stage:
            raise ValueError(
                f"num_layers_per_virtual_pipeline_stage: found {layers_per_virtual_stage}, expected a number "
                f"that divides the {here} layers of each of {pipeline} pipeline ranks (2 or more), or null."
            )
        return cls(pipeline, here // layers_per_virtual_stage, layers_per_virtual_stage)

    def place(self, layer: int) -> tuple[int, int, int]:
        """(pipeline rank, chunk, number within the chunk) of a layer of the model."""
        stage, number = divmod(layer, self.layers)
        chunk, rank = divmod(stage, self.pipeline)
        return rank, chunk, number

    @property
    def first(self) -> tuple[int, int]:
        """(pipeline rank, chunk) that embeds."""
        return 0, 0

    @property
    def last(self) -> tuple[int, int]:
        """(pipeline rank, chunk) that has the head."""
        return self.pipeline - 1, self.chunks - 1


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
