"""Sessions on vLLM: turns, stops, updates and sleep in the middle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from verl.sessions.engine_contract import Completion, RolloutEngine, SamplingParams
from verl.sessions.stop import StopCondition

Get = Callable[..., Any]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


def loaded(engine_for: Get, name: str = "qwen3-tied", seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    model = make_model(name, seed)
    engine = engine_for(name, **arguments)
    engine.load_weights(model.named_parameters(), 1)
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


def test_new_weights_in_the_middle_of_turns_leave_no_stale_state(engine_for: Get) -> None:
    engine, old = loaded(engine_for)
    new = make_model("qwen3-tied", seed=1)
    prompts = random_prompts(12, seed=3)
    ids = [engine.open(prompt, GREEDY) for prompt in prompts]
    for _ in range(5):
        assert engine.step() == []
    engine.load_weights(new.named_parameters(), 2)
    assert engine.partial(ids[0]).token_ids == greedy(old, prompts[0], 5)
    ended = run(engine)
    for session_id, prompt in zip(ids, prompts, strict=True):
        completion = ended[session_id]
        first = completion.token_ids[:5]
        rest = completion.token_ids[5:]
        assert first == greedy(old, prompt, 5)
        assert rest == greedy(new, prompt + first, 7)
        (logits,) = reference_logits(new, [prompt + first], [rest])
        assert completion.log_probs[5:] == pytest.approx(log_probs_of(logits, rest), abs=1e-4)
        assert (completion.version_first, completion.version_last) == (1, 2)
    close_all(engine, ids)
    with pytest.raises(ValueError, match="missing weights"):
        engine.load_weights([], 3)
    assert engine.version == -1  # its owner sends them again


def test_kv_state_of_older_weights_is_kept_for_the_turns_under_way_alone(engine_for: Get) -> None:
    engine, old = loaded(engine_for)
    new = make_model("qwen3-tied", seed=1)
    prompts = [prompt + list(range(40)) for prompt in random_prompts(6, seed=4)]
    exact = greedy(new, prompts[0] + greedy(old, prompts[0], 5), 7)
    engine.keeps_kv = True
    try:
        ids = [engine.open(prompt, GREEDY) for prompt in prompts]
        for _ in range(5):
            engine.step()
        before = engine.stats()
        engine.load_weights(new.named_parameters(), 2)
        late = [engine.open(prompt, GREEDY) for prompt in prompts]
        ended = run(engine)
        after = engine.stats()
    finally:
        engine.keeps_kv = False
    prefilled = after["prefilled_tokens"] - before["prefilled_tokens"]
    assert prefilled == sum(map(len, prompts)) and after["preemptions"] == before["preemptions"]
    for session_id, late_id, prompt in zip(ids, late, prompts, strict=True):
        assert ended[session_id].token_ids[:5] == greedy(old, prompt, 5)
        assert (ended[session_id].version_first, ended[session_id].version_last) == (1, 2)
        assert ended[late_id].token_ids == greedy(new, prompt, 12)
    (logits,) = reference_logits(new, [prompts[0] + ended[ids[0]].token_ids[:5]], [exact])
    computed_again = log_probs_of(logits, exact)
    assert ended[ids[0]].log_probs[5:] != pytest.approx(computed_again, abs=1e-4)
    close_all(engine, ids + late)


def test_a_session_that_goes_on_from_another_ones_tokens_draws_the_numbers_behind_it(engine_for: Get) -> None:
    engine, _ = loaded(engine_for)
    prompts = random_prompts(8, seed=6)
    whole = [SamplingParams(12, seed=seed) for seed in range(8)]
    expected = generate(engine, prompts, whole)
    begun = [[*prompt, *c.token_ids[:5]] for prompt, c in zip(prompts, expected, strict=True)]
    rest = [SamplingParams(7, seed=seed, drawn_before=5) for seed in range(8)]
    found = generate(engine, begun, rest)
    assert [c.token_ids for c in found] == [c.token_ids[5:] for c in expected]
    anew = [SamplingParams(12, seed=seed, drawn_before=12) for seed in range(8)]
    in_a_new_context = generate(engine, prompts, anew)
    for one, other in zip(in_a_new_context, expected, strict=True):
        assert one.token_ids != other.token_ids  # the same positions, and other numbers


def test_sleep_in_the_middle_of_turns_changes_no_token(engine_for: Get) -> None:
    engine, model = loaded(engine_for)
    prompts = random_prompts(4, seed=8)
    ids = [engine.open(prompt, GREEDY) for prompt in prompts]
    for _ in range(4):
        engine.step()
    engine.sleep()
    assert engine.sleep() == 0  # it sleeps already
    with pytest.raises(RuntimeError, match="asleep"):
        engine.step()
    engine.wake()
    ended = run(engine)
    assert [ended[i].token_ids for i in ids] == [greedy(model, prompt, 12) for prompt in prompts]
    close_all(engine, ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_format": "auto"}, "load_format"),
        ({"max_num_seq": 4}, "nearest is max_num_seqs"),
        ({"kv_cache_memory_bytes": 1 << 10}, "KV cache|kv cache|memory"),
        ({"tensor_parallel_size": 2}, "2, and 1 processes train; expected a divisor"),
    ],
)
def test_arguments_that_can_not_work_are_refused(
    arguments: dict[str, Any], message: str, engine_for: Get
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_for("qwen2", **arguments)
