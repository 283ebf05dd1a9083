"""Whole runs with other environments than searches, on the tiny model; mistakes are said before the start."""

import json

import pandas as pd
import pytest
from small_runs import arguments, metrics

from verl.trainer import main_ppo

OURS = "examples.environment:LetterEnv"


def write(folder, rows):
    for name in ("train", "test"):
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def row(number, **columns):
    return {"prompt": [{"role": "user", "content": f"Question: write e. {number}"}], "letter": "e", **columns}


@pytest.mark.slow
def test_a_mixed_batch_learns_and_counts_each_environment_and_needs_no_search_server(tmp_path):
    sums = {"env_class": "gsm8k", "reward_spec": {"method": "rule", "ground_truth": "7"}}
    write(
        tmp_path, [row(i, env_class=OURS) if i % 2 else row(i, **sums, data_source="sums") for i in range(8)]
    )
    settings = arguments(tmp_path, "http://127.0.0.1:9/retrieve", tmp_path / "run", data__val_data_num=4)
    assert main_ppo.run([*settings, "max_turns=2"]) == 0
    step = metrics(tmp_path / "run")[-1]
    name = "examples.environment.LetterEnv"
    assert step[f"env/{name}/turns"] == 2.0 and step["env/gsm8k/turns"] == 1.0
    assert step[f"env/{name}/reward"] > 0 and step[f"env/{name}/letters"] > 0
    assert step["env/gsm8k/reward"] == 0.0 and step["env/gsm8k/failed"] == 0.0
    assert {f"val/test_score/{name}", "val/test_score/gsm8k", "val/test_score/sums"} <= step.keys()
    assert "env/finish_ratio" not in step
    records = [
        json.loads(line)
        for path in sorted((tmp_path / "run" / "trajectories").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    scored = [
        each for each in records if each["trajectory"]["env_class"] == OURS and each["split"] == "train"
    ]
    for each in scored:
        text = "".join(t for t, sampled in zip(each["tokens"], each["token_mask"], strict=True) if sampled)
        turns = each["trajectory"]["turns"]
        assert each["score"] == pytest.approx(sum(turn["reward"] for turn in turns), abs=1e-6)
        assert sum(turn["metadata"]["count"] for turn in turns) <= text.count("e")
    assert scored and (tmp_path / "run" / "trajectories.html").exists()


@pytest.mark.parametrize(
    "setting, columns, message",
    [
        ("environment.env_class=gsm9k", {}, "Did you mean 'gsm8k'?"),
        ("max_turns=2", {"env_class": "text3sql"}, "Did you mean 'text2sql'?"),
        ("environment.env_class=no_such_module:Env", {}, "no_such_module can't be imported"),
        ("environment.env_config.gsm9k.method=strict", {}, "Did you mean 'gsm8k'?"),
        ("environment.env_config.search.topk=3", {}, "retriever.topk"),
    ],
)
def test_an_unknown_environment_ends_the_start(setting, columns, message, tmp_path, capsys):
    write(
        tmp_path, [row(i, data_source="x", reward_model={"ground_truth": "1"}, **columns) for i in range(8)]
    )
    settings = arguments(tmp_path, "http://127.0.0.1:9/retrieve", tmp_path / "run")
    assert main_ppo.run([*settings, setting]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_too_many_failures_stop_the_run(tmp_path, capsys):
    write(tmp_path, [row(i, env_class=OURS) | {"letter": 5} for i in range(8)])
    settings = arguments(tmp_path, "http://127.0.0.1:9/retrieve", tmp_path / "run")
    assert main_ppo.run([*settings, "max_turns=2", "trainer.val_before_train=false"]) == 3
    said = capsys.readouterr()
    assert "16 of 16 trajectories ended because examples.environment:LetterEnv failed" in said.err
    assert "TypeError" in said.err and said.out.count("an episode failed and is left out") == 1
