"""A user's Python file is imported as if it stood on the path, and a mistake in it is named by its line."""

import sys

import pytest

from verl.utils.reward_score import RewardFunctionFailed, call_reward_function, load_reward_function

DATACLASS = """
from __future__ import annotations
from collections import Counter
from dataclasses import dataclass
from concurrent.futures import ProcessPoolExecutor
from helper_of_a_reward import half

@dataclass
class Parts:
    right: float

def one(text):
    return half(len(text))

def score(data_sources, solution_strs, ground_truths, extra_infos):
    with ProcessPoolExecutor(1) as pool:
        return [Parts(value).right for value in pool.map(one, solution_strs)]
"""


@pytest.fixture(autouse=True)
def path_of_this_test(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def call(text="ab", **more):
    return {
        "data_source": "nq",
        "solution_str": text,
        "ground_truth": None,
        "extra_info": {"index": 7},
    } | more


def test_a_dataclass_a_process_pool_and_a_module_beside_it_work(tmp_path):
    (tmp_path / "helper_of_a_reward.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "reward_with_all.py").write_text(DATACLASS)
    settings = {"path": str(tmp_path / "reward_with_all.py"), "name": "score"}
    function = load_reward_function(settings)
    assert call_reward_function(function, [call("ab"), call("abcd")]) == [1.0, 2.0]
    assert load_reward_function(settings) is function
    with pytest.raises(ValueError, match=r"no function 'compute' .* expected one of \['one', 'score'\]"):
        load_reward_function(settings | {"name": "compute"})


@pytest.mark.parametrize(
    "text, reason",
    [
        ("\nscore(\n", r"SyntaxError: .*broken.py:2\)"),
        ("x = 1\nimport nowhere_at_all\n", r"ModuleNotFoundError: .*broken.py:2\)"),
        ("x = 1\n\nraise SystemExit(3)\n", r"SystemExit: 3 .*broken.py:3\)"),
    ],
)
def test_a_file_that_can_not_be_imported_is_one_line_with_its_own_line(tmp_path, text, reason):
    (tmp_path / "broken.py").write_text(text)
    with pytest.raises(ValueError, match=reason):
        load_reward_function({"path": str(tmp_path / "broken.py"), "name": "score"})


def test_a_file_with_the_name_of_a_library_hides_none(tmp_path):
    (tmp_path / "json.py").write_text("def score(**call):\n    return 1\n")
    function = load_reward_function({"path": str(tmp_path / "json.py"), "name": "score"})
    import json

    assert json.loads("1") == function() and "json" not in function.__module__


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "1.0", [1.0], {"score": float("nan")}, {"acc": 1}, b"1"]
)
def test_a_score_that_is_no_finite_number_names_the_function_and_the_row(value):
    def score(**call):
        return value

    with pytest.raises(RewardFunctionFailed, match=r"test_importing_files.py, line \d+, in score.*index=7"):
        call_reward_function(score, [call()])


def test_numbers_of_numpy_and_torch_are_scores():
    import numpy as np
    import torch

    values = iter(
        [np.float32(0.5), torch.tensor(1.0), np.array([2.0]), True, None, {"score": np.int64(3), "a": 1}]
    )
    scores = call_reward_function(lambda **call: next(values), [call()] * 6)
    assert scores == [0.5, 1.0, 2.0, 1.0, None, {"score": 3.0, "a": 1}]
    assert all(type(score) is float for score in scores[:4])
