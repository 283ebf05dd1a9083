"""Exact match: is the answer that the policy gave one of the golden answers?

    policy's own text -> extract_solution -> normalize_answer -> compare with each golden answer

The normalisation is SQuAD's (Rajpurkar et al. 2016), the one that Search-R1 and its baselines report.
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

# From the last opening tag before a closing one: an answer that was begun and not closed spoils no later one.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPEN_ANSWER = re.compile(r"<answer>(?!.*</answer>)", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces."""
    without_punctuation = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def golden_answers(ground_truth: Mapping[str, Any] | str | Iterable[str]) -> list[str]:
    """The golden answers of a row: `{"target": [...]}` as in the parquet files, or the answers themselves.

    Raises:
        ValueError: there is none.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    answers = list(_strings(target))
    if not answers:
        raise ValueError(
            f"Found the ground truth {ground_truth!r}; expected {{'target': [answer, ...]}} with an answer."
        )
    return answers


def em_check(prediction: str, golden: str | Iterable[str]) -> int:
    """1 if the normalised prediction equals a normalised golden answer, else 0.

    An answer of which the normalisation leaves nothing ("A", "?") is compared as it is written, in whatever
    case: no answer at all is never a right one.
    """
    normalized, written = normalize_answer(prediction), prediction.strip().lower()
    if not normalized:
        return int(bool(written) and any(answer.strip().lower() == written for answer in _strings(golden)))
    return int(any(normalize_answer(answer) == normalized for answer in _strings(golden)))


def subem_check(prediction: str, golden: str | Iterable[str]) -> int:
    """1 if a normalised golden answer occurs in the normalised prediction, else 0."""
    normalized = normalize_answer(prediction)
    wanted = [normalize_answer(answer) for answer in _strings(golden)]
    return int(any(answer in normalized for answer in wanted if answer))


def documents_hold_answer(documents: Iterable[Mapping[str, Any]], golden: Iterable[str]) -> bool:
    """Whether a golden answer stands, in whatever case, in the `contents` of a document."""
    text = "\n".join(document["contents"] for document in documents).lower()
    return any(answer.lower() in text for answer in golden)


def extract_solution(solution_str: str) -> str | None:
    """The text in the last `<answer>...</answer>` of what the policy wrote, stripped; None without one."""
    answers = _ANSWER.findall(solution_str)
    return answers[-1].strip() if answers else None


def join_turns(turns: Iterable[str]) -> str:
    """What the policy wrote in its turns as one text, for `extract_solution`.

    An answer stands in one turn, as in the agent loop: an opening tag that its turn does not close is left
    out, so that no later closing tag can complete it.
    """
    return "\n".join(_OPEN_ANSWER.sub("", turn) for turn in turns)


def compute_score_em(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` for a right answer, `format_score` for a wrong one, 0 for none.

    Args:
        solution_str: the policy's own text, without prompt and observations.
        ground_truth: `{"target": [golden answers]}`.
        method: has no effect, as in Search-R1.
    """
    return _score(em_check, solution_str, ground_truth, format_score, score)


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """As `compute_score_em`, with a golden answer inside the given one counted as right."""
    return _score(subem_check, solution_str, ground_truth, format_score, score)


def _score(
    check: Callable[[str, list[str]], int],
    solution_str: str,
    ground_truth: Mapping[str, Any],
    format_score: float,
    score: float,
) -> float:
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if check(answer, golden_answers(ground_truth)) else format_score


def _strings(value: Any) -> Iterable[str]:
    """The texts in a text, a list, an array, or lists of these; numbers as they are written."""
    if value is None:
        return
    if isinstance(value, list | tuple | np.ndarray):
        for item in value:
            yield from _strings(item)
    else:
        yield str(value)
