"""The names of verifiers, the verifiers that a row asks for, and those of a run.

    row -> assigned_verifiers -> [Assigned(name, label, weight)]
    Verifiers.verify([(response, what its row is assigned)]) -> Result of each row

Names are Open-Instruct's, or package.module:Class for one of your own. Your class is a subclass of
`verl.verifiers.Verifier` that can be made without arguments. A row names its verifiers in one of three forms.
The first one that is present counts:

    reward_model.ground_truth.verifiers = [{"name": "math", "label": "72", "weight": 1.0}, ...]
    reward_model.verifier = "math" or [names], with reward_model.ground_truth = label or [labels]
    columns `dataset` = "math" or [names] and `ground_truth` = label or [labels]           (Open-Instruct's)

A label is text, or JSON text if a verifier needs more. The row's score is the sum of weight * score.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl.config.environments import VerifiersConfig
from verl.utils.errors import CouldNotVerify
from verl.utils.extras import check_packages
from verl.utils.importing import describe, import_named
from verl.utils.reward_score import LARGEST_SCORE
from verl.utils.rows import row_max_turns, truth_struct
from verl.verifiers.verifier import Sample, Verdict, Verifier, VerifierLimit, VerifierSettings

UNVERIFIED = "unverified"  # the finish reason of a trajectory without a verdict
_NAMES = {
    "text:TextVerifier": "gsm8k flan string_matcher string_f1 puzzle re_search re_search_f1 passthrough",
    "text:LengthVerifier": "max_length up_to_max_length",
    "math:MathVerifier": "math strict_math",
    "ifeval:IFEvalVerifier": "ifeval ifeval_old",
    "code:CodeVerifier": "code code_stdio",
    "reasoning_gym:ReasoningGymVerifier": "reasoning_gym",
    "llm_judge:JudgeVerifier": "general-quality general-quality_rubric general-quality_ref general-safety "
    "general-factuality general-creative_writing general-refusal general-web_instruct_general_verifier",
    "llm_judge:RubricVerifier": "rubric",
}
VERIFIERS: dict[str, str] = {
    name: f"verl.verifiers.{path}" for path, names in _NAMES.items() for name in names.split()
}


@dataclass(frozen=True)
class Assigned:
    """One verifier of a row.

    Attributes:
        name: The name of the verifier.
        label: The label that the verifier gets.
        weight: The weight of the verifier's score in the row's. With 0 the score is only reported.
    """

    name: str
    label: Any
    weight: float = 1.0


def check_name(name: str) -> str:
    """Return the name of a verifier, in lower case unless it is package.module:Class.

    Raises ValueError, with the nearest name, if there is no such verifier.
    """
    if ":" not in name and name.lower() not in VERIFIERS:
        import_named(name, f"verifier {name!r}", VERIFIERS)
    return name if ":" in name else name.lower()


def assigned_verifiers(reward_model: Any, columns: Mapping[str, Any] | None = None) -> list[Assigned]:
    """Return the verifiers that a row names, which may be none.

    Args:
        reward_model: The row's column `reward_model` or `reward_spec`.
        columns: The other columns of the row.

    Raises:
        ValueError: If a name is unknown, if a weight is no number, or if there are not as many labels as
            names.
    """
    spec = reward_model if isinstance(reward_model, Mapping) else {}
    names: Any = spec.get("verifier")
    truth: Any = spec.get("ground_truth")
    struct = truth_struct(truth)
    entries = None if struct is None else parse_list(struct.get("verifiers"))
    if entries is None:
        if names is None and columns is not None and columns.get("ground_truth") is not None:
            # A data set without verifiers may have the column `dataset`, too, so it counts only with a label.
            names = columns.get("dataset")
            truth = columns["ground_truth"]
        if names is None:
            return []
        labels = list(truth) if _is_list(truth) else [truth]
        names = parse_list(names)
        if not isinstance(names, str) and not _are_texts(names):
            raise ValueError(f"Found verifiers {names!r:.200}; expected a name or a list of names.")
        if isinstance(names, str):  # Open-Instruct writes a single label as a list of one, too
            names = [names]
            labels = labels if len(labels) == 1 else [truth]
        if len(names) != len(labels):
            raise ValueError(
                f"Found {len(names)} verifiers {list(names)} with {len(labels)} labels; expected one each."
            )
        entries = [{"name": name, "label": label} for name, label in zip(names, labels, strict=True)]
    assigned = []
    if not isinstance(entries, str | Mapping) and not _is_list(entries):
        raise ValueError(f"Found verifiers {entries!r:.200}; expected a list of entries.")
    for entry in [entries] if isinstance(entries, str | Mapping) else entries:
        if not isinstance(entry, Mapping) or "name" not in entry or set(entry) - {"name", "label", "weight"}:
            form = '[{"name": "math", "label": "72", "weight": 1.0}, ...]'
            unknown = sorted(set(entry) - {"name", "label", "weight"}) if isinstance(entry, Mapping) else ()
            which = f" with the unknown {', '.join(map(repr, unknown))}" if unknown else ""
            raise ValueError(f"Found verifier {entry!r:.200}{which}; expected {form}.")
        weight = 1.0 if entry.get("weight") is None else as_number(entry["weight"])
        if not abs(weight) <= LARGEST_SCORE or isinstance(entry.get("weight"), bool):
            given_weight = entry["weight"]
            raise ValueError(
                f"Found weight {given_weight!r} of verifier {entry['name']!r}; expected a number."
            )
        assigned.append(Assigned(check_name(str(entry["name"])), entry.get("label"), weight))
    return assigned


def parse_list(value: Any) -> Any:
    """Return the list or struct that a JSON text holds, and any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_list(value: Any) -> bool:
    """Return whether a value is a list, as JSON, Python or a table has it."""
    return isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _are_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    return _is_list(value) and all(isinstance(item, str) for item in value)


def as_number(value: Any) -> float:
    """Convert a value to a number, or to nan if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def assigned_of_row(row: Mapping[str, Any]) -> list[Assigned]:
    """Return the verifiers that a row of a file names."""
    specs = (row.get(name) for name in ("reward_model", "reward_spec"))
    return assigned_verifiers(next((spec for spec in specs if spec is not None), None), row)


def make_verifier(name: str, settings: VerifierSettings) -> Verifier:
    """Make the verifier with a name and open it.

    Raises ValueError if there is none, if it is no verifier, or if a package that it needs is missing.
    """
    cls = import_named(VERIFIERS.get(check_name(name), name), f"verifier {name!r}", VERIFIERS)
    if not isinstance(cls, type) or not issubclass(cls, Verifier):
        raise ValueError(
            f"Found verifier {name!r}; expected a class that derives from verl.verifiers.Verifier."
        )
    if cls.verify is Verifier.verify and cls.verify_many is Verifier.verify_many:
        raise ValueError(f"Verifier {name!r}: found neither verify nor verify_many; expected one of them.")
    check_packages(f"verifier {name!r}", *cls.needs)
    verifier = cls()
    verifier.name = verifier.name or name
    verifier.open(settings)
    return verifier


SOLUTION_KEYS = ("reference_solution", "canonical_solution", "solution")


@dataclass(frozen=True)
class RowResult:
    """The result of one row.

    Attributes:
        score: The sum of weight * score. None if a verifier whose weight is not 0 has no verdict.
        verdicts: One plain dictionary for each verifier, with the keys name, score, weight, full_score (the
            most that weight * score can be), cost, timed_out and detail.
    """

    score: float | None
    verdicts: list[dict[str, Any]]


class Verifiers:
    """The verifiers of a run, each made when it is first used and kept until the end of the run."""

    def __init__(self, settings: VerifierSettings) -> None:
        self.settings = settings
        self._made: dict[str, Verifier] = {}

    def __getitem__(self, name: str) -> Verifier:
        if name not in self._made:
            self._made[name] = make_verifier(name, self.settings)
        return self._made[name]

    def check_rows(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Check rows before the run starts, and return how many of them name verifiers.

        The solutions that rows hold themselves (SOLUTION_KEYS of `extra_info`) go to `check_solutions`.

        Raises:
            ValueError: For the first row with an unknown name, a label that its verifier can't work with, or
                a max_turns that is no number.
        """
        count = 0
        solved: dict[str, list[Sample]] = defaultdict(list)
        for index, row in enumerate(rows):
            try:
                row_max_turns(row)
                assigned = assigned_of_row(row)
                for entry in assigned:
                    self[entry.name].check_label(entry.label)
                    solution = solution_of(row)
                    if solution:
                        solved[entry.name].append(Sample(solution, entry.label))
            except ValueError as error:
                raise ValueError(f"row {index}: {error}") from error
            count += bool(assigned)
        for name, samples in solved.items():
            self[name].check_solutions(samples)
        return count

    def verify(self, rows: Sequence[tuple[Sample, Sequence[Assigned]]]) -> list[RowResult]:
        """Return the result of each row, in order.

        Verifiers of different names work at the same time, in threads. A judge that waits holds up no math.

        Args:
            rows: The response of each row, whose label is not read here, and the row's verifiers.

        Raises:
            ValueError: If a name is unknown, if a score is no number, or if a verifier fails.
            VerifierLimit: If the run may not go on.
        """
        samples: dict[str, list[Sample]] = defaultdict(list)
        for sample, assigned in rows:
            for entry in assigned:
                samples[entry.name].append(replace(sample, label=entry.label))
        verifiers = {name: self[name] for name in samples}

        def verify(name: str) -> Iterator[Verdict]:
            try:
                verdicts = list(verifiers[name].verify_many(samples[name]))
            except CouldNotVerify as error:
                verdicts = [Verdict(None, str(error))] * len(samples[name])
            except VerifierLimit:
                raise
            except Exception as error:  # a mistake in the verifier's code, or in a label
                raise ValueError(f"verifier {name!r} failed: {describe(error)}") from error
            if len(verdicts) != len(samples[name]):
                num_verdicts = len(verdicts)
                num_responses = len(samples[name])
                raise ValueError(
                    f"verifier {name!r} returned {num_verdicts} verdicts of {num_responses} responses"
                )
            return iter(verdicts)

        with ThreadPoolExecutor(max(len(samples), 1), "verifier") as pool:
            verdicts_of = dict(zip(samples, pool.map(verify, samples), strict=True))
        results = []
        for _, assigned in rows:
            total: float | None = 0.0
            report = []
            for entry in assigned:
                verifier = verifiers[entry.name]
                verdict = next(verdicts_of[entry.name])
                if not isinstance(verdict, Verdict):
                    raise ValueError(
                        f"verifier {verifier.name!r} returned {verdict!r:.100}; expected a Verdict"
                    )
                score = verdict.score
                if score is None:
                    total = None if entry.weight else total
                elif math.isnan(as_number(score)):
                    raise ValueError(
                        f"verifier {verifier.name!r} returned the score {score!r}; expected a number"
                    )
                else:
                    score = min(max(float(score), verifier.low), verifier.high)
                    total = None if total is None else total + entry.weight * score
                full_score = max(entry.weight * verifier.low, entry.weight * verifier.high)
                named = {"name": verifier.name, "weight": entry.weight, "full_score": full_score}
                report.append({**vars(verdict), **named, "score": score})
            results.append(RowResult(total, report))
        return results

    def close(self) -> None:
        """End all that the verifiers have started."""
        while self._made:
            self._made.popitem()[1].close()


def solution_of(row: Mapping[str, Any]) -> str:
    """Return the solution that a row holds itself, or ""."""
    extra_info = row.get("extra_info")
    values = [extra_info.get(key) for key in SOLUTION_KEYS] if isinstance(extra_info, Mapping) else []
    return next((value for value in values if isinstance(value, str) and value.strip()), "")


def try_row(row: Mapping[str, Any], text: str, config: VerifiersConfig | None = None) -> RowResult:
    """Return the result of a row's verifiers for a response, to try them by hand.

    Args:
        row: The columns of the row.
        text: The response.
        config: The block `verifiers` of a run. None for its defaults.

    Raises:
        ValueError: If the row names no verifiers, or as in `Verifiers.check_rows` and `Verifiers.verify`.
    """
    verifiers = Verifiers(VerifierSettings(config or VerifiersConfig()))
    try:
        if not verifiers.check_rows([row]):
            raise ValueError(f"Found the columns {sorted(row)}; expected a row that names verifiers.")
        return verifiers.verify([(Sample(text, None), assigned_of_row(row))])[0]
    finally:
        verifiers.close()


def verifier_metrics(verdicts: Sequence[Sequence[Mapping[str, Any]] | None]) -> dict[str, float]:
    """Return figures of all verdicts of a step, also of rows that left the batch.

    Args:
        verdicts: `RowResult.verdicts` of each row, or None for a row without verifiers.

    Returns:
        A dictionary of figures. objective/{name}_reward is the mean over rows of weight * score, and
        objective/{name}_correct_rate is the share of rows above 0. Both have Open-Instruct's names and are
        taken over the rows with a verdict. reward/unverified/{name} and reward/timeout/{name} are numbers of
        verdicts, reward/cost is in US dollars, and code/judged_inside is the number of tests of programs that
        were judged in the program's own process.
    """
    metrics: dict[str, float] = defaultdict(float)
    totals: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))  # name -> row -> reward
    for row, reports in enumerate(verdicts):
        for verdict in reports or ():
            name = verdict["name"]
            score = verdict["score"]
            if score is not None:
                totals[name][row] += verdict["weight"] * score
            metrics[f"reward/unverified/{name}"] += score is None
            metrics[f"reward/timeout/{name}"] += verdict["timed_out"]
            metrics["reward/cost"] += verdict["cost"]
            if verdict.get("num_judged_inside"):
                metrics["code/judged_inside"] += verdict["num_judged_inside"]
    for name, rewards in totals.items():
        values = np.array(list(rewards.values()))
        metrics[f"objective/{name}_reward"] = float(values.mean())
        metrics[f"objective/{name}_correct_rate"] = float((values > 0).mean())
    return dict(metrics)
