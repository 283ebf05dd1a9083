"""Exact match: normalisation, extraction of the answer, and rule 8 (read only what the policy wrote)."""

from pathlib import Path

import numpy as np
import pytest

from verl.utils.reward_score import default_compute_score, load_reward_function, qa_em, qa_em_format
from verl.utils.reward_score.qa_em import (
    compute_score_em,
    compute_score_subem,
    em_check,
    extract_solution,
    f1_check,
    golden_answers,
    normalize_answer,
    subem_check,
)

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The  Beatles", "beatles"),
        ("a man, an apple; the end.", "man apple end"),
        ("U.S.A.", "usa"),
        ("Theatre of another", "theatre of another"),
        ("  tabs\tand\nlines ", "tabs and lines"),
        ("well-known", "wellknown"),
        ("", ""),
    ],
)
def test_normalisation(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Beijing </answer>", "Beijing"),
        ("<answer>a</answer> no, <answer>b</answer>", "b"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer></answer>", ""),
        ("no answer", None),
        ("<answer>never closed", None),
    ],
)
def test_the_answer_is_the_last_pair(text, answer):
    assert extract_solution(text) == answer


def test_f1_is_squads_and_never_below_exact_match():
    golden = ["the Denver Broncos", "Denver"]
    assert f1_check("Denver Broncos!", golden) == 1.0
    assert f1_check("Broncos of Denver", golden) == pytest.approx(2 * 2 / (3 + 2)), "the nearest counts"
    assert f1_check("Denver Denver", "Denver") == pytest.approx(2 / 3), (
        "a word counts as often as both have it"
    )
    assert f1_check("Paris", golden) == f1_check("", golden) == 0.0
    assert f1_check("A", "a") == em_check("A", "a") == 1 and f1_check("the", "a") == 0.0


def test_a_reward_of_both_is_their_mean():
    function = load_reward_function({"path": qa_em.__file__, "name": "compute_score_em_f1"})
    texts = ("<answer>red</answer>", "<answer>the red car</answer>", "red car")
    scores = [function("squad", text, {"target": ["red car"]}, {}) for text in texts]
    assert scores == [pytest.approx((0 + 2 / 3) / 2), 1.0, 0.0]


def test_one_pair_is_enough_and_none_scores_zero():
    target = {"target": ["Beijing"]}
    assert compute_score_em("<answer>beijing.</answer>", target) == 1.0
    assert compute_score_em("Beijing", target, format_score=0.1) == 0.0
    assert compute_score_em("<answer>Shanghai</answer>", target, format_score=0.1) == 0.1
    assert compute_score_em("<answer>Shanghai</answer>", target, "flexible", 0.1) == 0.1, "as Search-R1's"
    assert compute_score_subem("<answer>in Beijing</answer>", target, method="strict") == 1.0


def test_any_golden_answer_counts_in_every_form_a_parquet_file_gives_it():
    for target in (["x", "The Wall"], np.array(["x", "wall"], dtype=object), "wall", [np.array(["wall"])]):
        assert compute_score_em("<answer>the wall</answer>", {"target": target}) == 1.0


def test_a_substring_counts_for_subem_only():
    text = "<answer>Paris, France</answer>"
    target = {"target": ["Paris"]}
    assert compute_score_subem(text, target) == 1.0
    assert compute_score_em(text, target) == 0.0
    assert subem_check("anything", "the") == 0


def test_a_row_without_golden_answers_is_an_error():
    with pytest.raises(ValueError, match="expected {'target'"):
        golden_answers({"target": []})


def test_every_source_is_scored_by_exact_match_if_it_has_golden_answers():
    for source in ("nq", "strategyqa", "my_questions"):
        assert default_compute_score(source, "<answer>x</answer>", {"target": ["x"]}, {}) == 1.0
    with pytest.raises(ValueError, match="custom_reward_function.path"):
        default_compute_score("my_questions", "<answer>x</answer>", "x", {})


def test_search_r1s_sources_may_give_their_answers_as_plain_texts():
    for truth in ("x", ["y", "x"], np.array(["y", "x"], dtype=object)):
        assert default_compute_score("hotpotqa", "<answer>x</answer>", truth) == 1.0
        assert default_compute_score("hotpotqa", "<answer>z</answer>", truth) == 0.0
    for empty in ("", [], None):
        with pytest.raises(ValueError, match="custom_reward_function.path"):
            default_compute_score("hotpotqa", "no answer", empty)


def test_a_users_function_is_found_by_path_and_name(tmp_path):
    file = tmp_path / "reward.py"
    text = "from collections import Counter\nfrom math import gcd\nfrom textwrap import dedent\n\n"
    text += "def mine(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    file.write_text(text)
    function = load_reward_function({"path": str(file), "name": "mine"})
    assert function is not None and function("d", "s", {}, None) == 0.5
    assert load_reward_function({"path": None, "name": "mine"}) is None
    with pytest.raises(ValueError, match="expected one of \\['mine'\\]"):
        load_reward_function({"path": str(file), "name": "compute_score"})


def test_an_answer_that_was_not_closed_does_not_spoil_the_next_one():
    text = "<answer> hmm\n<answer> Paris </answer>"
    assert extract_solution(text) == "Paris"
    assert compute_score_em(text, {"target": ["Paris"]}) == 1.0


@pytest.mark.parametrize(
    ("prediction", "right"), [("", 0), (" ", 0), ("the", 0), ("A", 1), ("a ", 1), ("A.", 0)]
)
def test_an_empty_answer_is_wrong_also_where_normalisation_leaves_nothing_of_the_golden_one(
    prediction, right
):
    assert em_check(prediction, ["A"]) == right
    assert compute_score_em(f"<answer>{prediction}</answer>", {"target": ["A"]}) == right


def test_letters_are_composed_on_both_sides():
    composed = "<answer>Zo\u00eb</answer>"
    decomposed = "<answer>Zoe\u0308</answer>"
    for text in (composed, decomposed):
        for golden in ("Zo\u00eb", "Zoe\u0308"):
            assert default_compute_score("nq", text, {"target": [golden]}) == 1.0
    assert qa_em.documents_hold_answer([{"contents": "by Zoe\u0308"}], ["Zo\u00eb"])
    assert qa_em.has_unusual_letters(["\uff34\uff4f\uff4d"])
    assert qa_em.has_unusual_letters(["Tom\u2019s"])
    assert not qa_em.has_unusual_letters(["Tom\u2019s", "Tom's"])


@pytest.mark.parametrize(
    ("answer", "golden", "right"),
    [("the", "The", 1), ("A", "The", 0), ("?", "!", 0), ("", "The", 0), ("the", "a wall", 0)],
)
def test_answers_of_which_the_normalisation_leaves_nothing_are_compared_as_written(answer, golden, right):
    """Search-R1's `em` gives 1 to each of the first four; docs/search_r1.md says so."""
    assert em_check(answer, golden) == right
    assert subem_check("a wall", golden) == (golden == "a wall")


def test_the_docs_name_every_score():
    text = (ROOT / "docs" / "search_r1.md").read_text(encoding="utf-8").partition("## Scores")[2]
    modules = (qa_em, qa_em_format)
    names = [name for module in modules for name in vars(module) if name.startswith("compute_score")]
    assert len(names) > 3 and [name for name in names if f"`{name}`" not in text] == []
    assert "`subem`" in (ROOT / "README.md").read_text(encoding="utf-8")
