"""Reward functions by data source.

    (data_source, solution_str, ground_truth, extra_info) -> score

`default_compute_score` looks the data source up; a user's own function (`custom_reward_function.path`) is
called with the same four arguments instead. `solution_str` is only what the policy wrote; `extra_info` is
the row's, with `segments` added: the whole response in runs of sampled and of observed text.
"""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.reward_score import qa_em

RewardFunction = Callable[..., "float | Mapping[str, Any]"]

# Search-R1's data sets. Any other source that brings golden answers is scored in the same way.
EXACT_MATCH_SOURCES = (
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
    "web_questions",
    "strategyqa",
)

REWARD_FUNCTIONS: dict[str, Callable[[str, Any], float]] = dict.fromkeys(
    EXACT_MATCH_SOURCES, qa_em.compute_score_em
)


def register_reward(data_source: str) -> Callable[[Callable[[str, Any], float]], Callable[[str, Any], float]]:
    """Decorator: score this data source with `function(solution_str, ground_truth) -> float`.

    Raises:
        ValueError: the data source has a function already.
    """

    def add(function: Callable[[str, Any], float]) -> Callable[[str, Any], float]:
        if data_source in REWARD_FUNCTIONS:
            raise ValueError(
                f"Data source {data_source!r} has a reward function already; choose another name."
            )
        REWARD_FUNCTIONS[data_source] = function
        return function

    return add


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None
) -> float:
    """The score of one answer, by its data source; exact match where the source is not registered.

    Raises:
        ValueError: the source is unknown and the row has no golden answers to compare with.
    """
    function = REWARD_FUNCTIONS.get(data_source)
    if function is None:
        if not isinstance(ground_truth, Mapping) or ground_truth.get("target") is None:
            raise ValueError(
                f"Found data_source={data_source!r} and reward_model.ground_truth={ground_truth!r}; expected "
                "golden answers in ground_truth.target. Add them, or give custom_reward_function.path."
            )
        function = qa_em.compute_score_em
    return function(solution_str, ground_truth)


class FileReward:
    """A function of a user's file. Another process that gets it executes the file anew: what stands in the
    file (locks, clients, models) need not be fit for a pickle.

    Raises:
        ValueError: the file has no such function.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._source, self.path = (path, name), path
        spec = importlib.util.spec_from_file_location("custom_reward_function", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"Found custom_reward_function.path={path}; expected a python file (.py).")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self._function = module.__dict__.get(name)
        if not callable(self._function):
            names = [
                key for key, value in module.__dict__.items() if callable(value) and not key.startswith("_")
            ]
            raise ValueError(
                f"Found no function {name!r} in {path}; expected one of {names}. Set "
                "custom_reward_function.name."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> float | Mapping[str, Any]:
        assert callable(self._function)
        returned: float | Mapping[str, Any] = self._function(*args, **kwargs)
        return returned

    def __reduce__(self) -> tuple[Any, ...]:
        return FileReward, self._source


def load_reward_function(config: Mapping[str, Any]) -> RewardFunction | None:
    """A user's reward function: `config` is {path: python file or None, name: of the function}.

    Returns:
        The function, or None without a path.

    Raises:
        ValueError: the file has no such function.
    """
    path, name = config["path"], config["name"]
    # absolute, as another process may have another working directory
    return None if path is None else FileReward(Path(path).expanduser().absolute(), name)
