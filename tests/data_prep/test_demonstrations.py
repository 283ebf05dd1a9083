"""The samples of pretraining: reading that is right, and searching that is poor in the intended way."""

import random
import re

import pytest

from data_prep.demonstrations import PLAIN, Demonstrator
from data_prep.microworld import pretraining_world
from data_prep.tiny_tokenizer import TAGS


@pytest.fixture(scope="module")
def world():
    return pretraining_world(1234)


def text_of(sample):
    return "".join(text for text, _ in sample)


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


@pytest.mark.parametrize("mix", [0.0, 1.0])
def test_plain_samples_hold_no_tag_and_right_answers(world, mix):
    student = Demonstrator(world, random.Random(9), wording=PLAIN)
    texts = [text_of(student.draw(mix)) for _ in range(200)]
    assert not any(tag in text for text in texts for tag in TAGS)
    answers = [(a, text) for text in texts for a in re.findall(r"Answer: (.*?)\.", text)]
    assert len(answers) > 100
    assert all(answer in text.split("Answer:")[0] for answer, text in answers if "Doc 1" in text)
