"""The states of an episode, and the events that move it on."""

from __future__ import annotations

import pytest
from scripted_engine import ScriptedEngine, byte_tokenizer, prompts

from verl.agent.agent import EnvironmentAgent
from verl.agent.episode import TRANSITIONS, Episode, EpisodeEvent, EpisodeState
from verl.agent.loop import TrajectoryLoop
from verl.agent.service import TrajectoryService
from verl.agent.trajectory import AgentConfig, Trajectory
from verl.environments.executors import Environments
from verl.protocol import DataProto, object_array

State = EpisodeState
CONFIG = AgentConfig(3, 40, 600, 80, 60, max_in_flight=2)


def batch_of(rows) -> DataProto:
    """Return a batch of rows (environment, extras)."""
    batch = prompts(byte_tokenizer(), ["Q"] * len(rows))
    batch.non_tensor_batch["episode"] = object_array(
        [{"env_class": f"loop_environments:{name}", "prompt": [], "extras": extras} for name, extras in rows]
    )
    return batch


def agent() -> EnvironmentAgent:
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(tokenizer, lambda prompt, number: "words")
    return EnvironmentAgent(tokenizer, engine, CONFIG, Environments())


def test_every_state_can_be_reached_and_every_one_can_end():
    reached = {State.PENDING}
    for _ in State:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(State)
    ends = {state for (state, event), after in TRANSITIONS.items() if after is State.ENDED}
    assert ends == set(State) - {State.ENDED}
    assert {event for _, event in TRANSITIONS} == set(EpisodeEvent)


def test_an_event_that_can_not_happen_is_an_error():
    episode = Episode(Trajectory(0, [1], 0), 1)
    episode.handle_event(EpisodeEvent.ADMITTED)
    with pytest.raises(RuntimeError, match="TURN_ENDED can't happen to an episode in .*OPENING"):
        episode.handle_event(EpisodeEvent.TURN_ENDED)
    assert episode.state is State.OPENING
    assert Episode(Trajectory(0, [1], 0, finish_reason="answer"), 1).state is State.ENDED


def test_the_loops_collections_are_those_of_the_states():
    player = agent()
    rows = [
        ("Counting", {"goal": 2}),
        ("Threaded", {"goal": 2}),
        ("Threaded", {}),
        ("Counting", {"mood": "unmade"}),
    ]
    episodes = player.episodes(batch_of(rows))
    loop = TrajectoryLoop(player, player.sampling_params({}), episodes)
    seen = {episode.state for episode in episodes}
    loop._start_pending()
    while loop.num_in_flight:
        in_state = {state: {e.trajectory.row for e in episodes if e.state is state} for state in State}
        seen |= {state for state, numbers in in_state.items() if numbers}
        assert {e.trajectory.row for e in loop.pending} == in_state[State.PENDING]
        assert set(loop.waiting) == in_state[State.OPENING] | in_state[State.STEPPING]
        assert not in_state[State.STEP_DUE]  # nothing waits for this between two steps
        assert {e.trajectory.row for e in loop.sessions.values()} >= in_state[State.DECODING]
        assert loop.num_in_flight == len(rows) - len(in_state[State.PENDING]) - len(in_state[State.ENDED])
        loop.advance()
    loop.end()
    player.close()
    assert {episode.state for episode in episodes} == {State.ENDED}
    assert seen >= {State.PENDING, State.OPENING, State.DECODING}


def test_a_turn_that_waits_for_weights_is_held():
    player = agent()
    service = TrajectoryService(player)
    (first, second) = player.episodes(batch_of([("Counting", {})] * 2), params=player.sampling_params({}))
    service.add([first])
    service.load_weights(lambda: None, turns_end_first=True)
    service.add([second])
    assert (first.state, second.state) == (State.DECODING, State.HELD)
    while not service.is_idle:
        service.advance()
        service.take_finished()
    assert first.state is second.state is State.ENDED
    service.end()
    player.close()
