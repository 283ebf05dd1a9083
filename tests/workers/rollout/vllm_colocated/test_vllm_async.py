"""vLLM that schedules a step while the one before is computed gives the tokens that it gives step by step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_vllm_sessions import byte_tokenizer
from vllm_models import KV_BYTES, generate, make_model, random_prompts, run, scheduled_ahead, write_config

from verl.sessions.engine_contract import Completion, SamplingParams
from verl.sessions.stop import StopCondition

FEW_BLOCKS = 16 * 32 * 2 * 2 * 64 * 4  # positions, keys and values, layers, channels, bytes


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[[int], tuple[Any, Any]]]:
    """engines(seed, bytes of the KV cache) -> two that have the same weights: synchronous, asynchronous."""
    from verl.workers.rollout.vllm.colocated_engine import VllmEngine

    made: dict[int, tuple[Any, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, scheduled_ahead():
        write_config("qwen3", Path(folder))

        def start(size: int, ahead: bool) -> Any:
            sizes = {"max_num_seqs": 16, "max_model_len": 128, "kv_cache_memory_bytes": size}
            return VllmEngine(folder, async_scheduling=ahead, **sizes)

        def get(size: int = KV_BYTES) -> tuple[Any, Any]:
            if size not in made:
                made[size] = start(size, False), start(size, True)
            for engine in made[size]:
                engine.load_weights(make_model("qwen3").named_parameters(), 1)
            return made[size]

        yield get
        for pair in made.values():
            for engine in pair:
                stats = engine.stats()
                assert (stats["running"], stats["queued"], stats["kv_used_share"]) == (0, 0, 0)
                engine.shutdown()


def steps_under_way(engine: Any) -> int:
    return len(engine._llm.engine_core.engine_core.batch_queue or ())


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name in ("token_ids", "finish_reason", "stop_string", "version_first", "version_last"):
            assert getattr(one, name) == getattr(other, name)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        assert one.model_log_probs == pytest.approx(other.model_log_probs, abs=1e-4)


def turns(engine: Any) -> tuple[list[Completion], set[int]]:
    """Three turns of 24 sessions that stop at different steps; six are closed in the midst of one. Also how
    many steps were under way when another one was taken.
    """
    stop = StopCondition(byte_tokenizer(), list("abcdefgh"))
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 1.3},
        {"top_k": 20, "top_p": 0.9},
    ]
    params = [SamplingParams(25, seed=seed, stop=stop, **kinds[seed % 4]) for seed in range(24)]
    prompts = [[3, 4, *prompt] for prompt in random_prompts(24, 20)]
    ids = [engine.open(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    ended = {}
    found = []
    under_way = []
    for turn in range(3):
        begun = len(under_way)
        while engine.has_runnable:
            ended |= {completion.session_id: completion for completion in engine.step()}
            under_way.append(steps_under_way(engine))
            if turn == 1 and len(under_way) == begun + 3:
                for session_id in ids[:6]:
                    engine.close(session_id)
                ids = ids[6:]
                params = params[6:]
        found += [ended[i] for i in ids]
        for session_id, one in zip(ids, params, strict=True):
            if turn < 2:
                engine.resume(session_id, [7, 8, 9], one)
    assert len(ids) == 18
    for session_id in ids:
        engine.close(session_id)
    return found, set(under_way)


def test_turns_stops_preemption_and_closing_in_the_midst_give_the_same_tokens(engines: Any) -> None:
    (expected, at_once), (found, ahead) = (turns(engine) for engine in engines(FEW_BLOCKS))
    assert (at_once, ahead) == ({0}, {1})
    assert engines(FEW_BLOCKS)[1].stats()["preemptions"] > 2
    assert {c.finish_reason for c in found} == {"stop", "length"}
    assert_same(found, expected)


def test_new_weights_and_sleep_while_a_step_is_under_way_leave_nothing_old(engines: Any) -> None:
    prompts = random_prompts(12, seed=3)
    found = []
    for engine, steps in zip(engines(), (4, 5), strict=True):  # the fifth is under way
        ids = [engine.open(prompt, SamplingParams(12, seed=i)) for i, prompt in enumerate(prompts)]
        assert [engine.step() for _ in range(steps)] == [[]] * steps
        assert steps_under_way(engine) == steps - 4
        assert [len(engine.partial(i).token_ids) for i in ids] == [4] * 12
        engine.load_weights(make_model("qwen3", seed=1).named_parameters(), 2)
        for _ in range(steps - 2):
            engine.step()
        engine.sleep()
        engine.wake()
        ended = run(engine)
        found.append([ended[i] for i in ids])
        for session_id in ids:
            engine.close(session_id)
    assert {(c.version_first, c.version_last) for c in found[0]} == {(1, 2)}
    assert_same(found[1], found[0])
    of_the_new, same = (generate(engine, prompts, SamplingParams(8, seed=5)) for engine in engines())
    assert_same(same, of_the_new)


def test_answers_to_a_server_s_requests_are_the_same(engines: Any) -> None:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    answers = []
    for engine in engines():
        for seed, prompt in enumerate(random_prompts(8, seed=4)):
            params = VllmSamplingParams(
                max_tokens=6 + seed, logprobs=1, detokenize=False, ignore_eos=True,
                output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"session_seed": seed},
            )  # fmt: skip
            engine._llm.add_request(str(seed), tokens_input(prompt), params)
        ended = {}
        while engine._llm.has_unfinished_requests():
            ended |= {answer.request_id: answer.outputs[0] for answer in engine._llm.step()}
        answers.append([ended[str(seed)] for seed in range(8)])
        assert not engine._sampler.steps  # nobody would take them
    for one, other in zip(*answers, strict=True):
        assert list(one.token_ids) == list(other.token_ids) and len(one.token_ids) > 5
        for found, expected in zip(one.logprobs, other.logprobs, strict=True):
            assert found.keys() == expected.keys() and len(found) == 2
            for token, value in found.items():
                assert value.logprob == pytest.approx(expected[token].logprob, abs=1e-4)


def test_what_fails_while_a_step_is_drawn_is_said(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of this file: steps of the engine are lost afterwards."""
    engine = engines()[1]
    session_id = engine.open([1, 2, 3], SamplingParams(20))
    assert engine.step() == engine.step() == []

    def fail(*_: Any) -> None:
        raise ValueError("no memory left")

    monkeypatch.setattr("verl.workers.rollout.vllm.sampler.draw_in_pieces", fail)
    with pytest.raises(ValueError, match="no memory left"):
        engine.step()
    engine.close(session_id)
