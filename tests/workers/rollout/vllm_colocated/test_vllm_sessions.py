"""Sessions on vLLM: turns, stops, limits, updates and sleep in the middle, preemption, chunked prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm_models import (
    VOCAB,
    generate,
    log_probs_of,
    make_model,
    random_prompts,
    reference_logits,
    run,
)

from verl.workers.rollout.engine import Completion, RolloutEngine, SamplingParams
from verl.workers.rollout.stop import StopCondition

Get = Callable[..., Any]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def loaded(engine_for: Get, name: str = "qwen3-tied", seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    model = make_model(name, seed)
    engine = engine_for(name, **arguments)
    engine.update_weights(model.named_parameters(), 1)
    return engine, model


def greedy(model: Any, context: list[int], num_tokens: int) -> list[int]:
    output = model.generate(
        torch.tensor([context]),
        attention_mask=torch.ones(1, len(context), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return output[0, len(context) :].tolist()


def assert_exact(model: Any, context: list[int], completion: Completion) -> None:
    """Both kinds of log-probs of an untempered turn are the model's."""
    (logits,) = reference_logits(model, [context], [completion.token_ids])
    expected = pytest.approx(log_probs_of(logits, completion.token_ids), abs=1e-4)
    assert completion.log_probs == expected
    assert completion.model_log_probs == expected


def close_all(engine: RolloutEngine, ids: list[int]) -> None:
    for session_id in ids:
        engine.close(session_id)


def test_three_turns_with_observations_are_exact_and_reuse_whole_blocks(engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    before = engine.stats()
    context = random_prompts(1, seed=1)[0] + list(range(33))
    session_id = engine.open(context, SamplingParams(9, seed=3))
    hits = 0
    for turn in range(3):
        completion = run(engine)[session_id]
        assert_exact(model, context, completion)
        context = context + completion.token_ids
        if turn < 2:
            hits += (len(context) - 1) // 32 * 32  # the last token was sampled, but never computed
            observation = random_prompts(1, seed=10 + turn)[0][:15]
            context = context + observation
            engine.resume(session_id, observation, SamplingParams(9, seed=3))
    assert engine.stats()["prefix_hit_tokens"] - before["prefix_hit_tokens"] == hits
    assert engine.stats()["parked"] == 1
    engine.close(session_id)


def test_a_group_computes_its_shared_prompt_once(engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    before = engine.stats()
    prompt = list(range(70))
    completions = generate(engine, [prompt] * 6, [SamplingParams(8, seed=seed) for seed in range(6)])
    after = engine.stats()
    assert after["prefix_hit_tokens"] - before["prefix_hit_tokens"] == 5 * 64
    assert after["prefilled_tokens"] - before["prefilled_tokens"] == 70 + 5 * 6
    assert len({tuple(completion.token_ids) for completion in completions}) == 6
    for completion in completions:
        assert_exact(model, prompt, completion)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """97 ids: the printable ASCII characters, then three longer pieces."""
    words = [*map(chr, range(33, 127)), "</", "ab", "xyz"]
    assert len(words) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stop_string_spread_over_tokens_ends_the_turn_at_the_token_that_completes_it(
    engine_for: Get,
) -> None:
    engine, model = loaded(engine_for, "llama")
    tokenizer = byte_tokenizer()
    prompts = random_prompts(20, seed=2)
    spread = 0
    for prompt in prompts:
        tokens = greedy(model, prompt, 12)
        text = "".join(tokenizer.convert_ids_to_tokens(tokens[3:7]))
        for string in (text, text[1:-1]):  # ends with a token's last byte, and (perhaps) inside a token
            stop = StopCondition(tokenizer, [string, "never this"])
            end = next(n for n in range(1, 13) if stop.match(tokens[:n]))
            params = SamplingParams(12, temperature=0.0, stop=stop)
            (completion,) = generate(engine, [prompt], params)
            assert completion.token_ids == tokens[:end]
            assert (completion.finish_reason, completion.stop_string) == ("stop", string)
            spread += end > 5
    assert spread > 20


def test_a_stopped_session_goes_on_behind_its_completing_token(engine_for: Get) -> None:
    engine, model = loaded(engine_for, "llama")
    tokenizer = byte_tokenizer()
    prompt = random_prompts(1, seed=5)[0]
    tokens = greedy(model, prompt, 5)
    stop = StopCondition(tokenizer, [tokenizer.convert_ids_to_tokens(tokens[2])])
    session_id = engine.open(prompt, SamplingParams(12, temperature=0.0, stop=stop))
    first = run(engine)[session_id]
    assert first.stop_string is not None
    context = prompt + first.token_ids + [7, 8, 9]
    engine.resume(session_id, [7, 8, 9], GREEDY)
    assert run(engine)[session_id].token_ids == greedy(model, context, 12)
    engine.close(session_id)


def test_eos_ends_a_turn_and_is_kept_unless_ignored(engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    tokens = greedy(model, [1, 2, 3], 12)
    eos = frozenset({tokens[5]})
    params = SamplingParams(12, temperature=0.0, eos_token_ids=eos)
    (ended,) = generate(engine, [[1, 2, 3]], params)
    assert (ended.token_ids, ended.finish_reason) == (tokens[: tokens.index(tokens[5]) + 1], "eos")
    ignoring = SamplingParams(12, temperature=0.0, eos_token_ids=eos, ignore_eos=True)
    (went_on,) = generate(engine, [[1, 2, 3]], ignoring)
    assert (went_on.token_ids, went_on.finish_reason) == (tokens, "length")


def test_turns_end_at_max_model_len_and_an_observation_may_fill_it(engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    context = [1, 2, 3]
    session_id = engine.open(context, SamplingParams(5, temperature=0.0))
    context = context + run(engine)[session_id].token_ids
    observation = random_prompts(1, longest=200, seed=7)[0]
    observation = (observation * 128)[: 127 - len(context)]
    context = context + observation
    engine.resume(session_id, observation, GREEDY)
    completion = run(engine)[session_id]
    assert (completion.token_ids, completion.finish_reason) == (greedy(model, context, 1), "length")
    engine.resume(session_id, [4], GREEDY)
    assert engine.has_runnable
    (full,) = engine.step()
    assert (full.token_ids, full.log_probs, full.finish_reason) == ([], [], "length")
    assert not engine.has_runnable
    engine.close(session_id)


def test_a_session_can_be_closed_in_every_state(engine_for: Get) -> None:
    engine, _ = loaded(engine_for, max_num_seqs=2)
    ids = [engine.open([1, 2], SamplingParams(3)) for _ in range(4)]
    engine.close(ids[3])  # queued
    engine.step()
    assert (engine.stats()["running"], engine.stats()["queued"]) == (2, 1)
    engine.close(ids[0])  # running
    assert set(run(engine)) == {ids[1], ids[2]}
    engine.resume(ids[1], [5], SamplingParams(3))
    engine.close(ids[1])  # about to go on
    engine.resume(ids[2], [5] * 200, SamplingParams(3))
    engine.close(ids[2])  # has no room
    assert not engine.has_runnable
    with pytest.raises(ValueError, match="no session"):
        engine.close(ids[2])


def test_new_weights_in_the_middle_of_turns_leave_no_stale_state(engine_for: Get) -> None:
    engine, old = loaded(engine_for)
    new = make_model("qwen3-tied", seed=1)
    prompts = random_prompts(12, seed=3)
    ids = [engine.open(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        assert engine.step() == []
    engine.update_weights(new.named_parameters(), 2)
    assert engine.partial(ids[0]).token_ids == greedy(old, prompts[0], 5)
    ended = run(engine)
    for session_id, prompt in zip(ids, prompts, strict=True):
        completion = ended[session_id]
        first, rest = completion.token_ids[:5], completion.token_ids[5:]
        assert first == greedy(old, prompt, 5)
        assert rest == greedy(new, prompt + first, 7)
        (logits,) = reference_logits(new, [prompt + first], [rest])
        assert completion.log_probs[5:] == pytest.approx(log_probs_of(logits, rest), abs=1e-4)
        assert (completion.version_first, completion.version_last) == (1, 2)
    close_all(engine, ids)


def test_parked_sessions_go_on_with_new_weights_and_no_prefix_of_the_old_ones(engine_for: Get) -> None:
    engine, old = loaded(engine_for)
    prompt = list(range(70))
    session_id = engine.open(prompt, GREEDY)
    context = prompt + run(engine)[session_id].token_ids + [1, 2, 3]
    new = make_model("qwen3-tied", seed=1)
    engine.update_weights(new.named_parameters(), 2)
    before = engine.stats()["prefix_hit_tokens"]
    engine.resume(session_id, [1, 2, 3], GREEDY)
    assert run(engine)[session_id].token_ids == greedy(new, context, 12)
    assert engine.stats()["prefix_hit_tokens"] == before
    engine.close(session_id)


def test_preempted_turns_sample_what_they_would_have_sampled(engine_for: Get) -> None:
    roomy, model = loaded(engine_for)
    one_block = 2 * 2 * 32 * 32 * 4  # k and v, layers, positions, head size, bytes
    tight, _ = loaded(engine_for, kv_cache_memory_bytes=8 * one_block)
    prompts = random_prompts(10, seed=4)
    params = [SamplingParams(60, seed=seed) for seed in range(10)]
    expected = generate(roomy, prompts, params)
    before = tight.stats()["preemptions"]
    completions = generate(tight, prompts, params)
    assert tight.stats()["preemptions"] - before >= 3
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_exact(model, prompt, completion)


def test_prompts_computed_in_chunks_beside_running_turns_sample_the_same(engine_for: Get) -> None:
    whole, model = loaded(engine_for)
    chunked, _ = loaded(engine_for, max_num_seqs=8, max_num_batched_tokens=8)
    prompts = random_prompts(12, longest=100, seed=6)
    params = [SamplingParams(10, seed=seed) for seed in range(12)]
    expected = generate(whole, prompts, params)
    steps = chunked.stats()["steps"]
    completions = generate(chunked, prompts, params)
    assert chunked.stats()["steps"] - steps > sum(map(len, prompts)) / 8
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    for prompt, completion in zip(prompts, completions, strict=True):
        assert_exact(model, prompt, completion)


def test_sleep_in_the_middle_of_turns_gives_kv_memory_back_and_changes_no_token(engine_for: Get) -> None:
    engine, model = loaded(engine_for, kv_cache_memory_bytes=64 << 20)
    filler = [engine.open([n] * 120, SamplingParams(8)) for n in range(60)]
    run(engine)
    close_all(engine, filler)
    prompts = random_prompts(4, seed=8)
    ids = [engine.open(prompt, GREEDY) for prompt in prompts]
    for _ in range(4):
        engine.step()
    one_block = 2 * 2 * 32 * 32 * 4
    assert engine.sleep() >= 60 * 3 * one_block
    assert engine.sleep() == 0
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    ended = run(engine)
    assert [ended[i].token_ids for i in ids] == [greedy(model, prompt, 12) for prompt in prompts]
    close_all(engine, ids)


def test_after_sleep_level_2_new_weights_come_first(engine_for: Get) -> None:
    engine, _ = loaded(engine_for)
    session_id = engine.open([1, 2, 3], GREEDY)
    engine.step()
    engine.sleep(2)
    assert engine.version == -1
    engine.wake()
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.step()
    engine.update_weights(make_model("qwen3-tied").named_parameters(), 5)
    completion = run(engine)[session_id]
    assert (completion.version_first, completion.version_last) == (1, 5)
    engine.close(session_id)


def test_weights_that_do_not_fit_are_named_and_the_next_ones_are_taken(engine_for: Get) -> None:
    engine, model = loaded(engine_for, "qwen2")
    weights = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"missing weights: lm_head.weight"):
        engine.update_weights([(k, v) for k, v in weights.items() if k != "lm_head.weight"], 2)
    with pytest.raises(ValueError, match="no weight score.weight"):
        engine.update_weights([*weights.items(), ("score.weight", torch.zeros(1))], 2)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(3,\)"):
        engine.update_weights([("model.norm.weight", torch.zeros(3))], 2)
    session_id = engine.open([1], GREEDY)
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.step()
    engine.update_weights(weights.items(), 3)
    assert run(engine)[session_id].token_ids == greedy(model, [1], 12)
    engine.close(session_id)


@pytest.mark.parametrize("name", ["qwen2", "qwen3-tied"])
def test_a_hundred_updates_leave_no_packed_matrices_behind(name: str, engine_for: Get) -> None:
    engine, model = loaded(engine_for, name)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for _ in range(20):
        engine.update_weights(model.named_parameters(), 2)
    before = psutil.Process().memory_info().rss
    for _ in range(100):
        engine.update_weights(model.named_parameters(), 2)
    assert psutil.Process().memory_info().rss - before < 20 * model_bytes


def test_weights_with_nan_are_an_error_not_a_rollout(engine_for: Get) -> None:
    engine, model = loaded(engine_for, "qwen2")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    weights["lm_head.weight"][3, 0] = float("nan")
    engine.update_weights(weights.items(), 2)
    session_id = engine.open([1, 2], SamplingParams(4))
    with pytest.raises(RuntimeError, match="not finite"):
        engine.step()
    engine.close(session_id)


def test_user_mistakes_are_explained(engine_for: Get) -> None:
    engine, _ = loaded(engine_for)
    with pytest.raises(ValueError, match="prompt of 128 tokens"):
        engine.open([1] * 128, GREEDY)
    with pytest.raises(ValueError, match="prompt of 0 tokens"):
        engine.open([], GREEDY)
    with pytest.raises(ValueError, match=f"0 to {VOCAB - 1}"):
        engine.open([VOCAB], GREEDY)
    with pytest.raises(ValueError, match="0.005"):
        engine.open([1], SamplingParams(4, temperature=0.005))
    with pytest.raises(ValueError, match="min_p=0.1 and top_p=0.9"):
        engine.open([1], SamplingParams(4, min_p=0.1, top_p=0.9))
    session_id = engine.open([1], GREEDY)
    with pytest.raises(ValueError, match="under way"):
        engine.resume(session_id, [1], GREEDY)
    engine.close(session_id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_format": "auto"}, "load_format"),
        ({"max_num_seq": 4}, "nearest is max_num_seqs"),
        ({"kv_cache_memory_bytes": 1 << 10}, "KV cache|kv cache|memory"),
        ({"tensor_parallel_size": 2}, "placement=apart"),
    ],
)
def test_arguments_that_can_not_work_are_refused(
    arguments: dict[str, Any], message: str, engine_for: Get
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for("qwen2", **arguments)
