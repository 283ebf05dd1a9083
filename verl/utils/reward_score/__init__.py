"""Reward functions: (data_source, solution_str, ground_truth, extra_info) -> score.

`default_compute_score` is exact match. You name a function of your own with `custom_reward_function.path`.
`solution_str` is only what the policy wrote. `extra_info` is the row's, with `segments` added: the whole
response in runs of sampled and of observed text.
"""

import asyncio
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.utils.reward_score.qa_em import compute_score_em, known_answers

RewardFunction = Callable[..., Any]  # see `call_reward_function`

# Search-R1's data sources. Their ground truth may also be the golden answers themselves, as texts.
_PLAIN_SOURCES = (
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


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Return the exact match, whatever the data source.

    Raises ValueError if the row has no golden answers to compare with.
    """
    is_plain = data_source in _PLAIN_SOURCES and isinstance(ground_truth, str | list | tuple | np.ndarray)
    if is_plain and len(ground_truth) > 0:
        ground_truth = {"target": ground_truth}
    if not known_answers(ground_truth):
        raise ValueError(
            f"Found data_source={data_source!r} and reward_model.ground_truth={ground_truth!r}; expected "
            "golden answers in ground_truth.target. Add them, name verifiers (docs/environments.md), return "
            "a reward from the environment's step, or give custom_reward_function.path."
        )
    return compute_score_em(solution_str, ground_truth)


def load_reward_function(config: Mapping[str, Any]) -> RewardFunction | None:
    """Load a user's reward function; return None if there is no path.

    `config` is {path: python file or None, name: name of the function}. Raises ValueError if the file has no
    such function.
    """
    path = config["path"]
    name = config["name"]
    if path is None:
        return None
    path = Path(path).expanduser().absolute()
    spec = importlib.util.spec_from_file_location("custom_reward_function", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"Found custom_reward_function.path={path}; expected a python file (.py).")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        names = [key for key in functions if not key.startswith("_")]
        raise ValueError(
            f"Found no function {name!r} in {path}; expected one of {names}. Set custom_reward_function.name."
        )
    function: RewardFunction = functions[name]
    return function


class RewardFunctionFailed(Exception):
    """An exception of a user's reward function; the message names its line."""


def call_reward_function(function: RewardFunction, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what a reward function returns for each row: a number, a dictionary, or None (could not verify).

    A coroutine function is called for all rows at the same time. A function that takes data_sources,
    solution_strs, ground_truths and extra_infos (verl's batched form) is called once and returns a list.

    Args:
        function: the reward function.
        calls: data_source, solution_str, ground_truth and extra_info of each row.

    Raises:
        RewardFunctionFailed: the function raised an exception, or returned another number of scores.
    """
    if not calls:
        return []

    async def together(coroutines: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    try:
        if "solution_strs" in inspect.signature(function).parameters:
            returned = function(**{f"{name}s": [call[name] for call in calls] for name in calls[0]})
            scores = list(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
            if len(scores) != len(calls):
                raise ValueError(f"it returned {len(scores)} scores for {len(calls)} rows")
            return scores
        scores = [function(**call) for call in calls]
        return asyncio.run(together(scores)) if inspect.iscoroutinefunction(function) else scores
    except Exception as error:  # it is a user's function, which may raise anything
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        path = getattr(getattr(function, "__code__", None), "co_filename", None)
        user_frames = [frame for frame in frames if frame.filename == path] or frames
        location = (
            f"{user_frames[-1].filename}, line {user_frames[-1].lineno}, in {user_frames[-1].name}: "
            if user_frames
            else ""
        )
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RewardFunctionFailed(f"{location}{problem}") from error
