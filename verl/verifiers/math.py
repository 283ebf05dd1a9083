r"""Verifiers of mathematical answers: math, strict_math.

    response -> candidates -> equal to the label as text, or by math-verify (symbols) -> 1, else 0

The name of the verifier decides where the answer stands. For `math` the last \boxed{} and the text that
follows "The final answer is" (Minerva's form) are candidates. If there is neither, it is the last $..$, and
without that the whole response. For `strict_math` it is Minerva's form, or else the whole response.

Text is compared by the rules of Minerva (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D) and of MATH
(Hendrycks et al. 2021, arXiv:2103.03874).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from verl.verifiers.verifier import Sample, check_text_label
from verl.verifiers.workers import CheckedVerifier

_MINERVA = re.compile(r"Final Answer: The final answer is(.*?). I hope it is correct\.")
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_REPLACED = [("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")]
_REPLACED += [(",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")]
_REMOVED = "square ways integers dollars mph inches ft hours km units \\ldots sue points feet minutes digits"
_REMOVED += " cents degrees cm gm pounds meters meals edges students childrentickets multiples \\text{s}"
_REMOVED_TEXTS = [*_REMOVED.split(), "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"]
_REMOVED_TEXTS += ["\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"]
_UNWRAPPED = [(r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"\\text\{(.*?)\}", r"\1")]
_UNWRAPPED += [(r"\\textbf\{(.*?)\}", r"\1"), (r"\\overline\{(.*?)\}", r"\1"), (r"\\boxed\{(.*)\}", r"\1")]
_UNWRAPPED += [(r"frac([^{])(.)", r"frac{\1}{\2}"), (r"sqrt([^{])", r"sqrt{\1}")]
_STRIPPED = [("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")]
_STRIPPED += [("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")]


class MathVerifier(CheckedVerifier):
    """The verifiers `math` and `strict_math`, which work in processes of their own (`workers.py`)."""

    needs = ("math_verify",)
    function = "verl.verifiers.math:math_score"
    warm_up_arguments = ("0.50", "1/2", False)

    def check_label(self, label: Any) -> None:
        check_text_label(self.name, label)

    def _call(self, sample: Sample) -> Sequence[Any]:
        return sample.text, str(sample.label), self.name == "strict_math"


def math_score(text: str, label: str, is_strict: bool) -> float:
    """Return 1 if a candidate of the response equals the label, and 0 otherwise."""
    answers = candidates(text, is_strict)
    return float(
        any(equal(answer, label) for equal in (same_text, same_by_math_verify) for answer in answers)
    )


def candidates(text: str, is_strict: bool) -> list[str]:
    """Return the texts that may be the answer, by the rules in the module's docstring."""
    minerva = _MINERVA.search(text + "I hope it is correct.")
    boxed = None if is_strict else last_boxed(text)
    answers = [] if boxed is None else [boxed]
    answers += [] if minerva is None else [minerva_form(minerva[1].strip())]
    dollars = [match.start() for match in re.finditer(r"\$", text)]
    if not answers and not is_strict and len(dollars) > 1:
        answers = [minerva_form(text[dollars[-2] + 1 : dollars[-1]])]
    return answers or ([minerva_form(text)] if is_strict else [minerva_form(text), text])


def last_boxed(text: str) -> str | None:
    r"""Return the text in the last \boxed{..}, with matching braces, or the text after the last "\boxed ".

    Returns None if there is neither.
    """
    if "\\boxed " in text:
        return text.rsplit("\\boxed ", 1)[1].split("$")[0]
    start = text.rfind("\\boxed{")
    depth = 0
    for end in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start + 7 : end]
    return None


def minerva_form(answer: str) -> str:
    """Normalise an answer as in Minerva's evaluation.

    Units and markup are removed, and shorthand is written out.
    """
    answer = answer.split("=")[-1]
    for before, after in (*_REPLACED, *((text, "") for text in _REMOVED_TEXTS)):
        answer = answer.replace(before, after)
    for pattern, form in _UNWRAPPED:
        answer = re.sub(pattern, form, answer)
    answer = answer.replace("$", "")
    return answer.replace(",", "") if answer.replace(",", "").isdigit() else answer


def same_text(first: str, second: str) -> bool:
    """Return whether both texts are the same by the rules of MATH."""
    forms = _math_form(first), _math_form(second)
    return first == second if None in forms else forms[0] == forms[1]


def _math_form(answer: str) -> str | None:
    r"""Normalise an answer by the rules of MATH.

    Returns None if the answer has a form (two units, a \sqrt at its end) that these rules don't cover.
    """
    for before, after in _STRIPPED:
        answer = answer.replace(before, after)
    answer, *units = answer.split("\\text{ ")
    if len(units) > 1 or re.search(r"\\(sqrt|frac)$", answer):
        return None
    answer = answer.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    answer = "0" + answer if answer.startswith(".") else answer
    name, equals, value = answer.partition("=")
    answer = value if equals and len(name) <= 2 and "=" not in value else answer
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", answer)
    answer = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", answer)
    answer = "1/2" if answer == "0.5" else answer
    return re.sub(r"^(0|-?[1-9]\d*)/(0|-?[1-9]\d*)$", r"\\frac{\1}{\2}", answer)


def same_by_math_verify(candidate: str, label: str) -> bool:
    """Return whether math-verify finds that both are equal.

    Prose has no value: the last number of a text without an answer would be right by chance.
    """
    if len(candidate) > 2000 or len(_WORDS.findall(candidate)) > 3 or "\\boxed" in candidate:
        return False
    import math_verify  # This takes half a second, which only the processes pay.

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no clock of its own
    forms = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    gold, prediction = (
        math_verify.parse(f"${text}$", forms, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (label, candidate)
    )
    return bool(gold) and bool(math_verify.verify(gold, prediction, timeout_seconds=None))
