"""Verifiers that compare text, by Open-Instruct's rules. Each costs microseconds and runs where it is called.

The rule where the answer stands in a response is part of the verifier's name:

    gsm8k           the last number
    flan            what follows the last "The answer is: "
    string_matcher  between the last <answer> and the </answer> after it; without these tags 0
    puzzle          all that follows </think>, without <answer> tags
    string_f1       as puzzle; the label may be a list (JSON text), the best one counts
    re_search       the first <finish>..</finish>, as exact match; the label may be a list (JSON text)
    re_search_f1    the last <finish>, as F1; a wrong answer in good form is worth 0.1
    passthrough     nothing is read; 0
"""

from __future__ import annotations

import contextlib
import json
import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

from verl.verifiers.base import Sample, Verdict, Verifier, VerifierSettings

_NUMBER = re.compile(r"[-+]?(?:\d*\.\d+|\d+)")
_COMMA = re.compile(r"(\d),(\d)")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_FINISH = re.compile(r"<finish>(.*?)</finish>", re.IGNORECASE | re.DOTALL)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def after_thinking(text: str) -> str:
    """The response behind its last </think>, without <answer> tags."""
    answer = text.replace("<|assistant|>", "").strip().split("</think>")[-1]
    return answer.replace("<answer>", "").replace("</answer>", "").strip()


def normalized(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (SQuAD's rule)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def f1(answer: str, label: str) -> float:
    """Harmonic mean of precision and recall over the normalised words; 0 where none is shared."""
    found, wanted = normalized(answer).split(), normalized(label).split()
    shared = sum((Counter(found) & Counter(wanted)).values())
    return 2 * shared / (len(found) + len(wanted)) if shared else 0.0


def as_labels(label: Any) -> list[str]:
    """A label that may be a list, also as JSON text; other text stays as it is ("1.50" is no number here)."""
    read = label
    if isinstance(label, str):
        with contextlib.suppress(ValueError):
            read = json.loads(label)
    return [str(each) for each in read] if isinstance(read, list | tuple) else [str(label).strip()]


def _gsm8k(text: str, label: Any) -> float:
    numbers = _NUMBER.findall(_COMMA.sub(r"\1\2", text))
    answer = numbers[-1] if numbers else text
    label = int(label) if isinstance(label, float) and label.is_integer() else label  # 72.0 of a column
    return float(answer.lower() == _COMMA.sub(r"\1\2", str(label).strip()).lower())


def _string_matcher(text: str, label: Any) -> float:
    if "<answer>" not in text or "</answer>" not in text:
        return 0.0
    return _same(text.split("<answer>")[-1].split("</answer>")[0], label)


def _same(answer: str, label: Any) -> float:
    return float(normalized(answer) == normalized(str(label)))


def _re_search(text: str, label: Any) -> float:
    found = _FINISH.search(text)
    answer = found[1].strip() if found else ""
    return float(bool(answer) and normalized(answer) in map(normalized, as_labels(label)))


def _re_search_f1(text: str, label: Any) -> float:
    if "<finish>" not in text and "</finish>" not in text:
        return 0.0
    answer = text.split("<finish>")[-1].split("</finish>")[0]
    return (max(f1(answer, each) for each in as_labels(label)) or 0.1) if answer else 0.0


class TextVerifier(Verifier):
    """Those of the table above."""

    rules: ClassVar[dict[str, Callable[[str, Any], float]]] = {
        "gsm8k": _gsm8k,
        "flan": lambda text, label: _same(text.split("The answer is: ")[-1], label),
        "string_matcher": _string_matcher,
        "puzzle": lambda text, label: _same(after_thinking(text), label),
        "string_f1": lambda text, label: max(f1(after_thinking(text), each) for each in as_labels(label)),
        "re_search": _re_search,
        "re_search_f1": _re_search_f1,
        "passthrough": lambda text, label: 0.0,
    }

    def check_label(self, label: Any) -> None:
        if self.name != "passthrough" and (label is None or not as_labels(label)):
            raise ValueError(f"Found label {label!r} of {self.name}; expected an answer.")

    def verify(self, sample: Sample) -> Verdict:
        return Verdict(self.rules[self.name](sample.text, sample.label))


class LengthVerifier(Verifier):
    """max_length: 1 for a response of as many tokens as the label says, less in both directions;
    up_to_max_length: less only above. `verifiers.length_range` tokens away, and further, it is 0.
    """

    def __init__(self, name: str, length_range: int) -> None:
        self.name, self.length_range = name, length_range

    @classmethod
    def create(cls, name: str, settings: VerifierSettings) -> LengthVerifier:
        return cls(name, settings.config.length_range)

    def check_label(self, label: Any) -> None:
        try:
            float(label)
        except (TypeError, ValueError):
            raise ValueError(f"Found label {label!r} of {self.name}; expected a number of tokens.") from None

    def verify(self, sample: Sample) -> Verdict:
        away = sample.num_tokens - float(sample.label)
        away = max(away, 0.0) if self.name == "up_to_max_length" else abs(away)
        return Verdict(1 - away / self.length_range)
