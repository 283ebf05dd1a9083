"""The tag protocol: which action a text holds, and what an observation looks like to the character."""

from __future__ import annotations

import pytest

from data_prep import prompts
from search_r1.llm_agent.actions import HINT, Action, format_observation, parse_action


@pytest.mark.parametrize(
    "text, action",
    [
        ("<search>who?</search>", Action("search", "who?")),
        ("<think>x</think>\n<search>\n two\nlines </search>\n", Action("search", "two\nlines")),
        ("<answer> Beijing </answer>", Action("answer", "Beijing")),
        ("<answer></answer>", Action("answer", "")),
        ("<search>a</search><answer>b</answer>", Action("search", "a")),
        ("<answer>b</answer><search>a</search>", Action("answer", "b")),
        ("<search>a</answer></search>", Action("search", "a</answer>")),
        ("<search>a <search>b</search>", Action("search", "a <search>b")),
        ("<search>a", Action("invalid")),
        ("a</search>", Action("invalid")),
        ("<search>a</answer>", Action("invalid")),
        ("<Search>a</Search>", Action("invalid")),
        ("just words", Action("invalid")),
        ("", Action("invalid")),
    ],
)
def test_the_first_complete_action_counts(text, action):
    assert parse_action(text) == action


@pytest.mark.parametrize("text", ["<search></search>", "<search> \n </search><answer>x</answer>"])
def test_a_search_without_a_query_is_invalid(text):
    assert parse_action(text) == Action("invalid")


def test_without_search_only_answers_count():
    assert parse_action("<search>a</search> <answer>b</answer>", do_search=False) == Action("answer", "b")
    assert parse_action("<search>a</search>", do_search=False) == Action("invalid")


def test_the_hint_holds_no_tag():
    assert "<" not in HINT and ">" not in HINT
    assert parse_action(HINT) == Action("invalid")


def test_an_observation_is_search_r1s_to_the_character():
    documents = [
        {"contents": '"Amber Harbor"\nA film.\nIn colour.', "score": 1.0},
        {"contents": "no title line", "score": None},
        {"contents": '"Orlen"\nA town. ', "score": 0.5},
    ]
    assert format_observation(documents) == (
        '\n\n<information>Doc 1(Title: "Amber Harbor") A film.\nIn colour.\n'
        "Doc 2(Title: no title line) \n"
        'Doc 3(Title: "Orlen") A town.</information>\n\n'
    )


def test_an_observation_without_documents_is_empty():
    assert format_observation([]) == "\n\n<information></information>\n\n"


def test_pretraining_shows_the_layout_that_the_agent_writes():
    pairs = [('"Amber Harbor"', "A film."), ('"Orlen"', "A town.")]
    documents = [{"contents": f"{title}\n{text}", "score": None} for title, text in pairs]
    assert prompts.format_observation(pairs) == format_observation(documents)
