"""Tiny random models in shapes that vLLM runs on CPU (head size a multiple of 32), and small helpers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, patch

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl.sessions.engine_contract import Completion, RolloutEngine, SamplingParams
from verl.workers.rollout.vllm.start import prepare_environment

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GEMMA = {**_SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "initializer_range": 0.06}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=64, tie_word_embeddings=False),
    "qwen3-tied": Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, tie_word_embeddings=False),
    "two-heads": Qwen2Config(**{**_SIZES, "num_key_value_heads": 2}, tie_word_embeddings=True),
    "mistral-sliding": MistralConfig(**_SIZES, head_dim=32, sliding_window=7, tie_word_embeddings=False),
    "gemma2": Gemma2Config(**_GEMMA, sliding_window=8),
    "gemma2-uncapped": Gemma2Config(**_GEMMA, sliding_window=8, attn_logit_softcapping=None),
    "gemma3": Gemma3TextConfig(**_GEMMA, sliding_window=8),
}

KV_BYTES = 32 << 20  # of the KV cache of an engine in tests


def write_config(name: str, folder: Path) -> str:
    """A folder with the model's configuration, all that vLLM reads of a model here."""
    config = copy.deepcopy(CONFIGS[name])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return str(folder)


# vLLM's CPU kernel approximates the tanh of Gemma 2's attention soft cap
LOG_PROB_TOLERANCE = dict.fromkeys(CONFIGS, 0.0001) | {"gemma2": 5e-4}


def make_model(
    name: str, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> PreTrainedModel:
    """A random model, matrices times `scale`; biases and norms are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model.to(dtype)


@contextmanager
def scheduled_ahead() -> Iterator[None]:
    """vLLM's CPU build switches asynchronous scheduling off. Here its code runs all the same, with streams
    and events of CUDA that do nothing.
    """
    prepare_environment()
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def leave_it_on(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        configure(config)
        config.scheduler_config.async_scheduling = asked

    with (
        patch.object(CpuPlatform, "check_and_update_config", staticmethod(leave_it_on)),
        patch.multiple(torch.cuda, Event=DEFAULT, Stream=DEFAULT, stream=DEFAULT, current_stream=DEFAULT),
    ):
        yield


def engines_in_use(engine_for: Callable[..., Any]) -> list[Any]:
    return list(inspect.getclosurevars(engine_for).nonlocals["engines"].values())


def random_prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def run(engine: RolloutEngine) -> dict[int, Completion]:
    """Step until nothing can run; the completions by session id."""
    ended: dict[int, Completion] = {}
    while engine.has_runnable:
        for completion in engine.step():
            assert completion.session_id not in ended
            ended[completion.session_id] = completion
    return ended


def generate(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | SamplingParams
) -> list[Completion]:
    """Open all prompts, one turn each, close every session; completions in the order of the prompts."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    ids = [engine.open(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
    ended = run(engine)
    for session_id in ids:
        engine.close(session_id)
    return [ended[session_id] for session_id in ids]


@torch.no_grad()
def reference_logits(
    model: PreTrainedModel, contexts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Hugging Face's float32 logits [tokens of the output, V] before each token of each output."""
    rows = [[*context, *output] for context, output in zip(contexts, outputs, strict=True)]
    longest = max(map(len, rows))
    # padded on the right, which a causal model never looks at
    logits = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).logits.float()
    return [
        logits[index, len(context) - 1 : len(context) + len(output) - 1]
        for index, (context, output) in enumerate(zip(contexts, outputs, strict=True))
    ]


def log_probs_of(logits: Tensor, tokens: Sequence[int], temperature: float = 1.0) -> list[float]:
    ids = torch.tensor(tokens, dtype=torch.int64)[:, None]
    return (logits / temperature).log_softmax(-1).gather(1, ids)[:, 0].tolist()
