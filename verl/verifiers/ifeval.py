"""Verifiers of instructions that a program can check: ifeval, ifeval_old.

    ifeval      The label is [{"instruction_id": [ids], "kwargs": [arguments or null of each]}]. The score is
                the share of the instructions that the response follows. The package if-verifiable checks
                IFEval's 25 ids (Zhou et al. 2023, arXiv:2311.07911). This module checks Open-Instruct's 29
                others (IF-RLVR, Pyatkin et al. 2025, arXiv:2507.02833).
    ifeval_old  The label is {"func_name": name, its arguments}. The score is 1 or 0.

Both read the response after </think>. Nothing is downloaded: nltk's tokenizers find words and sentences
without their trained data, and the language detector starts from a fixed seed.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from verl.verifiers.text import after_thinking
from verl.verifiers.verifier import Sample, parse_literal
from verl.verifiers.workers import CheckedVerifier

_ABBREVIATIONS = "dr mr mrs ms prof st jr sr inc ltd co corp vs etc e.g i.e u.s u.k a.m p.m no fig p.s"
_RELATIONS = ("less than", "at least", "at most", "around")
_FIRST = {  # makes a process load words, sentences and languages before its first clock starts
    "instruction_id": ["language:response_language", "keywords:start_end"],
    "kwargs": [{"language": "en"}, None],
}


class IFEvalVerifier(CheckedVerifier):
    """The verifiers `ifeval` and `ifeval_old`, which work in processes of their own (`workers.py`)."""

    needs = ("if_verifiable",)
    function = "verl.verifiers.ifeval:ifeval_score"
    warm_up_arguments = ("This is so.", _FIRST)

    def check_label(self, label: Any) -> None:
        for name, arguments in instructions(label):
            _check(name, arguments)

    def _call(self, sample: Sample) -> Sequence[Any]:
        return sample.text, sample.label


def ifeval_score(text: str, label: Any) -> float:
    """Return the share of the label's instructions that the response follows.

    An empty response follows no instruction of ifeval. The checks of ifeval_old run on it nevertheless.
    """
    answer = after_thinking(text)
    wanted = instructions(label)
    followed = [
        bool(_check(name, arguments)(answer)) for name, arguments in wanted if answer or ":" not in name
    ]
    return sum(followed) / max(len(wanted), 1)


def instructions(label: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the id and the arguments of each instruction in a label.

    Raises ValueError if the label has another form.
    """
    content = label
    with suppress(ValueError):
        for _ in range(2):  # The label may be a list of one dictionary, which may be text once more.
            content = parse_literal(content)
            content = content[0] if isinstance(content, list) and content else content
    if isinstance(content, Mapping) and "func_name" in content:
        content = {"instruction_id": [content["func_name"]], "kwargs": [content]}
    if not isinstance(content, Mapping) or (content and "instruction_id" not in content):
        expected = '[{"instruction_id", "kwargs"}] or {"func_name"}'
        raise ValueError(f"Found label {label!r:.200}; expected {expected}.")
    names = content.get("instruction_id", [])
    kwargs = content.get("kwargs") or [None] * len(names)
    arguments = [
        {name: value for name, value in (entry or {}).items() if value is not None} for entry in kwargs
    ]
    return list(zip(names, arguments, strict=True))


def _check(name: str, arguments: dict[str, Any]) -> Callable[[str], Any]:
    """Return the check of one instruction.

    Raises ValueError if there is no such id, or if an argument is missing or has an unknown value.
    """
    check = _OWN.get(name)
    library = _library()
    if check is None and name not in library:
        ids = ", ".join(sorted({*_OWN, *library}))
        raise ValueError(f"Found instruction {name!r}; expected one of {ids}.")
    instruction: Any = None if check else library[name](name)
    names = (
        list(inspect.signature(check).parameters)[1:] if check else instruction.get_instruction_args_keys()
    )
    missing = [argument for argument in names if argument not in arguments]
    if missing:  # The library would draw a missing argument at random.
        raise ValueError(f"Found no {', '.join(missing)} in the arguments of {name}; expected {names}.")
    if check is not None:
        for argument in {"relation", "let_relation", "quantifier"} & {*names}:
            if arguments[argument] not in _RELATIONS:
                expected = ", ".join(_RELATIONS)
                raise ValueError(
                    f"Found {argument}={arguments[argument]!r} of {name}; expected one of {expected}."
                )
        return lambda text: check(text, **{argument: arguments[argument] for argument in names})
    instruction.build_description(**arguments)
    return instruction.check_following


@cache
def _library() -> dict[str, Any]:
    """Return IFEval's checks by id, with tokenizers that need no files."""
    import langdetect
    from if_verifiable.ifeval import instructions_util
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT

    langdetect.DetectorFactory.seed = 0
    instructions_util._get_sentence_tokenizer = _sentences
    instructions_util.nltk.word_tokenize = words
    return dict(INSTRUCTION_DICT)


@cache
def _sentences() -> Any:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(_ABBREVIATIONS.split())
    return PunktSentenceTokenizer(parameters)


def words(text: str) -> list[str]:
    """Split a text into nltk's words, where punctuation marks are words of their own."""
    from nltk.tokenize import NLTKWordTokenizer

    return [
        word for sentence in _sentences().tokenize(text) for word in NLTKWordTokenizer().tokenize(sentence)
    ]


def _split(text: str) -> list[str]:
    from if_verifiable.ifeval.instructions_util import split_into_sentences

    return list(split_into_sentences(text))


def _same(first: str, second: str) -> bool:
    return first.strip().lower() == second.strip().lower()


def _word(word: Any) -> str:
    return (word if isinstance(word, str) else word[0]).strip()


def _is_last(text: str, word: str) -> bool:
    return _same(re.sub(r"[^\w\s]", "", text.split()[-1]), word)


def _count(word: str, text: str) -> int:
    return len(re.findall(re.escape(word.strip()), text, re.IGNORECASE))  # "C++" is no pattern


def _holds(count: int, relation: str, wanted: int, tolerance: int | None = None) -> bool:
    """Return whether a count has a relation to the wanted number.

    Args:
        count: The count.
        relation: One of `_RELATIONS`.
        wanted: The wanted number.
        tolerance: The largest distance for "around". None for a tenth of `wanted`, but at least 1.
    """
    tolerance = max(round(wanted * 0.1), 1) if tolerance is None else tolerance
    if relation == "around":
        return abs(count - wanted) <= tolerance
    return {"less than": count < wanted, "at least": count >= wanted, "at most": count <= wanted}[relation]


def _parts(text: str, divider: str) -> int:
    """Return the number of paragraphs, without an empty one at either end.

    Returns 0 if any other paragraph is empty.
    """
    parts = [part.strip() for part in re.split(divider, text)]
    return 0 if not all(parts[1:-1]) else len(parts) - (not parts[0]) - (len(parts) > 1 and not parts[-1])


def _repeat_phrase(text: str, phrase: str, small_n: int) -> bool:
    original = phrase.split()
    copies = [copy.split() for copy in re.findall(rf"{original[0]} .*? {original[-1]}", text)]
    changes = [sum(a != b for a, b in zip(copy, original, strict=False)) for copy in copies]
    return (
        len(copies) == small_n and all(len(copy) == len(original) for copy in copies) and set(changes) <= {1}
    )


def _sentence_hyphens(text: str) -> bool:
    pairs = zip(text.split("-"), _split(text.replace("-", " ")), strict=False)
    return all(part == part.strip() == sentence for part, sentence in pairs)


def _composition(text: str, n_sent: int, n_words: int) -> bool:
    paragraphs = re.split(r"\s?\*\*\*\s?", text)
    sentences = [_split(paragraph) for paragraph in paragraphs]
    is_whole = all(
        len(paragraph) == n_sent and all(len(words(sentence)) == n_words for sentence in paragraph)
        for paragraph in sentences
    )
    return is_whole and _parts(text, r"\s?\*\*\*\s?") == 3


def _position(text: str, keyword: Any, n: int, m: int) -> bool:
    sentences = _split(text)
    return len(sentences) >= n and words(sentences[n - 1])[m - 1 : m] == [_word(keyword)]


def _no_neighbours(text: str) -> bool:
    letters = [word[0].lower() for word in text.split()]
    pairs = zip(letters, letters[1:], strict=False)
    return all(len(a) == len(b) == 1 and ord(b) - ord(a) != 1 for a, b in pairs)


def _letters(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """Return whether the count of a character has a relation to the wanted number.

    The character may be any. For one that is no letter the library would count a letter drawn at random.
    """
    return _holds(text.lower().count(letter.strip().lower()), let_relation, let_frequency)


_SENTENCE_END = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")
_OWN: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("keywords:letter_frequency", "letters:letter_counting2"), _letters),
    "copy:repeat_phrase": _repeat_phrase,
    "copy:copy": lambda text, prompt_to_repeat: _same(text, prompt_to_repeat),
    "copy:copying_simple": lambda text, prompt_to_repeat: _same(text, prompt_to_repeat),
    "copy:copying_multiple": lambda text, prompt_to_repeat, N: (
        len(parts := text.split("******")) == N and all(_same(part, prompt_to_repeat) for part in parts)
    ),
    "new:copy_span_idx": lambda text, prompt_to_repeat, n_start, n_end: _same(
        text, prompt_to_repeat[n_start:n_end]
    ),
    "detectable_format:sentence_hyphens": _sentence_hyphens,
    "detectable_format:square_brackets": lambda text: all(w[0] == "[" and w[-1] == "]" for w in text.split()),
    "detectable_format:bigram_wrapping": lambda text: all(
        a[:2] == "<<" and b[-2:] == ">>" for a, b in zip(text.split()[::2], text.split()[1::2], strict=False)
    ),
    "keywords:no_adjacent_consecutive": _no_neighbours,
    "keywords:word_once": lambda text, keyword: _count(keyword, text) == 1,
    "keywords:word_count_different_numbers": lambda text, keyword, frequency, relation: _holds(
        _count(keyword, text), relation, frequency
    ),
    "keywords:exclude_word_harder": lambda text, keyword: f" {keyword.strip()} " not in text,
    "keywords:palindrome": lambda text: any(word == word[::-1] for word in text.split()),
    "keywords:keyword_specific_position": _position,
    "keywords:start_end": lambda text: len(w := words(text)) > 1 and w[0].lower() == w[-1].lower(),
    "paragraphs:paragraphs": lambda text: _parts(text, r"\s?\*\*\*\s?") == 2,
    "paragraphs:paragraphs2": lambda text: _parts(text, r"\n\n") == 2,
    "first_word:first_word_sent": lambda text, first_word: all(
        sentence and _same(sentence.split()[0], _word(first_word)) for sentence in _split(text)
    ),
    "first_word:first_word_answer": lambda text, first_word: _same(text.split()[0], first_word),
    "last_word:last_word_sent": lambda text, last_word: all(
        sentence and _is_last(sentence, _word(last_word)) for sentence in _split(text)
    ),
    "last_word:last_word_answer": lambda text, last_word: _is_last(text, last_word),
    "punctuation:punctuation_dot": lambda text: "." not in text,
    "punctuation:punctuation_exclamation": lambda text: "!" not in text,
    "count:lowercase_counting": lambda text, N: len(re.findall(r"\b[a-z]+\b", text)) <= N,
    "letters:letter_counting": lambda text, N, relation: _holds(
        len(re.findall("[a-zA-Z]", text)), relation, N
    ),
    "count:counting_composition": _composition,
    "count:count_unique": lambda text: len(set(found := words(text))) == len(found),
    "count:count_increment_word": lambda text, keyword1, keyword2: (
        _count(keyword1, text) == 1 and _count(keyword2, text) == 2
    ),
    # The checks of ifeval_old.
    "verify_keywords": lambda text, keyword_list: all(
        keyword.lower() in text.lower() for keyword in keyword_list
    ),
    "verify_keyword_frequency": lambda text, word, N: (
        re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == N
    ),
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: len(letter) == 1 and text.count(letter) == N,
    "validate_response_language": lambda text, language: (
        importlib.import_module("langdetect").detect(text) == language
    ),
    "verify_paragraph_count": lambda text, N: (
        len(parts := text.split("* * *")) == N and all(map(str.strip, parts))
    ),
    "validate_word_constraint": lambda text, N, quantifier: _holds(len(text.split()), quantifier, N),
    "verify_sentence_constraint": lambda text, N, quantifier: _holds(
        len(_SENTENCE_END.split(text)), quantifier, N, tolerance=1
    ),
    "validate_paragraphs": lambda text, N, first_word, i: (
        len(parts := text.split("\n\n")) == N and 0 < i <= N and parts[i - 1].strip().startswith(first_word)
    ),
    "verify_postscript": lambda text, postscript_marker: bool(text.partition(postscript_marker)[2].strip()),
    "validate_placeholders": lambda text, N: len(re.findall(r"\[.*?\]", text)) >= N,
    "verify_bullet_points": lambda text, N: (
        sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N
    ),
    "validate_title": lambda text: re.search("<<.*?>>", text) is not None,
    "validate_choice": lambda text, options: any(option in text for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*.*?\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: (
        len(parts := text.split(section_splitter)) - (parts[0] == "") == N
    ),
    "validate_json_format": lambda text: bool([json.loads(text)]),  # if this raises, the score is 0
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: (
        len(parts := text.split("******")) == 2 and parts[0].strip() != parts[1].strip()
    ),
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: _holds(
        len(re.findall(r"\b[A-Z]+\b", text)), quantifier, N
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}
