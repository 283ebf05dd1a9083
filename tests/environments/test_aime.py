from __future__ import annotations

import pytest

from verl.environments import aime, make
from verl.utils.errors import CouldNotVerify
from verl.verifiers.workers import KillableWorkers


def start(gold, name="reward_spec"):
    return make("aime", env_config={}, extras={name: {"ground_truth": gold}})


@pytest.mark.parametrize(
    "text, answer",
    [
        ("Answer: 12\nso Answer : 13 <end>", "13"),
        ("answer:7", "7"),
        (r"thus \boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"Answer: 3" + "\n" + r"\boxed{4}", "3"),  # one answer is read, never two
        (r"\boxed{4", None),
        ("Answer: 5" + "." * 300, None),
        ("it is 5", None),
    ],
)
def test_one_answer_is_read(text, answer, monkeypatch):
    monkeypatch.setattr(KillableWorkers, "call_in_any", lambda self, *call: False)
    assert start("204").step(text)["metadata"]["pred"] == answer


def test_right_is_one_and_wrong_minus_one():
    env = start("204", "reward_model")
    metadata = {"acc": True, "pred": "204"}
    expected = {"observations": [], "reward": 1.0, "done": True, "metadata": metadata}
    assert env.step("So we get\nAnswer: 204") == expected and env.get_metrics() == {"acc": 1.0}
    assert start(204).step(r"\boxed{204}")["reward"] == 1
    wrong = start("204").step("no idea")
    assert wrong["reward"] == -1 and wrong["metadata"] == {"acc": False, "pred": None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "prediction, gold, same",
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"2\sqrt{2}", r"\sqrt{8}", True),
        ("3,4", "3", False),
        (r"3\text{or}4", "3", False),
        (r"\{1,2,3,204\}", "204", False),
        ("9^(9^(9^9))", "204", False),
    ],
)
def test_math_verify_finds_equal_values_and_can_be_killed(monkeypatch, prediction, gold, same):
    monkeypatch.setattr(aime, "CPU_SECONDS", 2.0)
    assert start(gold).step(f"Answer: {prediction}")["reward"] == (1 if same else -1)


def test_a_process_that_others_end_is_no_verdict(monkeypatch):
    def ended(self, *call):
        raise CouldNotVerify("ended")

    monkeypatch.setattr(KillableWorkers, "call_in_any", ended)
    with pytest.raises(CouldNotVerify, match="ended"):
        start("2").step("Answer: 1")
