"""Demonstrations for supervised training: the protocol in many small worlds, nothing of any test part."""

import re

import pandas as pd
import pytest

from data_prep.microworld import evaluation_world
from data_prep.sft_rows import demonstrations, write_rows


@pytest.fixture(scope="module")
def rows():
    return list(demonstrations(5, 300, right_share=0.3))


def trained(row):
    return [piece["text"] for piece in row["segments"] if piece["trained"]]


def test_the_same_seed_gives_the_same_rows_and_another_others(rows):
    assert list(demonstrations(5, 300, right_share=0.3)) == rows
    assert len({row["question"] for row in rows}) > 0.98 * len(rows)
    assert [row["question"] for row in demonstrations(6, 3, 0.3)] != [row["question"] for row in rows[:3]]


def test_a_row_is_a_rollout_from_the_prompt_to_the_answer(rows):
    for row in rows:
        first, *middle, last = row["segments"]
        assert first == {"text": f"Question: {row['question']}\n", "trained": False}
        assert last["trained"] and last["text"].startswith("<answer> ") and last["text"].endswith("</answer>")
        for search, observation in zip(middle[::2], middle[1::2], strict=True):
            assert search["trained"] and search["text"].endswith("</search>")
            assert not observation["trained"] and observation["text"].startswith("\n\n<information>")


def test_no_article_is_about_a_name_that_is_held_out_for_tests(rows):
    titles = {
        title
        for row in rows
        for piece in row["segments"]
        for title in re.findall(r'\(Title: "(.*?)"\)', piece["text"])
    }
    assert len(titles) > 300
    assert not titles & {name for seed in range(5) for name in evaluation_world(seed)[1]}


def test_files_hold_other_rows_and_numbers_are_checked(tmp_path):
    counts = write_rows(5, tmp_path, 20, 5, 0.3)
    assert counts == {"sft_train.parquet": 20, "sft_val.parquet": 5}
    assert list(counts)[-1] == "sft_train.parquet"  # train_sft.sh looks for this one
    train, val = (pd.read_parquet(tmp_path / f"sft_{name}.parquet") for name in ("train", "val"))
    assert not set(train.question) & set(val.question)
    for arguments, words in (((0, 5, 0.3), "--num-train 0"), ((5, 5, 1.5), "--right-share 1.5")):
        with pytest.raises(ValueError, match=words):
            write_rows(5, tmp_path, *arguments)
