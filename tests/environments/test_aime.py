from __future__ import annotations

import pytest

from verl.environments import make
from verl.environments.aime import last_boxed, normalized_answer, read_answer


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Answer: 12\nso Answer : 13 <end>", "13 "),
        ("answer:7", "7"),
        (r"thus \boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"Answer: 3" + "\n" + r"\boxed{4}", "3"),  # one answer is read, never two
        (r"\boxed{4", None),
        ("Answer: 5" + "." * 300, None),
        ("it is 5", None),
    ],
)
def test_one_answer_is_read(text, answer):
    assert read_answer(text) == answer


def test_nested_braces_belong_to_the_box():
    assert last_boxed(r"\boxed{a{b}c} d}") == "a{b}c"


@pytest.mark.parametrize(
    "answer, normal",
    [
        ("x = 1,234", "1234"),
        (r"$\text{the } 5 \text{ degrees}$", r"the5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"90^\circ", "90"),
        ("12 square units", "12"),
    ],
)
def test_minervas_rule(answer, normal):
    assert normalized_answer(answer) == normal


def test_right_is_one_and_wrong_minus_one():
    env = make("aime", env_config={}, extras={"reward_model": {"ground_truth": "204"}})
    output = env.step("So we get\nAnswer: 204")
    assert output == {
        "observations": [],
        "reward": 1.0,
        "done": True,
        "metadata": {"acc": True, "pred": "204"},
    }
    assert env.get_metrics() == {"acc": 1.0}
    assert make("aime", extras={"reward_spec": {"ground_truth": 204}}).step(r"\boxed{204}")["reward"] == 1
    wrong = make("aime", extras={"reward_spec": {"ground_truth": "204"}}).step("no idea")
    assert wrong["reward"] == -1 and wrong["metadata"] == {"acc": False, "pred": None}
