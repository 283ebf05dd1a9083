"""Verifiers by name, and which of them a row asks for.

    row -> assigned_verifiers -> [Assigned(name, label, weight)]        name -> make_verifier -> Verifier

Names are Open-Instruct's, or package.module:Class for one of your own: a subclass of
`verl.verifiers.Verifier` that can be made without arguments. A row names its verifiers in one of three forms,
the first that is there:

    reward_model.ground_truth.verifiers = [{"name": "math", "label": "72", "weight": 1.0}, ...]
    reward_model.verifier = "math" or [names], with reward_model.ground_truth = label or [labels]
    columns `dataset` = "math" or [names] and `ground_truth` = label or [labels]           (Open-Instruct's)

A label is text, or JSON text where a verifier wants more. The row's score is the sum of weight * score.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.verifiers.base import Verifier, VerifierSettings

_NAMES = {
    "text:TextVerifier": "gsm8k flan string_matcher string_f1 puzzle re_search re_search_f1 passthrough",
    "text:LengthVerifier": "max_length up_to_max_length",
    "math:MathVerifier": "math strict_math",
    "ifeval:IFEvalVerifier": "ifeval ifeval_old",
    "code:CodeVerifier": "code code_stdio",
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
    if ":" in name or name.lower() in VERIFIERS:
        return name if ":" in name else name.lower()
    near = difflib.get_close_matches(name.lower(), VERIFIERS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Found verifier {name!r}; expected one of {', '.join(sorted(VERIFIERS))}, or your own as "
        f"package.module:Class.{hint}"
    )


def assigned_verifiers(reward_model: Any, columns: Mapping[str, Any] | None = None) -> list[Assigned]:
    """The verifiers of a row; none if it names none.

    Args:
        reward_model: the row's (or its `reward_spec`). columns: its other columns.

    Raises:
        ValueError: a name is unknown, a weight is no number, or names and labels are not equally many.
    """
    spec = reward_model if isinstance(reward_model, Mapping) else {}
    names: Any = spec.get("verifier")
    truth: Any = spec.get("ground_truth")
    named = truth.get("verifiers") if isinstance(truth, Mapping) else None
    if named is not None:
        assigned = []
        for entry in named:
            if not isinstance(entry, Mapping) or "name" not in entry:
                raise ValueError(f'Found verifier {entry!r:.200}; expected {{"name", "label", "weight"}}.')
            weight = 1.0 if entry.get("weight") is None else float(entry["weight"])
            if not math.isfinite(weight):
                raise ValueError(f"Found weight {weight} of verifier {entry['name']!r}; expected a number.")
            assigned.append(Assigned(check_name(str(entry["name"])), entry.get("label"), weight))
        return assigned
    if names is None and columns is not None:
        names, truth = columns.get("dataset"), columns.get("ground_truth")
        names = None if truth is None else names  # many a data set has a column of that name
    if names is None:
        return []
    if isinstance(names, str):  # Open-Instruct writes a single label as a list of one, too
        is_list = not isinstance(truth, str | Mapping) and hasattr(truth, "__len__")
        return [Assigned(check_name(names), truth[0] if is_list and len(truth) == 1 else truth)]
    is_one = isinstance(truth, str | Mapping) or not hasattr(truth, "__len__")
    names, labels = list(names), [truth] if is_one else list(truth)
    if len(names) != len(labels):
        raise ValueError(
            f"Found {len(names)} verifiers {names} with {len(labels)} labels; expected one each."
        )
    return [Assigned(check_name(str(name)), label) for name, label in zip(names, labels, strict=True)]


def make_verifier(name: str, settings: VerifierSettings) -> Verifier:
    """The verifier of a name, ready to work. ValueError: there is none, or it is no verifier."""
    module_name, _, class_name = VERIFIERS.get(check_name(name), name).partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise ValueError(f"Verifier {name!r}: {module_name} can't be imported ({error})") from error
    if not isinstance(found, type) or not issubclass(found, Verifier):
        raise ValueError(
            f"Verifier {name!r}: found no class {class_name!r} in {module_name} that derives from "
            "verl.verifiers.Verifier."
        )
    return found.create(name, settings)


def check_rows(rows: Iterable[Mapping[str, Any]], settings: VerifierSettings) -> int:
    """How many rows name verifiers. ValueError for the first one with an unknown name or a label that its
    verifier can't work with. For before the run starts.
    """
    made: dict[str, Verifier] = {}
    count = 0
    for index, row in enumerate(rows):
        try:
            assigned = assigned_verifiers(row.get("reward_model", row.get("reward_spec")), row)
            for each in assigned:
                if each.name not in made:
                    made[each.name] = make_verifier(each.name, settings)
                made[each.name].check_label(each.label)
        except ValueError as error:
            raise ValueError(f"row {index}: {error}") from error
        count += bool(assigned)
    for verifier in made.values():
        verifier.close()
    return count
