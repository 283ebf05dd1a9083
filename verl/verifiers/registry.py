"""Verifiers by name, which of them a row asks for, and those of a run over the rows of a batch.

    row -> assigned_verifiers -> [Assigned(name, label, weight)]
    Verifiers.verify([(response, what its row is assigned)]) -> Result of each row

Names are Open-Instruct's, or package.module:Class for one of your own: a subclass of
`verl.verifiers.Verifier` that can be made without arguments. A row names its verifiers in one of three forms,
the first that is there:

    reward_model.ground_truth.verifiers = [{"name": "math", "label": "72", "weight": 1.0}, ...]
    reward_model.verifier = "math" or [names], with reward_model.ground_truth = label or [labels]
    columns `dataset` = "math" or [names] and `ground_truth` = label or [labels]           (Open-Instruct's)

A label is text, or JSON text where a verifier wants more. The row's score is the sum of weight * score.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.config.environments import VerifiersConfig
from verl.environments.base import row_max_turns
from verl.utils.importing import describe, import_named
from verl.verifiers.base import CouldNotVerify, Sample, Verdict, Verifier, VerifierLimit, VerifierSettings

UNVERIFIED = "unverified"  # finish reason of a trajectory without a verdict
_NAMES = {
    "text:TextVerifier": "gsm8k flan string_matcher string_f1 puzzle re_search re_search_f1 passthrough",
    "text:LengthVerifier": "max_length up_to_max_length",
    "math:MathVerifier": "math strict_math",
    "ifeval:IFEvalVerifier": "ifeval ifeval_old",
    "code:CodeVerifier": "code code_stdio",
    "reasoning_gym:ReasoningGymVerifier": "reasoning_gym",
    "judge:JudgeVerifier": "general-quality general-quality_rubric general-quality_ref general-safety "
    "general-factuality general-creative_writing general-refusal general-web_instruct_general_verifier",
    "judge:RubricVerifier": "rubric",
}
VERIFIERS: dict[str, str] = {
    name: f"verl.verifiers.{path}" for path, names in _NAMES.items() for name in names.split()
}


@dataclass(frozen=True)
class Assigned:
    """One verifier of a row. weight: of its score in the row's; 0: its score is only reported."""

    name: str
    label: Any
    weight: float = 1.0


def check_name(name: str) -> str:
    """The name, in lower case if it is one of ours. ValueError, with the nearest name: there is none."""
    if ":" not in name and name.lower() not in VERIFIERS:
        import_named(name, f"verifier {name!r}", VERIFIERS)
    return name if ":" in name else name.lower()


def assigned_verifiers(reward_model: Any, columns: Mapping[str, Any] | None = None) -> list[Assigned]:
    """The verifiers of a row, of its reward_model (or `reward_spec`) and its other columns; none if it names
    none. ValueError: a name is unknown, a weight is no number, names and labels are not equally many.
    """
    spec = reward_model if isinstance(reward_model, Mapping) else {}
    names: Any = spec.get("verifier")
    truth: Any = spec.get("ground_truth")
    entries = truth.get("verifiers") if isinstance(truth, Mapping) else None
    if entries is None:
        if names is None and columns is not None and columns.get("ground_truth") is not None:
            # many a data set has that column
            names = columns.get("dataset")
            truth = columns["ground_truth"]
        if names is None:
            return []
        labels = [truth] if isinstance(truth, str | Mapping) or not hasattr(truth, "__len__") else list(truth)
        if isinstance(names, str):  # Open-Instruct writes a single label as a list of one, too
            names = [names]
            labels = labels if len(labels) == 1 else [truth]
        if len(names) != len(labels):
            raise ValueError(
                f"Found {len(names)} verifiers {list(names)} with {len(labels)} labels; expected one each."
            )
        entries = [{"name": name, "label": label} for name, label in zip(names, labels, strict=True)]
    assigned = []
    for entry in [entries] if isinstance(entries, str | Mapping) else entries:
        if not isinstance(entry, Mapping) or "name" not in entry or set(entry) - {"name", "label", "weight"}:
            form = '[{"name": "math", "label": "72", "weight": 1.0}, ...]'
            unknown = sorted(set(entry) - {"name", "label", "weight"}) if isinstance(entry, Mapping) else ()
            which = f" with the unknown {', '.join(map(repr, unknown))}" if unknown else ""
            raise ValueError(f"Found verifier {entry!r:.200}{which}; expected {form}.")
        weight = 1.0 if entry.get("weight") is None else as_number(entry["weight"])
        if not math.isfinite(weight):
            found = entry["weight"]
            raise ValueError(f"Found weight {found!r} of verifier {entry['name']!r}; expected a number.")
        assigned.append(Assigned(check_name(str(entry["name"])), entry.get("label"), weight))
    return assigned


def as_number(value: Any) -> float:
    """nan: it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def verifiers_of(row: Mapping[str, Any]) -> list[Assigned]:
    """Those of a row as it stands in a file."""
    specs = (row.get(name) for name in ("reward_model", "reward_spec"))
    return assigned_verifiers(next((spec for spec in specs if spec is not None), None), row)


def make_verifier(name: str, settings: VerifierSettings) -> Verifier:
    """The verifier of a name, ready to work. ValueError: there is none, or it is no verifier."""
    found = import_named(VERIFIERS.get(check_name(name), name), f"verifier {name!r}", VERIFIERS)
    if not isinstance(found, type) or not issubclass(found, Verifier):
        raise ValueError(
            f"Found verifier {name!r}; expected a class that derives from verl.verifiers.Verifier."
        )
    if found.verify is Verifier.verify and found.verify_many is Verifier.verify_many:
        raise ValueError(f"Verifier {name!r}: found neither verify nor verify_many; expected one of them.")
    made = found()
    made.name = made.name or name
    made.open(settings)
    return made


@dataclass(frozen=True)
class Result:
    """score: the sum of weight * score, or None where a verifier of some weight has no verdict. verdicts: one
    plain dictionary for each verifier: name, score, weight, full_score (the most that weight * score can be),
    cost, timed_out, detail.
    """

    score: float | None
    verdicts: list[dict[str, Any]]


class Verifiers:
    """Makes each verifier when it is first asked for, and keeps it to the end of the run."""

    def __init__(self, settings: VerifierSettings) -> None:
        self.settings = settings
        self._made: dict[str, Verifier] = {}

    def __getitem__(self, name: str) -> Verifier:
        if name not in self._made:
            self._made[name] = make_verifier(name, self.settings)
        return self._made[name]

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """How many rows name verifiers. ValueError for the first one with an unknown name, a label that its
        verifier can't work with, or a max_turns that is no number. For before the run starts.
        """
        count = 0
        for index, row in enumerate(rows):
            try:
                row_max_turns(row)
                assigned = verifiers_of(row)
                for each in assigned:
                    self[each.name].check_label(each.label)
            except ValueError as error:
                raise ValueError(f"row {index}: {error}") from error
            count += bool(assigned)
        return count

    def verify(self, rows: Sequence[tuple[Sample, Sequence[Assigned]]]) -> list[Result]:
        """The result of each row (its response, whose label is not read here; its verifiers), in order.

        Verifiers of different names work at the same time, in threads: a judge that waits holds up no math.
        ValueError: an unknown name, or a score that is no number. VerifierLimit: the run may not go on.
        """
        samples: dict[str, list[Sample]] = defaultdict(list)
        for sample, assigned in rows:
            for each in assigned:
                samples[each.name].append(replace(sample, label=each.label))
        made = {name: self[name] for name in samples}

        def verify(name: str) -> Iterator[Verdict]:
            try:
                verdicts = list(made[name].verify_many(samples[name]))
            except CouldNotVerify as error:
                verdicts = [Verdict(None, str(error))] * len(samples[name])
            except VerifierLimit:
                raise
            except Exception as error:  # a mistake in its code, or in a label
                raise ValueError(f"verifier {name!r} failed: {describe(error)}") from error
            if len(verdicts) != len(samples[name]):
                found = len(verdicts)
                wanted = len(samples[name])
                raise ValueError(f"verifier {name!r} returned {found} verdicts of {wanted} responses")
            return iter(verdicts)

        with ThreadPoolExecutor(max(len(samples), 1), "verifier") as pool:
            found = dict(zip(samples, pool.map(verify, samples), strict=True))
        results = []
        for _, assigned in rows:
            total: float | None = 0.0
            report = []
            for each in assigned:
                verifier = made[each.name]
                verdict = next(found[each.name])
                if not isinstance(verdict, Verdict):
                    raise ValueError(
                        f"verifier {verifier.name!r} returned {verdict!r:.100}; expected a Verdict"
                    )
                score = verdict.score
                if score is None:
                    total = None if each.weight else total
                elif math.isnan(as_number(score)):
                    raise ValueError(
                        f"verifier {verifier.name!r} returned the score {score!r}; expected a number"
                    )
                else:
                    score = min(max(float(score), verifier.low), verifier.high)
                    total = None if total is None else total + each.weight * score
                full_score = max(each.weight * verifier.low, each.weight * verifier.high)
                named = {"name": verifier.name, "weight": each.weight, "full_score": full_score}
                report.append({**vars(verdict), **named, "score": score})
            results.append(Result(total, report))
        return results

    def close(self) -> None:
        """Ends what the verifiers have started."""
        while self._made:
            self._made.popitem()[1].close()


def try_row(row: Mapping[str, Any], text: str, config: VerifiersConfig | None = None) -> Result:
    """What the verifiers of a row make of a response, to try them by hand. config: `verifiers` of a run.
    ValueError as `Verifiers.verify`.
    """
    verifiers = Verifiers(VerifierSettings(config or VerifiersConfig()))
    try:
        if not verifiers.check_rows([row]):
            raise ValueError(f"Found the columns {sorted(row)}; expected a row that names verifiers.")
        return verifiers.verify([(Sample(text, None), verifiers_of(row))])[0]
    finally:
        verifiers.close()


def verifier_metrics(verdicts: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, float]:
    """Figures of all verdicts of a step, those of rows that left the batch too. verdicts: of each row,
    `Result.verdicts`, or None for rows without verifiers.

    objective/{name}_reward (mean of weight * score of a row) and objective/{name}_correct_rate (share of rows
    above 0), Open-Instruct's names, over rows with a verdict; reward/unverified/{name} and
    reward/timeout/{name} (verdicts); reward/cost (US dollars).
    """
    metrics: dict[str, float] = defaultdict(float)
    totals: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # name -> row -> reward
    for row, reports in enumerate(verdicts):
        for each in reports or ():
            name = each["name"]
            score = each["score"]
            if score is not None:
                totals[name][row] += each["weight"] * score
            metrics[f"reward/unverified/{name}"] += score is None
            metrics[f"reward/timeout/{name}"] += each["timed_out"]
            metrics["reward/cost"] += each["cost"]
    for name, rewards in totals.items():
        values = np.array(list(rewards.values()))
        metrics[f"objective/{name}_reward"] = float(values.mean())
        metrics[f"objective/{name}_correct_rate"] = float((values > 0).mean())
    return dict(metrics)
