"""The native engine against transformers, and its scheduling: sessions, slots, turns, weight updates."""

from __future__ import annotations

import math

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

from verl.workers.rollout.engine import SamplingParams
from verl.workers.rollout.native import NativeEngine

# Every architecture on the bare model: test_runner.py and test_native_exactness.py.
SOME = ["qwen2-sliding", "qwen3", "llama-llama3", "mistral", "gemma2", "gemma3"]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0)


@pytest.mark.parametrize("name", SOME)
def test_greedy_tokens_equal_transformers_generate(name: str) -> None:
    model = make_model(name)
    prompts = random_prompts(6)
    for prompt, completion in zip(prompts, generate(make_engine(model), prompts, GREEDY), strict=True):
        assert completion.token_ids == hf_greedy(model, prompt, 16)
        assert completion.finish_reason == "length"


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


def test_turns_of_many_sessions_interleave_without_touching_each_other() -> None:
    model = make_model("qwen3")
    prompts, observations = random_prompts(12, seed=3), random_prompts(12, longest=40, seed=4)

    def trajectories(max_num_seqs: int, order: list[int]) -> list[list[int]]:
        engine = make_engine(model, max_num_seqs=max_num_seqs)
        params = [SamplingParams(5 + index, seed=100 + index) for index in range(12)]
        index_of = {engine.open(prompts[index], params[index]): index for index in order}
        tokens: list[list[int]] = [[] for _ in prompts]
        resumed = set()
        while engine.has_runnable:
            for completion in engine.step():
                index = index_of[completion.session_id]
                tokens[index] += completion.token_ids
                if index in resumed:
                    engine.close(completion.session_id)
                else:
                    resumed.add(index)
                    engine.resume(completion.session_id, observations[index], params[index])
        assert engine.stats()["kv_bytes"] == 0
        return tokens

    alone = trajectories(1, list(range(12)))
    assert [len(tokens) for tokens in alone] == [2 * (5 + index) for index in range(12)]
    assert trajectories(12, list(range(12))) == alone
    assert trajectories(5, list(reversed(range(12)))) == alone


def test_a_long_session_beside_short_ones_changes_nothing() -> None:
    model = make_model("llama-bias")
    prompts = [random_prompts(1, seed=5)[0] for _ in range(40)]
    prompts[17] = torch.randint(0, VOCAB, (900,)).tolist()
    params = [SamplingParams(12, seed=index) for index in range(40)]
    together = generate(make_engine(model, max_num_seqs=40, max_model_len=1000), prompts, params)
    one_by_one = generate(make_engine(model, max_num_seqs=1, max_model_len=1000), prompts, params)
    for left, right in zip(together, one_by_one, strict=True):
        assert left.token_ids == right.token_ids
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-4)


def test_a_finished_slot_is_refilled_in_the_next_step() -> None:
    engine = make_engine(make_model(), max_num_seqs=2)
    ids = [engine.open([1, 2, 3], SamplingParams(length)) for length in (1, 5, 4)]
    (first,) = engine.step()
    assert first.session_id == ids[0]
    assert (engine.stats()["running"], engine.stats()["queued"]) == (1, 1)
    engine.close(ids[0])
    assert engine.step() == []
    assert (engine.stats()["running"], engine.stats()["queued"]) == (2, 0)
    lengths = {session_id: len(completion.token_ids) for session_id, completion in run(engine).items()}
    assert lengths == {ids[1]: 5, ids[2]: 4}


def test_parked_sessions_hold_no_slot_and_the_queue_goes_on() -> None:
    engine = make_engine(make_model(), max_num_seqs=2)
    ids = [engine.open([1, 2], SamplingParams(2)) for _ in range(3)]
    assert set(run(engine)) == set(ids)
    assert not engine.has_runnable
    assert engine.step() == []
    stats = engine.stats()
    assert (stats["parked"], stats["queued"], stats["running"]) == (3, 0, 0)
    assert stats["kv_bytes"] > 0
    for session_id in ids:
        engine.close(session_id)
    assert engine.stats()["kv_bytes"] == 0


def test_a_session_can_be_closed_in_every_state() -> None:
    engine = make_engine(make_model(), max_num_seqs=2)
    ids = [engine.open([1, 2], SamplingParams(3)) for _ in range(4)]
    engine.close(ids[3])  # queued
    engine.step()
    engine.close(ids[0])  # running
    assert set(run(engine)) == {ids[1], ids[2]}
    engine.resume(ids[1], [5], SamplingParams(3))
    engine.close(ids[1])  # ready
    engine.close(ids[2])  # waiting
    assert not engine.has_runnable
    assert engine.stats()["kv_bytes"] == 0


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


def test_the_seed_alone_decides_the_tokens() -> None:
    engine = make_engine(make_model())
    prompts = [[1, 2, 3]] * 3
    params = [SamplingParams(12, seed=seed) for seed in (5, 6, 5)]
    first, other, again = generate(engine, prompts, params)
    assert first.token_ids == again.token_ids != other.token_ids
    negative = [SamplingParams(4, seed=-1), SamplingParams(4, seed=2**64 - 1)]
    left, right = generate(engine, prompts[:2], negative)
    assert left.token_ids == right.token_ids


def test_parameters_of_sessions_side_by_side_do_not_mix() -> None:
    engine = make_engine(make_model("qwen2"), max_num_seqs=4)
    prompt = [3, 1, 4]
    params = [
        SamplingParams(10, temperature=0.0),
        SamplingParams(10, temperature=0.7, top_k=5, seed=1),
        SamplingParams(10, top_p=0.8, seed=2),
        SamplingParams(10, min_p=0.1, seed=3),
    ]
    together = generate(engine, [prompt] * 4, params)
    apart = [generate(engine, [prompt], one)[0] for one in params]
    assert [c.token_ids for c in together] == [c.token_ids for c in apart]
    for left, right in zip(together, apart, strict=True):
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)


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


def test_a_turn_ends_with_length_at_max_model_len() -> None:
    model = make_model()
    engine = make_engine(model, max_model_len=20)
    session_id = engine.open(list(range(12)), SamplingParams(100, temperature=0.0))
    completion = run(engine)[session_id]
    assert completion.finish_reason == "length"
    assert completion.token_ids == hf_greedy(model, list(range(12)), 8)


def test_an_observation_that_leaves_no_room_ends_at_once_with_length() -> None:
    engine = make_engine(make_model(), max_model_len=20)
    session_id = engine.open([1, 2, 3], SamplingParams(5))
    run(engine)
    engine.resume(session_id, list(range(12)), SamplingParams(5))
    assert engine.has_runnable
    (completion,) = engine.step()
    assert (completion.token_ids, completion.log_probs, completion.finish_reason) == ([], [], "length")
    assert not engine.has_runnable
    engine.close(session_id)
    assert engine.stats()["kv_bytes"] == 0


def test_the_last_position_of_the_window_can_be_filled_by_an_observation() -> None:
    model = make_model()
    engine = make_engine(model, max_model_len=20)
    context = [1, 2, 3]
    session_id = engine.open(context, SamplingParams(5, temperature=0.0))
    context = context + run(engine)[session_id].token_ids + list(range(11))
    engine.resume(session_id, list(range(11)), SamplingParams(5, temperature=0.0))
    completion = run(engine)[session_id]
    assert completion.token_ids == hf_greedy(model, context, 1)
    assert completion.finish_reason == "length"


def test_the_byte_budget_bounds_the_blocks() -> None:
    config = CONFIGS["qwen3"]
    per_block = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4 * 16
    assert NativeEngine(config, 8, 100, block_size=16).num_blocks == 8 * 7
    assert NativeEngine(config, 8, 100, block_size=16, kv_budget_bytes=9 * per_block + 1).num_blocks == 9
    with pytest.raises(ValueError, match="kv_budget_bytes"):
        NativeEngine(config, 8, 100, block_size=16, kv_budget_bytes=7 * per_block - 1)


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
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.step()
    engine.update_weights(model.named_parameters(), version=5)
    assert run(engine)[session_id].version_last == 5
    with pytest.raises(ValueError, match="level is 3"):
        engine.sleep(3)


def test_after_shutdown_nothing_is_left() -> None:
    engine = make_engine(make_model())
    for _ in range(6):
        engine.open([1, 2, 3], SamplingParams(5))
    engine.step()
    for _ in range(2):
        engine.shutdown()
        stats = engine.stats()
        assert (stats["running"], stats["queued"], stats["parked"], stats["kv_bytes"]) == (0, 0, 0, 0)
        assert not engine.has_runnable


def test_bfloat16_log_probs_are_near_a_bfloat16_forward() -> None:
    model = make_model("qwen3-tied-bias").to(torch.bfloat16)
    engine = make_engine(model, dtype=torch.bfloat16)
    prompts = random_prompts(8, seed=9)
    params = [SamplingParams(12, seed=index) for index in range(8)]
    errors = []
    for prompt, completion in zip(prompts, generate(engine, prompts, params), strict=True):
        context = prompt + completion.token_ids
        expected = hf_log_probs(model, context)[len(prompt) :]
        errors += [abs(a - b) for a, b in zip(completion.log_probs, expected, strict=True)]
    assert sum(errors) / len(errors) < 0.1


def test_partial_is_what_the_turn_under_way_has() -> None:
    engine = make_engine(make_model(), max_num_seqs=1)
    first, second = (engine.open([1, 2, 3], SamplingParams(4, seed=seed)) for seed in (1, 2))
    engine.step()
    engine.step()
    partial = engine.partial(first)
    assert (len(partial.token_ids), len(partial.log_probs), partial.version_first) == (2, 2, 1)
    assert engine.partial(second) == ([], [], None)
    completion = run(engine)[first]
    assert completion.token_ids[:2] == partial.token_ids
    assert completion.log_probs[:2] == partial.log_probs
    assert engine.partial(first) == ([], [], None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_in_place_take_effect_with_update_weights(dtype: torch.dtype) -> None:
    model = make_model()
    engine = make_engine(model, dtype=dtype)
    before = generate(engine, [[1, 2, 3]], GREEDY)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.5)
    engine.update_weights(model.named_parameters(), version=2)
    after = generate(engine, [[1, 2, 3]], GREEDY)[0]
    assert after.token_ids != before.token_ids
    if dtype is torch.float32:
        assert after.token_ids == hf_greedy(model, [1, 2, 3], 16)


def test_the_model_can_be_trained_between_rollouts() -> None:
    model = make_model()
    engine = make_engine(model)
    generate(engine, [[1, 2, 3]], GREEDY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    optimizer.step()
    engine.update_weights(model.named_parameters(), version=2)
    assert generate(engine, [[1, 2, 3]], GREEDY)[0].token_ids == hf_greedy(model, [1, 2, 3], 16)


def test_a_state_dict_with_the_tied_head_is_accepted_too() -> None:
    model = make_model("qwen2-tied")
    engine = NativeEngine(model.config, 2, 64)
    assert "lm_head.weight" in model.state_dict()
    engine.update_weights(model.state_dict().items(), version=1)
    assert generate(engine, [[1, 2, 3]], GREEDY)[0].token_ids == hf_greedy(model, [1, 2, 3], 16)


def test_weights_that_do_not_fit_are_named() -> None:
    model = make_model("qwen3")
    engine = NativeEngine(model.config, 2, 64)
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"1 missing \(lm_head.weight\)"):
        engine.update_weights([(k, v) for k, v in weights.items() if k != "lm_head.weight"], 1)
    with pytest.raises(ValueError, match=r"1 unknown \(score.weight\)"):
        engine.update_weights([*weights.items(), ("score.weight", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        engine.update_weights([("model.norm.weight", torch.zeros(3))], 1)
    engine.open([1], GREEDY)
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.step()


def test_after_an_update_that_failed_there_is_no_version_until_the_next() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    with pytest.raises(ValueError, match="missing"):
        engine.update_weights([], version=2)
    assert engine.version == engine.stats()["weight_version"] == -1  # its owner sends them again
    engine.update_weights(model.named_parameters(), version=1)
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
    engine.update_weights(healthy.named_parameters(), version=2)
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
    with pytest.raises(ValueError, match="queued"):
        engine.resume(session_id, [1], GREEDY)
    with pytest.raises(ValueError, match="no session 99"):
        engine.close(99)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5}]
)
def test_sampling_params_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**{"max_tokens": 1, **wrong})


def test_rope_that_depends_on_the_running_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = type(CONFIGS["llama"])(**{**CONFIGS["llama"].to_dict(), "rope_parameters": rope})
    NativeEngine(config, 2, 256)
    with pytest.raises(ValueError, match="dynamic"):
        NativeEngine(config, 2, 257)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral-sliding"])
def test_log_probs_on_cuda_equal_a_full_forward(name: str) -> None:
    model = make_model(name)
    prompts = random_prompts(6)
    engine = NativeEngine(model.config, 4, 128, device="cuda")
    engine.update_weights(model.named_parameters(), version=1)
    for prompt, completion in zip(prompts, generate(engine, prompts, SamplingParams(16)), strict=True):
        expected = hf_log_probs(model, prompt + completion.token_ids)[len(prompt) :]
        assert completion.log_probs == pytest.approx(expected, abs=1e-3)
