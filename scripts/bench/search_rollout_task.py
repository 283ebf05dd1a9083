"""What the contenders of the search rollout benchmark are given, and what they give back.

    parent -> task file (JSON) -> a contender's process -> Measured (JSON, last line of its output)

Only the standard library, so that a contender with an environment of its own can import it. A contender runs
the warm-up prompts first; what is measured is the CPU time of its process, all threads, over the real ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

INFORMATION = "\n\n<information>{}</information>\n\n"


@dataclass(frozen=True)
class Task:
    """One run. Lengths in tokens: of a prompt, of a turn, of an observation, of a whole context."""

    model: str
    url: str  # of /retrieve
    warm_up: list[str]
    prompts: list[str]
    seed: int
    temperature: float = 1.0
    topk: int = 2
    max_turns: int = 3
    max_start_length: int = 64
    max_response_length: int = 32
    max_obs_length: int = 250
    max_prompt_length: int = 768

    @staticmethod
    def read(path: str) -> Task:
        return Task(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Counts:
    """Over all trajectories of a run: searches with documents, sampled tokens that are kept in the context,
    all sampled tokens, answers.
    """

    searches: int
    kept_tokens: int
    sampled_tokens: int
    answers: int


@dataclass(frozen=True)
class Measured:
    """One run of one contender."""

    trajectories: int
    cpu_s: float
    wall_s: float
    counts: Counts

    @staticmethod
    def parse(text: str) -> Measured:
        fields = json.loads(text)
        return Measured(**{**fields, "counts": Counts(**fields["counts"])})


def measure(task: Task, run: Callable[[list[str], int], Counts]) -> None:
    """`run(prompts, seed)` twice: the warm-up, then the prompts with the clock. Prints the result."""
    run(task.warm_up, task.seed + 1)
    cpu, wall = time.process_time(), time.perf_counter()
    counts = run(task.prompts, task.seed)
    result = Measured(len(task.prompts), time.process_time() - cpu, time.perf_counter() - wall, counts)
    print(json.dumps(asdict(result)))


def format_documents(documents: list[dict]) -> str:
    """Search-R1's text of the documents of one query."""
    lines = []
    for number, document in enumerate(documents, start=1):
        title, _, text = document["document"]["contents"].partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    return "".join(lines).strip()


def task_of_command_line() -> Task:
    return Task.read(sys.argv[1])
