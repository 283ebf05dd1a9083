"""Questions of three to five hops: answers, names, what a search finds, and the run that is made for them."""

import json
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from data_prep.hops import write_hops
from data_prep.names import NAME_PARTS, is_held_out
from search_r1.search.bm25 import BM25Retriever
from search_r1.search.corpus import Corpus
from verl.config import load_config
from verl.preflight.preflight import run_preflight
from verl.preflight.target import Target

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hops") / "seed57"
    write_hops(seed=57, out=out, num_train=300, num_test=60)
    return out


def test_long_questions_have_one_answer_and_a_search_for_each_name_finds_its_article_first(folder):
    retriever = BM25Retriever(Corpus.open(folder / "corpus.jsonl"))
    for name, hops in {"train_3hop": 3, "test_3hop": 3, "test_4hop": 4, "test_5hop": 5}.items():
        rows = pd.read_parquet(folder / f"{name}.parquet").to_dict("records")
        assert len({row["question"] for row in rows}) == len(rows) == (300 if name == "train_3hop" else 60)
        for row in rows:
            path = list(row["extra_info"]["gold_titles"])
            (answer,) = row["golden_answers"]
            assert row["extra_info"]["hops"] == len(path) == hops and path[0] in row["question"]
            articles = [found[0].contents for found in retriever.batch_search(path, 2)[0]]
            for title, article, following in zip(path, articles, [*path[1:], answer], strict=True):
                assert article.startswith(f'"{title}"\n') and following in article
                assert following not in row["question"]
                assert name == "train_3hop" or any(is_held_out(f"{kind}|{title}") for kind in NAME_PARTS)


def test_the_run_on_these_files_is_sound_and_the_longest_trajectory_fits(folder, tmp_path):
    settings = json.loads((folder / "settings.yaml").read_text())
    files = [entry["path"] for entry in settings["data.mixture"]]
    files += settings["data.val_files"] + settings["data.extra_val_files"]
    model = f"actor_rollout_ref.model.path={ROOT}/data_prep/base_model"
    line = [f"@{ROOT}/configs/hops.yaml", f"@{folder}/settings.yaml", model]
    config = load_config([*line, f"trainer.default_local_dir={tmp_path}"])
    assert run_preflight(Target(config), only=["settings", "batches", "lengths", "data"]).findings == []
    tokenizer = AutoTokenizer.from_pretrained(f"{ROOT}/data_prep/base_model")
    data = config.data
    rows = [row for file in files for row in pd.read_parquet(file).to_dict("records")]
    longest = max(len(tokenizer.encode(row["prompt"][0]["content"])) for row in rows)
    turns = config.max_turns * (data.max_response_length + data.max_obs_length)
    assert longest <= data.max_start_length and longest + turns <= data.max_prompt_length
    assert config.max_turns >= max(row["extra_info"]["hops"] for row in rows)
