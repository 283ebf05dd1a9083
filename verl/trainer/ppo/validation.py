"""The measurement of a policy, with the generation, search and reward code of training, over every row.

The trainer calls `validate`, also with `trainer.val_only=true`; the pretraining script of the tiny base model
prints its figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl.checkpoints.run_state import RunState
from verl.data.rl_dataset import RLHFDataset
from verl.data.row_check import SCORED_BY_ANSWERS
from verl.protocol import DataProto
from verl.records.console import EXACT_MATCH, REWARD
from verl.records.figures import UNKNOWN_REWARD_REASONS
from verl.records.trajectories import find_question
from verl.trainer.ppo.collection import (
    VALIDATION_STREAM,
    prompt_batch,
    sampling_seeds,
    with_seeds,
    without_padding,
)
from verl.trainer.ppo.kinds import kind_figures
from verl.trainer.ppo.outcome import run_outcome
from verl.trainer.ppo.scoring import RewardManager, score_answers
from verl.utils.announcing import announce
from verl.utils.reward_score.qa_em import documents_hold_answer, extract_solution, golden_answers
from verl.verifiers.registry import verifier_metrics

SAMPLED = "sampled"
GREEDY = "greedy"


@dataclass
class ValidationReport:
    """The scores of one pass over the questions in each mode ("sampled": temperature 1; "greedy")."""

    # Mode -> a record of each question whose answer could be judged; see `question_records`.
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # Mode -> a record of each other question. Nobody knows what its answer is worth, so it is in no figure.
    left_out: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    # Mode -> figures of the verifiers.
    verdicts: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: DataProto | None = None  # the first mode's first batch, for the trajectory records
    extra: ValidationReport | None = None  # that of `data.extra_val_files`, if they were asked too

    def metrics(self, prefix: str = "val") -> dict[str, float]:
        """Return the metrics of the report.

        They are `val/test_score/<data_source or environment>` (first mode), and for each mode EM, F1 and
        searches, the first and the last also by hops where these are known. For each mode they also say how
        many questions were left out: `unverified`, and of these `search_failed`. A figure over no question is
        missing.
        """
        metrics: dict[str, float] = {}
        for column in ("data_source", "env_class"):
            for name, members in _group(next(iter(self.rows.values()), []), column).items():
                metrics[f"{prefix}/test_score/{name}"] = _mean(members, "score")
        for mode, rows in self.rows.items():
            figures = self._figures(mode)
            left_out = self.left_out.get(mode, [])
            failed = sum(row["finish_reason"] == "search_failed" for row in left_out)
            if rows:
                metrics |= {f"{prefix}/{mode}/{name}": figures[name] for name in ("em", "f1", "searches")}
            metrics[f"{prefix}/{mode}/search_failed"] = float(failed)
            metrics[f"{prefix}/{mode}/unverified"] = float(len(left_out))
            for name in ("em", "searches"):
                for hops, mean in figures[f"{name}_by_hops"].items():
                    metrics[f"{prefix}/{mode}/{name}/hops_{hops}"] = mean
            for name in ("documents_hold_answer", "first_query_right", "all_queries_right"):
                judged = [row for row in rows if row[name] is not None]
                if judged:
                    metrics[f"{prefix}/{mode}/{name}"] = _mean(judged, name)
            metrics |= {f"{prefix}/{mode}/{name}": x for name, x in self.verdicts.get(mode, {}).items()}
        return metrics | (self.extra.metrics(f"{prefix}_extra") if self.extra else {})

    def lines(self, questions: str = "val") -> list[dict[str, Any]]:
        """Return a record of each judged question in each mode, for `validation.jsonl`.

        See `question_records`.
        """
        lines = [
            {"questions": questions, "mode": mode, **row} for mode, rows in self.rows.items() for row in rows
        ]
        return lines + (self.extra.lines("extra") if self.extra else [])

    def summary(self) -> dict[str, Any]:
        """Return the figures for `summary.json`: mode -> name -> value.

        - em, f1 and searches, each also with the suffix _by_hops: over the judged questions, None if there is
          none.
        - num_questions: how many questions there are in all.
        - num_unverified: how many of them were left out.
        - kinds: see `kind_figures`.
        - measures: see `measures_of`.
        """
        result: dict[str, Any] = {mode: self._figures(mode) for mode in self.rows}
        return result | ({"extra": self.extra.summary()} if self.extra else {})

    def _figures(self, mode: str) -> dict[str, Any]:
        rows = self.rows[mode]
        num_unverified = len(self.left_out.get(mode, []))
        by_hops = {str(hops): members for hops, members in sorted(_group(rows, "hops").items())}
        means: dict[str, Any] = {}
        for name in ("em", "f1", "searches"):
            means[name] = _mean(rows, name) if rows else None
            means[f"{name}_by_hops"] = {hops: _mean(members, name) for hops, members in by_hops.items()}
        means |= {"num_questions": len(rows) + num_unverified, "num_unverified": num_unverified}
        return means | {"kinds": kind_figures(rows), "measures": measures_of(rows)}


def validate(
    generate: Callable[[DataProto], DataProto],
    reward_fn: RewardManager,
    dataset: RLHFDataset,
    modes: list[str],
    batch_size: int | None,
    seed: int,
) -> ValidationReport:
    """Ask every question of `dataset` once in each mode; the last batch may be smaller.

    A question whose search or environment failed, or whose answer nobody could verify, is left out of the
    figures and counted.

    Args:
        generate: prompts -> a trajectory for each row, with the prompts' columns.
        reward_fn: scores the trajectories.
        dataset: the questions.
        modes: some of "sampled" (temperature 1, no truncation of the distribution) and "greedy".
        batch_size: questions in flight at once; None for all.
        seed: seed of the sampled mode. Equal seeds give equal draws, so two reports of a run can be compared.
    """
    report = ValidationReport()
    size = batch_size or len(dataset)
    for mode in modes:
        rows: list[dict[str, Any]] = []
        verdicts: list[Any] = []
        with announce(f"{mode} validation of {len(dataset)} questions"):
            for start in range(0, len(dataset), size):
                items = [dataset[i] for i in range(start, min(start + size, len(dataset)))]
                prompts = prompt_batch(items, f"val-{start}")
                seeds = sampling_seeds(seed, VALIDATION_STREAM, start, len(prompts))
                batch = ask(generate, reward_fn, prompts, seeds, float(mode != GREEDY))
                rows += question_records(batch)
                verdicts += list(batch.non_tensor_batch["verdicts"])
                if mode == modes[0]:
                    report.samples = batch if report.samples is None else report.samples
        report.rows[mode] = [row for row in rows if row["finish_reason"] not in UNKNOWN_REWARD_REASONS]
        report.left_out[mode] = [row for row in rows if row["finish_reason"] in UNKNOWN_REWARD_REASONS]
        if any(verdicts):
            report.verdicts[mode] = verifier_metrics(verdicts)
    return report


def ask(
    generate: Callable[[DataProto], DataProto],
    reward_fn: RewardManager,
    prompts: DataProto,
    seeds: torch.Tensor,
    temperature: float,
) -> DataProto:
    """Return the scored trajectories of a batch.

    Temperature 0 is greedy; with any other, tokens are drawn from the whole distribution.
    """
    sampling = {"do_sample": temperature > 0, "temperature": temperature, "top_p": 1.0}
    batch = generate(with_seeds(prompts, seeds, **sampling, top_k=-1, min_p=0.0, validate=True))
    score_answers(batch, reward_fn)
    return without_padding(batch)


def question_records(batch: DataProto) -> list[dict[str, Any]]:
    """Return a record of each row of a scored batch: question, answer, figures, and how it ended."""
    totals = batch.tensors["outcome"].tolist()
    records = []
    for i, trajectory in enumerate(batch.non_tensor_batch["trajectory"]):
        extra = batch.non_tensor_batch["extra_info"][i] or {}
        is_verified = bool(batch.non_tensor_batch["verdicts"][i])
        is_scored = is_verified or trajectory.get("env_reward") is not None
        records.append(
            {
                "question": extra.get("question") or find_question(trajectory["prompt_text"]),
                "answer": extract_solution(trajectory["policy_text"]),
                "score": totals[i],
                "em": float(batch.non_tensor_batch["em"][i]),
                "f1": float(batch.non_tensor_batch["f1"][i]),
                "searches": trajectory["num_searches"],
                "hops": extra.get("hops"),  # None, as below, if the data does not say
                "data_source": batch.non_tensor_batch["data_source"][i],
                "env_class": trajectory.get("env_class", "").replace(":", ".") or None,
                # "score" if the score is a verifier's or an environment's.
                "judged_by": "score" if is_scored else "em",
                "finish_reason": trajectory["finish_reason"],
                "documents_hold_answer": None,
                "first_query_right": None,
                "all_queries_right": None,
            }
        )
        golden = batch.non_tensor_batch["reward_model"][i]["ground_truth"]
        if isinstance(golden, Mapping) and golden.get("target") is not None:
            documents = [document for turn in trajectory["turns"] for document in turn.get("documents") or []]
            holds_answer = float(documents_hold_answer(documents, golden_answers(golden)))
            records[-1]["documents_hold_answer"] = holds_answer
        # The title that each search should name, in the order of the hops.
        titles = extra.get("gold_titles")
        wanted_titles = [] if titles is None else [str(title).lower() for title in titles]
        if wanted_titles:
            turns = [turn for turn in trajectory["turns"] if turn["action"] == "search" and turn["query"]]
            queries = [turn["query"].lower() for turn in turns]
            first_is_right = bool(queries) and wanted_titles[0] in queries[0]
            all_are_right = all(any(title in query for query in queries) for title in wanted_titles)
            records[-1] |= {
                "first_query_right": float(first_is_right),
                "all_queries_right": float(all_are_right),
            }
    return records


def measures_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what questions are judged by, and how well they are answered.

    Args:
        rows: records as `question_records` makes them.

    Returns:
        Environment, or data source of searches and single turns -> {measure, value, count}. The measure is
        "exact match" where this is the score of all rows, and otherwise "reward", which an environment, a
        verifier or a user's function gives.
    """
    rows_of: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        is_named_by_source = row["env_class"] in (None, *SCORED_BY_ANSWERS)
        rows_of[row["data_source"] if is_named_by_source else row["env_class"]].append(row)
    measures: dict[str, dict[str, Any]] = {}
    for name, members in sorted(rows_of.items()):
        is_reward = any(row["judged_by"] == "score" or row["score"] != row["em"] for row in members)
        measures[name] = {
            "measure": REWARD if is_reward else EXACT_MATCH,
            "value": _mean(members, "score"),
            "count": len(members),
        }
    return measures


def _group(rows: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            groups[row[key]].append(row)
    return groups


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows]))


def run_summary(state: RunState, wall_seconds: float, seed: int) -> dict[str, Any]:
    """Return the contents of `summary.json`.

    - em_before, em_after, em_before_by_hops, em_after_by_hops, searches_by_hops, num_val_questions,
      num_unverified_before and num_unverified_after (questions that no figure counts). They are of the mode
      that samples at temperature 1 if `trainer.val_modes` has it, and else of the first mode. Those of every
      further mode have its name as a suffix, such as `_greedy`; those of `data.extra_val_files` have the
      prefix `extra_`.
    - measures_before, measures_after: see `measures_of`.
    - steps, wall_seconds, seconds_by_phase, generated_tokens_per_second, trained_tokens_per_second and seed.
    - not_learnt, score_rose and open_collapses (see `run_outcome`).

    What was not measured is None.
    """
    before, after = (state.validation.get(when) or {} for when in ("before", "after"))
    seconds = state.seconds_by_phase
    updating = seconds.get("update_actor", 0.0) + seconds.get("update_critic", 0.0)
    summary = _validation_summary(before, after, "")
    if "extra" in before or "extra" in after:
        summary |= _validation_summary(before.get("extra") or {}, after.get("extra") or {}, "extra_")
    return summary | {
        "steps": state.step,
        "wall_seconds": wall_seconds,
        "seconds_by_phase": dict(seconds),
        "generated_tokens_per_second": _rate(state.generated_tokens, seconds.get("gen", 0.0)),
        "trained_tokens_per_second": _rate(state.trained_tokens, updating),
        "seed": seed,
        **run_outcome(_first_mode(before), _first_mode(after), state.health, state.step),
    }


def _first_mode(validation: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the mode that `summary.json` has first, or {} if there was no validation."""
    modes = _sorted_modes(validation)
    return dict(validation[modes[0]]) if modes else {}


def _sorted_modes(validation: dict[str, Any]) -> list[str]:
    modes = [mode for mode in validation if mode != "extra"]
    modes.sort(key=lambda mode: mode != SAMPLED)  # the sort is stable: the others keep their order
    return modes


def _validation_summary(before: dict[str, Any], after: dict[str, Any], prefix: str) -> dict[str, Any]:
    modes = _sorted_modes(after or before)
    summary: dict[str, Any] = {}
    for i, mode in enumerate(modes or [SAMPLED]):
        first = before.get(mode) or {}
        last = after.get(mode) or {}
        named = {
            "em_before": first.get("em"),
            "em_after": last.get("em"),
            "em_before_by_hops": first.get("em_by_hops"),
            "em_after_by_hops": last.get("em_by_hops"),
            "searches_by_hops": (last or first).get("searches_by_hops"),
            "measures_before": first.get("measures"),
            "measures_after": last.get("measures"),
            "num_val_questions": (last or first).get("num_questions"),
            "num_unverified_before": first.get("num_unverified"),
            "num_unverified_after": last.get("num_unverified"),
        }
        summary |= {f"{prefix}{name}{f'_{mode}' if i else ''}": value for name, value in named.items()}
    return summary


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
