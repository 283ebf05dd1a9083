"""What a validation says of a row, for the kinds of rows that people's data has."""

import pytest

from verl.trainer.ppo.validation import _documents_hold_answer

TRAJECTORY = {"turns": [{"documents": [{"contents": "Oslo\nOslo lies in Norway.", "score": 1.0}]}, {}]}


@pytest.mark.parametrize(
    ("ground_truth", "expected"),
    [
        ({"target": ["Bergen", "norway"]}, 1.0),
        ({"target": ["Bergen"]}, 0.0),
        ({"target": "Bergen"}, 0.0),  # a text is one answer, not one for each of its letters
        ({"target": "Norway"}, 1.0),
        ("42", None),  # what a user's own reward compares with
        ({"answer": 42}, None),
    ],
)
def test_documents_hold_the_answer_if_one_golden_answer_stands_in_them(ground_truth, expected):
    assert _documents_hold_answer(TRAJECTORY, ground_truth) == expected
