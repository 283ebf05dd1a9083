"""Demonstrations on real passages: what a rollout would show, from training rows only; worked examples."""

import argparse
import json
import random
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from data_prep import squad
from data_prep.prompts import BASE_PROMPT, fill_prompt
from data_prep.real_demonstrations import Passages, make_query, write_rows
from search_r1.llm_agent.generation import format_observation

ROOT = Path(__file__).parents[2]
PLACES = ["Oslo", "Lima", "Rome", "Cairo", "Delhi", "Quito", "Paris", "Tunis", "Sofia", "Minsk"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten articles of one passage with two questions: every passage has their words but for the place."""
    folder = tmp_path_factory.mktemp("data")
    articles = []
    for number, place in enumerate(PLACES):
        text = (
            f"The old bridge of {place} was built by Person{number} of Guild{number}. It leads to a market."
        )
        qas = [{"question": f"Who built the old bridge of {place}", "answers": [{"text": f"Person{number}"}]}]
        qas += [{"question": f"Which guild made {place}'s market", "answers": [{"text": f"Guild{number}"}]}]
        articles.append({"title": f"Bridges_in_{place}", "paragraphs": [{"context": text, "qas": qas}]})
    (folder / "squad.json").write_text(json.dumps({"data": articles}))
    squad.convert([folder / "squad.json"], [], folder, 0.3, 0, BASE_PROMPT, "article", 2)
    return folder


def make(folder, out, **changes):
    options = {"topk": 1, "variants": 2, "max_searches": 3, "good_queries": 0.5, "num_examples": 2, "seed": 0}
    options |= {"tokenizer": None, "max_obs_length": 500}
    return write_rows(argparse.Namespace(data=folder, out=out, **options | changes))


def read(folder, name):
    rows = pd.read_parquet(folder / f"{name}.parquet").to_dict("records")
    return [{**row, "segments": [dict(piece) for piece in row.get("segments", [])]} for row in rows]


def test_a_query_of_each_kind():
    question = "Which team, based in Denver, won Super Bowl 50.5?"
    rng = random.Random(0)
    assert make_query(question, "question", rng) == question
    assert make_query(question, "content", rng) == "team based Denver won Super Bowl 50.5"
    assert make_query(question, "names", rng) == "Denver Super Bowl 50.5"
    words = make_query(question, "content", rng)
    assert all(make_query(question, "fragment", rng) in words for _ in range(9))
    assert make_query("Who was it?", "content", rng) == "Who was it?"


def test_a_demonstration_is_a_rollout_that_ends_at_its_gold_passage(folder, tmp_path):
    counts = make(folder, tmp_path)
    assert list(counts)[1] == "sft_train.parquet", "train_sft.sh looks for this one; it is written after val"
    train = {row["question"]: row for row in read(folder, "train")}
    passages = Passages(folder / "corpus.jsonl", 1)
    rows = read(tmp_path, "sft_train")
    assert len(rows) > 10 and any(row["searches"] > 1 for row in rows)
    for row in rows:
        source = train[row["question"]]
        prompt, *turns, answer = row["segments"]
        assert prompt == {"text": fill_prompt(BASE_PROMPT, row["question"]), "trained": False}
        assert answer == {"text": f"<answer> {source['golden_answers'][0]} </answer>", "trained": True}
        assert len(turns) == 2 * row["searches"]
        found = []
        for search, observation in zip(turns[::2], turns[1::2], strict=True):
            query = search["text"].removeprefix("<search> ").removesuffix(" </search>")
            documents = passages.search(query)
            assert search["trained"] and observation == {
                "text": format_observation(documents),
                "trained": False,
            }
            found += [document["id"] for document in documents]
        assert source["extra_info"]["gold_ids"][0] in found


def test_good_queries_are_the_share_of_first_queries_that_find_more(folder, tmp_path):
    searches = {}
    for share in (0.0, 1.0):
        make(folder, tmp_path, good_queries=share)
        searches[share] = [row["searches"] for row in read(tmp_path, "sft_train")]
    assert sum(searches[1.0]) / len(searches[1.0]) < sum(searches[0.0]) / len(searches[0.0])


def test_long_observations_are_cut_as_in_rollouts_and_no_answer_is_beyond_the_cut(folder, tmp_path):
    model = ROOT / "data_prep" / "base_model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {}
    for length in (500, 34):
        make(folder, tmp_path, tokenizer=model, max_obs_length=length)
        rows[length] = read(tmp_path, "sft_train")
    assert 0 < len(rows[34]) < len(rows[500])
    for row in rows[34]:
        observation = row["segments"][-2]["text"]
        assert len(tokenizer.encode(observation)) <= 34 and observation.endswith("</information>\n\n")
        assert any(row["answer"] in piece["text"] for piece in row["segments"][2:-1:2])


def test_equal_seeds_give_equal_files_and_no_row_is_about_a_test_passage(folder, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(folder, tmp_path / name, seed=seed)
    parts = {name: read(tmp_path / name, "sft_train") for name in "abc"}
    assert parts["a"] == parts["b"] != parts["c"]
    tests = {row["question"] for row in read(folder, "test")}
    assert not tests & {row["question"] for row in parts["a"] + read(tmp_path / "a", "sft_val")}


def test_worked_examples_stand_before_the_prompts_of_the_test(folder, tmp_path):
    make(folder, tmp_path)
    plain = read(folder, "test")
    shown = read(tmp_path, "test_fewshot")
    texts = [row["prompt"][0]["content"] for row in shown]
    examples = {
        text.removesuffix(row["prompt"][0]["content"]) for text, row in zip(texts, plain, strict=True)
    }
    assert len(examples) == 1
    blocks = examples.pop().split(BASE_PROMPT.split("\n")[0])[1:]
    trained = {row["question"]: row["golden_answers"][0] for row in read(folder, "train")}
    assert len(blocks) == 2
    for block in blocks:
        question = block.split("Question: ")[1].split("\n")[0]
        assert f"<search> {question} </search>\n\n<information>Doc 1(Title: " in block
        assert block.endswith(f"</information>\n\n<answer> {trained[question]} </answer>\n\n")


def test_mistakes_are_named(folder, tmp_path):
    with pytest.raises(ValueError, match="--topk 0: give at least 1"):
        make(folder, tmp_path, topk=0)
    with pytest.raises(ValueError, match="--good-queries 1.5: give a number from 0 to 1"):
        make(folder, tmp_path, good_queries=1.5)
    with pytest.raises(ValueError, match=r"holds no train.parquet and no train.jsonl: search-r1 squad makes"):
        make(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="--num-examples 99: only"):
        make(folder, tmp_path, num_examples=99)
