"""Each mechanism of the scheduler, provoked on a real model: the results stay those of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from rollout_models import VOCAB, hf_greedy, hf_log_probs, make_engine, make_model, run
from transformers import PreTrainedModel

from verl.workers.rollout.engine import Completion, SamplingParams
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


def test_the_prompt_is_found_in_any_member_that_still_holds_it() -> None:
    owner = engine(num_blocks=16)
    first = owner.open(prompt(11), greedy(2))
    second = owner.open(prompt(11), greedy(20))
    run_first = owner.step() + owner.step()
    assert [completion.session_id for completion in run_first] == [first]
    owner.close(first)
    other = owner.open(prompt(20, seed=1), greedy(8))  # takes the blocks that are free now
    owner.step()
    before = owner.stats()["prefilled_tokens"]
    third = owner.open(prompt(11), greedy(5))
    ended = run(owner)
    assert owner.stats()["prefilled_tokens"] == before + 1
    for session_id, context in ((second, prompt(11)), (third, prompt(11)), (other, prompt(20, seed=1))):
        check(context, ended[session_id])


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


def test_a_group_that_is_computed_again_shares_its_prompt_again() -> None:
    owner = engine()
    ids = [owner.open(prompt(16), SamplingParams(12, seed=seed)) for seed in range(4)]
    for _ in range(5):
        owner.step()
    before = owner.stats()["prefilled_tokens"]
    owner.sleep()
    owner.wake()
    ended = finish(owner)
    assert owner.stats()["prefilled_tokens"] == before + 16 + 4 * 5
    for session_id in ids:
        check(prompt(16), ended[session_id], is_greedy=False)


# ---- memory ----


def test_when_blocks_run_out_the_youngest_is_preempted_and_computed_again() -> None:
    owner = engine(max_num_seqs=3, num_blocks=12)
    contexts = [prompt(11, seed=seed) for seed in range(3)]
    ids = [owner.open(context, greedy(25)) for context in contexts]
    steps, ended = 0, {}
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


def test_preemption_does_not_change_what_is_sampled() -> None:
    def sampled(num_blocks: int) -> tuple[float, list[Completion]]:
        owner = engine(max_num_seqs=4, num_blocks=num_blocks)
        ids = [owner.open(prompt(9, seed=seed // 2), SamplingParams(24, seed=seed)) for seed in range(4)]
        ended = finish(owner)
        return owner.stats()["preemptions"], [ended[i] for i in ids]

    (none, roomy), (some, tight) = sampled(40), sampled(12)
    assert none == 0 and some > 0
    for left, right in zip(roomy, tight, strict=True):
        assert left.token_ids == right.token_ids
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-4)


def test_parked_sessions_lose_their_kv_state_before_anything_has_to_wait() -> None:
    owner = engine(max_num_seqs=2, num_blocks=14)
    contexts = [prompt(15, seed=seed) for seed in range(2)]
    parked = [owner.open(context, greedy(4)) for context in contexts]
    ended = run(owner)  # the two hold all blocks but four
    contexts = [context + ended[i].token_ids for context, i in zip(contexts, parked, strict=True)]
    newcomer = owner.open(prompt(20, seed=2), greedy(6))
    assert owner.has_runnable
    check(prompt(20, seed=2), run(owner)[newcomer])
    stats = owner.stats()
    assert (stats["evictions"], stats["preemptions"], stats["parked"]) == (1, 0, 3)
    owner.close(newcomer)

    def cost_of_resuming(index: int) -> float:
        before = owner.stats()["prefilled_tokens"]
        owner.resume(parked[index], prompt(3, seed=3), greedy(3))
        check(contexts[index] + prompt(3, seed=3), run(owner)[parked[index]])
        return owner.stats()["prefilled_tokens"] - before

    assert cost_of_resuming(1) == 1 + 3  # its last token and the observation
    assert cost_of_resuming(0) > 1 + 3  # it was parked longest, so it had to give way


def test_resumed_sessions_that_wait_for_a_slot_give_way_too() -> None:
    owner = engine(max_num_seqs=1, num_blocks=10)
    contexts = [prompt(17, seed=seed) for seed in range(2)]
    ids = [owner.open(context, greedy(2)) for context in contexts]
    for context, completion in zip(contexts, run(owner).values(), strict=True):
        context += completion.token_ids
    for context, session_id in zip(contexts, ids, strict=True):
        owner.resume(session_id, [5], greedy(15))
        context.append(5)
    ended = finish(owner)
    assert (owner.stats()["evictions"], owner.stats()["preemptions"]) == (1, 0)
    for context, session_id in zip(contexts, ids, strict=True):
        check(context, ended[session_id])


def test_resuming_computes_only_what_is_new() -> None:
    owner = engine()
    context = prompt(13)
    session_id = owner.open(context, greedy(5))
    context += run(owner)[session_id].token_ids
    owner.resume(session_id, prompt(6, seed=1), greedy(5))
    check(context + prompt(6, seed=1), run(owner)[session_id])
    assert owner.stats()["prefilled_tokens"] == 13 + 1 + 6


def test_the_whole_pool_is_enough_for_one_sequence_of_full_length() -> None:
    owner = engine(max_num_seqs=3, num_blocks=5, longest=20)
    ids = [owner.open(prompt(13), greedy(50)) for _ in range(3)]
    ended = finish(owner)
    for session_id in ids:
        check(prompt(13), ended[session_id])
        assert len(ended[session_id].token_ids) == 7


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


@pytest.mark.parametrize("limit", [1, 3, 4, 7])
def test_chunks_of_any_size_give_the_same(limit: int) -> None:
    owner = engine(max_prefill_tokens=limit)
    contexts = [prompt(length, seed=length) for length in (9, 1, 17, 8)] + [prompt(17, seed=17)]
    ids = [owner.open(context, greedy(7)) for context in contexts]
    ended = finish(owner)
    for context, session_id in zip(contexts, ids, strict=True):
        check(context, ended[session_id])
    assert owner.stats()["prefilled_tokens"] <= 9 + 1 + 17 + 8 + 1


def test_slots_are_refilled_while_others_go_on() -> None:
    owner = engine(max_num_seqs=2)
    contexts = [prompt(5 + index, seed=index) for index in range(7)]
    ids = [owner.open(context, greedy(3 + index % 4)) for index, context in enumerate(contexts)]
    ended = {}
    while owner.has_runnable:
        for completion in owner.step():
            ended[completion.session_id] = completion
        assert owner.stats()["running"] <= 2
    for index, (context, session_id) in enumerate(zip(contexts, ids, strict=True)):
        check(context, ended[session_id])
        assert len(ended[session_id].token_ids) == 3 + index % 4


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


def test_a_preempted_session_goes_on_before_those_that_were_queued() -> None:
    owner = engine(max_num_seqs=2, num_blocks=10)
    resumed = owner.open(prompt(3, seed=1), greedy(1))
    run(owner)
    contexts = [prompt(11, seed=2), prompt(11, seed=3)]
    older, younger = (owner.open(context, greedy(20)) for context in contexts)
    owner.step()
    owner.resume(resumed, [4], greedy(3))
    while not owner.stats()["preemptions"]:
        owner.step()
    assert owner.stats()["running"] == 1  # the other slot waits for the younger one's blocks
    ended = run(owner)
    for context, session_id in zip(contexts, (older, younger), strict=True):
        check(context, ended[session_id])
    assert len(ended[resumed].token_ids) == 3


# ---- what happens in the middle of turns ----


def test_update_weights_in_the_middle_of_a_turn_goes_on_with_the_new_weights() -> None:
    owner = engine(max_num_seqs=2, max_prefill_tokens=16)
    contexts = [prompt(6, seed=1), prompt(30, seed=2), prompt(7, seed=3)]  # running, half computed, queued
    ids = [owner.open(context, greedy(8)) for context in contexts]
    owner.step()
    owner.step()
    before = [owner.partial(session_id).token_ids for session_id in ids]
    assert [len(tokens) for tokens in before] == [2, 0, 0]
    owner.update_weights(model(1).named_parameters(), version=2)
    assert owner.stats()["kv_bytes"] == 0
    ended = run(owner)
    for context, tokens, session_id in zip(contexts, before, ids, strict=True):
        completion = ended[session_id]
        rest = 8 - len(tokens)
        if tokens:
            assert tokens == hf_greedy(model(), context, len(tokens))
        assert completion.token_ids == tokens + hf_greedy(model(1), context + tokens, rest)
        assert (completion.version_first, completion.version_last) == (1 if tokens else 2, 2)
        expected = hf_log_probs(model(1), context + completion.token_ids)[-rest:]
        assert completion.log_probs[-rest:] == pytest.approx(expected, abs=1e-4)


def test_parked_sessions_are_computed_again_after_update_weights() -> None:
    owner = engine()
    context = prompt(9)
    session_id = owner.open(context, greedy(4))
    context += run(owner)[session_id].token_ids
    owner.update_weights(model(1).named_parameters(), version=2)
    owner.resume(session_id, prompt(3, seed=1), greedy(6))
    context += prompt(3, seed=1)
    completion = run(owner)[session_id]
    assert completion.token_ids == hf_greedy(model(1), context, 6)
    assert (completion.version_first, completion.version_last) == (2, 2)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_in_the_middle_of_turns_changes_nothing(level: int) -> None:
    owner = engine(max_num_seqs=2, max_prefill_tokens=16)
    contexts = [prompt(6, seed=1), prompt(30, seed=2), prompt(7, seed=3)]
    ids = [owner.open(context, greedy(8)) for context in contexts]
    owner.step()
    owner.step()
    owner.sleep(level)
    assert owner.has_runnable
    owner.wake()
    if level == 2:
        owner.update_weights(model().named_parameters(), version=1)
    ended = run(owner)
    for context, session_id in zip(contexts, ids, strict=True):
        check(context, ended[session_id])


def test_a_session_can_be_closed_while_its_prompt_is_computed_and_others_wait_for_it() -> None:
    owner = engine(max_prefill_tokens=6)
    ids = [owner.open(prompt(16), SamplingParams(5, seed=seed)) for seed in range(3)]
    owner.step()
    owner.close(ids[0])
    ended = run(owner)
    for session_id in ids[1:]:
        check(prompt(16), ended[session_id], is_greedy=False)
    assert owner.stats()["prefilled_tokens"] == 16 + 2  # what was computed in the first step is found again


def test_closing_a_member_does_not_take_the_prompt_from_the_others() -> None:
    owner = engine(num_blocks=20)
    ids = [owner.open(prompt(10), greedy(14)) for _ in range(3)]
    owner.step()
    owner.close(ids[0])
    newcomer = owner.open(prompt(20, seed=1), greedy(10))  # would overwrite what was freed too early
    ended = run(owner)
    for session_id in ids[1:]:
        check(prompt(10), ended[session_id])
    check(prompt(20, seed=1), ended[newcomer])
