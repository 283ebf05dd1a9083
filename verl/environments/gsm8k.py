"""Arithmetic in GSM8K's form: the answer is a number after `####`.

    gsm8k             one turn, with a reward of 1 or 0
    gsm8k_multi_turn  up to `max_turns` turns, until the answer is right, with a reward of 1 for the right
                      answer and of 0.2 / max_turns for each turn that gives another number

`env_config`: {"method": "strict" (default: the number after the first ####) | "flexible" (the last number)}.
The strict rule is SkyRL's and verl's, so that rewards can be compared.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, gold_text
from verl.utils.rows import row_max_turns

FORM_REWARD = 0.2  # the most that all turns together earn for numbers that are not right

_NUMBERS = {"strict": r"#### (-?[0-9.,]+)", "flexible": r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"}


def extract_number(text: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the number that the text gives as its answer, without commas, or None if it gives none."""
    numbers = re.findall(_NUMBERS[method], text)
    if not numbers:
        return None
    number = numbers[0] if method == "strict" else numbers[-1]
    return number.replace(",", "")


class GSM8kEnv(BaseTextEnv):
    """One turn with a reward of 1 for the right number and 0 otherwise."""

    runs = "inline"
    counts_turns = stateless = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.gold = gold_text(extras)
        self.max_turns = row_max_turns(extras or {}) or type(self).max_turns
        self.method = (env_config or {}).get("method", "strict")
        if self.method not in _NUMBERS:
            raise ValueError(f"Found method={self.method!r} of gsm8k; expected 'strict' or 'flexible'.")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(extract_number(action, self.method) == self.gold)
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class GSM8kMultiTurnEnv(GSM8kEnv):
    """Several turns, until the number is right.

    Each turn asks for reasoning and a tentative number. The last turn asks for the number alone.
    """

    max_turns = 5

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        number = extract_number(action, self.method)
        is_right = number == self.gold
        num_left = self.max_turns - self.turns
        reward = 0.0
        if is_right:
            reward = 1.0
        elif number is not None:
            reward = FORM_REWARD / self.max_turns
        if is_right or num_left <= 0:
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        content = "Reason step by step, and end with a tentative number in the exact form '#### NUMBER'."
        if num_left == 1:
            content = "This is the last turn. Give only the final number, in the exact form '#### NUMBER'."
        observations = [{"role": "user", "content": content}]
        return {"observations": observations, "reward": reward, "done": False, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {"avg_steps": sum(row["steps"] for row in metrics) / len(metrics)} if metrics else {}
