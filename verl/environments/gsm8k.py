"""Arithmetic in GSM8K's form: the answer is a number after `####`.

    gsm8k             one turn: 1 or 0
    gsm8k_multi_turn  up to `max_turns` turns, over with the right answer: 1, or 0.2 / max_turns for each turn
                      that ends in a number which is not the right one

`env_config`: {"method": "strict" (default: the number after the first ####) | "flexible" (the last number)}.
The strict rule is SkyRL's and verl's, so that rewards can be compared.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal

from verl.environments.base import BaseTextEnv, BaseTextEnvStepOutput, gold_answer, row_max_turns

FORM_REWARD = 0.2  # of all turns together

_NUMBERS = {"strict": r"#### (-?[0-9.,]+)", "flexible": r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"}


def extract_number(text: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """The number that the text gives as its answer, without commas; None: it gives none."""
    numbers = re.findall(_NUMBERS[method], text)
    if not numbers:
        return None
    number = numbers[0] if method == "strict" else numbers[-1]
    return number.replace(",", "")


class GSM8kEnv(BaseTextEnv):
    """One turn; reward 1 for the right number, else 0."""

    runs = "inline"
    counts_turns = stateless = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.gold = str(gold_answer(extras))
        self.max_turns = row_max_turns(extras or {}) or type(self).max_turns
        self.method = (env_config or {}).get("method", "strict")
        if self.method not in _NUMBERS:
            raise ValueError(f"Found method={self.method!r} of gsm8k; expected 'strict' or 'flexible'.")

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(extract_number(action, self.method) == self.gold)
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class GSM8kMultiTurnEnv(GSM8kEnv):
    """Several turns: each asks for reasoning and a tentative number, the last one for the number alone."""

    max_turns = 5

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        number = extract_number(action, self.method)
        right = number == self.gold
        left = self.max_turns - self.turns
        reward = 0.0
        if right:
            reward = 1.0
        elif number is not None:
            reward = FORM_REWARD / self.max_turns
        if right or left <= 0:
            return {"observations": [], "reward": reward, "done": True, "metadata": {}}
        content = "Reason step by step, and end with a tentative number in the exact form '#### NUMBER'."
        if left == 1:
            content = "This is the last turn. Give only the final number, in the exact form '#### NUMBER'."
        observations = [{"role": "user", "content": content}]
        return {"observations": observations, "reward": reward, "done": False, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return {"steps": self.turns}

    @staticmethod
    def aggregate_metrics(metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {"avg_steps": sum(row["steps"] for row in metrics) / len(metrics)} if metrics else {}
