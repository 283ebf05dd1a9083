"""The native engine gives Hugging Face's tokens and log-probs, and samples from the model's distribution.

Greedy tokens are checked one by one against the reference's logits after the same tokens: each must be the
largest logit. Where the reference's two largest are closer than 1e-5, rounding decides between them and
either may come; such places are counted and must be rare.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from rollout_models import VOCAB, generate, make_engine, make_model, random_prompts
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.sessions.engine_contract import Completion, SamplingParams

ARCHITECTURES = ["qwen2-tied", "qwen3", "llama-llama3", "mistral-sliding-tied", "gemma3-untied", "gemma3"]
NEAR = 1e-5
NEW_TOKENS = 16


@torch.no_grad()
def _reference(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> list[torch.Tensor]:
    """Hugging Face's logits float32 [tokens, vocab] at the places of the sampled tokens, padded right."""
    rows = [[*prompt, *c.token_ids] for prompt, c in zip(prompts, completions, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    logits = model(ids, attention_mask=mask).logits.float()
    return [logits[i, len(prompt) - 1 : len(rows[i]) - 1] for i, prompt in enumerate(prompts)]


def _check_greedy(completions: Sequence[Completion], references: Sequence[torch.Tensor]) -> None:
    near = total = 0
    for completion, logits in zip(completions, references, strict=True):
        chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        two = logits.topk(2, -1).values
        assert bool((two[:, 0] - chosen < NEAR).all()), "a token that is not the largest logit"
        near += int((two[:, 0] - two[:, 1] < NEAR).sum())
        total += len(chosen)
    assert near <= 0.001 * total


def _log_probs(completions: Sequence[Completion], references: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference's log-probs of all sampled tokens."""
    return torch.cat(
        [
            logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            for completion, logits in zip(completions, references, strict=True)
        ]
    )


def _disturb(model: PreTrainedModel, seed: int) -> None:
    """What an optimizer step does: all parameters move, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.add_(noise * 0.1 * parameter.abs().mean())


def _run_through_updates(name: str, num_prompts: int) -> None:
    """Greedy turns of all prompts and sampled ones of some, after each of four weight versions."""
    model = make_model(name)
    engine = make_engine(model, max_num_seqs=64, max_model_len=64, block_size=8)
    prompts = random_prompts(num_prompts)
    prompts += prompts[: num_prompts // 4]
    params = [SamplingParams(NEW_TOKENS, temperature=0.0)] * num_prompts
    params += [SamplingParams(NEW_TOKENS, seed=seed) for seed in range(num_prompts // 4)]
    expected = torch.zeros(num_prompts * NEW_TOKENS + num_prompts // 4 * NEW_TOKENS)
    for version in range(2, 6):
        completions = generate(engine, prompts, params)
        references = _reference(model, prompts, completions)
        before = expected
        expected = _log_probs(completions, references)
        assert float((before - expected).abs().max()) > 0.01  # the update did change the model
        _check_greedy(completions[:num_prompts], references[:num_prompts])
        for ours in ([c.log_probs for c in completions], [c.model_log_probs for c in completions]):
            torch.testing.assert_close(torch.tensor(ours).flatten(), expected, atol=1e-4, rtol=0)
        _disturb(model, seed=version)
        engine.load_weights(model.named_parameters(), version)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_few_prompts_are_exact_through_three_weight_updates(name: str) -> None:
    _run_through_updates(name, num_prompts=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_200_prompts_are_exact_through_three_weight_updates(name: str) -> None:
    _run_through_updates(name, num_prompts=200)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-tied-bias", "gemma3-untied"])
def test_200_prompts_are_near_in_bfloat16_and_nearer_than_the_reference_itself(name: str) -> None:
    """`truth` is the reference in float32 on the same bfloat16 weights, drawn small as in a trained model."""
    model = make_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.25)
    model = model.to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    engine = make_engine(model, max_num_seqs=64, max_model_len=64, dtype=torch.bfloat16, block_size=8)
    prompts = random_prompts(200)
    params = [SamplingParams(NEW_TOKENS, seed=seed) for seed in range(200)]
    for version in range(2, 6):
        completions = generate(engine, prompts, params)
        ours = torch.tensor([c.log_probs for c in completions]).flatten()
        theirs = _log_probs(completions, _reference(model, prompts, completions))
        truth = _log_probs(completions, _reference(exact, prompts, completions))
        assert float((ours - truth).abs().max()) < 0.05
        assert float((ours - theirs).abs().quantile(0.999)) < 0.05  # the reference's own rounding is in it
        assert float((ours - truth).abs().mean()) < float((theirs - truth).abs().mean())
        _disturb(model, seed=version)
        exact.load_state_dict(model.state_dict())
        engine.load_weights(model.named_parameters(), version)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2"])
@pytest.mark.parametrize(
    "values",
    [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.05, "temperature": 1.5}],
    ids=str,
)
def test_sampled_tokens_pass_a_chi_square_test(name: str, values: dict[str, float]) -> None:
    count = 4000
    model = make_model(name)
    prompt = [4, 8, 15]
    engine = make_engine(model, max_num_seqs=500)
    params = [SamplingParams(1, seed=seed, **values) for seed in range(count)]
    completions = generate(engine, [prompt] * count, params)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=VOCAB).double()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(values.get("temperature", 1.0))])
    if "top_k" in values:
        warpers.append(TopKLogitsWarper(int(values["top_k"])))
    if "top_p" in values:
        warpers.append(TopPLogitsWarper(values["top_p"]))
    if "min_p" in values:
        warpers.append(MinPLogitsWarper(values["min_p"]))
    with torch.no_grad():
        ids = torch.tensor([prompt])
        probs = warpers(ids, model(ids).logits[:, -1])[0].double().softmax(-1)
    assert float(counts[probs == 0].sum()) == 0
    expected = probs * count
    cells = expected >= 5
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert freedom > 0
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    for completion in completions[:50]:
        assert completion.log_probs[0] == pytest.approx(float(probs[completion.token_ids[0]].log()), abs=1e-4)
