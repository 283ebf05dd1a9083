"""What the contenders of the GRPO step benchmark are given, and what they give back.

    parent -> task file (JSON) -> a contender's process -> one `Step` a line (JSON) in `Task.records`

Only the standard library, so that a contender with an environment of its own can import it.
"""

from __future__ import annotations

import json
import re
import string
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

GROUP = 8  # trajectories of one question


@dataclass(frozen=True)
class Row:
    """A training question, as the policy's prompt, and its right answers."""

    prompt: str
    answers: list[str]


@dataclass(frozen=True)
class GrpoTask:
    """One run. Lengths in tokens: of a prompt, of a turn, of an observation, of a whole context.

    It ends after `num_steps` steps, or with the first step that ends later than `max_seconds`.
    """

    model: str
    url: str  # of /retrieve
    folder: str  # with the world's parquet files
    rows: list[Row]  # in the order in which they are asked, `prompts_per_step` a step
    records: str  # file that the steps are written to
    final_model: str  # folder for the trained weights
    num_steps: int
    max_seconds: float
    seed: int
    prompts_per_step: int = 16
    lr: float = 8e-4
    temperature: float = 1.0
    topk: int = 2
    max_turns: int = 3
    max_start_length: int = 64
    max_response_length: int = 32
    max_obs_length: int = 250
    max_prompt_length: int = 768
    trl_micro_batch: int = 32  # trajectories of a forward and backward pass of TRL's

    @staticmethod
    def read(path: str) -> GrpoTask:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
        return GrpoTask(**{**fields, "rows": [Row(**row) for row in fields["rows"]]})


@dataclass(frozen=True)
class Step:
    """One step: seconds since the first one began, its right answers, and its sizes per trajectory."""

    cpu_s: float
    wall_s: float
    em: float
    sampled_tokens: float
    context_tokens: float


class Steps:
    """Writes down each step as it ends, and says when the run is over."""

    def __init__(self, task: GrpoTask) -> None:
        self.task, self.count = task, 0
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._path = Path(task.records)

    def start(self) -> None:
        """The first step begins."""
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def add(self, em: float, sampled_tokens: float, context_tokens: float) -> None:
        self.count += 1
        step = Step(
            time.process_time() - self._cpu,
            time.perf_counter() - self._wall,
            em,
            sampled_tokens,
            context_tokens,
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(step)) + "\n")

    @property
    def is_over(self) -> bool:
        return self.count >= self.task.num_steps or time.perf_counter() - self._wall >= self.task.max_seconds


def exact_match(answer: str | None, golden: list[str]) -> float:
    """1.0 if the answer is a golden one after SQuAD's normalisation (case, punctuation, articles, spaces)."""
    return float(answer is not None and any(_normalised(answer) == _normalised(gold) for gold in golden))


def last_answer(text: str) -> str | None:
    """What stands between the last <answer> tags."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def _normalised(text: str) -> str:
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def task_of_command_line() -> GrpoTask:
    return GrpoTask.read(sys.argv[1])
