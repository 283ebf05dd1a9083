from __future__ import annotations

import pytest

from verl.environments import make
from verl.environments.gsm8k import GSM8kMultiTurnEnv, extract_number


def row(gold="42", **more):
    return {"reward_spec": {"method": "rule", "ground_truth": gold}, **more}


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("so #### 42", "42", "42"),
        ("#### -1,234.5 dollars", "-1234.5", "-1234.5"),
        ("#### 1 and #### 2", "1", "2"),
        ("####42", None, "42"),
        ("The answer is 1,042.", None, "1042"),
        ("between .5 and 7, I think.", None, "7"),
        ("none", None, None),
        ("...,", None, None),
    ],
)
def test_strict_reads_the_first_marked_number_and_flexible_the_last_number(text, strict, flexible):
    assert extract_number(text) == strict
    assert extract_number(text, "flexible") == flexible


def test_gsm8k_pays_one_for_the_right_number():
    for name in ("reward_spec", "reward_model"):
        env = make("gsm8k", env_config={}, extras={name: {"ground_truth": 42}})
        assert env.step("#### 42") == {"observations": [], "reward": 1.0, "done": True, "metadata": {}}
    assert make("gsm8k", extras=row()).step("it is 42")["reward"] == 0
    assert make("gsm8k", env_config={"method": "flexible"}, extras=row()).step("it is 42.")["reward"] == 1


def test_multi_turn_pays_a_share_for_the_form_and_ends_with_the_right_number_or_its_turns():
    env = make("gsm8k_multi_turn", extras=row(max_turns=4))
    outputs = [env.step(action) for action in ("let me think", "#### 41", "#### 42")]
    assert [output["reward"] for output in outputs] == [0.0, 0.05, 1.0] and env.get_metrics() == {"steps": 3}
    assert [output["done"] for output in outputs] == [False, False, True]
    assert [len(output["observations"]) for output in outputs] == [1, 1, 0]
    env = make("gsm8k_multi_turn", extras=row(extra_info={"max_turns": 2}))
    first = env.step("#### 1")
    last = env.step("#### 1")
    assert "final number" in first["observations"][0]["content"] and not first["done"]
    assert last["done"] and last["reward"] == 0.1
    assert env.aggregate_metrics([{"steps": 2}]) == {"avg_steps": 2}
    assert make("gsm8k_multi_turn", extras=row()).max_turns == 5
    assert GSM8kMultiTurnEnv(extras=row(max_turns=4)).max_turns == 4  # in a subclass's constructor, too


def test_mistakes_of_the_user_are_told():
    with pytest.raises(ValueError, match=r"columns \['a'\].*reward_spec.ground_truth"):
        make("gsm8k", extras={"a": 1})
    with pytest.raises(ValueError, match="expected 'strict' or 'flexible'"):
        make("gsm8k", env_config={"method": "loose"}, extras=row())
