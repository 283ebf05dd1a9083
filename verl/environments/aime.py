"""Competition mathematics: one turn that ends with `Answer: ...`, or with \\boxed{...} without such a line.

Reward 1 or -1. An answer is right where Minerva's rule says so: it equals the row's as text, once words,
units and spellings of LaTeX that mean nothing are gone (Lewkowycz et al. 2022, appendix D.1; also SkyRL's and
verl's rule). What that rule refuses math-verify may still find equal, such as 1/2 and 0.5. One answer is
read: the last `Answer:` of the last 300 characters, else the last box.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, gold_answer

LAST_CHARACTERS = 300

_ANSWER = re.compile(r"Answer\s*:\s*([^\n<]+)", re.IGNORECASE)
_REPLACED = {
    "an ": "", "a ": "", ".$": "$", r"\$": "", r"\ ": "", " ": "", "mbox": "text", r",\text{and}": ",",
    r"\text{and}": ",", r"\text{m}": r"\text{}",
}  # fmt: skip
_LEFT_OUT = [
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue",
    "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals",
    "edges", "students", "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}",
    r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;",
    r",\!", "{,}", '"', r"\dots",
]  # fmt: skip
_REWRITTEN = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r".*?\$(.*?)\$.*", r"$\1$"),  # only what stands between dollar signs
        (r"\\text\{(.*?)\}", r"\1"),
        (r"\\textbf\{(.*?)\}", r"\1"),
        (r"\\overline\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    )
]


def normalized_answer(answer: str) -> str:
    """An answer by Minerva's rule: two answers with equal results count as the same."""
    answer = answer.split("=")[-1]
    for text, by in (*_REPLACED.items(), *dict.fromkeys(_LEFT_OUT, "").items()):
        answer = answer.replace(text, by)
    for pattern, by in _REWRITTEN:
        answer = pattern.sub(by, answer)
    answer = answer.replace("$", "")
    without_commas = answer.replace(",", "")
    return (without_commas if without_commas.isdigit() else answer).strip()


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{...}; None: there is none that is closed."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for end in range(start + len(r"\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + len(r"\boxed{") : end]
    return None


def read_answer(text: str) -> str | None:
    """The one answer of a response, as it stands there."""
    answers = _ANSWER.findall(text[-LAST_CHARACTERS:])
    return answers[-1] if answers else last_boxed(text)


class AIMEEnv(BaseTextEnv):
    """One turn; reward 1 or -1. Metrics: `acc`."""

    runs = "thread"

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.gold = str(gold_answer(extras))
        self.is_right = False

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answer = read_answer(action)
        prediction = None if answer is None else normalized_answer(answer)
        self.is_right = prediction is not None and prediction == normalized_answer(self.gold)
        metadata = {"acc": self.is_right, "pred": prediction}
        reward = 1.0 if self.is_right else -1.0
        return {"observations": [], "reward": reward, "done": True, "metadata": metadata}

    def get_metrics(self) -> dict[str, Any]:
        return {"acc": float(self.is_right)}
