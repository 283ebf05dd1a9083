"""The samples of pretraining: reading that is right, and searching that is poor in the intended way."""

import random
import re
from collections import Counter

import pytest

from data_prep.demonstrations import PLAIN, Demonstrator, Retriever
from data_prep.microworld import pretraining_world
from data_prep.relations import chains
from data_prep.tiny_tokenizer import TAGS


@pytest.fixture(scope="module")
def world():
    return pretraining_world(1234)


def text_of(sample):
    return "".join(text for text, _ in sample)


def actions(sample):
    """(queries, answer) of a trace."""
    text = text_of(sample)
    return re.findall(r"<search> (.*?)</search>", text), re.findall(r"<answer> (.*?)</answer>", text)[-1]


@pytest.fixture(scope="module")
def traces(world):
    """(question, trace) pairs."""
    student = Demonstrator(world, random.Random(0))
    asked = []
    draw_question = student.question
    student.question = lambda hops: asked.append(draw_question(hops)) or asked[-1]  # remember what was asked
    return [(asked[-1], sample) for sample in (student.trace() for _ in range(3000)) if sample]


def test_the_same_seed_draws_the_same_samples(world):
    first, second = (Demonstrator(world, random.Random(7)) for _ in range(2))
    assert [first.draw(0.5) for _ in range(50)] == [second.draw(0.5) for _ in range(50)]


def test_a_name_finds_its_own_article_first(world):
    retriever = Retriever(world)
    found = [retriever.search(name, 2)[0].name == name for name in world]
    assert sum(found) / len(found) > 0.98
    assert retriever.search("qqqq", 2) == []


def test_only_what_a_policy_would_write_is_trained(traces):
    for _, sample in traces[:300]:
        for text, trained in sample:
            assert trained == (text.startswith(("<search>", "<think>", "<answer>")))


def test_answers_of_reading_samples_are_always_right(world):
    student = Demonstrator(world, random.Random(3))
    question = None
    draw_question = student.question

    def remember(hops):
        nonlocal question
        question = draw_question(hops)
        return question

    student.question = remember
    answered = 0
    for _ in range(300):
        text = text_of(student.reading())
        for phrase, value in re.findall(r"<think> .* of? ?(\w+ \w+) is (.*?)\.</think>", text):
            assert value in world[phrase].facts.values()
        for answer in re.findall(r"<answer> (.*?)</answer>", text):
            answered += 1
            assert answer == question.answer
            assert answer in text.rsplit("<information>", 1)[1].split("</information>")[0]
    assert answered > 100


def test_first_queries_are_right_about_half_of_the_time(traces):
    firsts = [queries[0] == q.path[0] for q, s in traces for queries in [actions(s)[0]] if queries]
    assert 0.42 < sum(firsts) / len(firsts) < 0.62


def test_the_number_of_searches_does_not_depend_on_the_hops(traces):
    counts = {hops: [len(actions(s)[0]) for q, s in traces if len(q.path) == hops] for hops in (1, 2)}
    means = {hops: sum(values) / len(values) for hops, values in counts.items()}
    assert abs(means[1] - means[2]) < 0.12
    assert set(counts[1]) == {0, 1, 2, 3}


def test_demonstrated_answers_are_mostly_wrong_and_two_hops_almost_always(traces):
    right = {hops: [actions(s)[1] == q.answer for q, s in traces if len(q.path) == hops] for hops in (1, 2)}
    assert 0.2 < sum(right[1]) / len(right[1]) < 0.45
    assert 0.02 < sum(right[2]) / len(right[2]) < 0.12


def test_a_bridge_query_is_shown_now_and_then_for_every_chain(traces):
    shown = Counter(q.relations for q, s in traces if len(q.path) == 2 and q.path[1] in actions(s)[0])
    assert len(shown) > 0.9 * len(chains(2))


def test_answers_of_packs_stand_in_their_articles(world):
    student = Demonstrator(world, random.Random(6))
    sizes = set()
    for _ in range(60):
        text = text_of(student.pack())
        articles = text.split("</information>")[0]
        sizes.add(articles.count("Doc "))
        for answer in re.findall(r"<answer> (.*?)</answer>", text):
            assert answer in articles
    assert sizes == {1, 2, 3, 4}


def test_echoes_train_only_words_that_were_listed(world):
    student = Demonstrator(world, random.Random(8))
    for _ in range(30):
        sample = student.echo()
        listed = sample[0][0].split()
        for text, trained in sample[2:]:
            assert not trained or set(text.split()) <= set(listed)


def test_shares_of_the_kinds_move_with_the_mix(world):
    student = Demonstrator(world, random.Random(5))
    early = sum("<search>" in text_of(student.draw(0.1)) for _ in range(400)) / 400
    late = sum("<search>" in text_of(student.draw(1.0)) for _ in range(400)) / 400
    assert early < 0.15
    assert 0.4 < late < 0.6


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_plain_samples_hold_no_tag_and_right_answers(world, mix):
    student = Demonstrator(world, random.Random(9), wording=PLAIN)
    texts = [text_of(student.draw(mix)) for _ in range(200)]
    assert not any(tag in text for text in texts for tag in TAGS)
    answers = [(a, text) for text in texts for a in re.findall(r"Answer: (.*?)\.", text)]
    assert len(answers) > 100
    assert all(answer in text.split("Answer:")[0] for answer, text in answers if "Doc 1" in text)
