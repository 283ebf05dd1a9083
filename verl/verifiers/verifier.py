"""The interface of a verifier: Sample -> Verifier.verify -> Verdict (a score, or None).

"Could not verify" is not a score: a judge that stalls or a server that dies says nothing about the policy. A
row without a score leaves the batch and is counted as `reward/unverified/<name>`. A timeout that the policy's
own text has caused gives the lowest score, with `timed_out`.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from verl.utils.errors import CouldNotVerify
from verl.utils.text import is_encodable, is_printed_list

if TYPE_CHECKING:
    from verl.config.environments import VerifiersConfig


class VerifierLimit(Exception):
    """An error that stops the run because a verifier has spent what it was allowed to.

    You can resume the run with a higher limit.
    """


@dataclass(frozen=True)
class VerifierSettings:
    """The settings that a verifier is made with.

    Attributes:
        config: The configuration's block `verifiers`.
        folder: The run's folder, for files that have to last.
        shared: Objects that the verifiers of a run share, by name.
    """

    config: VerifiersConfig
    folder: Path | None = None
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One response.

    Attributes:
        text: The text that the policy wrote, with all turns joined and nothing else.
        label: The row's label as it is in the data, which is often text or JSON text.
        query: The text of the prompt.
        num_tokens: The number of tokens that the policy sampled.
        extra_info: The row's column `extra_info`.
    """

    text: str
    label: Any
    query: str = ""
    num_tokens: int = 0
    extra_info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one response.

    Attributes:
        score: The score, within the verifier's range. None if the response could not be verified.
        detail: The reason of the score, for people to read.
        cost: The cost of the verdict in US dollars.
        timed_out: Whether the policy's text was too much to check in time. The score is then the lowest.
        num_judged_inside: The number of tests that were judged in the program's own process.
    """

    score: float | None
    detail: str = ""
    cost: float = 0.0
    timed_out: bool = False
    num_judged_inside: int = 0


class Verifier:
    """The base class of verifiers, which score responses.

    A subclass defines `verify`, or `verify_many` if it is faster with many responses at once.

    Attributes:
        name: The name of the verifier in rows and metrics.
        low: The lowest score. Lower ones are clipped to it.
        high: The highest score. Higher ones are clipped to it.
        needs: Modules of `verl.utils.extras` without which the verifier can't work.
    """

    name: str = ""
    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0
    needs: ClassVar[tuple[str, ...]] = ()

    def open(self, settings: VerifierSettings) -> None:
        """Prepare the verifier.

        This method is called once, after `name` is set.
        """

    def check_label(self, label: Any) -> None:
        """Raise ValueError if the verifier can't work with a label.

        This method is called before the run starts.
        """

    def check_solutions(self, samples: Sequence[Sample]) -> None:
        """Verify the rows' own solutions, and warn of those that do not pass.

        This method is called before the run starts, if there are such rows.
        """

    def verify(self, sample: Sample) -> Verdict:
        """Return the verdict on one response.

        Raising CouldNotVerify is the same as returning a verdict without a score. Any other exception stops
        the run, because it is a mistake in the verifier or in the row's label.
        """
        return self.verify_many([sample])[0]

    def verify_many(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Return the verdict on each response, in order."""
        verdicts = []
        for sample in samples:
            try:
                verdicts.append(self.verify(sample))
            except CouldNotVerify as error:
                verdicts.append(Verdict(None, str(error)))
        return verdicts

    def close(self) -> None:
        """End processes and connections."""


def parse_literal(value: Any) -> Any:
    """Parse a text as JSON or as a Python literal.

    A value that is no text is returned as it is. Raises ValueError if a text is neither JSON nor a literal.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError(f"neither JSON nor a Python literal: {value!r:.100}") from None


def check_text_label(name: str, label: Any) -> None:
    """Raise ValueError unless a label is an answer that a response can be compared with: text or a number.

    Args:
        name: The name of the verifier.
        label: The label.
    """
    is_number = isinstance(label, Real) and not isinstance(label, bool) and math.isfinite(label)
    is_text = isinstance(label, str) and bool(label.strip()) and is_encodable(label)
    if not is_number and not (is_text and not is_printed_list(label)):
        raise ValueError(f"Found label {label!r:.200} of {name}; expected an answer, as text or a number.")
