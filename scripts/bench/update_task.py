"""What the contenders of the update benchmark are given, and what they give back.

    parent -> folder with task.json and batch.pt -> a contender's process -> Measured (JSON, last line)

Only torch besides the standard library, so that a contender with an environment of its own can import it. A
contender makes optimizer steps on the same trajectories; loss and gradient of the first are kept for
comparison. Memory is the growth of the largest resident set over the steps.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class UpdateTask:
    """One run. model: a Hugging Face folder; rows of batch.pt: see `draw_trajectories`."""

    model: str
    micro_batch: int
    sorts_by_length: bool  # micro-batches of rows of like length, each padded to its own longest
    num_steps: int
    keeps_gradient: bool = True  # of the first step, in gradient.pt
    learning_rate: float = 1e-5
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Measured:
    """CPU seconds of each step; resident MB before the steps, and at most during them."""

    cpu_s: list[float]
    wall_s: list[float]
    before_mb: float
    peak_mb: float
    loss: float
    processed_tokens: int  # with padding, in one step


class Contender(Protocol):
    """A model with its optimizer. One step is `accumulate`, then `apply`."""

    model: nn.Module
    processed_tokens: int

    def accumulate(self) -> float:
        """The loss; its gradient is left in the parameters."""
        ...

    def apply(self) -> None:
        """Clips the gradient, and one step of AdamW."""
        ...


def draw_trajectories(
    num_groups: int,
    group: int,
    shortest: int,
    longest: int,
    observed: float,
    vocabulary: int,
    seed: int,
    alike: float = 0.0,
) -> dict[str, Tensor]:
    """Random trajectories: prompt, turn, observation, turn, observation, turn.

    Returns input_ids, attention_mask, response_mask (all [N, W], right-padded; response_mask 1 where the
    policy sampled), prompt_lengths [N], advantages [N]. Lengths are uniform, one from each of N equal parts
    of the range, so that a small step has the mean and the padding of a large one; a share `observed` of each
    trajectory's tokens is retrieved text; its prompt, which its group shares, is an eighth of the shortest
    of the group, at least 4. A group has that share `alike` of its shortest trajectory in common besides.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num = num_groups * group
    part = (longest - shortest) / num
    lengths = [round(shortest + part * (row + rng.random())) for row in range(num)]
    rng.shuffle(lengths)
    width = max(lengths)
    ids = torch.randint(3, vocabulary, (num, width), generator=generator)
    prompt_lengths = torch.zeros(num, dtype=torch.int64)
    sampled = torch.zeros(num, width, dtype=torch.int64)
    attention = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    for start in range(0, num, group):
        prompt = max(4, min(lengths[start : start + group]) // 8)
        common = max(prompt, round(alike * min(lengths[start : start + group])))
        ids[start : start + group, :common] = ids[start, :common]
        prompt_lengths[start : start + group] = prompt
        for row in range(start, start + group):
            documents = round(lengths[row] * observed) // 2
            turn = (lengths[row] - prompt - 2 * documents) // 3
            sampled[row, prompt : lengths[row]] = 1
            for first in (prompt + turn, prompt + 2 * turn + documents):
                sampled[row, first : first + documents] = 0
    advantages = torch.randn(num, generator=generator)
    return {
        "input_ids": ids * attention,
        "attention_mask": attention,
        "response_mask": sampled,
        "prompt_lengths": prompt_lengths,
        "advantages": advantages,
    }


def micro_batch_rows(task: UpdateTask, batch: dict[str, Tensor]) -> list[list[int]]:
    """Rows of each micro-batch of a padded contender."""
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = list(range(len(lengths)))
    if task.sorts_by_length:
        rows.sort(key=lambda row: -lengths[row])
    return [rows[i : i + task.micro_batch] for i in range(0, len(rows), task.micro_batch)]


def adamw(task: UpdateTask, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=task.learning_rate, weight_decay=0.01, fused=True)


def _memory_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {field}; the benchmark needs Linux.")


def reset_peak() -> float:
    """Resident MB now; VmHWM counts from here on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return _memory_mb("VmRSS")


def run_contender(make: Any) -> None:
    """main() of a contender: `make(task, batch)` returns a Contender."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    task = UpdateTask(**json.loads((folder / "task.json").read_text(encoding="utf-8")))
    batch = torch.load(folder / "batch.pt", weights_only=True)
    contender = make(task, batch)
    before = reset_peak()
    cpu, wall, losses = [], [], []
    for number in range(task.num_steps):
        started, started_wall = time.process_time(), time.perf_counter()
        losses.append(contender.accumulate())
        cpu.append(time.process_time() - started)
        wall.append(time.perf_counter() - started_wall)
        if number == 0 and task.keeps_gradient:
            torch.save({n: p.grad for n, p in contender.model.named_parameters()}, folder / "gradient.pt")
        started, started_wall = time.process_time(), time.perf_counter()
        contender.apply()
        cpu[-1] += time.process_time() - started
        wall[-1] += time.perf_counter() - started_wall
    measured = Measured(cpu, wall, before, _memory_mb("VmHWM"), losses[0], contender.processed_tokens)
    print(json.dumps(asdict(measured)))
