"""Reward functions by data source.

    (data_source, solution_str, ground_truth, extra_info) -> score

`default_compute_score` looks the data source up; a user's own function (`custom_reward_function.path`) is
called with the same four arguments instead. `solution_str` is only what the policy wrote; `extra_info` is
the row's, with `segments` added: the whole response in runs of sampled and of observed text.
"""

import asyncio
import importlib.util
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.reward_score import qa_em

RewardFunction = Callable[..., Any]  # see `call_reward_function`

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

    @property
    def function(self) -> Callable[..., Any]:
        """The user's own."""
        assert callable(self._function)
        return self._function

    def __call__(self, *args: Any, **kwargs: Any) -> float | Mapping[str, Any]:
        returned: float | Mapping[str, Any] = self.function(*args, **kwargs)
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


class RewardFunctionFailed(Exception):
    """A user's reward function raised; the message names its line."""


def call_reward_function(function: RewardFunction, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What a reward function returns for each row: a number, a dictionary, or None (could not verify).

    A coroutine function is called for all rows at the same time. One that takes data_sources, solution_strs,
    ground_truths and extra_infos (verl's batched form) is called once and returns a list.

    Args:
        calls: data_source, solution_str, ground_truth and extra_info of each row.
    """
    if not calls:
        return []
    inner = function.function if isinstance(function, FileReward) else function

    async def together(coroutines: Sequence[Any]) -> list[Any]:
        return list(await asyncio.gather(*coroutines))

    try:
        if "solution_strs" in inspect.signature(inner).parameters:
            returned = inner(**{f"{name}s": [call[name] for call in calls] for name in calls[0]})
            many = list(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
            if len(many) != len(calls):
                raise ValueError(f"it returned {len(many)} scores for {len(calls)} rows")
            return many
        many = [inner(**call) for call in calls]
        return asyncio.run(together(many)) if inspect.iscoroutinefunction(inner) else many
    except Exception as error:  # it is a user's function: anything may come
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        path = getattr(getattr(inner, "__code__", None), "co_filename", None)
        own = [frame for frame in frames if frame.filename == path] or frames
        where = f"{own[-1].filename}, line {own[-1].lineno}, in {own[-1].name}: " if own else ""
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise RewardFunctionFailed(f"{where}{what}") from error
