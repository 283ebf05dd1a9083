"""Exact match: whether the answer that the policy gave is one of the golden answers.

    policy's own text -> extract_solution -> normalize_answer -> compare with each golden answer

`f1_check` measures how many words the answer shares with the nearest golden answer.

The normalisation is that of SQuAD (Rajpurkar et al. 2016), the one that Search-R1 and its baselines report.
"""

import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from verl.utils.rows import truth_struct
from verl.utils.text import is_encodable, is_printed_list

# The match starts at the last opening tag before a closing one, so that an answer that was begun and not
# closed spoils no later one.
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_OPEN_ANSWER = re.compile(r"<answer>(?!.*</answer>)", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CURLY = frozenset("\u2018\u2019\u201c\u201d")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_NUMBERS = re.compile(r"\[[\d\s.,+-]*\]")  # a list of numbers
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and English articles, with single spaces.

    Letters with accents are composed (NFC), however a file or a policy writes them.
    """
    return " ".join(_ARTICLES.sub(" ", composed(text).lower().translate(_PUNCTUATION)).split())


def composed(text: str) -> str:
    """Return the text with its letters composed (NFC)."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def has_unusual_letters(answers: Iterable[str]) -> bool:
    """Return whether all golden answers of a row have letters that a policy hardly writes.

    These are full-width letters, ligatures and the like, and curly quotes. They are compared as they are.

    Args:
        answers: the golden answers, at least one.
    """
    return all(map(_is_unusual, answers))


def _is_unusual(answer: str) -> bool:
    if answer.isascii():
        return False
    is_compatible = unicodedata.normalize("NFKC", answer) != composed(answer)
    return is_compatible or not _CURLY.isdisjoint(answer)


def known_answers(ground_truth: Any) -> list[str]:
    """Return the golden answers of a row, `{"target": [...]}` as in the parquet files; [] if it has none.

    The struct, and the list in it, may be JSON text.
    """
    struct = truth_struct(ground_truth)
    return [] if struct is None else _strings(struct.get("target"))


def has_answers(ground_truth: Any) -> bool:
    """Return whether a row has golden answers, as `known_answers` reads them."""
    struct = truth_struct(ground_truth)
    target = None if struct is None else struct.get("target")
    if isinstance(target, list) and target and isinstance(target[0], str) and not target[0].startswith("["):
        return True  # the usual case, and the fastest check
    return bool(known_answers(ground_truth))


def check_answers(ground_truth: Any) -> list[str]:
    """Return the golden answers of a row, as `known_answers` does.

    An answer is text or a number. Text of a list as Python prints it is refused, because it would be a single
    answer that nobody writes.

    Raises ValueError if a golden answer can't be compared with what a policy writes.
    """
    struct = truth_struct(ground_truth)
    if struct is None:
        return []
    answers = _leaves(struct.get("target"))
    for answer in answers:
        if not isinstance(answer, str):
            is_number = isinstance(answer, int | float | Decimal | np.number) and not isinstance(answer, bool)
            if is_number and math.isfinite(answer):
                continue
            raise ValueError(f"found the golden answer {answer!r:.60}; expected text or a number")
        if not is_encodable(answer) or _CONTROL.search(answer):
            raise ValueError(
                f"found the golden answer {answer!r:.60}, with a control character or half of a letter; "
                "expected text"
            )
        is_alone = answer is struct.get("target")
        if is_printed_list(answer) or (is_alone and _NUMBERS.fullmatch(answer.strip())):
            raise ValueError(
                f"found the golden answer {answer!r:.60}, a list as text; expected a list of answers"
            )
    if answers and not any(str(answer).strip() for answer in answers):
        raise ValueError("found golden answers without a letter; expected an answer")
    return list(map(_text_of, answers))


def has_empty_answer(ground_truth: Any) -> bool:
    """Return whether a row has a golden answer that is null or without a letter, beside others."""
    struct = truth_struct(ground_truth)
    target = None if struct is None else struct.get("target")
    if not isinstance(target, list | tuple | np.ndarray):
        return False
    return any(answer is None or (isinstance(answer, str) and not answer.strip()) for answer in target)


def golden_answers(ground_truth: Mapping[str, Any] | str | Iterable[str]) -> list[str]:
    """Return the golden answers of a row, or the answers themselves as texts.

    Raises ValueError if there is none.
    """
    is_row = truth_struct(ground_truth) is not None
    answers = known_answers(ground_truth) if is_row else _strings(ground_truth)
    if not answers:
        raise ValueError(
            f"Found the ground truth {ground_truth!r}; expected {{'target': [answer, ...]}} with an answer."
        )
    return answers


def em_check(prediction: str, golden: str | Iterable[str]) -> int:
    """Return 1 if the normalised prediction equals a normalised golden answer, else 0.

    If the normalisation leaves nothing of an answer ("A", "?"), the answer is compared as it is written,
    ignoring case. An empty prediction is never right.
    """
    normalized = normalize_answer(prediction)
    written = composed(prediction).strip().lower()
    if not normalized:
        answers = (composed(answer).strip().lower() for answer in _strings(golden))
        return int(bool(written) and written in answers)
    return int(any(normalize_answer(answer) == normalized for answer in _strings(golden)))


def token_f1(answer: str, label: str) -> float:
    """Return the harmonic mean of precision and recall over the normalised words; 0 if none is shared."""
    answer_words = normalize_answer(answer).split()
    label_words = normalize_answer(label).split()
    shared = sum((Counter(answer_words) & Counter(label_words)).values())
    return 2 * shared / (len(answer_words) + len(label_words)) if shared else 0.0


def f1_check(prediction: str, golden: str | Iterable[str]) -> float:
    """Return SQuAD's F1, that of the nearest golden answer; it is 1 wherever `em_check` is 1."""
    answers = _strings(golden)
    return max([float(em_check(prediction, answers)), *(token_f1(prediction, answer) for answer in answers)])


def subem_check(prediction: str, golden: str | Iterable[str]) -> int:
    """Return 1 if a normalised golden answer occurs in the normalised prediction, else 0."""
    normalized = normalize_answer(prediction)
    answers = [normalize_answer(answer) for answer in _strings(golden)]
    return int(any(answer in normalized for answer in answers if answer))


def documents_hold_answer(documents: Iterable[Mapping[str, Any]], golden: Iterable[str]) -> bool:
    """Return whether a golden answer occurs in the `contents` of a document, ignoring case."""
    text = composed("\n".join(document["contents"] for document in documents)).lower()
    return any(composed(answer).lower() in text for answer in golden)


def extract_solution(solution_str: str) -> str | None:
    """Return the text in the last `<answer>...</answer>` that the policy wrote, stripped, or None."""
    answers = _ANSWER.findall(solution_str)
    return answers[-1].strip() if answers else None


def join_turns(turns: Iterable[str]) -> str:
    """Join what the policy wrote in its turns to one text, for `extract_solution`.

    An answer must stand in one turn, as in the agent loop. An opening tag that its turn does not close is
    left out, so that no later closing tag can complete it.
    """
    return "\n".join(_OPEN_ANSWER.sub("", turn) for turn in turns)


def compute_score_em(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    check: Callable[[str, list[str]], int] = em_check,
) -> float:
    """Return `score` for a right answer, `format_score` for a wrong one, 0 for none.

    Args:
        solution_str: the policy's own text, without prompt and observations.
        ground_truth: `{"target": [golden answers]}`.
        method: has no effect, as in Search-R1.
        format_score: the reward of a wrong answer.
        score: the reward of a right answer.
        check: function that says whether an answer is right.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if check(answer, golden_answers(ground_truth)) else format_score


def compute_score_em_f1(
    data_source: str, solution_str: str, ground_truth: Mapping[str, Any], extra_info: Any = None
) -> float:
    """Return the mean of exact match and token F1, for `custom_reward_function` (path: this file)."""
    answer = extract_solution(solution_str)
    golden = golden_answers(ground_truth)
    return 0.0 if answer is None else (em_check(answer, golden) + f1_check(answer, golden)) / 2


# Like `compute_score_em`, but an answer that contains a golden answer counts as right.
compute_score_subem = partial(compute_score_em, check=subem_check)


def _strings(value: Any) -> list[str]:
    """Return the texts in a text, a list, an array, or lists of these; numbers come as they are written.

    JSON text of a list of texts is such a list.
    """
    return list(map(_text_of, _leaves(value)))


def _text_of(answer: Any) -> str:
    """Return an answer as text. A whole number from a column of numbers may be a float."""
    if isinstance(answer, str):
        return answer
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer)


def _leaves(value: Any) -> list[Any]:
    """Return the answers in an answer, a list, an array, lists of these, or JSON text of a list of texts."""
    if value is None:
        return []
    if isinstance(value, str):
        if not value.startswith("["):
            return [value]
        value = _list_in_text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        return [value]
    leaves = list[Any]()
    for item in np.atleast_1d(value) if isinstance(value, np.ndarray) else value:
        leaves += _leaves(item)
    return leaves


def _list_in_text(text: str) -> Any:
    """Return the texts of a JSON list of texts, and any other text as it is."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_list = isinstance(parsed, list) and bool(parsed) and all(isinstance(item, str) for item in parsed)
    return parsed if is_list else text


def plain_title(text: str) -> str:
    """Return a title as titles are compared: in small letters, without quotes around it."""
    return text.strip().strip('"').strip().lower()
