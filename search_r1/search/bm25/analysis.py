"""Turn text into index terms, as Lucene's EnglishAnalyzer does (Pyserini's and Anserini's default).

    text -> find_words -> normalize each: no possessive 's, lower case, no stop words, Porter's stem -> terms

Queries and documents are analysed in the same way. Words come again and again. A caller that analyses much
text therefore keeps a dictionary from the word as written to whatever it needs, and calls `normalize` only
for words that it has not met.
"""

from __future__ import annotations

from search_r1.search.bm25.word_break import JOINER_CHARACTERS, find_words

ANALYSIS_VERSION = 2  # an index must have the same: raise it when the terms of a text change
MAX_WORD_UNITS = 255  # Lucene cuts longer words into pieces of this many UTF-16 units
STOP_WORD_TEXT = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they
this to was will with
"""
STOP_WORDS = frozenset(STOP_WORD_TEXT.split())
POSSESSIVES = ("'s", "'S", "’s", "’S", "＇s", "＇S")

VOWELS = frozenset("aeiou")
UNCHANGED_ENDINGS = ("a", "o", "f", "k", "h", "b", "p", "w", "x", "z", "v", "j", "q")
"""No rule removes a suffix that ends in one of these letters."""

DOUBLE_SUFFIXES = {
    "ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble",
    "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate",
    "alism": "al", "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive",
    "biliti": "ble", "logi": "log",
}  # fmt: skip
SINGLE_SUFFIXES = {
    "icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": "",
}  # fmt: skip
LAST_SUFFIXES = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "sion", "tion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip
# `str.endswith` with a tuple is one fast call; most words fail it.
REPLACED = [(tuple(suffixes), suffixes) for suffixes in (DOUBLE_SUFFIXES, SINGLE_SUFFIXES)]


def words(text: str) -> list[str]:
    """Return the words of a text as they are written, in order."""
    written = find_words(text)
    if len(text) > MAX_WORD_UNITS // 2 and max(map(len, written), default=0) > MAX_WORD_UNITS // 2:
        return [piece for word in written for piece in _pieces(word)]
    return written


def normalize(word: str) -> str | None:
    """Return the term of a word, or None for a word that is not indexed."""
    if word.endswith(POSSESSIVES):
        word = word[:-2]
    # This goes letter by letter, as in Java: there is no final sigma, and İ becomes i.
    word = word.lower() if word.isascii() else "".join([letter.lower()[0] for letter in word])
    if word in STOP_WORDS or not word.strip(JOINER_CHARACTERS):
        return None
    return stem(word)


def analyze(text: str) -> list[str]:
    """Return the terms of a text, in order."""
    return [term for term in map(normalize, words(text)) if term is not None]


def _pieces(word: str) -> list[str]:
    """Return a word cut after every MAX_WORD_UNITS UTF-16 units."""
    if len(word) <= MAX_WORD_UNITS and len(word.encode("utf-16-le")) <= 2 * MAX_WORD_UNITS:
        return [word]
    pieces = []
    start = 0
    units = 0
    for index, letter in enumerate(word):
        width = 2 if letter > "\uffff" else 1
        if units + width > MAX_WORD_UNITS:
            pieces.append(word[start:index])
            start = index
            units = 0
        units += width
    return [*pieces, word[start:]]


def stem(word: str) -> str:
    """Return Porter's stem of a lower-case word, as Lucene has it: "directors" -> "director".

    M.F. Porter, "An algorithm for suffix stripping", Program 14 (1980), with the two changes that he made
    later ("bli" -> "ble", "logi" -> "log"). Words of up to two letters are left alone.

    Packages that compute this stem differ from Lucene in one of these points, or in which doubled letters
    they halve. With such a package this index would not find what Lucene finds. A character that is no letter
    from a to z counts as a consonant.
    """
    if len(word) <= 2 or word.endswith(UNCHANGED_ENDINGS):
        return word
    word = _strip_inflection(word)
    for endings, suffixes in REPLACED:
        if word.endswith(endings):
            suffix = next(ending for ending in endings if word.endswith(ending))
            base = word.removesuffix(suffix)
            word = base + suffixes[suffix] if _measure(base) > 0 else word
    if word.endswith(LAST_SUFFIXES):
        suffix = next(ending for ending in LAST_SUFFIXES if word.endswith(ending))
        base = word[:-3] if suffix in ("sion", "tion") else word.removesuffix(suffix)
        word = base if _measure(base) > 1 else word
    if word.endswith("e"):
        measure = _measure(word[:-1])
        if measure > 1 or (measure == 1 and not _ends_short(word[:-1])):
            word = word[:-1]
    if word.endswith("ll") and _measure(word) > 1:
        word = word[:-1]
    return word


def _shape(text: str) -> str:
    """Return "v" for each vowel of a text and "c" for each consonant.

    A y after a consonant is a vowel.
    """
    shape = []
    vowel = True  # a y at the start is a consonant
    for letter in text:
        vowel = letter in VOWELS or (letter == "y" and not vowel)
        shape.append("v" if vowel else "c")
    return "".join(shape)


def _measure(text: str) -> int:
    """Return m of a stem `[C](VC)^m[V]`: how many times a vowel is followed by a consonant."""
    return _shape(text).count("vc")


def _ends_short(text: str) -> bool:
    """Return whether a text ends in a consonant, a vowel and a consonant other than w, x, y, as in "hop"."""
    return text[-1:] not in ("w", "x", "y") and _shape(text).endswith("cvc")


def _strip_inflection(word: str) -> str:
    """Remove plural endings, -ed and -ing, and turn a final y into i."""
    if word.endswith("s"):
        if word.endswith(("sses", "ies")):
            word = word[:-2]
        elif not word.endswith("ss"):
            word = word[:-1]
    if word.endswith("eed"):
        if _measure(word[:-3]) > 0:
            word = word[:-1]
    elif word.endswith(("ed", "ing")):
        base = word[:-2] if word.endswith("d") else word[:-3]
        if "v" in _shape(base):
            word = _mend_ending(base)
    if word.endswith("y") and "v" in _shape(word[:-1]):
        word = word[:-1] + "i"
    return word


def _mend_ending(base: str) -> str:
    """Mend what is left of a word without -ed or -ing: conflat -> conflate, hopp -> hop, fil -> file."""
    if base.endswith(("at", "bl", "iz")):
        return base + "e"
    if len(base) > 1 and base[-1] == base[-2] and _shape(base)[-1] == "c":
        return base if base[-1] in "lsz" else base[:-1]
    if _measure(base) == 1 and _ends_short(base):
        return base + "e"
    return base
