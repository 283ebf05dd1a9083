"""Measures of how near a long answer comes to its reference, and of what searching brought.

They stand beside exact match.

    answer, references -> rouge_l, token_f1, jaccard, bleu: of the best reference
    turns              -> gold_recall, gold_recall_at_<search>, answer_from_search

Texts in Chinese, Japanese or Korean are compared by letters, others by words (small letters, no punctuation).
The four figures are those that LegalSearch-R1 (a fork of Search-R1 for law) prints: ROUGE-L with beta 1.2
(Lin 2004), F1 of tokens, Jaccard's index of their sets, and BLEU-4 (Papineni et al. 2002), where an order of
n-grams without a match counts 1 / (number * 2^n).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.reward_score.qa_em import documents_hold_answer, plain_title

ROUGE_BETA = 1.2
BLEU_ORDER = 4
SEARCHES_TOLD = 4
NAMES = ("rouge_l", "token_f1", "jaccard", "bleu")
_CJK = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_WORD = re.compile(r"\w+")


def tokens_of(text: str, by_letters: bool) -> list[str]:
    """Return the letters of a text without white space, or its words."""
    return list("".join(text.split())) if by_letters else _WORD.findall(text.lower())


def is_by_letters(text: str) -> bool:
    """Return whether a text is mostly Chinese, Japanese or Korean."""
    return 2 * len(_CJK.findall(text)) > len(_WORD.findall(text))


def similarity(answer: str, references: Sequence[str]) -> dict[str, float]:
    """Return the four figures, each of the reference that gives the highest one.

    They are 0 without an answer or a reference.
    """
    best = dict.fromkeys(NAMES, 0.0)
    for reference in references:
        by_letters = is_by_letters(reference)
        pair = tokens_of(reference, by_letters), tokens_of(answer, by_letters)
        for name, figure in zip(NAMES, (rouge_l, token_f1, jaccard, bleu), strict=True):
            best[name] = max(best[name], figure(*pair))
    return best


def rouge_l(reference: Sequence[str], answer: Sequence[str]) -> float:
    """Return the F-measure of the longest common subsequence, with recall weighted by ROUGE_BETA."""
    row = [0] * (len(answer) + 1)
    for token in reference:
        diagonal = 0
        for i, other in enumerate(answer, 1):
            above = row[i]
            row[i] = diagonal + 1 if token == other else max(above, row[i - 1])
            diagonal = above
    if not row[-1]:
        return 0.0
    recall = row[-1] / len(reference)
    precision = row[-1] / len(answer)
    square = ROUGE_BETA**2
    return (1 + square) * recall * precision / (recall + square * precision)


def token_f1(reference: Sequence[str], answer: Sequence[str]) -> float:
    """Return the F1 of the tokens, each counted as often as it occurs."""
    common = (Counter(reference) & Counter(answer)).total()
    return 2 * common / (len(reference) + len(answer)) if common else float(not reference and not answer)


def jaccard(reference: Sequence[str], answer: Sequence[str]) -> float:
    """Return the number of common tokens over that of all tokens, each counted once."""
    all_tokens = set(reference) | set(answer)
    return len(set(reference) & set(answer)) / len(all_tokens) if all_tokens else 1.0


def bleu(reference: Sequence[str], answer: Sequence[str]) -> float:
    """Return BLEU-4 of one answer, which is 0 for an answer of fewer than four tokens."""
    if len(answer) < BLEU_ORDER:
        return 0.0
    logs = 0.0
    for n in range(1, BLEU_ORDER + 1):
        counts = [Counter(zip(*(text[i:] for i in range(n)), strict=False)) for text in (reference, answer)]
        number = counts[1].total()
        common = (counts[0] & counts[1]).total()
        logs += math.log(common / number if common else 1 / (number * 2**n)) / BLEU_ORDER
    brevity = min(0.0, 1 - len(reference) / len(answer))
    return math.exp(brevity + logs)


def retrieval_effect(
    trajectory: Mapping[str, Any], gold_titles: Sequence[str] | None, answer: str | None
) -> dict[str, float | None]:
    """Return what a rollout's searches brought.

    Returns:
        These figures, each None if the row or the rollout does not tell it:

        - `gold_recall`: the share of the passages in extra_info.gold_titles of the row that were found.
        - `gold_recall_at_1` to `gold_recall_at_4`: the share after this many searches, or all that it made.
        - `answer_from_search`: 1 if its answer was in the documents of a search, and 0 if not.
        - `answer_search`: the number of the first such search, from 1.
    """
    documents_so_far: list[Mapping[str, Any]] = []
    figures: dict[str, float | None] = {
        "gold_recall": None,
        "answer_from_search": None,
        "answer_search": None,
    }
    gold = {plain_title(title) for title in gold_titles or ()}
    searches = [turn["documents"] for turn in trajectory["turns"] if turn.get("documents") is not None]
    if gold:
        names = [f"gold_recall_at_{n + 1}" for n in range(SEARCHES_TOLD)]
        figures |= dict.fromkeys(["gold_recall", *names], 0.0)
    if answer and searches:
        figures["answer_from_search"] = 0.0
    for number, documents in enumerate(searches, 1):
        documents_so_far += documents
        if gold:
            titles = {plain_title(document["contents"].partition("\n")[0]) for document in documents_so_far}
            recall = len(gold & titles) / len(gold)
            names_from_here = [f"gold_recall_at_{n}" for n in range(number, SEARCHES_TOLD + 1)]
            figures |= dict.fromkeys(["gold_recall", *names_from_here], recall)
        if answer and not figures["answer_from_search"] and documents_hold_answer(documents, [answer]):
            figures["answer_from_search"] = 1.0
            figures["answer_search"] = float(number)
    return figures
