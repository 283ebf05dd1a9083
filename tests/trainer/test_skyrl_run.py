"""SkyRL's own environment classes in a whole run: searches over HTTP, queries on SQLite files.

The classes are those of skyrl-gym 0.4.0, from PyPI.
"""

import json
import sqlite3

import pandas as pd
import pytest
import yaml
from small_runs import arguments, metrics

from verl.trainer import main_ppo

SEARCH = "skyrl_gym.envs.search.env:SearchEnv"
SQL = "skyrl_gym.envs.sql.env:SQLEnv"


def search_row(row):
    target = [str(answer) for answer in row["reward_model"]["ground_truth"]["target"]]
    prompt = [dict(message) for message in row["prompt"]]
    return {"prompt": prompt, "env_class": SEARCH, "reward_spec": {"ground_truth": {"target": target}}}


def sql_row(number):
    prompt = [{"role": "user", "content": f"Which letter is number {number}? Write <sql>..</sql>."}]
    spec = {"ground_truth": f"SELECT letter FROM letters WHERE number = {number}"}
    return {"prompt": prompt, "env_class": SQL, "reward_spec": spec, "db_id": "abc", "data": "spider"}


@pytest.mark.slow
def test_skyrls_search_and_sql_environments_train_as_they_are(tmp_path, world, url):
    pytest.importorskip("skyrl_gym")
    folder = tmp_path / "databases" / "spider" / "database" / "abc"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "abc.sqlite") as connection:
        connection.execute("CREATE TABLE letters (number INTEGER, letter TEXT)")
        connection.executemany("INSERT INTO letters VALUES (?, ?)", enumerate("abcdef"))
    questions = pd.read_parquet(world / "train.parquet").to_dict("records")[:8]
    rows = [search_row(row) | {"max_turns": 3} for row in questions[:6]]
    rows += [sql_row(number) | {"max_turns": 2} for number in range(2)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {SEARCH: {"search_url": url, "topk": 2, "timeout": 10}}
    settings[SQL] = {"db_path": str(tmp_path / "databases")}
    (tmp_path / "recipe").mkdir()
    recipe = yaml.safe_dump({"environment": {"env_config": settings}})
    (tmp_path / "recipe" / "skyrl.yaml").write_text(f"# @package _global_\n{recipe}")
    command = arguments(
        tmp_path,
        "http://127.0.0.1:9/retrieve",
        tmp_path / "run",
        data__train_files=tmp_path / "train.jsonl",
        data__val_files=tmp_path / "test.jsonl",
        data__train_batch_size=8,
        data__max_prompt_length=1024,
        data__max_start_length=512,
        data__max_response_length=48,
        actor_rollout_ref__rollout__n_agent=2,
        trainer__total_training_steps=1,
    )
    assert main_ppo.run(["--config-dir", str(tmp_path), "+recipe=skyrl", *command]) == 0
    step = metrics(tmp_path / "run")[-1]
    for env_class in (SEARCH, SQL):
        assert step[f"env/{env_class.replace(':', '.')}/failed"] == 0.0, step
    records = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    texts = dict.fromkeys((SEARCH, SQL), "")
    for record in records:
        texts[record["trajectory"]["env_class"]] += "".join(record["tokens"])
    assert "<information>" in texts[SEARCH] and "Doc 1" in texts[SEARCH]
