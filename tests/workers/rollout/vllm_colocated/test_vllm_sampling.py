"""What is sampled on vLLM: the right distribution, both log-probs, and a seed that decides the tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm_models import VOCAB, generate, log_probs_of, make_model, random_prompts, reference_logits, run

from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.sampler import truncate

Get = Callable[..., Any]


def loaded(engine_for: Get, name: str = "qwen3") -> tuple[Any, Any]:
    model = make_model(name)
    engine = engine_for(name)
    engine.load_weights(model.named_parameters(), 1)
    return engine, model


TRUNCATIONS = [
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 5},
    {"top_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"top_k": 9, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.02},
]


def processed(logits: torch.Tensor, choice: dict[str, Any]) -> torch.Tensor:
    """The logits of the distribution that `choice` samples from."""
    rows = logits.shape[0]
    return truncate(
        logits / choice.get("temperature", 1.0),
        torch.full((rows,), choice.get("top_k", 0)),
        torch.full((rows,), choice.get("top_p", 1.0), dtype=torch.float64),
        torch.full((rows,), choice.get("min_p", 0.0), dtype=torch.float64),
    )


def test_log_probs_are_those_that_were_sampled_from_and_model_log_probs_the_models_own(
    engine_for: Get,
) -> None:
    """Rows of all kinds side by side in one batch, greedy and plain ones too."""
    engine, model = loaded(engine_for)
    choices = [*TRUNCATIONS, {}, {"temperature": 0.0}] * 4
    prompts = random_prompts(len(choices), seed=1)
    params = [SamplingParams(12, seed=seed, **choice) for seed, choice in enumerate(choices)]
    completions = generate(engine, prompts, params)
    logits = reference_logits(model, prompts, [c.token_ids for c in completions])
    for completion, choice, plain in zip(completions, choices, logits, strict=True):
        tokens = completion.token_ids
        sampled_from = plain if choice.get("temperature") == 0.0 else processed(plain, choice)
        assert completion.log_probs == pytest.approx(log_probs_of(sampled_from, tokens), abs=1e-4)
        assert completion.model_log_probs == pytest.approx(log_probs_of(plain, tokens), abs=1e-4)


@pytest.mark.parametrize("choice", [{"temperature": 1.5}, {"temperature": 2.0, "top_k": 12}])
def test_sampled_tokens_pass_a_chi_square_test(choice: dict[str, Any], engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    prompt = [5, 6, 7]
    draws = 6000
    params = [SamplingParams(2, seed=seed, **choice) for seed in range(draws)]
    completions = generate(engine, [prompt] * draws, params)
    contexts = {(): draws}
    for completion in completions:
        first = tuple(completion.token_ids[:1])
        contexts[first] = contexts.get(first, 0) + 1
    common = max((key for key in contexts if key), key=contexts.__getitem__)
    for before, place in (((), 0), (common, 1)):
        tokens = [c.token_ids[place] for c in completions if tuple(c.token_ids[:place]) == before]
        (logits,) = reference_logits(model, [[*prompt, *before]], [[0]])
        expected = processed(logits, choice).softmax(-1)[0] * len(tokens)
        counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
        large = expected >= 5
        observed = torch.cat((counts[large], counts[~large].sum()[None])).double()
        theory = torch.cat((expected[large], expected[~large].sum()[None])).double()
        kept = theory > 0
        assert observed[~kept].sum() == 0
        statistic = ((observed - theory) ** 2 / theory)[kept].sum().item()
        freedom = int(kept.sum()) - 1
        # Wilson and Hilferty: the cube root is nearly normal; 4 sigma is 1 in 30,000
        z = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
        assert freedom > 5
        assert abs(z) < 4


def test_the_seed_decides_the_tokens_whatever_else_is_in_the_batch(engine_for: Get) -> None:
    engine, _ = loaded(engine_for)
    prompts = random_prompts(10, seed=2)
    params = [SamplingParams(12, seed=1000 + seed) for seed in range(10)]
    together = generate(engine, prompts, params)
    alone = [generate(engine, [prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    ids = [
        engine.open(prompt, replace(one, max_tokens=5)) for prompt, one in zip(prompts, params, strict=True)
    ]
    begun = run(engine)
    for session_id in ids:
        engine.resume(session_id, [], SamplingParams(7, seed=1000 + session_id - ids[0]))
    ended = run(engine)
    in_two_turns = [begun[i].token_ids + ended[i].token_ids for i in ids]
    for session_id in ids:
        engine.close(session_id)
    assert in_two_turns == [c.token_ids for c in together]
    first, other = generate(engine, [prompts[0]] * 2, [SamplingParams(12, seed=s) for s in (-1, 2**64 - 1)])
    assert first.token_ids == other.token_ids != together[0].token_ids


def test_preemption_changes_no_token_and_no_log_prob(engine_for: Get) -> None:
    roomy, model = loaded(engine_for)
    tight = engine_for("qwen3", kv_cache_memory_bytes=12 * 32 * 2 * 2 * 64 * 4)  # 12 blocks of 32 positions
    tight.load_weights(model.named_parameters(), 1)
    prompts = [[*prompt, 1, 2, 3] for prompt in random_prompts(8, longest=20, seed=5)]
    params = [SamplingParams(70, seed=seed, temperature=1.2, top_k=20) for seed in range(8)]
    expected, found = (generate(engine, prompts, params) for engine in (roomy, tight))
    assert tight.stats()["preemptions"] > 2
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
