import pytest

from verl.trainer.ppo import core_algos as algos
from verl.trainer.ppo.algos.registry import Registry, call_with


def test_a_function_is_found_by_the_name_it_was_registered_under_and_a_name_is_taken_once():
    registry = Registry("some.key")

    @registry.register("half")
    def half(x):
        return x / 2

    assert registry.get("half") is half and list(registry) == ["half"]
    assert registry.register("half")(half) is half  # a module that is imported twice
    with pytest.raises(ValueError, match="registered already"):
        registry.register("half")(lambda x: x)
    with pytest.raises(ValueError, match="some.key: found 'third', expected one of half"):
        registry.get("third")


def test_a_users_own_function_is_taken_by_its_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_own_estimators.py").write_text(
        "def zero(token_level_rewards, response_mask):\n"
        "    return token_level_rewards * 0, token_level_rewards\n"
        "NUMBER = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert algos.get_adv_estimator_fn("my_own_estimators:zero").__name__ == "zero"
    assert algos.get_policy_loss_fn("my_own_estimators:zero").__name__ == "zero"
    for path, found in (
        ("my_own_estimators:one", "has no attribute 'one'"),
        ("no_such_module_here:one", "No module named 'no_such_module_here'"),
        ("my_own_estimators:NUMBER", "is a int, expected a function"),
    ):
        with pytest.raises(ValueError, match=found):
            algos.get_adv_estimator_fn(path)


def test_a_function_is_called_with_what_it_names_and_what_it_needs_must_be_there():
    def fn(a, b, c=3):
        return a, b, c

    assert call_with(fn, {"a": 1, "b": 2, "d": 4}, "fn") == (1, 2, 3)
    assert call_with(fn, {"a": 1, "b": 2, "c": None}, "fn") == (1, 2, 3)
    with pytest.raises(ValueError, match="fn needs b, which this batch does not have"):
        call_with(fn, {"a": 1, "b": None}, "fn")
