"""Find the words of a text in any script, by the rules of Unicode Standard Annex #29 as Lucene applies them.

    text -> find_words(text) -> ["The", "N.A.T.O", "film's", "3.5", "snake_case", "東", "京", ...]

word_break.txt holds the Word_Break property of Unicode 12.1, which Lucene's StandardTokenizer (9 and 10)
uses: names of classes, and ranges of hexadecimal code points.

Words are letters and digits with what extends them. A mark such as . or ' belongs to a word between two
letters or two digits, an underscore anywhere. Han and Hiragana characters and pictographs are words of one
character. Three rules are left out: quotation marks inside Hebrew words, keycaps, and a word that goes on
from Katakana over an underscore to another script.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_BLOCKS = Path(__file__).with_name("word_break.txt").read_text(encoding="ascii").split("\n\n")
CLASSES = {
    name: [(int(low, 16), int(high or low, 16)) for low, _, high in (span.partition("-") for span in ranges)]
    for name, *ranges in map(str.split, _BLOCKS)
}
"""Maps the name of a class to the first and last code point of each of its ranges."""


def _pattern(last: int = sys.maxunicode) -> re.Pattern[str]:
    """Return a pattern that finds words in texts without code points beyond `last`.

    A set that ends at 0xffff is ten times as fast.
    """
    # Maps each class to the inside of a character set of a regular expression, up to `last`.
    sets = {
        name: "".join(f"\\U{low:08x}-\\U{min(high, last):08x}" for low, high in ranges if low <= last)
        for name, ranges in CLASSES.items()
    }
    letters, numerals, extenders, joiners = map(sets.get, ("LETTERS", "NUMERALS", "EXTENDERS", "JOINERS"))
    pictographs = sets["PICTOGRAPHS"]
    flags = sets["REGIONAL_INDICATORS"]
    run = f"[{letters}{numerals}{joiners}][{letters}{numerals}{joiners}{extenders}]*"
    inside = (
        f"(?<=[{letters}{extenders}])[{sets['MID_LETTERS']}][{extenders}]*(?=[{letters}])"
        f"|(?<=[{numerals}{extenders}])[{sets['MID_NUMERALS']}][{extenders}]*(?=[{numerals}])"
    )
    pattern = (
        f"{run}(?:(?:{inside}){run})*"
        f"|[{sets['SINGLES']}][{extenders}]*"
        f"|[{sets['KATAKANA']}][{sets['KATAKANA']}{extenders}{joiners}]*"
        f"|[{sets['COMPLEX']}][{sets['COMPLEX']}{extenders}]*"
        f"|[{pictographs}](?:[{extenders}]|(?<=\u200d)[{pictographs}])*"
    )
    return re.compile(pattern + f"|[{flags}]{{2}}[{extenders}]*" if flags else pattern)


ASCII_WORD = re.compile(
    r"[A-Za-z0-9_]+(?:(?:(?<=[A-Za-z])[:.'](?=[A-Za-z])|(?<=[0-9])[,;.'](?=[0-9]))[A-Za-z0-9_]+)*"
)
SHORT_WORD = _pattern(0xFFFF)
ANY_WORD = _pattern()
BEYOND_16_BITS = re.compile("[\U00010000-\U0010ffff]")
JOINER_CHARACTERS = "".join(chr(code) for low, high in CLASSES["JOINERS"] for code in range(low, high + 1))


def find_words(text: str) -> list[str]:
    """Return the words of a text, in order.

    JOINER_CHARACTERS without a letter are among them, though they are no words.
    """
    if text.isascii():
        return ASCII_WORD.findall(text)
    return (ANY_WORD if BEYOND_16_BITS.search(text) else SHORT_WORD).findall(text)
