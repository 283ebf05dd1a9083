"""Trajectories of a snapshot go on elsewhere where they were, on an engine that writes by a script."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_engine import MemorySearch, ScriptedEngine, byte_tokenizer, prompts
from test_stragglers import CONFIG, QUICK, encode, story

from search_r1.llm_agent.generation import LLMGenerationManager, format_observation
from verl.agent.service import TrajectoryService
from verl.agent.trajectory import Trajectory
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.saved_rows import continuations

TOKENIZER = byte_tokenizer()
SETTINGS = replace(CONFIG, search_delay_steps=None, straggler_factor=None)
LONG = "w" * 40 + QUICK


class Process:
    """A rollout process with one row, whose policy tells a story."""

    def __init__(self, *turns: str, search: MemorySearch | None = None, version: int = 3) -> None:
        script = story(*turns)
        self.engine = ScriptedEngine(TOKENIZER, lambda prompt, number: script(prompt[3:], number))
        self.engine.version = version
        self.agent = LLMGenerationManager(TOKENIZER, self.engine, search or MemorySearch(), SETTINGS)
        self.service = TrajectoryService(self.agent)

    def begin(self, state: dict | None = None) -> None:
        rows = prompts(TOKENIZER, ["q0 "])
        rows.non_tensor_batch["continuation"] = object_array([state])
        self.service.add(self.agent.episodes(rows, params=self.agent.sampling_params({})))

    def snapshot(self) -> dict:
        """What a checkpoint holds of the row."""
        batch: DataProto = self.agent.batch(self.service.snapshot(), {}, {})
        return continuations(batch)[0]

    def finish(self) -> Trajectory:
        while not self.service.is_idle:
            self.service.advance()
            for trajectory in self.service.take_finished():
                self.service.end()
                return trajectory
        raise AssertionError("the row did not end")


def undisturbed(*turns: str) -> Trajectory:
    process = Process(*turns)
    process.begin()
    return process.finish()


@pytest.mark.parametrize("num_steps", [1, 17, len(encode(LONG)) - 1])
def test_a_turn_goes_on_where_it_was_with_what_is_left_of_its_limit(num_steps):
    first = Process(LONG, version=3)
    first.begin()
    for _ in range(num_steps):
        first.service.advance()
    state = first.snapshot()
    num_begun = state["record"]["num_begun"]
    assert state["record"]["turns"] == [] and 0 < num_begun <= num_steps
    first.service.end()

    second = Process(LONG, version=4)
    second.begin(state)
    assert second.engine.params[-1].max_tokens == CONFIG.max_response_length - num_begun
    trajectory = second.finish()
    expected = undisturbed(LONG)
    assert trajectory.response_ids == expected.response_ids
    assert trajectory.response_mask == expected.response_mask
    assert trajectory.log_probs[:num_begun] == state["log_probs"]
    assert [turn.text for turn in trajectory.turns] == [turn.text for turn in expected.turns]
    assert (trajectory.version_first, trajectory.version_last, trajectory.num_begun) == (3, 4, 0)
    assert trajectory.finish_reason == "answer"


def test_a_trajectory_that_waits_for_its_search_asks_again_and_goes_on():
    turns = ("<search>never</search>", QUICK)
    first = Process(*turns, search=MemorySearch(held={"never"}))
    first.begin()
    while not first.service.waiting:
        first.service.advance()
    state = first.snapshot()
    first.service.end()
    search = MemorySearch()
    second = Process(*turns, search=search)
    second.begin(state)
    trajectory = second.finish()
    assert search.posts == [["never"]]
    text = TOKENIZER.decode(trajectory.response_ids)
    assert text == turns[0] + format_observation(search.documents("never")) + QUICK
    assert [turn.action for turn in trajectory.turns] == ["search", "answer"]
    assert trajectory.finish_reason == "answer"


@pytest.mark.parametrize("num_written", range(1, len(encode("</search>"))))
def test_a_stop_string_that_is_half_written_still_ends_the_turn(num_written):
    """The next engine does not know the first half, so it is sampled again."""
    settled = "w" * 40 + "<search>x"
    turns = (settled + "</search>", QUICK)
    first = Process(*turns)
    first.begin()
    for _ in range(len(encode(settled)) + num_written):
        first.service.advance()
    state = first.snapshot()
    first.service.end()
    assert TOKENIZER.decode(state["response_ids"]) == settled
    second = Process(*turns)
    second.begin(state)
    trajectory = second.finish()
    assert [turn.action for turn in trajectory.turns] == ["search", "answer"]
    assert trajectory.turns[0].text == turns[0]
