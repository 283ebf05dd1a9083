"""Competition mathematics: one turn that ends with `Answer: ...`, or with \\boxed{...} without such a line.

The reward is 1 or -1. One answer is read: the last `Answer:` of the last 300 characters, or else the last
box. It is right if it equals the row's answer as text, normalised by Minerva's rule as in SkyRL and verl. An
answer that differs by that rule may still be equal for math-verify, such as 1/2 and 0.5. math-verify runs in
a process that can be killed.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from verl.environments.environment import BaseTextEnv, BaseTextEnvStepOutput, gold_text
from verl.verifiers.math import last_boxed, minerva_form
from verl.verifiers.workers import CheckFailed, shared_workers

LAST_CHARACTERS = 300
CPU_SECONDS = 5.0  # the processor time that math-verify may take for one answer

_ANSWER = re.compile(r"Answer\s*:\s*([^\n<]+)", re.IGNORECASE)


class AIMEEnv(BaseTextEnv):
    """One problem of competition mathematics.

    `step` raises CouldNotVerify if someone else has ended math-verify's process. The metric is `acc`.
    """

    counts_turns = stateless = True

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__()
        self.gold = minerva_form(gold_text(extras)).strip()
        self.is_right = False
        self.workers = shared_workers("verl.verifiers.math:same_by_math_verify", CPU_SECONDS, ("0.50", "1/2"))

    def step(self, action: str) -> BaseTextEnvStepOutput:
        answer = (_ANSWER.findall(action[-LAST_CHARACTERS:]) or [last_boxed(action)])[-1]
        prediction = None if answer is None else minerva_form(answer).strip()
        if prediction is not None:
            with suppress(CheckFailed):  # an answer that is too much for math-verify is not equal
                self.is_right = prediction == self.gold or bool(
                    self.workers.call_in_any(prediction, self.gold)
                )
        metadata = {"acc": self.is_right, "pred": prediction}
        reward = 1.0 if self.is_right else -1.0
        return {"observations": [], "reward": reward, "done": True, "metadata": metadata}

    def get_metrics(self) -> dict[str, Any]:
        return {"acc": float(self.is_right)}
