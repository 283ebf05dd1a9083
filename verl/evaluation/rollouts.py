"""Asking a benchmark: rollouts through the agent loop of training, scored and written as they end.

    results.jsonl   a line for each rollout, which is not asked again unless nobody could verify it
    summary.json    the figures of all lines (`verl/records/figures.py`)
    page.html       the rollouts, for the eye

A rollout's seed depends on the run's seed, its example and its number alone, so a run that was killed ends
with the same rollouts as an undisturbed one.
"""

from __future__ import annotations

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
from verl.data.rl_dataset import RLHFDataset
from verl.evaluation.api_engine import ApiEngine
from verl.evaluation.results import RESULTS_FILE, SETTINGS_FILE
from verl.evaluation.similarity import retrieval_effect, similarity
from verl.protocol import object_array
from verl.records.figures import UNKNOWN_REWARD_REASONS, rollout_seed, summarize
from verl.records.trajectories import TokenTexts, spread_rows, trajectory_records, write_page
from verl.trainer.ppo.collection import prompt_batch, with_seeds
from verl.trainer.ppo.scoring import RewardManager, score_answers
from verl.utils.json_files import read_lines, to_json, write_lines, write_text_atomically

PAGE_RECORDS = 5000
PAID = ("prompt_tokens", "completion_tokens", "cost")
SAY_SECONDS = 10.0


@dataclass(frozen=True)
class EvaluationSettings:
    """The settings with which a benchmark is asked.

    Attributes:
        rollouts: Number of rollouts of each example.
        temperature: The sampling temperature. 0 is greedy.
        seed: The seed of the run.
        concurrency: Maximum number of rollouts under way at once.
        solved_at: The reward from which a rollout counts as solved.
        prices: US dollars per million tokens read and written, for servers that tell their usage.
        category: The name in extra_info by which figures are grouped. None means the data source.
        similarity: Whether answers are compared with their references.
    """

    rollouts: int = 1
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 128
    solved_at: float = 1.0
    prices: tuple[float, float] = (0.0, 0.0)
    category: str | None = None
    similarity: bool = False


RolloutId = tuple[int, int]  # (example, number of its rollout)


@dataclass(frozen=True)
class FinishedRollout:
    """A rollout that is over.

    Attributes:
        rollout_id: The example and the number of its rollout.
        row: The row of the example.
        trajectory: The trajectory.
        seconds: Number of seconds from its first request to its end.
    """

    rollout_id: RolloutId
    row: Mapping[str, Any]
    trajectory: Trajectory
    seconds: float


def rollouts(
    agent: EnvironmentAgent,
    dataset: RLHFDataset,
    rollout_ids: Sequence[RolloutId],
    evaluation_settings: EvaluationSettings,
) -> Iterator[list[FinishedRollout]]:
    """Run all rollouts, and yield those that ended as soon as they have."""
    service = TrajectoryService(agent)
    waiting = deque(rollout_ids)
    numbers = count()
    live: dict[int, tuple[RolloutId, Mapping[str, Any], float]] = {}
    sampling = {
        "do_sample": evaluation_settings.temperature > 0,
        "temperature": evaluation_settings.temperature,
        "top_p": 1.0,
    }
    sampling |= {"top_k": -1, "min_p": 0.0, "validate": True}
    try:
        while waiting or live:
            new_rollout_ids = [
                waiting.popleft()
                for _ in range(min(len(waiting), evaluation_settings.concurrency - len(live)))
            ]
            if new_rollout_ids:
                rows = [dataset[example] for example, _ in new_rollout_ids]
                seeds = torch.tensor(
                    [rollout_seed(evaluation_settings.seed, rollout_id) for rollout_id in new_rollout_ids]
                )
                batch = with_seeds(prompt_batch(rows, "evaluation"), seeds, **sampling)
                row_numbers = [next(numbers) for _ in rows]
                episodes = agent.episodes(batch, row_numbers, agent.sampling_params(batch.meta_info))
                for rollout_id, row, row_number in zip(new_rollout_ids, rows, row_numbers, strict=True):
                    live[row_number] = rollout_id, row, time.perf_counter()
                service.add(episodes)
            service.advance()
            if ended := service.take_finished():
                now = time.perf_counter()
                finished = [(live.pop(trajectory.row), trajectory) for trajectory in ended]
                yield [
                    FinishedRollout(rollout_id, row, trajectory, now - began)
                    for (rollout_id, row, began), trajectory in finished
                ]
    finally:
        service.end()


class Benchmark:
    """One model's results of one benchmark, in a folder."""

    def __init__(
        self,
        name: str,
        dataset: RLHFDataset,
        folder: Path,
        settings: Mapping[str, Any],
        encode: Callable[[list[str]], np.ndarray] | None = None,
    ) -> None:
        """Create the benchmark. Nothing is written yet.

        Args:
            name: The name of the benchmark.
            dataset: Its rows.
            folder: The folder of its files.
            settings: Everything that a result depends on. A folder keeps the settings that it began with.
            encode: Function of texts that returns vectors of length 1, [N, D], for `answer_similarity`.
        """
        self.encode = encode
        self.name = name
        self.dataset = dataset
        self.folder = folder
        self.settings = settings
        self.results = folder / RESULTS_FILE

    def run(
        self, agent: EnvironmentAgent, reward_fn: RewardManager, evaluation_settings: EvaluationSettings
    ) -> dict[str, Any]:
        """Ask what has no result yet, write the three files, and return the summary."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text_atomically(self.folder / SETTINGS_FILE, to_json(self.settings) + "\n")
        lines = read_lines(self.results)
        verified = [line for line in lines if line["reward"] is not None]
        self._add_spent([line for line in lines if line["reward"] is None])
        write_lines(self.results, verified)
        done = {(line["example_id"], line["rollout_idx"]) for line in verified}
        all_rollout_ids = [
            (example, i) for example in range(len(self.dataset)) for i in range(evaluation_settings.rollouts)
        ]
        rollout_ids = [rollout_id for rollout_id in all_rollout_ids if rollout_id not in done]
        texts = TokenTexts(agent.tokenizer)
        jobs = list[Future[None]]()
        num_done = len(done)
        began = time.monotonic()
        with ThreadPoolExecutor(1, "scoring") as scoring, self.results.open("a", encoding="utf-8") as file:

            def write(ended: list[FinishedRollout]) -> None:
                for line in self._lines(ended, agent, reward_fn, texts, evaluation_settings):
                    file.write(to_json(line) + "\n")
                file.flush()

            try:
                for ended in rollouts(agent, self.dataset, rollout_ids, evaluation_settings):
                    jobs.append(scoring.submit(write, ended))
                    while jobs and jobs[0].done():
                        jobs.pop(0).result()
                    num_done += len(ended)
                    if time.monotonic() - began > SAY_SECONDS:
                        began = time.monotonic()
                        print(
                            f"{self.name}: {num_done} of {len(all_rollout_ids)} rollouts",
                            file=sys.stderr,
                            flush=True,
                        )
            finally:
                for job in jobs:
                    job.result()
                if isinstance(agent.engine, ApiEngine):  # rollouts that were broken off were paid for, too
                    usages = list(agent.engine.usage.values())
                    self._add_spent([_priced(usage, evaluation_settings) for usage in usages])
                    agent.engine.usage.clear()
        return self.report(evaluation_settings.solved_at)

    def _lines(
        self,
        ended: list[FinishedRollout],
        agent: EnvironmentAgent,
        reward_fn: RewardManager,
        texts: TokenTexts,
        evaluation_settings: EvaluationSettings,
    ) -> Iterator[dict[str, Any]]:
        rows = prompt_batch([dict(rollout.row) for rollout in ended], "evaluation").non_tensor_batch
        rows["uid"] = object_array([f"{rollout.rollout_id[0]}" for rollout in ended])
        batch = agent.batch([rollout.trajectory for rollout in ended], rows, {})
        began = time.perf_counter()
        answers = score_answers(batch, reward_fn)
        scoring_ms = 1000 * (time.perf_counter() - began) / len(ended)
        records = trajectory_records(batch, texts, 0, "test", len(ended))
        for i, (rollout, record) in enumerate(zip(ended, records, strict=True)):
            trajectory = record["trajectory"]
            reason = trajectory["finish_reason"]
            score = answers["score"][i]
            extra = record["extra_info"]
            engine = agent.engine if isinstance(agent.engine, ApiEngine) else None
            refused = None if engine is None else engine.refused.pop(rollout.trajectory.seed, None)
            reward = None if score is None or reason in UNKNOWN_REWARD_REASONS or refused else float(score)
            line = {
                "example_id": rollout.rollout_id[0],
                "rollout_idx": rollout.rollout_id[1],
                "task": str(extra.get(evaluation_settings.category))
                if evaluation_settings.category
                else record["data_source"],
                "prompt": trajectory["prompt_text"],
                "completion": "".join(record["tokens"]),
                "reward": reward,
                "is_truncated": reason == "length",
                "completion_len": sum(record["token_mask"]),
                "searches": trajectory["num_searches"],
                "finish_reason": reason,
                "generation_ms": 1000 * rollout.seconds,
                "scoring_ms": scoring_ms,
                "total_ms": 1000 * rollout.seconds + scoring_ms,
                "metrics": rollout.trajectory.env_metrics,
                "info": extra,
                "retrieval": retrieval_effect(trajectory, extra.get("gold_titles"), record["answer"]),
            }
            if evaluation_settings.similarity:
                line["similarity"] = similarity(record["answer"] or "", record["gold"])
                if self.encode is not None:
                    vectors = self.encode([record["answer"] or "", *record["gold"]])
                    line["similarity"]["answer_similarity"] = float((vectors[1:] @ vectors[0]).max())
            if engine is not None:
                spent = _priced(engine.usage.pop(rollout.trajectory.seed, Counter()), evaluation_settings)
                length = spent["completion_tokens"] or line["completion_len"]
                line |= {**spent, "completion_len": length, "refused": refused}
            record |= {"score": reward}
            yield line | {name: value for name, value in record.items() if name not in ("step", "extra_info")}

    def _add_spent(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Note what was paid for rollouts that have no line."""
        if sums := {name: sum(line[name] for line in lines) for name in PAID if lines and name in lines[0]}:
            spent_before = self._spent()
            total = {name: value + spent_before.get(name, 0) for name, value in sums.items()}
            write_text_atomically(self.folder / "spent.json", to_json(total) + "\n")

    def _spent(self) -> dict[str, float]:
        (spent,) = read_lines(self.folder / "spent.json") or [{}]
        return spent

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all rollouts that are over, by example."""
        return sorted(read_lines(self.results), key=lambda line: (line["example_id"], line["rollout_idx"]))

    def report(self, solved_at: float) -> dict[str, Any]:
        """Write summary.json and page.html from the existing lines, and return the summary."""
        lines = self.lines()
        figures = summarize(lines, solved_at)
        figures |= {name: figures.get(name, 0) + value for name, value in self._spent().items()}
        summary = {"benchmark": self.name, **figures, "settings": self.settings}
        write_text_atomically(self.folder / "summary.json", to_json(summary, indent=2) + "\n")
        rows = [
            [name, format_figure(value)] for name, value in figures.items() if not isinstance(value, dict)
        ]
        shown_lines = [lines[i] for i in spread_rows(len(lines), PAGE_RECORDS)]
        records = [line | {"step": line["rollout_idx"], "extra_info": line["info"]} for line in shown_lines]
        tables = [{"title": self.name, "columns": ["", ""], "rows": rows}]
        write_page(records, self.folder / "page.html", self.name, {"tables": tables, "image": None})
        return summary


def _priced(usage: Mapping[str, int], evaluation_settings: EvaluationSettings) -> dict[str, float]:
    """Return the numbers of tokens that a rollout read and wrote, and what they cost."""
    num_read, num_written = (usage.get(name, 0) for name in PAID[:2])
    cost = (num_read * evaluation_settings.prices[0] + num_written * evaluation_settings.prices[1]) / 1e6
    return {"prompt_tokens": num_read, "completion_tokens": num_written, "cost": cost}


def format_figure(value: Any) -> str:
    """Return a figure in a form for people, such as .412 [.381, .446] for [mean, low, high]."""
    if isinstance(value, list):
        mean, low, high = value
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
