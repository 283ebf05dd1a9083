"""The native engine against transformers, and its scheduling: sessions, slots, turns, weight updates."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import pytest
import torch
from rollout_models import (
    CONFIGS,
    VOCAB,
    generate,
    hf_greedy,
    hf_log_probs,
    make_engine,
    make_model,
    random_prompts,
    run,
)
from transformers import GPT2Config

from verl.sessions.engine_contract import SamplingParams
from verl.workers.rollout.native import NativeEngine

# Every architecture on the bare model: test_runner.py and test_native_exactness.py.
SOME = ["qwen2-sliding", "llama-llama3", "gemma3"]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.mark.parametrize("name", SOME)
def test_log_probs_equal_a_full_forward_over_three_turns(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model, max_num_seqs=3)
    contexts = random_prompts(5, seed=1)
    observations = random_prompts(10, longest=30, seed=2)
    for index, context in enumerate(contexts):
        session_id = engine.open(context, SamplingParams(9, seed=index))
        for turn in range(3):
            completion = run(engine)[session_id]
            sampled = slice(len(context), len(context) + len(completion.token_ids))
            context += completion.token_ids
            expected = hf_log_probs(model, context)[sampled]
            assert completion.log_probs == pytest.approx(expected, abs=1e-4)
            if turn < 2:
                observation = observations[2 * index + turn]
                context += observation
                engine.resume(session_id, observation, SamplingParams(9, seed=index))
        if index % 2:
            engine.close(session_id)


def test_random_numbers_go_on_over_resume() -> None:
    """Two turns with nothing between them sample what one long turn samples."""
    model = make_model()
    engine = make_engine(model)
    (whole,) = generate(engine, [[1, 2, 3]], SamplingParams(12, seed=77))
    session_id = engine.open([1, 2, 3], SamplingParams(5, seed=77))
    first = run(engine)[session_id]
    engine.resume(session_id, [], SamplingParams(7, seed=77))
    second = run(engine)[session_id]
    assert first.token_ids + second.token_ids == whole.token_ids
    assert first.log_probs + second.log_probs == pytest.approx(whole.log_probs, abs=1e-5)


def test_eos_ends_a_turn_and_is_kept_unless_ignored() -> None:
    model = make_model()
    tokens = hf_greedy(model, [1, 2, 3], 16)
    eos = tokens[5]
    engine = make_engine(model)
    params = SamplingParams(16, temperature=0.0, eos_token_ids=frozenset({eos}))
    (ended,) = generate(engine, [[1, 2, 3]], params)
    assert (ended.token_ids, ended.finish_reason) == (tokens[: tokens.index(eos) + 1], "eos")
    ignoring = SamplingParams(16, temperature=0.0, eos_token_ids=frozenset({eos}), ignore_eos=True)
    (went_on,) = generate(engine, [[1, 2, 3]], ignoring)
    assert (went_on.token_ids, went_on.finish_reason) == (tokens, "length")


def test_prompts_that_hold_eos_or_pad_tokens_are_read_whole() -> None:
    """Padding does not exist here, so a prompt full of the eos (= pad) token is a prompt like any other."""
    model = make_model()
    prompt = [0, 0, 5, 0]
    params = SamplingParams(6, eos_token_ids=frozenset({0}), seed=3)
    (completion,) = generate(make_engine(model), [prompt], params)
    expected = hf_log_probs(model, prompt + completion.token_ids)[4:]
    assert completion.log_probs == pytest.approx(expected, abs=1e-4)


def test_sleep_says_what_it_gives_back_and_no_step_runs_until_wake() -> None:
    model = make_model()
    engine = make_engine(model, dtype=torch.bfloat16, block_size=16)
    per_block = 2 * 2 * 2 * 12 * 2 * 16
    assert engine.sleep() == 0  # nothing was used yet
    engine.wake()
    session_id = engine.open(list(range(20)), SamplingParams(4))
    engine.step()
    assert engine.stats()["kv_bytes"] == 2 * per_block
    assert engine.sleep() == 2 * per_block
    assert engine.stats()["kv_bytes"] == 0
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    weights = sum(2 * parameter.numel() for parameter in model.parameters())
    assert 0.9 * weights < engine.sleep(2) < 1.1 * weights  # cast to bfloat16, so they are the engine's own
    engine.wake()
    engine.wake()
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.step()
    engine.load_weights(model.named_parameters(), version=5)
    assert run(engine)[session_id].version_last == 5
    with pytest.raises(ValueError, match="level is 3"):
        engine.sleep(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_in_place_take_effect_with_load_weights(dtype: torch.dtype) -> None:
    model = make_model()
    engine = make_engine(model, dtype=dtype)
    before = generate(engine, [[1, 2, 3]], GREEDY)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    engine.load_weights(model.named_parameters(), version=2)
    after = generate(engine, [[1, 2, 3]], GREEDY)[0]
    assert after.token_ids != before.token_ids
    if dtype is torch.float32:
        assert after.token_ids == hf_greedy(model, [1, 2, 3], 16)


def test_weights_that_do_not_fit_are_named() -> None:
    model = make_model("qwen3")
    engine = NativeEngine(model.config, 2, 64)
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match="missing weights: lm_head.weight"):
        engine.load_weights([(k, v) for k, v in weights.items() if k != "lm_head.weight"], 1)
    with pytest.raises(ValueError, match="the model has no weight score.weight"):
        engine.load_weights([*weights.items(), ("score.weight", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        engine.load_weights([("model.norm.weight", torch.zeros(3))], 1)
    engine.open([1], GREEDY)
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.step()


def test_after_an_update_that_failed_there_is_no_version_until_the_next() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    with pytest.raises(ValueError, match="missing"):
        engine.load_weights([], version=2)
    assert engine.version == -1  # its owner sends them again
    engine.load_weights(model.named_parameters(), version=1)
    assert generate(engine, [[1, 2, 3]], GREEDY)[0].token_ids == hf_greedy(model, [1, 2, 3], 16)


def test_weights_with_nan_are_an_error_not_a_rollout() -> None:
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[3, 0] = math.nan
    engine = make_engine(model)
    session_id = engine.open([1, 2], SamplingParams(5, seed=3))
    with pytest.raises(RuntimeError, match="not finite"):
        engine.step()
    healthy = make_model()
    engine.load_weights(healthy.named_parameters(), version=2)
    after = run(engine)[session_id]
    expected = generate(make_engine(healthy), [[1, 2]], SamplingParams(5, seed=3))[0]
    assert after.token_ids == expected.token_ids  # the step that failed took no random number


def test_user_mistakes_are_explained() -> None:
    with pytest.raises(ValueError, match="'gpt2'"):
        NativeEngine(GPT2Config(), 2, 64)
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        NativeEngine(CONFIGS["qwen3"], 0, 64)
    engine = make_engine(make_model(), max_model_len=10)
    with pytest.raises(ValueError, match="prompt of 10 tokens"):
        engine.open(list(range(10)), GREEDY)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        engine.open([], GREEDY)
    with pytest.raises(ValueError, match=f"0 to {VOCAB - 1}"):
        engine.open([VOCAB], GREEDY)
    session_id = engine.open([1], GREEDY)
    with pytest.raises(ValueError, match="under way"):
        engine.resume(session_id, [1], GREEDY)
    with pytest.raises(ValueError, match="no session 99"):
        engine.close(99)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5}]
)
def test_sampling_params_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**{"max_tokens": 1, **wrong})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pools_take_memory_as_they_are_used_and_give_it_back(dtype: torch.dtype) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    budget = 1 << 30
    engine = make_engine(
        make_model(), kv_budget_bytes=budget, max_model_len=1024, max_num_seqs=8, dtype=dtype
    )
    before = resident()
    turns = set()
    for _ in range(3):  # it sleeps and wakes in each step of training
        turns.add(tuple(generate(engine, [[1, 2, 3]], SamplingParams(12, seed=7))[0].token_ids))
        assert resident() - before < budget / 8
        engine.sleep()
        engine.wake()
    assert len(turns) == 1
