"""The microworld: facts that agree, questions with their answers, a seed that decides, names kept apart."""

import json
import random
import re
import subprocess
import sys

import pandas as pd
import pytest

from data_prep import microworld
from data_prep.microworld import FIRST_PRETRAINING_SEED, evaluation_world, pretraining_world, write_world
from data_prep.names import HELD_OUT_SHARE, NAME_PARTS, VALUES, draw_names, is_held_out
from data_prep.relations import OF_KIND, RELATIONS, chains


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


def test_corpus_lines_are_quoted_titles_and_texts(world_dir):
    lines = (world_dir / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    assert 1000 <= len(lines) <= 2000
    for index, line in enumerate(lines):
        entry = json.loads(line)
        assert entry["id"] == str(index)
        title, text = entry["contents"].split("\n")
        assert re.fullmatch(r'"\w+ \w+"', title)
        assert text.startswith(title.strip('"'))


def test_two_thirds_of_the_training_and_half_of_the_test_questions_have_two_hops(world_dir):
    for split, divisor in (("train", 3), ("test", 2)):
        hops = [row["extra_info"]["hops"] for row in read_rows(world_dir / f"{split}.parquet")]
        assert hops.count(1) == len(hops) // divisor and hops.count(2) == len(hops) - hops.count(1)
    assert {row["extra_info"]["hops"] for row in read_rows(world_dir / "test_3hop.parquet")} == {3}


def test_answers_follow_from_the_articles_on_the_gold_path(world_dir):
    corpus = read_corpus(world_dir)
    for split in ("train", "test", "test_3hop"):
        for row in read_rows(world_dir / f"{split}.parquet"):
            path = [*row["extra_info"]["gold_titles"], row["golden_answers"][0]]
            assert path[0] in row["question"]
            for name, following in zip(path, path[1:], strict=False):
                assert following in corpus[f'"{name}"']
                assert following not in row["question"]


def test_every_chain_of_relations_is_asked_about_in_training(world_dir):
    rows = read_rows(world_dir / "train.parquet")
    asked = {tuple(row["extra_info"]["relations"]) for row in rows}
    assert asked == set(chains(1)) | set(chains(2))


def test_no_question_is_asked_twice_in_a_file(world_dir):
    for split in ("train", "test", "test_3hop"):
        rows = read_rows(world_dir / f"{split}.parquet")
        keys = {(tuple(row["extra_info"]["relations"]), row["extra_info"]["gold_titles"][0]) for row in rows}
        assert len(keys) == len(rows)


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
    assert all(is_held_out(entity.kind, entity.name) for entity in test.values())
    assert not any(is_held_out(entity.kind, entity.name) for entity in train.values())
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
        if is_held_out(kind, f"{first} {second}")
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


def test_about_one_name_in_five_is_held_out_and_the_choice_is_frozen():
    for kind, (firsts, seconds) in NAME_PARTS.items():
        held = [is_held_out(kind, f"{first} {second}") for first in firsts for second in seconds]
        assert abs(sum(held) / len(held) - 1 / HELD_OUT_SHARE) < 0.04
    assert is_held_out("film", "Midnight Harbor") and is_held_out("person", "Bikia Bankaw")
    assert not is_held_out("film", "Amber Harbor")


def test_no_word_stands_in_two_inventories_but_titles():
    words = [word for firsts, seconds in NAME_PARTS.values() for word in (*firsts, *seconds)]
    words += [word for values in VALUES.values() for word in values]
    repeated = {word.lower() for word in words if [w.lower() for w in words].count(word.lower()) > 1}
    assert repeated == {word.lower() for word in NAME_PARTS["film"][0]}


def test_too_many_questions_or_names_are_refused_with_the_number_there_is():
    world = pretraining_world(FIRST_PRETRAINING_SEED)
    with pytest.raises(ValueError, match="this world has only"):
        microworld.draw_questions(random.Random(0), world, 1, 10_000)
    with pytest.raises(ValueError, match="at most"):
        draw_names(random.Random(0), "place", 800, held_out=True)


def test_every_sentence_has_its_cue_before_the_name():
    for relations in OF_KIND.values():
        for relation in relations:
            for sentence in relation.sentences:
                assert sentence.index("{v}") > 8, sentence
