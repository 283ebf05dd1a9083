"""Asking a benchmark: rollouts through the agent loop of training, scored and written as they end.

    results.jsonl   a line for each rollout; what is there is not asked again, unless nobody could verify it
    summary.json    the figures of all lines (`figures.py`)
    page.html       the rollouts, for the eye

A rollout's seed depends on the run's seed, its example and its number alone, so a run that was killed ends
with the same rollouts as an undisturbed one.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.agent.agent import EnvironmentAgent
from verl.agent.service import TrajectoryService
from verl.agent.trajectory import Trajectory
from verl.evaluation.api_engine import ApiEngine
from verl.evaluation.figures import LOST, rollout_seed, summarize
from verl.evaluation.similarity import retrieval_effect, similarity
from verl.protocol import object_array
from verl.trainer.ppo.collection import prompt_batch, with_seeds
from verl.trainer.ppo.scoring import RewardManager, score_answers
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.records.files import read_lines, to_json, write_lines, write_text_atomically
from verl.utils.records.trajectories import TokenTexts, spread_rows, trajectory_records, write_page

PAGE_RECORDS = 5000
PAID = ("prompt_tokens", "completion_tokens", "cost")
SAY_SECONDS = 10.0


@dataclass(frozen=True)
class Asking:
    """How a benchmark is asked. rollouts: of each example. temperature: 0 is greedy. concurrency: rollouts
    under way at once. solved_at: the reward from which a rollout counts as solved. prices: US dollars per
    million tokens read and written, for servers that tell their usage. category: name in extra_info by which
    figures are told, None: the data source. similarity: whether answers are compared with their references.
    """

    rollouts: int = 1
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 128
    solved_at: float = 1.0
    prices: tuple[float, float] = (0.0, 0.0)
    category: str | None = None
    similarity: bool = False


Place = tuple[int, int]  # example, number of its rollout


@dataclass(frozen=True)
class Ended:
    """A rollout that is over. seconds: from its first request to its end."""

    place: Place
    row: Mapping[str, Any]
    trajectory: Trajectory
    seconds: float


def rollouts(
    agent: EnvironmentAgent, dataset: RLHFDataset, places: Sequence[Place], asking: Asking
) -> Iterator[list[Ended]]:
    """Runs all places; gives those that ended, as soon as they have."""
    service = TrajectoryService(agent)
    waiting = deque(places)
    numbers = count()
    live: dict[int, tuple[Place, Mapping[str, Any], float]] = {}
    sampling = {"do_sample": asking.temperature > 0, "temperature": asking.temperature, "top_p": 1.0}
    sampling |= {"top_k": -1, "min_p": 0.0, "validate": True}
    try:
        while waiting or live:
            fresh = [waiting.popleft() for _ in range(min(len(waiting), asking.concurrency - len(live)))]
            if fresh:
                rows = [dataset[example] for example, _ in fresh]
                seeds = torch.tensor([rollout_seed(asking.seed, place) for place in fresh])
                batch = with_seeds(prompt_batch(rows, "evaluation"), seeds, **sampling)
                begun = agent.trajectories(batch)
                params = agent.sampling_params(batch.meta_info)
                for place, row, trajectory in zip(fresh, rows, begun, strict=True):
                    trajectory.row = next(numbers)
                    trajectory.params = params
                    live[trajectory.row] = place, row, time.perf_counter()
                service.add(begun)
            service.advance()
            if ended := service.take_finished():
                now = time.perf_counter()
                over = [(live.pop(each.row), each) for each in ended]
                yield [Ended(place, row, each, now - began) for (place, row, began), each in over]
    finally:
        service.end()


class Benchmark:
    """One model's results of one benchmark, in a folder. settings: all that a result depends on; a folder
    keeps to those that it began with.
    """

    def __init__(
        self,
        name: str,
        dataset: RLHFDataset,
        folder: Path,
        settings: Mapping[str, Any],
        encode: Callable[[list[str]], np.ndarray] | None = None,
    ) -> None:
        """encode: texts -> vectors of length 1, [N, D], for `answer_similarity`."""
        self.encode = encode
        self.name = name
        self.dataset = dataset
        self.folder = folder
        self.settings = settings
        self.results = folder / "results.jsonl"

    def check(self, resume: bool) -> None:
        """ValueError: there are results already, and these are not to be gone on with, or not with these
        settings.
        """
        if not self.results.exists():
            return
        if not resume:
            raise ValueError(
                f"Found results at {self.folder}; expected none. Give --resume to go on with them, or "
                "another --out."
            )
        (before,) = read_lines(self.folder / "settings.json") or [{}]
        now = json.loads(to_json(self.settings))  # as a file gives them back
        other = [name for name in (before | now) if before.get(name) != now.get(name)]
        if other:
            found = ", ".join(f"{name}={before.get(name)!r}, now {now.get(name)!r}" for name in other)
            raise ValueError(
                f"{self.folder} was begun with other settings: {found}. Use those, or give another --out."
            )

    def run(self, agent: EnvironmentAgent, reward_fn: RewardManager, asking: Asking) -> dict[str, Any]:
        """Asks what is not known yet, writes the three files, and returns the summary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.folder / "settings.json", to_json(self.settings) + "\n")
        lines = read_lines(self.results)
        known = [line for line in lines if line["reward"] is not None]
        self._spend([line for line in lines if line["reward"] is None])
        write_lines(self.results, known)
        done = {(line["example_id"], line["rollout_idx"]) for line in known}
        every = [(example, i) for example in range(len(self.dataset)) for i in range(asking.rollouts)]
        places = [place for place in every if place not in done]
        texts = TokenTexts(agent.tokenizer)
        jobs = list[Future[None]]()
        said = len(done)
        began = time.monotonic()
        with ThreadPoolExecutor(1, "scoring") as scoring, self.results.open("a", encoding="utf-8") as file:

            def write(ended: list[Ended]) -> None:
                for line in self._lines(ended, agent, reward_fn, texts, asking):
                    file.write(to_json(line) + "\n")
                file.flush()

            try:
                for ended in rollouts(agent, self.dataset, places, asking):
                    jobs.append(scoring.submit(write, ended))
                    while jobs and jobs[0].done():
                        jobs.pop(0).result()
                    said += len(ended)
                    if time.monotonic() - began > SAY_SECONDS:
                        began = time.monotonic()
                        print(f"{self.name}: {said} of {len(every)} rollouts", file=sys.stderr, flush=True)
            finally:
                for job in jobs:
                    job.result()
                if isinstance(agent.engine, ApiEngine):  # of rollouts that were broken off
                    left = list(agent.engine.usage.values())
                    self._spend([_priced(usage, asking) for usage in left])
                    agent.engine.usage.clear()
        return self.report(asking.solved_at)

    def _lines(
        self,
        ended: list[Ended],
        agent: EnvironmentAgent,
        reward_fn: RewardManager,
        texts: TokenTexts,
        asking: Asking,
    ) -> Iterator[dict[str, Any]]:
        rows = prompt_batch([dict(each.row) for each in ended], "evaluation").non_tensor_batch
        rows["uid"] = object_array([f"{each.place[0]}" for each in ended])
        batch = agent.batch([each.trajectory for each in ended], rows, {})
        began = time.perf_counter()
        answers = score_answers(batch, reward_fn)
        scoring_ms = 1000 * (time.perf_counter() - began) / len(ended)
        records = trajectory_records(batch, texts, 0, "test", len(ended))
        for i, (each, record) in enumerate(zip(ended, records, strict=True)):
            trajectory = record["trajectory"]
            reason = trajectory["finish_reason"]
            score = answers["score"][i]
            extra = record["extra_info"]
            engine = agent.engine if isinstance(agent.engine, ApiEngine) else None
            refused = None if engine is None else engine.refused.pop(each.trajectory.seed, None)
            reward = None if score is None or reason in LOST or refused else float(score)
            line = {
                "example_id": each.place[0],
                "rollout_idx": each.place[1],
                "task": str(extra.get(asking.category)) if asking.category else record["data_source"],
                "prompt": trajectory["prompt_text"],
                "completion": "".join(record["tokens"]),
                "reward": reward,
                "is_truncated": reason == "length",
                "completion_len": sum(record["token_mask"]),
                "searches": trajectory["num_searches"],
                "finish_reason": reason,
                "generation_ms": 1000 * each.seconds,
                "scoring_ms": scoring_ms,
                "total_ms": 1000 * each.seconds + scoring_ms,
                "metrics": each.trajectory.env_metrics,
                "info": extra,
                "retrieval": retrieval_effect(trajectory, extra.get("gold_titles"), record["answer"]),
            }
            if asking.similarity:
                line["similarity"] = similarity(record["answer"] or "", record["gold"])
                if self.encode is not None:
                    vectors = self.encode([record["answer"] or "", *record["gold"]])
                    line["similarity"]["answer_similarity"] = float((vectors[1:] @ vectors[0]).max())
            if engine is not None:
                spent = _priced(engine.usage.pop(each.trajectory.seed, Counter()), asking)
                length = spent["completion_tokens"] or line["completion_len"]
                line |= {**spent, "completion_len": length, "refused": refused}
            record |= {"score": reward}
            yield line | {name: value for name, value in record.items() if name not in ("step", "extra_info")}

    def _spend(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Notes what was paid for rollouts that have no line."""
        if sums := {name: sum(line[name] for line in lines) for name in PAID if lines and name in lines[0]}:
            before = self._spent()
            total = {name: value + before.get(name, 0) for name, value in sums.items()}
            write_text_atomically(self.folder / "spent.json", to_json(total) + "\n")

    def _spent(self) -> dict[str, float]:
        (spent,) = read_lines(self.folder / "spent.json") or [{}]
        return spent

    def lines(self) -> list[dict[str, Any]]:
        """Of all rollouts that are over, by example."""
        return sorted(read_lines(self.results), key=lambda line: (line["example_id"], line["rollout_idx"]))

    def report(self, solved_at: float) -> dict[str, Any]:
        """Writes summary.json and page.html of the lines that are there."""
        lines = self.lines()
        figures = summarize(lines, solved_at)
        figures |= {name: figures.get(name, 0) + value for name, value in self._spent().items()}
        summary = {"benchmark": self.name, **figures, "settings": self.settings}
        write_text_atomically(self.folder / "summary.json", to_json(summary, indent=2) + "\n")
        rows = [[name, shown(value)] for name, value in figures.items() if not isinstance(value, dict)]
        shown_lines = [lines[i] for i in spread_rows(len(lines), PAGE_RECORDS)]
        records = [line | {"step": line["rollout_idx"], "extra_info": line["info"]} for line in shown_lines]
        tables = [{"title": self.name, "columns": ["", ""], "rows": rows}]
        write_page(records, self.folder / "page.html", self.name, {"tables": tables, "image": None})
        return summary


def _priced(usage: Mapping[str, int], asking: Asking) -> dict[str, float]:
    """A rollout's tokens, and what they cost."""
    read, written = (usage.get(name, 0) for name in PAID[:2])
    cost = (read * asking.prices[0] + written * asking.prices[1]) / 1e6
    return {"prompt_tokens": read, "completion_tokens": written, "cost": cost}


def shown(value: Any) -> str:
    """A figure for people: .412 [.381, .446] of [mean, low, high]."""
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
