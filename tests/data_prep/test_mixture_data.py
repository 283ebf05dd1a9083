"""Sums, SQL tables and their demonstrations: what a student can read, write and earn."""

import random
import sqlite3
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from data_prep import arithmetic, mixture
from data_prep.demonstrations import Demonstrator
from data_prep.microworld import pretraining_world
from data_prep.microworld_sql import database_file, make_row, student_turns, write_database, write_tables
from data_prep.tiny_tokenizer import END_TOKEN
from verl.environments import make


def play_rewards(env, turns: list[str]) -> list[float]:
    outputs = [env.step(turn) for turn in turns]
    assert [output["done"] for output in outputs] == [False] * (len(turns) - 1) + [True]
    return [output["reward"] for output in outputs]


def test_a_sum_worked_without_mistakes_earns_one_in_its_last_turn() -> None:
    rng = random.Random(0)
    for _ in range(50):
        pair = arithmetic.draw_pair(rng, held_out=True)
        turns = arithmetic.student_turns(rng, pair, right_share=1.0)
        env = make("gsm8k_multi_turn", extras=arithmetic.make_row(pair))
        assert play_rewards(env, turns) == [0.0, 0.0, 1.0], (pair, turns)
    turns = arithmetic.student_turns(random.Random(0), (345, 678), right_share=1.0)
    assert turns == ["5+8+0=13;3", "4+7+1=12;23", "3+6+1=10;#### 1023"]


def test_no_test_pair_is_trained_on_and_a_seed_gives_the_same_files(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        counts = arithmetic.write_rows(3, tmp_path / folder, 500, 50)
        assert counts == {"train.parquet": 500, "test.parquet": 50}
    sums = {}
    for split in ("train", "test"):
        first, second = (pd.read_parquet(tmp_path / folder / f"{split}.parquet") for folder in "ab")
        assert first.to_json() == second.to_json()
        sums[split] = {info["question"] for info in first["extra_info"]}
        for row in first.to_dict("records"):
            left, right = map(int, row["extra_info"]["question"].split("+"))
            assert row["reward_spec"]["ground_truth"] == str(left + right)
    assert not sums["train"] & sums["test"]


def test_the_tiny_model_reads_a_sum_digit_by_digit() -> None:
    tokenizer = AutoTokenizer.from_pretrained("data_prep/base_model")
    for pair in ((199, 944), (345, 678)):
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(arithmetic.fill_sum(pair))]
        assert [piece for piece in pieces if any(map(str.isdigit, piece))] == [*f"{pair[0]}{pair[1]}"]


def test_the_right_queries_find_the_answers_and_names_of_the_tests_are_new(tmp_path: Path) -> None:
    assert write_tables(5, tmp_path, 60, 20) == {"train.parquet": 60, "test.parquet": 20}
    names = {}
    for split in ("train", "test"):
        rows = pd.read_parquet(tmp_path / f"{split}.parquet").to_dict("records")
        file = database_file(tmp_path / "databases", f"microworld_5_{split}")
        with sqlite3.connect(file) as connection:
            for row in rows:
                assert len(connection.execute(row["reward_spec"]["ground_truth"]).fetchall()) == 1
            people = connection.execute("select name, spouse from person").fetchall()
        names[split] = {name for name, _ in people}
        assert dict(people) == {spouse: name for name, spouse in people}
    assert names["train"] and names["test"] and not names["train"] & names["test"]


def test_a_student_who_is_always_right_earns_one_in_every_question(tmp_path: Path) -> None:
    world = pretraining_world(1234)
    rng = random.Random(0)
    write_database(world, database_file(tmp_path, "w"))
    student = Demonstrator(world, rng)
    for number in range(40):
        question = student.question(1 + number % 2)
        turns = student_turns(rng, question, right_share=1.0)
        env = make("text2sql", env_config={"db_path": str(tmp_path)}, extras=make_row(question, "w"))
        assert play_rewards(env, turns)[-1] == 1.0, turns


def test_demonstrations_train_on_what_the_student_writes_alone(tmp_path: Path) -> None:
    samples = list(mixture.demonstrations(0, 120, tmp_path))
    texts = ["".join(text for text, _ in sample) for sample in samples]
    trained = ["".join(text for text, is_trained in sample if is_trained) for sample in samples]
    sums = [i for i, text in enumerate(texts) if "#### NUMBER" in text]
    queries = [i for i, text in enumerate(texts) if "<solution>" in text]
    searches = [i for i, text in enumerate(texts) if "<information>" in text]
    assert min(map(len, (sums, queries, searches))) > 10
    for i in sums:
        assert "NUMBER" not in trained[i] and trained[i].count(END_TOKEN) == arithmetic.NUM_DIGITS
    for i in queries:
        assert "reminder" not in trained[i] and trained[i].startswith("<think>")
    assert any("<reminder>" in texts[i] for i in queries)
    assert all("<information>" not in trained[i] for i in searches)
    assert list(mixture.demonstrations(0, 120, tmp_path)) == samples


@pytest.mark.parametrize("option", ["--num-train", "--num-test", "--num-demonstrations"])
def test_too_few_rows_are_refused_by_name(option: str, tmp_path: Path, capsys) -> None:
    assert mixture.main(["--out", str(tmp_path), option, "0"]) == 2
    assert f"{option} 0" in capsys.readouterr().err
