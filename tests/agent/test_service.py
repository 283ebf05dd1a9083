"""The loop that does not end, with the native engine and real searches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_engine import prompts
from test_generation_with_a_model import CONFIG, QUESTIONS, model, tokenizer  # noqa: F401  # fixtures
from test_stragglers_with_a_model import server

from search_r1.llm_agent.generation import LLMGenerationManager
from search_r1.search.client import SearchClient
from verl.agent.episode import Episode
from verl.agent.service import TrajectoryService
from verl.agent.trajectory import KEPT, Trajectory
from verl.protocol import DataProto
from verl.trainer.ppo.saved_rows import continuations
from verl.workers.rollout.native import NativeEngine


@pytest.fixture
def url() -> Iterator[str]:
    with server() as address:
        yield address


@contextmanager
def serving(tokenizer, model, url: str) -> Iterator[tuple[LLMGenerationManager, TrajectoryService]]:  # noqa: F811
    engine = NativeEngine(model.config, 16, max_model_len=CONFIG.max_prompt_length)
    engine.load_weights(model.state_dict().items(), 1)
    settings = replace(CONFIG, search_delay_steps=None, topk=1)
    with SearchClient(url, timeout=60) as client:
        agent = LLMGenerationManager(tokenizer, engine, client, settings)
        service = TrajectoryService(agent)
        yield agent, service
        service.end()
        assert engine.stats()["running"] == engine.stats()["parked"] == 0


def what(trajectory: Trajectory) -> tuple[Any, ...]:
    return trajectory.response_ids, trajectory.response_mask, trajectory.finish_reason


def rows_of(agent: LLMGenerationManager, batch: DataProto) -> list[Episode]:
    """As a rollout process begins them."""
    return agent.episodes(batch, params=agent.sampling_params(batch.meta_info))


def undisturbed(tokenizer, model, url: str) -> list[tuple[Any, ...]]:  # noqa: F811
    with serving(tokenizer, model, url) as (agent, service):
        service.add(rows_of(agent, prompts(tokenizer, QUESTIONS)))
        ended: list[Trajectory] = []
        while not service.is_idle:
            service.advance()
            ended += service.take_finished()
    return [what(trajectory) for trajectory in sorted(ended, key=lambda each: each.row)]


def test_rows_that_come_while_others_run_are_what_a_batch_makes_of_them(tokenizer, model, url):  # noqa: F811
    rows = prompts(tokenizer, QUESTIONS)
    rng = random.Random(0)
    with serving(tokenizer, model, url) as (agent, service):
        batch = agent.run_llm_loop(rows)
        waiting = rows_of(agent, rows)
        ended = dict[int, Trajectory]()
        while waiting or not service.is_idle:
            while waiting and rng.random() < 0.3:
                service.add([waiting.pop()])
            service.advance()
            ended |= {each.row: each for each in service.take_finished()}
        again = agent.batch([ended[row] for row in range(len(QUESTIONS))], rows.non_tensor_batch, {})
    for key in ("responses", "response_mask", "attention_mask"):
        assert torch.equal(batch.tensors[key], again.tensors[key]), key
    assert torch.allclose(batch.tensors["rollout_log_probs"], again.tensors["rollout_log_probs"], atol=1e-5)


@pytest.mark.parametrize("moment", [1, 9, 20, 30])
def test_what_is_noted_at_any_moment_goes_on_elsewhere_to_the_same_end(tokenizer, model, url, moment):  # noqa: F811
    expected = undisturbed(tokenizer, model, url)
    rows = prompts(tokenizer, QUESTIONS)
    with serving(tokenizer, model, url) as (agent, service):
        service.add(rows_of(agent, rows))
        for _ in range(moment):
            service.advance()
        noted = service.snapshot()
        assert {each.finish_reason for each in noted} >= {KEPT}
        noted.sort(key=lambda each: each.row)
        states = continuations(agent.batch(noted, rows.non_tensor_batch, {}))
    rows.non_tensor_batch["continuation"] = states
    with serving(tokenizer, model, url) as (agent, service):
        service.add(rows_of(agent, rows))
        ended = list[Trajectory]()
        while not service.is_idle:
            service.advance()
            ended += service.take_finished()
    assert [what(each) for each in sorted(ended, key=lambda each: each.row)] == expected


@pytest.mark.parametrize("turns_end_first", [False, True])
def test_new_weights_come_between_steps_or_between_turns(tokenizer, model, url, turns_end_first):  # noqa: F811
    with serving(tokenizer, model, url) as (agent, service):
        service.add(rows_of(agent, prompts(tokenizer, QUESTIONS)))
        for _ in range(5):
            service.advance()

        def load() -> None:
            agent.engine.load_weights(model.state_dict().items(), 2)

        service.load_weights(load, turns_end_first)
        assert agent.engine.version == (1 if turns_end_first else 2)
        ended = list[Trajectory]()
        while not service.is_idle:
            service.advance()
            ended += service.take_finished()
    assert len(ended) == len(QUESTIONS)
    assert {each.version_first for each in ended} == {1}  # all had begun
    assert 2 in {each.version_last for each in ended}
    # the same weights under another number: nothing else may change
    assert [what(e) for e in sorted(ended, key=lambda e: e.row)] == undisturbed(tokenizer, model, url)


def test_rows_that_are_given_up_leave_nothing_behind(tokenizer, model, url):  # noqa: F811
    expected = undisturbed(tokenizer, model, url)
    for moment in (0, 3, 25):
        with serving(tokenizer, model, url) as (agent, service):
            service.add(rows_of(agent, prompts(tokenizer, QUESTIONS)))
            for _ in range(moment):
                service.advance()
            early = {each.row for each in service.take_finished()}
            service.cancel({0, 3, 7, *early})
            ended = list[Trajectory]()
            while not service.is_idle:
                service.advance()
                ended += service.take_finished()
            assert agent.engine.stats()["running"] == 0 and service.num_in_flight == 0
        rest = set(range(len(QUESTIONS))) - early - {0, 3, 7}
        assert {each.row for each in ended} == rest
        assert all(what(each) == expected[each.row] for each in ended)
