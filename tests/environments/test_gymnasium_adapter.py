from __future__ import annotations

import pytest

from verl.environments import make

gymnasium = pytest.importorskip("gymnasium")


class Corridor(gymnasium.Env):
    """Find the door: `length` steps to the right. Text observations; actions are names, or words."""

    closed = 0

    def __init__(self, length=3, words=False):
        self.action_space = gymnasium.spaces.Text(20) if words else gymnasium.spaces.Discrete(2, start=5)
        self.observation_space = gymnasium.spaces.Text(200)
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(0, 3))
        return f"You stand at {self.place}.", {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.place += 1 if action in (6, "right") else -1
        return f"Now at {self.place}.", float(self.place >= self.length), self.place >= self.length, False, {}

    def close(self):
        Corridor.closed += 1


@pytest.fixture(scope="module", autouse=True)
def registered():
    gymnasium.register("Corridor-v0", entry_point=Corridor, max_episode_steps=4)
    yield
    del gymnasium.registry["Corridor-v0"]


def episode(config=None, **row):
    default = {"id": "Corridor-v0", "kwargs": {"length": 9}, "actions": ["left", "right"]}
    env = make("gymnasium", env_config=default if config is None else config, extras=row)
    return env, env.init([{"role": "user", "content": "Find the door."}])[0]


def test_an_episode_by_names_of_actions():
    env, messages = episode({"id": "Corridor-v0", "actions": ["left", "right"]}, seed=1)
    start = int(messages[1]["content"][-2])
    assert [each["content"] for each in messages] == ["Find the door.", f"You stand at {start}."]
    output = env.step("I jump.")
    assert "choose one of left, right" in output["observations"][0]["content"] and output["reward"] == 0
    for step in range(start, 3):
        output = env.step("<action>left</action> no: <action>right</action>")
        assert output["done"] == (step == 2) and output["reward"] == float(step == 2)
    assert output["observations"] == [] and env.turns == 4 - start
    before = Corridor.closed
    env.close()
    assert Corridor.closed == before + 1


def test_an_episode_by_words_ends_when_it_is_cut():
    env, _ = episode({"id": "Corridor-v0", "kwargs": {"length": 9, "words": True}})
    outputs = [env.step(" left ") for _ in range(4)]
    assert [output["done"] for output in outputs] == [False, False, False, True]
    assert outputs[-1]["metadata"]["truncated"]


def test_trajectories_of_a_prompt_start_alike():
    starts = [episode(extra_info={"index": index})[1][1]["content"] for index in (0, 0, 1, 2, 3, 4, 5)]
    assert starts[0] == starts[1] and len(set(starts)) > 1


def test_mistakes_of_the_user_are_told():
    with pytest.raises(ValueError, match="environment.env_config.gymnasium.id"):
        episode({})
    with pytest.raises(ValueError, match=r"Discrete\(2, start=5\) and 1 names"):
        episode({"id": "Corridor-v0", "actions": ["left"]})
    with pytest.raises(ValueError, match=r"Text\(.*and 2 names"):
        episode({"id": "Corridor-v0", "kwargs": {"words": True}, "actions": ["left", "right"]})
