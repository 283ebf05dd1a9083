"""Each mechanism of the scheduler, provoked on a real model: the results stay those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from rollout_models import VOCAB, hf_greedy, hf_log_probs, make_engine, make_model, run
from transformers import PreTrainedModel

from verl.sessions.engine_contract import Completion, SamplingParams
from verl.workers.rollout.native import NativeEngine

SIZE = 4  # positions of a block
PER_BLOCK = 2 * 2 * 2 * 12 * 4 * SIZE  # bytes: keys and values, layers, heads, width, float32


@cache
def model(seed: int = 0) -> PreTrainedModel:
    return make_model("qwen3", seed=seed)


def engine(max_num_seqs: int = 4, num_blocks: int | None = None, longest: int = 40, **kwargs) -> NativeEngine:
    budget = None if num_blocks is None else num_blocks * PER_BLOCK
    kwargs = {"max_model_len": longest, "kv_budget_bytes": budget, "block_size": SIZE, **kwargs}
    made = make_engine(model(), max_num_seqs, **kwargs)
    assert num_blocks is None or made.num_blocks == num_blocks
    return made


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(context: Sequence[int], completion: Completion, is_greedy: bool = True) -> None:
    """The completion is what Hugging Face's model says after `context`."""
    tokens = completion.token_ids
    if is_greedy:
        assert tokens == hf_greedy(model(), context, len(tokens))
    expected = hf_log_probs(model(), [*context, *tokens])[len(context) :]
    assert completion.log_probs == pytest.approx(expected, abs=1e-4)
    assert completion.model_log_probs == pytest.approx(expected, abs=1e-4)


def finish(owner: NativeEngine) -> dict[int, Completion]:
    """Step to the end, closing what ends."""
    ended = {}
    while owner.has_runnable:
        for completion in owner.step():
            ended[completion.session_id] = completion
            owner.close(completion.session_id)
    return ended


# ---- shared prefixes ----


@pytest.mark.parametrize("length", [8, 9, 11])
def test_equal_prompts_of_one_step_are_computed_once_and_sampled_apart(length: int) -> None:
    owner = engine(max_num_seqs=6)
    ids = [owner.open(prompt(length), SamplingParams(9, seed=seed)) for seed in range(6)]
    owner.step()
    stats = owner.stats()
    assert (stats["running"], stats["prefilled_tokens"]) == (6, length)
    assert stats["prefix_hit_tokens"] == 5 * length
    ended = finish(owner)
    assert len({tuple(ended[i].token_ids) for i in ids}) == 6
    for session_id in ids:
        check(prompt(length), ended[session_id], is_greedy=False)


@pytest.mark.parametrize("length", [8, 9, 11])
def test_late_members_of_a_group_compute_one_token_while_another_holds_the_prompt(length: int) -> None:
    owner = engine(max_num_seqs=2)
    ids = [owner.open(prompt(length), SamplingParams(3 + 2 * seed, seed=seed)) for seed in range(5)]
    ended = finish(owner)
    stats = owner.stats()
    # The first two share a row; each later one gets all but the last token of the prompt.
    assert stats["prefilled_tokens"] == length + 3
    assert stats["prefix_hit_tokens"] == length + 3 * (length - 1)
    for session_id in ids:
        check(prompt(length), ended[session_id], is_greedy=False)


def test_prompts_with_a_common_beginning_share_its_full_blocks() -> None:
    owner = engine()
    stem = prompt(10)  # two full blocks and a half
    prompts = [stem + prompt(5, seed=seed) for seed in (1, 2, 3)]
    ids = [owner.open(prompts[index], greedy(6)) for index in (0, 1)]
    owner.step()
    assert owner.stats()["prefilled_tokens"] == 15 + 7
    ids.append(owner.open(prompts[2], greedy(6)))
    ended = run(owner)
    assert owner.stats()["prefilled_tokens"] == 15 + 7 + 7
    for context, session_id in zip(prompts, ids, strict=True):
        check(context, ended[session_id])


# ---- memory ----


def test_when_blocks_run_out_the_youngest_is_preempted_and_computed_again() -> None:
    owner = engine(max_num_seqs=3, num_blocks=12)
    contexts = [prompt(11, seed=seed) for seed in range(3)]
    ids = [owner.open(context, greedy(25)) for context in contexts]
    steps = 0
    ended = {}
    while owner.has_runnable:
        steps += 1
        for completion in owner.step():
            ended[completion.session_id] = (steps, completion)
            owner.close(completion.session_id)
    assert owner.stats()["preemptions"] >= 2
    assert ended[ids[0]][0] == 25  # the oldest is never interrupted
    assert ended[ids[0]][0] < ended[ids[1]][0] < ended[ids[2]][0]
    for context, session_id in zip(contexts, ids, strict=True):
        check(context, ended[session_id][1])


def test_resuming_computes_only_what_is_new() -> None:
    owner = engine()
    context = prompt(13)
    session_id = owner.open(context, greedy(5))
    context += run(owner)[session_id].token_ids
    owner.resume(session_id, prompt(6, seed=1), greedy(5))
    check(context + prompt(6, seed=1), run(owner)[session_id])
    assert owner.stats()["prefilled_tokens"] == 13 + 1 + 6


# ---- chunked prefill, slots ----


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_sessions() -> None:
    owner = engine(max_prefill_tokens=5)
    short = owner.open(prompt(3), greedy(20))
    owner.step()
    long = owner.open(prompt(23, seed=1), greedy(6))
    for chunk in range(1, 5):
        before = owner.stats()["prefilled_tokens"]
        owner.step()
        assert owner.stats()["prefilled_tokens"] == before + 5
        assert len(owner.partial(short).token_ids) == 1 + chunk  # goes on in every step
        assert owner.partial(long).token_ids == []
    owner.step()
    assert len(owner.partial(long).token_ids) == 1
    ended = run(owner)
    check(prompt(3), ended[short])
    check(prompt(23, seed=1), ended[long])


def test_a_resumed_session_is_served_before_new_ones() -> None:
    owner = engine(max_num_seqs=1)
    first = owner.open(prompt(5), greedy(2))
    run(owner)
    second = owner.open(prompt(5, seed=1), greedy(4))
    owner.resume(first, [1, 2], greedy(4))
    owner.step()
    assert len(owner.partial(first).token_ids) == 1
    assert owner.partial(second).token_ids == []
    assert set(run(owner)) == {first, second}


# ---- what happens in the middle of turns ----
