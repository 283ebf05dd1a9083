"""Packed attention in real Hugging Face models against their own eager attention, sequence by sequence."""

import importlib.util

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

from verl.packing.attention import PACKED_ATTENTION, Packing, packed_attention_forward, use_flash_3

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
GEMMA3 = SIZES | {  # four query heads to one of keys, of another width than hidden / heads
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "sliding_window": 3,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen2 window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "mistral window": MistralConfig(**SIZES, sliding_window=3),
    "gemma": GemmaConfig(**SIZES),
    "gemma3": Gemma3TextConfig(**GEMMA3),
    "gemma3, window of 1": Gemma3TextConfig(**GEMMA3 | {"sliding_window": 1, "attention_bias": True}),
    "phi": PhiConfig(**SIZES),
}
LENGTHS = (7, 3, 3, 1, 9)


def build(name, attention):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).train()


def run(model, ids, positions, **kwargs):
    hidden = model.base_model(ids, position_ids=positions, use_cache=False, **kwargs).last_hidden_state
    return model.get_output_embeddings()(hidden)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logits_and_gradients_equal_those_of_each_sequence_alone(name):
    packed = build(name, PACKED_ATTENTION)
    eager = build(name, "eager")
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 50, (1, n), generator=generator) for n in LENGTHS]
    weights = [torch.randn(n, 50, generator=generator) for n in LENGTHS]
    positions = [torch.arange(n)[None] for n in LENGTHS]
    got = run(packed, torch.cat(ids, 1), torch.cat(positions, 1), packing=Packing.of(LENGTHS, "cpu"))
    want = torch.cat([run(eager, *pair) for pair in zip(ids, positions, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    (got * torch.cat(weights)).sum().backward()
    (want * torch.cat(weights)).sum().backward()
    for (key, ours), theirs in zip(packed.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=key)


def test_what_packed_attention_cannot_do_is_refused():
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ValueError, match="without packing="):
        packed_attention_forward(torch.nn.Module(), q, q, q, None)
    with pytest.raises(ValueError, match="no 'softcap'"):
        packed_attention_forward(
            torch.nn.Module(), q, q, q, None, packing=Packing.of((3,), "cpu"), softcap=50.0
        )


@pytest.mark.parametrize(
    ("package", "capability", "taken"),
    [
        ("flash_attn_interface", (9, 0), True),
        ("flash_attn_interface", (8, 0), False),
        ("another", (9, 0), False),
    ],
)
def test_flash_attention_3_is_taken_where_its_package_and_a_hopper_gpu_are(
    monkeypatch, package, capability, taken
):
    find_spec = importlib.util.find_spec
    activated = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == package or find_spec(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    assert use_flash_3() is taken and activated == ["FA3"] * taken


def test_flash_attention_3_that_does_not_fit_is_not_taken(monkeypatch, caplog):
    def refuse(name):
        raise RuntimeError("no backward kernels")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", refuse)
    assert use_flash_3() is False and "no backward kernels" in caplog.text
