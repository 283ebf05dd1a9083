"""reasoning_gym: tasks of the package of that name (Stojanovski et al. 2025, arXiv:2505.24760), scored by it.

Label: JSON text {"task": name, "entry": {"question", "answer", "metadata"}}, an item of the task's data set.
The answer is what stands in the response's last <answer>..</answer>, else the whole response behind </think>.
Scores lie between 0 and 1; some tasks give part of the point for a wrong answer in good form.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from verl.verifiers.base import Sample, parsed
from verl.verifiers.text import after_thinking
from verl.verifiers.workers import CheckedVerifier

_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)
_FIRST = {"task": "leg_counting", "entry": {"question": "", "answer": "4", "metadata": {}}}


class ReasoningGymVerifier(CheckedVerifier):
    """The work is done in processes of their own (`workers.py`): scoring may run a solver."""

    function = "verl.verifiers.reasoning_gym:reasoning_gym_score"
    first = ("4", _FIRST)

    def check_label(self, label: Any) -> None:
        read = parsed(label)
        if not isinstance(read, dict) or not {"task", "entry"} <= read.keys():
            raise ValueError(
                f"Found reasoning_gym label {label!r:.200}; expected an object of task and entry."
            )
        if read["task"] not in library("reasoning_gym.factory").DATASETS:
            raise ValueError(f"Found no reasoning_gym task {read['task']!r}; expected one of its data sets.")

    def _call(self, sample: Sample) -> Sequence[Any]:
        return sample.text, parsed(sample.label)


def reasoning_gym_score(text: str, label: Any) -> float:
    """The score of a response, between 0 and 1."""
    found = _ANSWER.match(text)
    answer = found[1].strip() if found else after_thinking(text)
    return float(library("reasoning_gym").get_score_answer_fn(label["task"])(answer, label["entry"]))


def library(module: str) -> Any:
    """A module of the package. ValueError: it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        command = "pip install -c constraints.txt reasoning-gym"
        raise ValueError(f"reasoning_gym needs a package: {error}; install it: {command}") from error
