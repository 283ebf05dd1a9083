"""The microworld: facts that agree, questions with their answers, a seed that decides, names kept apart."""

import json
import re
import subprocess
import sys

import pandas as pd
import pytest

from data_prep.microworld import FIRST_PRETRAINING_SEED, evaluation_world, pretraining_world, write_world
from data_prep.names import NAME_PARTS, VALUES, is_held_out
from data_prep.relations import RELATIONS


@pytest.fixture(scope="module")
def world_dir(tmp_path_factory):
    out = tmp_path_factory.mktemp("world")
    write_world(seed=3, out=out, num_train=600, num_test=400, num_3hop=60)
    return out


def read_rows(path):
    return pd.read_parquet(path).to_dict("records")


def read_corpus(folder):
    lines = (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return dict(json.loads(line)["contents"].split("\n", 1) for line in lines)


def test_same_seed_gives_the_same_files_and_another_seed_does_not(world_dir, tmp_path):
    counts = {"num_train": 600, "num_test": 400, "num_3hop": 60}
    write_world(seed=3, out=tmp_path / "again", **counts)
    write_world(seed=4, out=tmp_path / "other", **counts)
    for name in ("corpus.jsonl", "train.parquet", "test.parquet", "test_3hop.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (world_dir / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (world_dir / name).read_bytes()


def test_command_line_writes_the_world_and_refuses_bad_numbers(tmp_path):
    command = [sys.executable, "-m", "data_prep.microworld", "--seed", "1", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--num-train", "20"], capture_output=True, text=True, check=True)
    assert "train.parquet: 20 rows" in done.stdout
    assert "test.parquet: 400 rows" in done.stdout
    bad = subprocess.run([*command, "--num-train", "1"], capture_output=True, text=True)
    assert bad.returncode != 0
    assert "--num-train 1" in bad.stderr


def test_rows_follow_search_r1s_schema(world_dir):
    for split in ("train", "test", "test_3hop"):
        rows = read_rows(world_dir / f"{split}.parquet")
        for index, row in enumerate(rows):
            assert row["data_source"] == "microworld"
            assert row["ability"] == "fact-reasoning"
            assert [message["role"] for message in row["prompt"]] == ["user"]
            assert row["question"] in row["prompt"][0]["content"]
            assert row["reward_model"]["style"] == "rule"
            assert list(row["reward_model"]["ground_truth"]["target"]) == list(row["golden_answers"])
            assert row["extra_info"]["split"] == split
            assert row["extra_info"]["index"] == index
            assert row["extra_info"]["hops"] == len(row["extra_info"]["relations"])


def test_answers_follow_from_the_articles_on_the_gold_path(world_dir):
    corpus = read_corpus(world_dir)
    for split in ("train", "test", "test_3hop"):
        for row in read_rows(world_dir / f"{split}.parquet"):
            path = [*row["extra_info"]["gold_titles"], row["golden_answers"][0]]
            assert path[0] in row["question"]
            for name, following in zip(path, path[1:], strict=False):
                assert following in corpus[f'"{name}"']
                assert following not in row["question"]


def test_entities_of_test_questions_are_never_in_training_questions(world_dir):
    corpus = read_corpus(world_dir)

    def names(split):
        found = set()
        for row in read_rows(world_dir / f"{split}.parquet"):
            found |= set(row["extra_info"]["gold_titles"])
            found |= {answer for answer in row["golden_answers"] if f'"{answer}"' in corpus}
        return found

    assert not names("train") & (names("test") | names("test_3hop"))


@pytest.mark.parametrize("seed", [0, 1, 2, 57, 99])
def test_test_entities_are_held_out_names_and_training_entities_are_not(seed):
    train, test = evaluation_world(seed)
    assert all(is_held_out(f"{entity.kind}|{entity.name}") for entity in test.values())
    assert not any(is_held_out(f"{entity.kind}|{entity.name}") for entity in train.values())
    for part in (train, test):  # closed: no fact leads out of its part
        for entity in part.values():
            for name, value in entity.facts.items():
                assert RELATIONS[name].value in VALUES or value in part


def test_pretraining_worlds_have_no_held_out_name_anywhere_in_their_text():
    reserved = {
        f"{first} {second}"
        for kind, (firsts, seconds) in NAME_PARTS.items()
        for first in firsts
        for second in seconds
        if is_held_out(f"{kind}|{first} {second}")
    }
    for seed in range(FIRST_PRETRAINING_SEED, FIRST_PRETRAINING_SEED + 20):
        for entity in pretraining_world(seed).values():
            words = re.findall(r"\w+", entity.text)
            pairs = {f"{left} {right}" for left, right in zip(words, words[1:], strict=False)}
            assert not pairs & reserved


def test_seeds_of_training_and_pretraining_worlds_cannot_meet():
    with pytest.raises(ValueError, match="pretraining worlds have seeds from 1000"):
        pretraining_world(99)
    with pytest.raises(ValueError, match="seeds 0 to 999"):
        evaluation_world(FIRST_PRETRAINING_SEED)
