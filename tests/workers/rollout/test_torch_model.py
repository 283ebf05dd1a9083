"""The decoder in plain torch operations, on the way it takes on a GPU: one attention call for all sequences.

Flash attention's kernels need a GPU; here their place has attention by the book, sequence by sequence, on
exactly what they are given.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rollout_models import generate, make_engine, make_model, random_prompts
from torch import Tensor

from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.native import runner, torch_model


def varlen_by_the_book(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_key_lens: Tensor,
    longest: tuple[int, int],
    scale: float,
    window: int | None,
) -> Tensor:
    """As `varlen_attention`."""
    assert cu_seqlens.dtype == cu_key_lens.dtype == torch.int32
    lengths = [sums.diff().tolist() for sums in (cu_seqlens, cu_key_lens)]
    assert (max(lengths[0]), max(lengths[1])) == longest
    assert (len(query), len(key)) == (sum(lengths[0]), sum(lengths[1]))
    outputs = []
    for q, k, v in zip(query.split(lengths[0]), key.split(lengths[1]), value.split(lengths[1]), strict=True):
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        mask = (distance >= 0) & (distance < (window or 2**40))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["qwen2-tied", "mistral-sliding-tied"])
def test_bfloat16_is_rounded_where_a_trainer_under_autocast_rounds_it(name, monkeypatch):
    model = make_model(name)
    prompts = random_prompts(40, 60)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    monkeypatch.setattr(runner, "DTYPES", ())  # no compiled kernels: torch operations, as on a GPU
    params = [SamplingParams(10, 1.0, seed=seed, ignore_eos=True) for seed in range(len(prompts))]
    apart = []
    sampled = generate(make_engine(model, 8, dtype=torch.bfloat16), prompts, params)
    for prompt, done in zip(prompts, sampled, strict=True):
        ids = torch.tensor([[*prompt, *done.token_ids]])
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(model.model(ids).last_hidden_state)[0, -11:-1]
        log_probs = logits.float().log_softmax(-1).gather(1, ids[0, -10:, None])[:, 0]
        apart.append((log_probs - torch.tensor(done.log_probs)).abs())
    assert float(torch.cat(apart).mean()) < 0.014  # 0.018 to 0.022 where the residual stream is bfloat16


@pytest.mark.parametrize("name", ["qwen2-tied", "mistral-sliding-tied", "gemma3"])
def test_one_call_for_all_sequences_gives_the_tokens_that_calls_one_by_one_give(name, monkeypatch):
    prompts = random_prompts(10, 70)
    prompts += prompts[:3]  # which share their blocks
    params = [SamplingParams(12, 1.0, seed=seed, ignore_eos=True) for seed in range(13)]
    model = make_model(name)
    sampled = []
    for flash in (False, True):
        monkeypatch.setattr(torch_model, "takes_flash", lambda *_, flash=flash: flash)
        monkeypatch.setattr(torch_model, "varlen_attention", varlen_by_the_book)
        engine = make_engine(model, 6, dtype=torch.float64, max_prefill_tokens=48)
        sampled.append(generate(engine, prompts, params))
    for one_by_one, together in zip(*sampled, strict=True):
        assert together.token_ids == one_by_one.token_ids
        assert together.log_probs == pytest.approx(one_by_one.log_probs, abs=1e-5)
