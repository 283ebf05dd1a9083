"""What a verifier takes and gives: Sample -> Verifier.verify -> Verdict (a score, or None).

"Could not verify" is no score: a judge that stalls or a server that dies says nothing about the policy. Such
a row leaves the batch and is counted as `reward/unverified/<name>`. A timeout that the policy's own text has
caused is a score, the lowest, with `timed_out`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from verl.config.environments import VerifiersConfig


class CouldNotVerify(Exception):
    """An environment or a verifier has no verdict, for a reason that is not the policy's."""


class VerifierLimit(Exception):
    """The run may not go on: a verifier has spent what it was allowed to. It resumes with a higher limit."""


@dataclass(frozen=True)
class VerifierSettings:
    """What a verifier is made from: the `verifiers` block, the run's folder for what has to last, and what
    the verifiers of a run share, by name.
    """

    config: VerifiersConfig
    folder: Path | None = None
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One response.

    text: only what the policy wrote, all turns joined. label: the row's, as it is in the data (often text or
    JSON text). query: the prompt's text. num_tokens: that the policy sampled. extra_info: the row's.
    """

    text: str
    label: Any
    query: str = ""
    num_tokens: int = 0
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """score: within the verifier's range, or None: could not verify. detail: why, for people. cost: US
    dollars that it took. timed_out: the policy's text was too much to check in time; the score is the lowest.
    """

    score: float | None
    detail: str = ""
    cost: float = 0.0
    timed_out: bool = False


class Verifier:
    """Scores responses. A subclass defines `verify`, or `verify_many` where many at once are faster.

    name: what rows call it, and its metrics. low, high: the range of its scores, to which they are clipped.
    """

    name: str = ""
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0

    def open(self, settings: VerifierSettings) -> None:
        """Gets what it works with; called once, when `name` is set."""

    def check_label(self, label: Any) -> None:
        """Raises ValueError for a label that it can't work with; called before the run starts."""

    def verify(self, sample: Sample) -> Verdict:
        """The verdict of one response. CouldNotVerify is the same as a verdict without a score; any other
        exception stops the run, as it is a mistake in the verifier or in the row's label.
        """
        return self.verify_many([sample])[0]

    def verify_many(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The verdict of each response, in order."""
        verdicts = []
        for sample in samples:
            try:
                verdicts.append(self.verify(sample))
            except CouldNotVerify as error:
                verdicts.append(Verdict(None, str(error)))
        return verdicts

    def close(self) -> None:
        """Ends processes and connections."""


def parsed(value: Any) -> Any:
    """A value, or what a text holds as JSON or as a Python literal. ValueError: the text is neither."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"neither JSON nor a Python literal: {value!r:.100}") from None
