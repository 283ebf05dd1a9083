"""Policies and critics on Megatron: a process's stage of a model, and the stage's outputs.

    Hugging Face folder --build_model--> BuiltModel(stage, weights)
    PackedMicroBatch --stage(pack, **options)--> hidden states for the next stage, or outputs of the last one

Every stage is called with the same micro-batch. The first stage embeds its tokens, the others take the hidden
states that Megatron's schedule gives them (`set_input_tensor`). With context parallelism each process takes
its share of the tokens. With tensor parallelism each tensor rank keeps a part of those between its matrices.
Packs are padded so that they can be divided. The last stage's outputs are those of
`verl.workers.engine.loading`, for all distinct loss tokens of the micro-batch, and the same on each of the
stage's processes: (log_probs, entropy, sum_pi_squared) [U] of a policy, (values,) [U] of a critic.

Gradients: each process of the last stage computes a loss from these outputs. The gradient that a process
finds for a weight must be summed over its context and data groups. For weights with `sequence_parallel`, and
for those of the norms of queries and keys, it must be summed over the tensor group as well. Megatron's
`finalize_model_grads` does both, without a division. The configuration says `calculate_per_token_loss`, so
the schedule's loss function returns (loss, torch.tensor(0), metrics), where 0 tokens mean that nothing is
divided by them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from verl.packing.linear_logprob import linear_log_prob
from verl.packing.packs import PackedMicroBatch, ShardedMicroBatch, shard_micro_batch
from verl.workers.engine.cuda_layers import can_compile, is_large_enough_to_compile
from verl.workers.engine.loading import initial_value_head, load_hf_config
from verl.workers.engine.lora import wants_adapters
from verl.workers.megatron import cpu_support, parallel_state
from verl.workers.megatron.layers import PackedTokens, RMSNorm, layer_spec, transformer_config
from verl.workers.megatron.settings import ModelShape, ParallelSizes
from verl.workers.megatron.weights import Piece, Read, WeightMap, read_folder


class _Stage(GPTModel):
    """Some consecutive layers of a decoder, with the embedding if they are the first.

    With `keeps_head` the last stage has Megatron's output matrix, which is tied to the embedding if the
    model's is.
    """

    def __init__(self, config: TransformerConfig, shape: ModelShape, rotary: nn.Module, keeps_head: bool):
        num_layers = shape.num_layers // config.pipeline_model_parallel_size
        layers = TransformerBlockSubmodules(layer_specs=[layer_spec(shape)] * num_layers, layer_norm=RMSNorm)
        super().__init__(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=shape.padded_vocabulary(config.tensor_model_parallel_size),
            max_sequence_length=0,  # there is no table of positions
            pre_process=mpu.is_pipeline_first_stage(),
            post_process=mpu.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=shape.tied and keeps_head,
            position_embedding_type="none",
        )
        self.shape = shape
        self.rotary = rotary  # Hugging Face's module, which returns (cos, sin), each [1, t, D]

    def _hidden_states(self, pack: PackedMicroBatch, sharded: ShardedMicroBatch | None) -> Tensor:
        """Return [t, 1, D] after this stage's layers, for the t tokens of this process and tensor rank."""
        local_pack = pack if sharded is None else sharded.local
        like = torch.empty((), dtype=self.config.params_dtype, device=local_pack.position_ids.device)
        cos, sin = self.rotary(like, local_pack.position_ids)
        embedded = self.embedding(local_pack.input_ids, local_pack.position_ids) if self.pre_process else None
        hidden: Tensor = self.decoder(
            hidden_states=embedded,
            attention_mask=None,
            packed_seq_params=PackedTokens(packing=local_pack.packing, cos=cos[0], sin=sin[0]),
        )
        return hidden

    def _pad_and_shard(self, pack: PackedMicroBatch) -> tuple[PackedMicroBatch, ShardedMicroBatch | None]:
        """Return the micro-batch, padded so that it can be cut, and this process's share of its context."""
        pack = padded(pack, self.config.tensor_model_parallel_size * self.config.context_parallel_size)
        if self.config.context_parallel_size == 1:
            return pack, None
        return pack, shard_micro_batch(pack, mpu.get_context_parallel_group())


class PolicyStage(_Stage):
    """A stage of a causal language model."""

    def forward(
        self,
        micro_batch: PackedMicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_pi_squared: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        """Return the hidden states [t, 1, D] or, in the last stage, (log_probs, entropy, sum_pi_squared).

        These are [U] float32 each, with one number for each distinct loss token; see `linear_log_prob`.
        """
        pack, sharded = self._pad_and_shard(micro_batch)
        hidden = self._hidden_states(pack, sharded)
        if not self.post_process:
            return hidden
        local_pack = pack if sharded is None else sharded.local
        group = mpu.get_tensor_model_parallel_group()
        hidden = gather_from_sequence_parallel_region(hidden)
        rows = hidden[:, 0].index_select(0, local_pack.predicted_from)
        weight = self.output_layer.weight
        if weight is None:
            weight = self.shared_embedding_or_output_weight()
        options = temperature, with_entropy, with_sum_pi_squared
        size = self.shape.vocabulary
        outputs = linear_log_prob(rows, weight, local_pack.labels, *options, group=group, vocabulary=size)
        log_probs, entropy, sum_pi_squared = outputs if sharded is None else sharded.gather(outputs)
        return log_probs, entropy, sum_pi_squared


class ValueStage(_Stage):
    """A stage of a backbone with a scalar head."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.post_process:
            del self.output_layer
            weight = self.decoder.final_layernorm.weight
            self.value_head = nn.utils.skip_init(
                nn.Linear, self.shape.hidden, 1, device=weight.device, dtype=weight.dtype
            )

    def forward(self, micro_batch: PackedMicroBatch) -> Tensor | tuple[Tensor, ...]:
        """Return the hidden states [t, 1, D] or, in the last stage, (values,).

        The values are [U] float32, one for each distinct loss token.
        """
        pack, sharded = self._pad_and_shard(micro_batch)
        hidden = self._hidden_states(pack, sharded)
        if not self.post_process:
            return hidden
        local_pack = pack if sharded is None else sharded.local
        # every tensor rank computes all values, and each its own gradient
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        rows = hidden[:, 0].index_select(0, local_pack.predicted_from)
        values = self.value_head(rows).squeeze(-1).float()
        return (values,) if sharded is None else sharded.gather([values])


@dataclass(frozen=True)
class BuiltModel:
    """The part of a model that a process has.

    Attributes:
        stage: this process's layers.
        weights: the parameters of the whole model and their names. It refers to the stage's
            `named_parameters()`.
        config: Megatron's configuration. An engine may set its own hooks in it.
        shape: the model's sizes.
        hugging_face: the model's config.json.
    """

    stage: PolicyStage | ValueStage
    weights: WeightMap
    config: TransformerConfig
    shape: ModelShape
    hugging_face: PretrainedConfig

    def parameter(self, name: str) -> Tensor:
        """Return the parameter that `WeightMap` asks for by its name."""
        return self.stage.get_parameter(name)


def _compiles(device: torch.device, num_parameters: int) -> bool:
    return device.type == "cuda" and is_large_enough_to_compile(num_parameters) and can_compile()


def build_model(
    model_config: Mapping[str, Any],
    sizes: ParallelSizes,
    device: torch.device,
    dtype: torch.dtype,
    is_policy: bool = True,
) -> BuiltModel:
    """Build this process's part of a model, filled from the model's folder.

    Each process reads its own slices. All processes call the function together. The groups are created if
    they do not exist yet (`parallel_state.initialize`).

    Args:
        model_config: an `actor_rollout_ref.model` or `critic.model` block.
        sizes: the sizes of the cut.
        device: the device of parameters and computation.
        dtype: the dtype of parameters and computation.
        is_policy: True for a `PolicyStage`. False for a `ValueStage`, whose head is the same for every run
            and cut.

    Raises:
        ValueError: the folder, the architecture, a setting of it or a size does not fit. Nothing was read.
    """
    if wants_adapters(model_config):
        raise ValueError(
            "strategy=megatron trains no LoRA adapters; set model.lora_rank=0 or use strategy=fsdp."
        )
    hugging_face = load_hf_config(model_config)
    shape = ModelShape.of(hugging_face)
    shape.check(sizes)
    parallel_state.initialize(sizes, device)
    recompute = bool(model_config.get("enable_gradient_checkpointing"))
    weights = WeightMap(shape, sizes, has_head=is_policy)
    compiles = _compiles(device, sum(math.prod(dims) for dims in weights.shapes().values()))
    config = transformer_config(shape, sizes, device, dtype, recompute, compiles)
    stage_class: Any = PolicyStage if is_policy else ValueStage
    rotary: Any = LlamaRotaryEmbedding  # the same in Qwen2 and Qwen3
    with cpu_support.cuda_names(device):
        stage = stage_class(config, shape, rotary(hugging_face), keeps_head=is_policy)
    built = BuiltModel(stage.to(device), weights, config, shape, hugging_face)
    # Megatron's gradient norm needs a mark on parameters that are cut over tensor ranks. Megatron sets the
    # mark when it draws initial weights, which it does not do here.
    for parameter in weights.local_parameters:
        tensor = built.parameter(parameter.name)
        cut = parameter.pieces[0].cut
        if cut is not None and not hasattr(tensor, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(tensor, True, cut, 1)
    weights.fill(built.parameter, initial_weights(model_config, built))
    return built


def initial_weights(model_config: Mapping[str, Any], built: BuiltModel) -> Read:
    """Return a function that reads the weights that a model begins with.

    It reads them in the dtypes of the model's folder, for `WeightMap.fill` and `local_tensor`.
    """
    folder = Path(model_config["path"]).expanduser()
    if not folder.is_dir():  # a model of the hub, taken from its cache or downloaded
        folder = Path(snapshot_download(str(folder), allow_patterns=["*.safetensors*", "*.json"]))
    in_folder = read_folder(folder)
    value_head: dict[str, Tensor] = {}
    if not built.weights.has_head:
        initial = initial_value_head(built.shape.hidden)
        value_head = {f"value_head.{kind}": tensor for kind, tensor in initial.items()}

    def read(piece: Piece, region: tuple[slice, ...]) -> Tensor:
        return value_head[piece.name][region] if piece.name in value_head else in_folder(piece, region)

    return read


def padded(pack: PackedMicroBatch, multiple: int) -> PackedMicroBatch:
    """Return the micro-batch with so many tokens that `multiple` divides their number.

    The padding is a sequence of its own at the end, to which no token attends and which predicts nothing.
    """
    num_tokens = pack.input_ids.shape[1]
    num_padding = -num_tokens % multiple
    if not num_padding:
        return pack
    zeros = pack.input_ids.new_zeros(1, num_padding)
    packing = pack.packing
    key_index = packing.key_index
    if key_index is not None:
        padding_index = torch.arange(num_tokens, num_tokens + num_padding, device=key_index.device)
        key_index = torch.cat([key_index, padding_index])
    longer_packing = type(packing).of(
        [*packing.seq_lens, num_padding], zeros.device, [*packing.key_lens, num_padding], key_index
    )
    return replace(
        pack,
        input_ids=torch.cat([pack.input_ids, zeros], dim=1),
        position_ids=torch.cat([pack.position_ids, zeros], dim=1),
        packing=longer_packing,
    )
