"""The verifier reasoning_gym, for tasks of the package reasoning-gym.

The package (Stojanovski et al. 2025, arXiv:2505.24760) scores the answers to its own tasks. The label is JSON
text {"task": name, "entry": {"question", "answer", "metadata"}}, with an item of the task's data set as its
entry. The answer is the text in the response's last <answer>..</answer>, or else the whole response after
</think>. Scores lie between 0 and 1. Some tasks give a part of the point for a wrong answer in good form.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from verl.utils.extras import missing_package
from verl.verifiers.text import after_thinking
from verl.verifiers.verifier import Sample, parse_literal
from verl.verifiers.workers import CheckedVerifier

_ANSWER = re.compile(r".*<answer>(.*?)</answer>", re.DOTALL)
_FIRST = {"task": "leg_counting", "entry": {"question": "", "answer": "4", "metadata": {}}}


class ReasoningGymVerifier(CheckedVerifier):
    """The verifier `reasoning_gym`, which works in processes of its own (`workers.py`).

    Scoring may run a solver.
    """

    needs = ("reasoning_gym",)
    function = "verl.verifiers.reasoning_gym:reasoning_gym_score"
    warm_up_arguments = ("4", _FIRST)

    def check_label(self, label: Any) -> None:
        content = parse_literal(label)
        if not isinstance(content, dict) or not {"task", "entry"} <= content.keys():
            raise ValueError(
                f"Found reasoning_gym label {label!r:.200}; expected an object of task and entry."
            )
        if content["task"] not in import_library("reasoning_gym.factory").DATASETS:
            raise ValueError(
                f"Found no reasoning_gym task {content['task']!r}; expected one of its data sets."
            )

    def _call(self, sample: Sample) -> Sequence[Any]:
        return sample.text, parse_literal(sample.label)


def reasoning_gym_score(text: str, label: Any) -> float:
    """Return the score of a response, between 0 and 1."""
    match = _ANSWER.match(text)
    answer = match[1].strip() if match else after_thinking(text)
    return float(import_library("reasoning_gym").get_score_answer_fn(label["task"])(answer, label["entry"]))


def import_library(module: str) -> Any:
    """Import a module of the package.

    Raises ValueError if the package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(f"reasoning_gym ({error})", "reasoning_gym") from error
