"""Rows of other environments than searches, SkyRL's as they are."""

import json
from pathlib import Path

import pandas as pd
from transformers import AutoTokenizer

from verl.config import load_config
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_environments import environments_in, environments_of, searches

MODEL = str(Path(__file__).parents[2] / "data_prep" / "base_model")
PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]


def read(path, rows, **config):
    pd.DataFrame(rows).to_parquet(path)
    return RLHFDataset(str(path), AutoTokenizer.from_pretrained(MODEL), config)


def test_a_row_of_skyrl_gives_its_environment_all_columns_but_the_prompt(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": PROMPT,
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": "7"},
        "extra_info": {"split": "train", "index": 3, "max_turns": 2},
        "tags": ["a", "b"],
    }
    item = read(tmp_path / "rows.parquet", [row])[0]
    extras = item["episode"].pop("extras")
    assert item["episode"] == {"env_class": "gsm8k", "prompt": PROMPT}
    assert extras["tags"] == ["a", "b"] and extras["extra_info"]["max_turns"] == 2 and "prompt" not in extras
    assert extras["reward_model"] == extras["reward_spec"] == item["reward_model"]
    assert item["data_source"] == "openai/gsm8k"


def test_rows_of_searches_have_no_column_of_an_environment(tmp_path):
    row = {"data_source": "nq", "prompt": PROMPT, "reward_model": {"ground_truth": {"target": ["7"]}}}
    assert read(tmp_path / "rows.parquet", [row])[0]["episode"] is None
    mixed = read(tmp_path / "mixed.parquet", [row, row | {"env_class": "aime"}, row | {"max_turns": 3}])
    episodes = [mixed[i]["episode"] for i in range(3)]
    assert episodes[0] is None and episodes[1]["env_class"] == "aime"
    assert episodes[2] == {"env_class": "search", "prompt": [], "extras": {"max_turns": 3}}


def test_the_configurations_environment_is_for_rows_that_name_none(tmp_path):
    rows = [{"prompt": PROMPT}, {"prompt": PROMPT, "env_class": "lcb"}]
    data = read(tmp_path / "rows.parquet", rows, env_class="aime")
    assert [data[i]["episode"]["env_class"] for i in range(2)] == ["aime", "lcb"]
    assert [data[i]["data_source"] for i in range(2)] == ["aime", "lcb"]


def test_the_search_server_is_needed_where_a_row_searches(tmp_path):
    def needed(*names, **settings):
        rows = [{"prompt": PROMPT} | ({"env_class": name} if name else {}) for name in names]
        pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
        files = [f"data.{name}_files={tmp_path}/rows.parquet" for name in ("train", "val")]
        more = [f"environment.{name}={value}" for name, value in settings.items()]
        config = load_config([*files, *more])
        return environments_of(config), searches(config)

    assert needed(None) == ({"search"}, True)
    assert needed("gsm8k", None) == ({"gsm8k", "search"}, True)
    assert needed("gsm8k", None, env_class="aime") == ({"gsm8k", "aime"}, False)
    assert needed("searchcode") == ({"searchcode"}, True)


def test_a_line_s_environment_is_found_behind_one_that_stands_inside_another_value(tmp_path):
    file = tmp_path / "rows.jsonl"
    nested = {"extra_info": {"env_class": "aime"}}
    rows = [
        {"prompt": PROMPT, **nested, "env_class": "aime"},
        {"prompt": PROMPT, **nested, "env_class": "lcb"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert environments_in(file, "search") == {"aime", "lcb"}


def test_a_line_s_environment_is_found_where_others_named_it_inside_other_values_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    pairs = (("aime", "lcb"), ("lcb", "aime"))
    rows = [
        {"prompt": PROMPT, "extra_info": {"env_class": inner}, "env_class": name} for inner, name in pairs
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert environments_in(file, "search") == {"aime", "lcb"}


def test_a_line_that_is_no_object_is_left_to_the_reading_of_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps([{"env_class": "aime"}]) + "\n" + json.dumps({"env_class": "lcb"}) + "\n")
    assert environments_in(file, "search") == {"lcb"}
