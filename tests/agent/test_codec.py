"""The tag protocol: which action a text holds, what an observation looks like, and which ids it becomes."""

from __future__ import annotations

import pytest
from scripted_engine import EOS, byte_tokenizer
from transformers import tokenization_utils_base

from data_prep import prompts
from search_r1.llm_agent.generation import HINT, format_observation, parse_action
from verl.agent.codec import Codec
from verl.agent.trajectory import AgentConfig


@pytest.mark.parametrize(
    "text, action",
    [
        ("<search>who?</search>", ("search", "who?")),
        ("<think>x</think>\n<search>\n two\nlines </search>\n", ("search", "two\nlines")),
        ("<answer> Beijing </answer>", ("answer", "Beijing")),
        ("<answer></answer>", ("answer", "")),
        ("<search>a</search><answer>b</answer>", ("search", "a")),
        ("<answer>b</answer><search>a</search>", ("answer", "b")),
        ("<search>a</answer></search>", ("search", "a</answer>")),
        ("<search>a <search>b</search>", ("search", "a <search>b")),
        ("<search>a", ("invalid", "")),
        ("a</search>", ("invalid", "")),
        ("<search>a</answer>", ("invalid", "")),
        ("<Search>a</Search>", ("invalid", "")),
        ("just words", ("invalid", "")),
        ("", ("invalid", "")),
    ],
)
def test_the_first_complete_action_counts(text, action):
    assert parse_action(text) == action


@pytest.mark.parametrize("text", ["<search></search>", "<search> \n </search><answer>x</answer>"])
def test_a_search_without_a_query_is_invalid(text):
    assert parse_action(text) == ("invalid", "")


def test_the_hint_holds_no_tag():
    assert "<" not in HINT and ">" not in HINT
    assert parse_action(HINT) == ("invalid", "")


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


def test_pretraining_shows_the_layout_that_the_agent_writes():
    pairs = [('"Amber Harbor"', "A film."), ('"Orlen"', "A town.")]
    documents = [{"contents": f"{title}\n{text}", "score": None} for title, text in pairs]
    assert prompts.format_observation(pairs) == format_observation(documents)


def test_a_control_token_that_a_document_spells_out_stays_text():
    tokenizer = byte_tokenizer()
    codec = Codec(tokenizer, AgentConfig(2, 100, 1000, 100, 500))
    documents = [{"contents": f"A title\nIt ends with {EOS}{EOS} and goes on.", "score": None}]
    ids = codec.observation_ids(format_observation(documents))
    assert tokenizer.eos_token_id in codec.tokenizer.encode(format_observation(documents))
    assert tokenizer.eos_token_id not in ids
    assert codec.decode(ids) == format_observation(documents)


def test_what_was_encoded_before_changes_no_ids():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<information>"]})
    codec = Codec(tokenizer, AgentConfig(2, 100, 1000, 100, 500))
    first = codec.encode("<information>a</information>")
    assert tokenizer.convert_tokens_to_ids("<information>") == first[0]
    codec.encode(f"a text that spells {EOS}")
    tokenizer.pad_token = EOS
    tokenizer(["a", "a longer one"], padding=True, truncation=True, max_length=5)
    assert codec.encode("<information>a</information>") == first


def test_a_long_document_shows_no_warning_of_indexing_errors(monkeypatch):
    """It is cut to max_obs_length afterwards: what transformers would say means nothing."""
    shown = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda text, *_: shown.append(text))
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 100
    codec = Codec(tokenizer, AgentConfig(2, 100, 1000, 100, 500))
    assert len(codec.encode(f"{EOS} a long document " * 40)) > 100 and shown == []
    tokenizer.encode("a long document " * 40)
    assert "will result in indexing errors" in shown[0]
