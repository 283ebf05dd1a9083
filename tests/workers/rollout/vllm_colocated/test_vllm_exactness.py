"""vLLM's tokens and log-probs are Hugging Face's, for every architecture and after every weight update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_models import (
    LOG_PROB_TOLERANCE,
    generate,
    log_probs_of,
    make_model,
    random_prompts,
    reference_logits,
)

from verl.sessions.engine_contract import SamplingParams


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied", "mistral-sliding", "gemma2", "gemma3"])
def test_greedy_tokens_and_log_probs_equal_transformers_on_100_prompts_after_each_of_three_updates(
    name: str, engine_for: Callable[..., Any]
) -> None:
    engine = engine_for(name)
    prompts = random_prompts(100)
    for version in range(3):
        model = make_model(name, seed=version)
        engine.load_weights(model.named_parameters(), version)
        completions = generate(engine, prompts, SamplingParams(max_tokens=10, temperature=0.0))
        logits = reference_logits(model, prompts, [c.token_ids for c in completions])
        for completion, expected in zip(completions, logits, strict=True):
            # Each token has the largest logit; rounding decides between two that tie.
            chosen = expected.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert float((expected.amax(-1) - chosen).max()) < LOG_PROB_TOLERANCE[name]
            log_probs = pytest.approx(
                log_probs_of(expected, completion.token_ids), abs=LOG_PROB_TOLERANCE[name]
            )
            assert completion.log_probs == log_probs
            assert completion.model_log_probs == log_probs
            assert (completion.version_first, completion.version_last) == (version, version)


@pytest.mark.parametrize("name", ["qwen2-tied", "gemma2-uncapped"])
def test_bfloat16_log_probs_are_near_a_bfloat16_forward_after_each_of_three_updates(
    name: str, engine_for: Callable[..., Any]
) -> None:
    engine = engine_for(name, dtype=torch.bfloat16)
    prompts = random_prompts(32)
    for version in range(3):
        # at full scale the logits reach into the tens, where bfloat16 itself is coarser than the bound
        model = make_model(name, seed=version, dtype=torch.bfloat16, scale=0.4)
        engine.load_weights(model.named_parameters(), version)
        completions = generate(engine, prompts, SamplingParams(max_tokens=10, seed=version))
        logits = reference_logits(model, prompts, [c.token_ids for c in completions])
        errors = [
            abs(a - b)
            for completion, expected in zip(completions, logits, strict=True)
            for a, b in zip(completion.log_probs, log_probs_of(expected, completion.token_ids), strict=True)
        ]
        assert max(errors) < 0.05
