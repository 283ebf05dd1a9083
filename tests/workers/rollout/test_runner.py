"""PagedRunner: the same numbers as Hugging Face, however the tokens come and wherever their blocks lie."""

from __future__ import annotations

import pytest
import torch
from rollout_models import CONFIGS, hf_log_probs, make_model, random_prompts
from step_driver import StepDriver
from transformers import PreTrainedModel

from verl.workers.rollout.native.runner import PagedRunner

LONGEST = 64


def _runner(model: PreTrainedModel, dtype: torch.dtype = torch.float32, block_size: int = 8) -> PagedRunner:
    runner = PagedRunner(model.config, dtype, "cpu", block_size, LONGEST)
    runner.update_weights(model.named_parameters())
    return runner


def _check(
    model: PreTrainedModel, driver: StepDriver, prompts: list[list[int]], tolerance: float = 1e-4
) -> None:
    tokens, log_probs, model_log_probs = driver.generate(prompts, 24)
    for prompt, sampled, ours, plain in zip(prompts, tokens, log_probs, model_log_probs, strict=True):
        expected = hf_log_probs(model, prompt + sampled)[len(prompt) :]
        assert ours == pytest.approx(expected, abs=tolerance)
        assert plain == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_are_hugging_faces(name: str) -> None:
    model = make_model(name)
    _check(model, StepDriver(_runner(model), LONGEST, 5), random_prompts(5))


@pytest.mark.parametrize("name", ["qwen2-sliding", "qwen3", "gemma2", "gemma3"])
def test_log_probs_are_hugging_faces_in_bfloat16(name: str) -> None:
    model = make_model(name).to(torch.bfloat16)
    _check(model, StepDriver(_runner(model, torch.bfloat16), LONGEST, 5), random_prompts(5), tolerance=0.3)
