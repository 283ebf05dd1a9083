"""Measuring a policy: the same generation, search and reward code as in training, over every row.

`validate` is what the trainer calls, what the pretraining script of the tiny base model prints, and what
`trainer.val_only=true` runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.collection import (
    VALIDATION_STREAM,
    prompt_batch,
    sampling_seeds,
    with_seeds,
    without_padding,
)
from verl.trainer.ppo.run_state import RunState
from verl.trainer.ppo.scoring import RewardManager, score_answers
from verl.utils.announcing import announced
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score.qa_em import documents_hold_answer, golden_answers
from verl.verifiers.batch import UNVERIFIED, verifier_metrics

SAMPLED, GREEDY = "sampled", "greedy"


@dataclass
class ValidationReport:
    """Scores of one pass over the questions in each mode ("sampled": temperature 1; "greedy").

    Attributes:
        rows: mode -> one record per question that was verified: score (float), em (0/1), searches (int),
            hops (int or None), data_source (str), env_class (str; None of a search), finish_reason (str),
            documents_hold_answer (0/1; None without golden answers), first_query_right and all_queries_right
            (0/1; None where the data does not say).
        verdicts: mode -> figures of the verifiers, and `unverified`, how many questions are not in `rows` as
            their answers could not be verified.
        samples: DataProto of the first mode's first batch, for the trajectory records.
        extra: the report of `data.extra_val_files`, if those were asked too.
    """

    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    verdicts: dict[str, dict[str, float]] = field(default_factory=dict)
    samples: DataProto | None = None
    extra: ValidationReport | None = None

    def metrics(self, prefix: str = "val") -> dict[str, float]:
        """`val/test_score/<data_source or environment>` (first mode); per mode EM and searches, by hops where
        known.
        """
        metrics: dict[str, float] = {}
        for i, (mode, rows) in enumerate(self.rows.items()):
            if i == 0:
                for column in ("data_source", "env_class"):
                    for name, members in _group(rows, column).items():
                        metrics[f"{prefix}/test_score/{name}"] = _mean(members, "score")
            metrics[f"{prefix}/{mode}/em"] = _mean(rows, "em")
            metrics[f"{prefix}/{mode}/searches"] = _mean(rows, "searches")
            metrics[f"{prefix}/{mode}/search_failed"] = float(
                sum(row["finish_reason"] == "search_failed" for row in rows)
            )
            for hops, members in _group(rows, "hops").items():
                metrics[f"{prefix}/{mode}/em/hops_{hops}"] = _mean(members, "em")
                metrics[f"{prefix}/{mode}/searches/hops_{hops}"] = _mean(members, "searches")
            for name in ("documents_hold_answer", "first_query_right", "all_queries_right"):
                known = [row for row in rows if row[name] is not None]
                if known:
                    metrics[f"{prefix}/{mode}/{name}"] = _mean(known, name)
            metrics |= {f"{prefix}/{mode}/{name}": x for name, x in self.verdicts.get(mode, {}).items()}
        return metrics | (self.extra.metrics(f"{prefix}_extra") if self.extra else {})

    def summary(self) -> dict[str, Any]:
        """Per mode: em, em_by_hops, searches_by_hops, num_questions; for `summary.json`."""
        result: dict[str, Any] = {}
        for mode, rows in self.rows.items():
            by_hops = {str(hops): members for hops, members in sorted(_group(rows, "hops").items())}
            result[mode] = {
                "em": _mean(rows, "em"),
                "em_by_hops": {hops: _mean(members, "em") for hops, members in by_hops.items()},
                "searches": _mean(rows, "searches"),
                "searches_by_hops": {hops: _mean(members, "searches") for hops, members in by_hops.items()},
                "num_questions": len(rows),
            }
        return result | ({"extra": self.extra.summary()} if self.extra else {})


def validate(
    generate: Callable[[DataProto], DataProto],
    reward_fn: RewardManager,
    dataset: RLHFDataset,
    modes: list[str],
    batch_size: int | None,
    seed: int,
) -> ValidationReport:
    """Ask every question of `dataset` once in each mode.

    Args:
        generate: prompts -> a trajectory for each row, with the prompts' columns.
        reward_fn: what their answers are worth.
        dataset: the questions; none is dropped, the last batch may be smaller.
        modes: of "sampled" (temperature 1, no truncation of the distribution) and "greedy".
        batch_size: questions in flight at once; None: all.
        seed: of the sampled mode. Equal seeds give equal draws, so two reports of a run can be compared.
    """
    report = ValidationReport()
    size = batch_size or len(dataset)
    for mode in modes:
        rows: list[dict[str, Any]] = []
        verdicts: list[Any] = []
        with announced(f"{mode} validation of {len(dataset)} questions"):
            for start in range(0, len(dataset), size):
                prompts = prompt_batch(
                    [dataset[i] for i in range(start, min(start + size, len(dataset)))], f"val-{start}"
                )
                batch = generate(_sampled_as(prompts, mode, seed, start))
                score_answers(batch, reward_fn)
                batch = without_padding(batch)
                rows += _records(batch)
                verdicts += list(batch.non_tensor_batch["verdicts"])
                if mode == modes[0]:
                    report.samples = batch if report.samples is None else report.samples
        lost = (UNVERIFIED, "env_failed")  # nobody knows what these are worth: not 0
        report.rows[mode] = [row for row in rows if row["finish_reason"] not in lost]
        if any(verdicts) or len(report.rows[mode]) < len(rows):
            unverified = {"unverified": float(len(rows) - len(report.rows[mode]))}
            report.verdicts[mode] = verifier_metrics(verdicts) | unverified
    return report


def _sampled_as(prompts: DataProto, mode: str, seed: int, start: int) -> DataProto:
    seeds = sampling_seeds(seed, VALIDATION_STREAM, start, len(prompts))
    greedy = mode == GREEDY
    sampling = {"do_sample": not greedy, "temperature": 0.0 if greedy else 1.0}
    return with_seeds(prompts, seeds, **sampling, top_p=1.0, top_k=-1, min_p=0.0, validate=True)


def _records(batch: DataProto) -> list[dict[str, Any]]:
    totals = batch.tensors["outcome"].tolist()
    records = []
    for i, trajectory in enumerate(batch.non_tensor_batch["trajectory"]):
        extra = batch.non_tensor_batch["extra_info"][i] or {}
        records.append(
            {
                "score": totals[i],
                "em": float(batch.non_tensor_batch["em"][i]),
                "searches": trajectory["num_searches"],
                "hops": extra.get("hops"),
                "data_source": batch.non_tensor_batch["data_source"][i],
                "env_class": trajectory.get("env_class", "").replace(":", ".") or None,
                "finish_reason": trajectory["finish_reason"],
                "documents_hold_answer": _documents_hold_answer(
                    trajectory, batch.non_tensor_batch["reward_model"][i]["ground_truth"]
                ),
                **_query_records(trajectory, extra),
            }
        )
    return records


def _documents_hold_answer(trajectory: dict[str, Any], ground_truth: Any) -> float | None:
    """Whether a golden answer stands in a document that was found; None for a row without golden answers."""
    if not isinstance(ground_truth, Mapping) or ground_truth.get("target") is None:
        return None
    documents = [document for turn in trajectory["turns"] for document in turn.get("documents") or []]
    return float(documents_hold_answer(documents, golden_answers(ground_truth)))


def _query_records(trajectory: dict[str, Any], extra: dict[str, Any]) -> dict[str, float | None]:
    """Whether the queries named the entities of the chain, where the data says which these are.

    `extra_info.gold_titles` lists, in the order of the hops, the title that each search should name.
    """
    wanted = extra.get("gold_titles")
    if wanted is None or len(wanted) == 0:
        return {"first_query_right": None, "all_queries_right": None}
    queries = [
        turn["query"].lower() for turn in trajectory["turns"] if turn["action"] == "search" and turn["query"]
    ]
    first = bool(queries) and str(wanted[0]).lower() in queries[0]
    every = all(any(str(title).lower() in query for query in queries) for title in wanted)
    return {"first_query_right": float(first), "all_queries_right": float(every)}


def _group(rows: list[dict[str, Any]], key: str) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            groups[row[key]].append(row)
    return groups


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return float(np.mean([row[key] for row in rows])) if rows else 0.0


def run_summary(state: RunState, wall_seconds: float, seed: int) -> dict[str, Any]:
    """What `summary.json` holds.

    Keys: em_before, em_after, em_before_by_hops, em_after_by_hops, searches_by_hops, num_val_questions
    (sampled at temperature 1 if `trainer.val_modes` has that, else the first mode), and the same with the
    suffix of every further mode, `_greedy`; for `data.extra_val_files` with the prefix `extra_`. Then steps,
    wall_seconds, seconds_by_phase, generated_tokens_per_second, trained_tokens_per_second, seed. What was not
    measured is None.
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
    }


def _validation_summary(before: dict[str, Any], after: dict[str, Any], prefix: str) -> dict[str, Any]:
    modes = [mode for mode in (after or before) if mode != "extra"]
    modes.sort(key=lambda mode: mode != SAMPLED)  # stable: the others keep their order
    summary: dict[str, Any] = {}
    for i, mode in enumerate(modes or [SAMPLED]):
        first, last = before.get(mode) or {}, after.get(mode) or {}
        named = {
            "em_before": first.get("em"),
            "em_after": last.get("em"),
            "em_before_by_hops": first.get("em_by_hops"),
            "em_after_by_hops": last.get("em_by_hops"),
            "searches_by_hops": (last or first).get("searches_by_hops"),
            "num_val_questions": (last or first).get("num_questions"),
        }
        summary |= {f"{prefix}{name}{f'_{mode}' if i else ''}": value for name, value in named.items()}
    return summary


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None
