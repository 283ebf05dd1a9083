from dataclasses import dataclass
from enum import Enum

import pytest
import torch

from verl.algos.registry import Registry, call_with
from verl.trainer.ppo import core_algos as algos


def test_a_function_is_found_by_the_name_it_was_registered_under_and_a_name_is_taken_once():
    registry = Registry("some.key")

    @registry.register("half")
    def half(x):
        return x / 2

    assert registry.find("half") is half and list(registry) == ["half"]
    assert registry.register("half")(half) is half  # a module that is imported twice
    with pytest.raises(ValueError, match="registered already"):
        registry.register("half")(lambda x: x)
    with pytest.raises(ValueError, match="some.key: found 'third', expected one of half"):
        registry.find("third")


def test_a_users_own_function_is_taken_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_own_estimators.py").write_text(
        "def zero(token_level_rewards, response_mask):\n"
        "    return token_level_rewards * 0, token_level_rewards\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "my_broken_estimators.py").write_text("x = 1\nraise RuntimeError('not today')\n")
    (tmp_path / "my_unfinished_estimators.py").write_text("def zero(\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert algos.get_adv_estimator_fn("my_own_estimators:zero").__name__ == "zero"
    assert algos.get_policy_loss_fn("my_own_estimators:zero").__name__ == "zero"
    for path, found in (
        ("my_own_estimators:one", "has no attribute 'one'"),
        ("no_such_module_here:one", "No module named 'no_such_module_here'"),
        ("my_own_estimators:NUMBER", "is a int, expected a function"),
        ("my_broken_estimators:zero", r"RuntimeError: not today .*my_broken_estimators.py:2"),
        ("my_unfinished_estimators:zero", "SyntaxError: .*my_unfinished_estimators.py, line 1"),
    ):
        with pytest.raises(ValueError, match=found):
            algos.get_adv_estimator_fn(path)


@dataclass
class Inputs:
    a: int | None = 1
    b: int | None = 2
    c: int | None = None
    d: int | None = 4


def test_a_function_is_called_with_what_it_names_and_what_it_needs_must_be_there():
    def fn(a, b, c=3):
        return a, b, c

    assert call_with(fn, Inputs(), "fn") == (1, 2, 3)
    with pytest.raises(ValueError, match="fn needs b, which this batch does not have"):
        call_with(fn, Inputs(b=None), "fn")
    assert call_with(lambda inputs: inputs.d, Inputs(), "fn") == 4


def test_a_function_with_kwargs_gets_everything_that_there_is():
    """verl's own signature is (token_level_rewards, response_mask, config=None, **kwargs)."""

    def fn(a, c=None, **kwargs):
        return a, c, kwargs

    assert call_with(fn, Inputs(), "fn") == (1, None, {"b": 2, "d": 4})

    @algos.register_adv_est("an estimator with kwargs")
    def estimator(token_level_rewards, response_mask, config=None, **kwargs):
        assert kwargs["index"] == ["a"] and kwargs["gamma"] == 0.5 and "values" not in kwargs
        return token_level_rewards, response_mask

    ones = torch.ones(1, 2)
    inputs = algos.AdvantageInputs(3 * ones, ones, index=["a"], gamma=0.5)
    assert algos.estimate_advantages("an estimator with kwargs", inputs)[0].tolist() == [[3.0, 3.0]]
    assert algos.estimator_inputs("an estimator with kwargs") == {
        "token_level_rewards",
        "response_mask",
        "config",
    }


def test_a_member_of_somebodys_own_enum_stands_for_its_value():
    """verl's AdvantageEstimator in a user's module is not ours: its member was the key, and listing the names
    in a message then failed."""

    class Theirs(str, Enum):
        MINE = "an enum of mine"

    class Plain(Enum):
        OTHER = "another enum of mine"

    for member in (Theirs.MINE, Plain.OTHER):
        estimator = algos.register_adv_est(member)(lambda token_level_rewards: token_level_rewards)
        assert algos.get_adv_estimator_fn(member.value) is estimator
        assert algos.get_adv_estimator_fn(member) is estimator
    with pytest.raises(ValueError, match="found 'no such name', expected one of .*an enum of mine, another"):
        algos.get_adv_estimator_fn("no such name")
