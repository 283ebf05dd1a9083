"""A last layer that answers for the wanted tokens alone gives the same figures and gradients as the whole."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from verl.packing.attention import PACKED_ATTENTION
from verl.packing.packs import pack_rows
from verl.workers.engine.loading import PolicyModel, ValueModel

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=3),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=3, layer_types=["full_attention", "sliding_attention"]
    ),
}


def build(config, is_critic=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).train()
    return ValueModel(model.model) if is_critic else PolicyModel(model)


def micro_batch(share=True):
    """Four rows with gaps in the mask; the first two begin alike, and differ in a sampled token."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 50, (4, 20), generator=generator)
    if share:
        ids[1, :12] = ids[0, :12]
    mask = torch.randint(0, 2, (4, 16), generator=generator)
    mask[:2, 8] = 1
    mask[3] = 0
    attention = torch.ones_like(ids)
    attention[2, 15:] = 0
    mask[2, 11:] = 0
    positions = torch.arange(20).expand(4, 20)
    batch = {"input_ids": ids, "attention_mask": attention, "position_ids": positions, "response_mask": mask}
    return pack_rows(batch, range(4), "cpu")


def loss_of(module, part):
    if isinstance(module, ValueModel):
        return (module(part)[0] - 1).square().sum()
    log_probs, entropy, _ = module(part, 1.0, True)
    return (log_probs * torch.arange(1.0, 1 + len(log_probs))).sum() + entropy.sum()


@pytest.mark.parametrize("saves_memory", [False, True])
@pytest.mark.parametrize("is_critic", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_are_those_of_the_whole_layer(name, is_critic, saves_memory):
    part = micro_batch()
    short, whole = (build(CONFIGS[name], is_critic) for _ in range(2))
    assert short.is_short
    whole.is_short = False
    if saves_memory:
        short.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    losses = [loss_of(module, part) for module in (short, whole)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for loss in losses:
        loss.backward()
    for (key, ours), theirs in zip(short.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=key)


def test_a_pass_without_loss_tokens_gives_zero_gradients_not_none():
    module = build(CONFIGS["qwen2"])
    part = micro_batch()
    row = {
        "input_ids": part.input_ids,
        "attention_mask": torch.ones_like(part.input_ids),
        "position_ids": part.position_ids,
        "response_mask": torch.zeros_like(part.input_ids),
    }
    loss_of(module, pack_rows(row, [0], "cpu")).backward()
    assert all(not p.grad.any() for p in module.parameters())
