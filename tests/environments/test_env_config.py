"""The settings of an environment are a mapping and have attributes, as SkyRL's environments read them."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest

from verl.environments.environment import BaseTextEnv, EnvConfig
from verl.environments.executors import Environments
from verl.environments.registry import make

HERE = "test_env_config"


@dataclass
class Settings:
    topk: int = 3
    url: str = "http://127.0.0.1:8000/retrieve"


class ReadsAttributes(BaseTextEnv):
    def __init__(self, env_config: Settings | dict[str, Any], extras: Any = None):
        super().__init__()
        self.seen = (env_config.topk, env_config["topk"], env_config.url, env_config.inner.depth)


def test_values_are_items_and_attributes():
    config = EnvConfig({"topk": 2, "inner": {"depth": 1}})
    for again in (config, pickle.loads(pickle.dumps(config))):
        assert again.topk == again["topk"] == again.get("topk") == 2 and again.inner.depth == 1
        assert {**again} == {"topk": 2, "inner": {"depth": 1}} and not hasattr(again, "other")
    with pytest.raises(AttributeError, match="'search_url' in env_config .it has: topk, inner."):
        _ = config.search_url


def test_the_defaults_of_an_environments_own_dataclass_stand_for_what_is_left_out():
    settings = {f"{HERE}:ReadsAttributes": {"topk": 5, "inner": {"depth": 1}}}
    expected = (5, 5, "http://127.0.0.1:8000/retrieve", 1)
    assert make(f"{HERE}:ReadsAttributes", env_config=settings[f"{HERE}:ReadsAttributes"]).seen == expected
    environments = Environments(None, settings)
    runner = environments[f"{HERE}:ReadsAttributes"]
    assert runner._cls(**runner._kwargs, extras={}).seen == expected
    environments.close()


def test_skyrls_own_environments_are_made_from_a_mapping(tmp_path):
    pytest.importorskip("skyrl_gym")
    row = {"reward_spec": {"ground_truth": {"target": ["x"]}}, "max_turns": 2}
    env = make("skyrl_gym.envs.search.env:SearchEnv", env_config={"topk": 1}, extras=row)
    output = env.step("<answer>x</answer>")
    assert output["done"] and output["reward"] == 1.0
    row = {"reward_spec": {"ground_truth": "SELECT 1"}, "db_id": "d", "data": "spider", "max_turns": 2}
    folder = tmp_path / "spider" / "database" / "d"
    folder.mkdir(parents=True)
    (folder / "d.sqlite").touch()
    env = make("skyrl_gym.envs.sql.env:SQLEnv", env_config={"db_path": str(tmp_path)}, extras=row)
    assert env.db_path.startswith(str(tmp_path))
