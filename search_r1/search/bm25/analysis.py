"""Text to index terms, as Lucene's EnglishAnalyzer does it (Pyserini's and Anserini's default).

    text -> find_words -> normalize each: no possessive 's, lower case, no stop words, Porter's stem -> terms

The same for queries and documents. Words come again and again, so who analyses much text keeps a dictionary
from the word as written to whatever it needs, and calls `normalize` for words that it has not met.
"""

from __future__ import annotations

from search_r1.search.bm25.porter import stem
from search_r1.search.bm25.word_break import JOINER_CHARACTERS, find_words

ANALYSIS_VERSION = 2  # part of what an index must agree with: raise it when a text's terms change
MAX_WORD_UNITS = 255  # Lucene cuts longer words into pieces of so many UTF-16 units
STOP_WORD_TEXT = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(STOP_WORD_TEXT.split())
POSSESSIVES = ("'s", "'S", "’s", "’S", "＇s", "＇S")


def words(text: str) -> list[str]:
    """The words of a text as they are written, in order."""
    written = find_words(text)
    if len(text) > MAX_WORD_UNITS // 2 and max(map(len, written), default=0) > MAX_WORD_UNITS // 2:
        return [piece for word in written for piece in _pieces(word)]
    return written


def normalize(word: str) -> str | None:
    """The term of a word; None for one that is not indexed."""
    if word.endswith(POSSESSIVES):
        word = word[:-2]
    word = word.lower() if word.isascii() else "".join([_lower(letter) for letter in word])
    if word in STOP_WORDS or not word.strip(JOINER_CHARACTERS):
        return None
    return stem(word)


def analyze(text: str) -> list[str]:
    """The terms of a text, in order."""
    return [term for term in map(normalize, words(text)) if term is not None]


def _lower(letter: str) -> str:
    """Letter by letter, as Java does: no final sigma, and İ becomes i."""
    return letter.lower()[0]


def _pieces(word: str) -> list[str]:
    """A word cut after each MAX_WORD_UNITS UTF-16 units."""
    if len(word) <= MAX_WORD_UNITS and len(word.encode("utf-16-le")) <= 2 * MAX_WORD_UNITS:
        return [word]
    pieces, start, units = [], 0, 0
    for place, letter in enumerate(word):
        width = 2 if letter > "\uffff" else 1
        if units + width > MAX_WORD_UNITS:
            pieces.append(word[start:place])
            start, units = place, 0
        units += width
    return [*pieces, word[start:]]
