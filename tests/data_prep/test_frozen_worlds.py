"""What the shipped models were pretrained on and are tested on never changes, to the letter.

The hashes were taken of the worlds, questions and samples of the first release of `data_prep`.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest

from data_prep.demonstrations import PLAIN, PROTOCOL, Demonstrator, Wording
from data_prep.microworld import draw_questions, evaluation_world, make_rows, pretraining_world
from data_prep.sft_rows import demonstrations


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def test_the_articles_and_questions_of_a_world():
    parts = evaluation_world(0)
    assert (
        digest([[(each.name, each.text) for each in part.values()] for part in parts]) == "41dd9989f36b5927"
    )
    rng = random.Random("questions 0")
    rows = [make_rows(draw_questions(rng, parts[0], hops, 40), "train") for hops in (1, 2)]
    assert digest(rows) == "fcd6470ef3c033cb"


@pytest.mark.parametrize(
    ("wording", "expected"), [(PROTOCOL, "f317b9e5b92d9a21"), (PLAIN, "7ef4078b1ce34eb4")]
)
def test_the_samples_of_pretraining(wording: Wording, expected: str):
    student = Demonstrator(pretraining_world(1234), random.Random(7), wording=wording)
    assert digest([student.draw(mix) for mix in (0.0, 0.5, 1.0) for _ in range(40)]) == expected


def test_the_demonstrations_of_supervised_training():
    assert digest(list(demonstrations(5, 50, 0.8))) == "ad230f2ddd3cb057"
