"""Verifiers that compare text by Open-Instruct's rules.

Each takes microseconds and runs in the caller's thread. The name of the verifier decides where the answer
stands in a response:

    gsm8k           the last number
    flan            the text after the last "The answer is: "
    string_matcher  the text between the last <answer> and the </answer> after it; 0 without these tags
    puzzle          the text after </think>, without <answer> tags
    string_f1       as puzzle; the label may be a list (JSON text), of which the best one counts
    re_search       the first <finish>..</finish>, by exact match; the label may be a list (JSON text)
    re_search_f1    the last <finish>, by F1; a wrong answer in good form is worth 0.1
    passthrough     nothing is read; always 0
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score.qa_em import normalize_answer, token_f1
from verl.verifiers.verifier import Sample, Verdict, Verifier, VerifierSettings, check_text_label

_NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+)")
_COMMA = re.compile(r"(\d),(\d)")
_FINISH = re.compile(r"<finish>(.*?)</finish>", re.IGNORECASE | re.DOTALL)


def after_thinking(text: str) -> str:
    """Return the response after its last </think>, without <answer> tags."""
    answer = text.replace("<|assistant|>", "").strip().split("</think>")[-1]
    return answer.replace("<answer>", "").replace("</answer>", "").strip()


def as_labels(label: Any) -> list[str]:
    """Return the labels in a label that may be a list, or JSON text of one.

    Other text is the only label and stays as it is ("1.50" is no number here).
    """
    labels = label
    if isinstance(label, str):
        with contextlib.suppress(ValueError):
            labels = json.loads(label)
    return [str(item) for item in labels] if isinstance(labels, list | tuple) else [str(label).strip()]


class TextVerifier(Verifier):
    """The verifiers of the table in the module's docstring."""

    def check_label(self, label: Any) -> None:
        if self.name == "passthrough":
            return
        labels: Sequence[Any] = [label]
        if "re_search" in self.name or self.name == "string_f1":
            labels = label if isinstance(label, list | tuple) else as_labels(label)
        if label is None or isinstance(label, bytes) or not as_labels(label):
            raise ValueError(f"Found label {label!r} of {self.name}; expected an answer.")
        for answer in labels:
            check_text_label(self.name, answer)

    def verify(self, sample: Sample) -> Verdict:
        text = sample.text
        label = sample.label
        answer = None
        labels = as_labels(label) if "re_search" in self.name else [str(label)]
        match self.name:
            case "gsm8k":
                numbers = _NUMBER.findall(_COMMA.sub(r"\1\2", text))
                answer = numbers[-1] if numbers else text
                # A whole number from a column of numbers may be a float.
                label = int(label) if isinstance(label, float) and label.is_integer() else label
                return Verdict(float(answer.lower() == _COMMA.sub(r"\1\2", str(label).strip()).lower()))
            case "flan":
                answer = text.split("The answer is: ")[-1]
            case "string_matcher" if "<answer>" in text and "</answer>" in text:
                answer = text.split("<answer>")[-1].split("</answer>")[0]
            case "puzzle":
                answer = after_thinking(text)
            case "string_f1":
                return Verdict(
                    max(token_f1(after_thinking(text), reference) for reference in as_labels(label))
                )
            case "re_search" if finish := _FINISH.search(text):
                answer = finish[1].strip() or None
            case "re_search_f1" if "<finish>" in text or "</finish>" in text:
                answer = text.split("<finish>")[-1].split("</finish>")[0]
                return Verdict(
                    (max(token_f1(answer, reference) for reference in labels) or 0.1) if answer else 0.0
                )
        is_right = answer is not None and normalize_answer(answer) in map(normalize_answer, labels)
        return Verdict(float(is_right))


class LengthVerifier(Verifier):
    """The verifiers `max_length` and `up_to_max_length`, which score the length of a response.

    The score is 1 for a response with as many tokens as the label says. It falls in both directions for
    `max_length`, and only above for `up_to_max_length`. It is 0 from `verifiers.length_range` tokens away on.
    """

    def open(self, settings: VerifierSettings) -> None:
        self.length_range = settings.config.length_range

    def check_label(self, label: Any) -> None:
        try:
            number = math.nan if isinstance(label, bool | bytes) else float(label)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"Found label {label!r} of {self.name}; expected a number of tokens.")

    def verify(self, sample: Sample) -> Verdict:
        distance = sample.num_tokens - float(sample.label)
        distance = max(distance, 0.0) if self.name == "up_to_max_length" else abs(distance)
        return Verdict(1 - distance / self.length_range)
