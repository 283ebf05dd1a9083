"""Reward functions: (data_source, solution_str, ground_truth, extra_info) -> score.

`default_compute_score` is exact match. You name a function of your own with `custom_reward_function.path`.
`solution_str` is only what the policy wrote. `extra_info` is the row's, with `segments` added: the whole
response in runs of sampled and of observed text.
"""

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from verl.utils.importing import import_file
from verl.utils.reward_score.qa_em import compute_score_em, has_answers
from verl.utils.rows import truth_struct
from verl.utils.text import short_repr

RewardFunction = Callable[..., Any]  # see `call_reward_function`
LARGEST_SCORE = 3.4e38  # rewards are float32

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
    return compute_score_em(solution_str, with_golden_answers(data_source, ground_truth))


def with_golden_answers(data_source: str, ground_truth: Any) -> Any:
    """Return a row's ground truth in the form that exact match compares with.

    Raises ValueError if the row has no golden answers.
    """
    is_plain = data_source in _PLAIN_SOURCES and isinstance(ground_truth, str | list | tuple | np.ndarray)
    if is_plain and len(ground_truth) > 0 and truth_struct(ground_truth) is None:
        ground_truth = {"target": ground_truth}
    if not has_answers(ground_truth):
        raise ValueError(
            f"Found data_source={data_source!r} and reward_model.ground_truth={ground_truth!r}; expected "
            "golden answers in ground_truth.target. Add them, name verifiers (docs/environments.md), return "
            "a reward from the environment's step, or give custom_reward_function.path."
        )
    return ground_truth


def load_reward_function(config: Mapping[str, Any]) -> RewardFunction | None:
    """Load a user's reward function; return None if there is no path.

    The file is imported as `import_file` does, once in a process.

    Args:
        config: {path: python file or None, name: name of the function}.

    Raises:
        ValueError: the file can't be imported, or it has no such function.
    """
    path = config["path"]
    name = config["name"]
    if path is None:
        return None
    module = import_file(path, "custom_reward_function.path")
    function: RewardFunction | None = vars(module).get(name)
    if not callable(function):
        functions = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ValueError(
            f"Found no function {name!r} in {path}; expected one of {functions}. Set "
            "custom_reward_function.name."
        )
    return function


def is_score(value: Any) -> bool:
    """Return whether a value is a number that float32 holds."""
    is_number = isinstance(value, Real)
    return bool(is_number and abs(value) <= LARGEST_SCORE)


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
        RewardFunctionFailed: the function raised an exception, or returned another number of scores, or a
            score that is no finite number.
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
        else:
            scores = [function(**call) for call in calls]
            if inspect.iscoroutinefunction(function):
                scores = asyncio.run(together(scores))
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
    return [plain_score(function, call, score) for call, score in zip(calls, scores, strict=True)]


def plain_score(function: RewardFunction, call: Mapping[str, Any], returned: Any) -> Any:
    """Return what a reward function returned for a row, with its score as a float or None.

    Raises RewardFunctionFailed, with the function and the row, if the score is no number that float32 holds.
    """
    is_mapping = isinstance(returned, Mapping)
    score = returned.get("score", returned) if is_mapping else returned
    is_single = getattr(score, "shape", None) == () or getattr(score, "shape", None) == (1,)
    if is_single and hasattr(score, "item"):  # a number of numpy or torch
        score = score.item()
    if score is not None and not is_score(score):
        code = getattr(function, "__code__", None)
        name = getattr(function, "__name__", type(function).__name__)
        location = f"{code.co_filename}, line {code.co_firstlineno}, in {name}" if code else name
        index = call["extra_info"].get("index") if isinstance(call["extra_info"], Mapping) else None
        row = "" if index is None else f" (extra_info.index={index!r:.40})"
        raise RewardFunctionFailed(
            f"{location}: found the score {short_repr(returned)} for the response "
            f"{short_repr(call['solution_str'])} of a row of {call['data_source']!r:.60}{row}; expected a "
            "finite number, a dictionary with one as 'score', or None where it can't verify"
        )
    number = None if score is None else float(score)
    return {**returned, "score": number} if is_mapping else number
