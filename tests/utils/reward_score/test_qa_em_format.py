"""The format reward: its table, and which structures are well formed."""

import pytest

from verl.utils.reward_score.qa_em_format import (
    Segment,
    compute_score_em,
    is_retrieval_correct,
    is_valid_sequence,
)

SCORES = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.1}
TARGET = {"target": ["Beijing"]}
HIT = "\n\n<information>Doc 1(Title: China) Its capital is Beijing.</information>\n\n"
MISS = "\n\n<information>Doc 1(Title: France) Its capital is Paris.</information>\n\n"


def trajectory(*texts: str) -> list[Segment]:
    """Policy text and observations in turn."""
    return [Segment(text, i % 2 == 0) for i, text in enumerate(texts)]


def reward_of(segments: list[Segment]) -> float:
    text = "\n".join(segment.text for segment in segments if segment.sampled)
    return compute_score_em("nq", text, TARGET, {"segments": segments}, **SCORES)["score"]


SEARCH = "<think>I need it</think>\n<search>capital</search>"
END = "<think>so</think> <answer>{}</answer>"


@pytest.mark.parametrize(
    ("segments", "reward"),
    [
        (trajectory(SEARCH, MISS, END.format("Beijing")), 1.0),
        (trajectory(SEARCH, MISS, "so <answer>Beijing</answer>"), 0.8),
        (trajectory(SEARCH, HIT, END.format("Paris")), 0.3),
        (trajectory(SEARCH, MISS, END.format("Paris")), 0.2),
        (trajectory(SEARCH, HIT, "so <answer>Paris</answer>"), 0.1),
        (trajectory(SEARCH, HIT, "Beijing!"), 0.0),
        (trajectory("garbage"), 0.0),
    ],
)
def test_the_table_of_rewards(segments, reward):
    assert reward_of(segments) == pytest.approx(reward)


@pytest.mark.parametrize(
    "texts",
    [
        ("<think>easy</think><answer>x</answer>",),
        (SEARCH, HIT, END.format("x")),
        (SEARCH, HIT, SEARCH, MISS, END.format("x") + "\n"),
    ],
)
def test_well_formed(texts):
    assert is_valid_sequence(trajectory(*texts)) == (True, "")


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (("<answer>x</answer>",), "found <answer> where <think>"),
        (("<think>a</think>",), "ended where <search> or <answer>"),
        (("<think>a</think> and <answer>x</answer>",), "text outside of the tags: 'and'"),
        (("<think>a</think><answer>x</answer> bye",), "text outside of the tags"),
        (("<think>a <search>b</search></think>",), "found <search> where </think>"),
        (("<think>a</think><search>b</search><answer>x</answer>",), "found <answer> where <information>"),
        ((SEARCH + "<observation>" + END.format("x"),), "text outside of the tags: '<observation>'"),
        ((SEARCH, HIT, "<answer>x</answer>"), "found <answer> where <think>"),
        ((SEARCH, "\nA hint about the tags.\n", END.format("x")), "text outside of the tags"),
        (("<think>a</think><information>made up</information>",), "found <information>"),
        (("<think>a</think><answer>x</answer><answer>x</answer>",), "where nothing was expected"),
        ((), "ended where <think>"),
    ],
)
def test_malformed(texts, words):
    valid, reason = is_valid_sequence(trajectory(*texts))
    assert not valid and words in reason


def test_tags_inside_a_document_do_no_harm():
    document = "\n\n<information>HTML has <answer>no</answer> </think> tag</information>\n\n"
    assert is_valid_sequence(trajectory(SEARCH, document, END.format("x")))[0]


def test_rule_8_an_answer_inside_a_document_is_not_an_answer():
    document = "\n\n<information><answer>Beijing</answer></information>\n\n"
    assert reward_of(trajectory(SEARCH, document, "I give up")) == 0.0


def test_a_hit_must_be_in_an_observation():
    assert is_retrieval_correct(trajectory(SEARCH, HIT), ["the Beijing"])
    assert not is_retrieval_correct(trajectory("<information>Beijing</information>", MISS), ["Beijing"])


def test_the_signs_that_the_reward_is_made_of_are_there_one_by_one():
    segments = trajectory(SEARCH, HIT, END.format("Paris"))
    fields = ("nq", "<answer>Paris</answer>", TARGET, {"segments": segments})
    assert compute_score_em(*fields, **SCORES) == {
        "score": pytest.approx(0.3),
        "well_formed": 1.0,
        "retrieved": 1.0,
    }
