"""Tiny random models and small helpers for the rollout tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from verl.sessions.engine_contract import Completion, SamplingParams
from verl.workers.rollout.native import NativeEngine

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**_SIZES),
    "qwen2-tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2-sliding": Qwen2Config(**_SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    "qwen2-yarn": Qwen2Config(**_SIZES, rope_parameters={**_ROPE, **_YARN}),
    "qwen3": Qwen3Config(**_SIZES, head_dim=12),
    "qwen3-tied-bias": Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True),
    "llama": LlamaConfig(**_SIZES),
    "llama-bias": LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-llama3": LlamaConfig(**_SIZES, rope_parameters={**_ROPE, **_LLAMA3}),
    "llama-llama3-tied": LlamaConfig(
        **_SIZES, rope_parameters={**_ROPE, **_LLAMA3}, tie_word_embeddings=True
    ),
    "llama-linear": LlamaConfig(**_SIZES, rope_parameters={**_ROPE, "rope_type": "linear", "factor": 2.0}),
    "gemma3": Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3},
        head_dim=16,
        sliding_window=7,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3-untied": Gemma3TextConfig(
        **_SIZES,
        head_dim=12,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=False,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "mistral": MistralConfig(**_SIZES, sliding_window=None),
    "mistral-sliding": MistralConfig(**_SIZES, sliding_window=7, head_dim=16),
    "mistral-sliding-tied": MistralConfig(**_SIZES, sliding_window=7, tie_word_embeddings=True),
}


def make_model(name: str = "qwen3", seed: int = 0) -> PreTrainedModel:
    """A random float32 model; biases are random too (transformers starts them at 0)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def make_engine(
    model: PreTrainedModel, max_num_seqs: int = 4, max_model_len: int = 128, **kwargs: Any
) -> NativeEngine:
    engine = NativeEngine(model.config, max_num_seqs, max_model_len, **kwargs)
    engine.load_weights(model.named_parameters(), version=1)
    return engine


def run(engine: NativeEngine) -> dict[int, Completion]:
    """Step until nothing can run; the completions by session id."""
    ended: dict[int, Completion] = {}
    while engine.has_runnable:
        for completion in engine.step():
            assert completion.session_id not in ended
            ended[completion.session_id] = completion
    return ended


def generate(
    engine: NativeEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[Completion]:
    """Open all prompts, one turn each, close every session as its turn ends; completions in prompt order."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    ids = [engine.open(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    ended: dict[int, Completion] = {}
    while engine.has_runnable:
        for completion in engine.step():
            ended[completion.session_id] = completion
            engine.close(completion.session_id)
    return [ended[session_id] for session_id in ids]


@torch.no_grad()
def hf_greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def hf_log_probs(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Entry t: log-prob of token_ids[t] given what stands before it; entry 0 is nan."""
    ids = torch.tensor([list(token_ids)])
    log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return [float("nan"), *log_probs.tolist()]


def random_prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
