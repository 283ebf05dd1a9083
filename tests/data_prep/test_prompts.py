"""The layout of prompts and observations."""

import pytest

from data_prep.prompts import MICROWORLD_PROMPT, SEARCH_PROMPT, fill_prompt, format_observation


def test_observation_has_the_layout_of_a_rollout():
    text = format_observation([('"Amber Harbor"', "A film."), ('"Old Valdon"', "A town.")])
    documents = 'Doc 1(Title: "Amber Harbor") A film.\nDoc 2(Title: "Old Valdon") A town.'
    assert text == f"\n\n<information>{documents}</information>\n\n"


def test_prompts_take_any_question_unchanged():
    for template in (MICROWORLD_PROMPT, SEARCH_PROMPT):
        assert "What is {x} in {question}?" in fill_prompt(template, "What is {x} in {question}?")
    with pytest.raises(ValueError, match="no {question} in it"):
        fill_prompt("Answer this.", "Who?")


def test_search_prompt_explains_every_tag():
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in SEARCH_PROMPT
        assert f"</{tag}>" in SEARCH_PROMPT
