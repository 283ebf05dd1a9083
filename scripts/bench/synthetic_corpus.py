"""A made-up corpus of any size for the retrieval benchmark, and questions about it.

    seed -> block of 10,000 passages -> jsonl lines {"id", "contents": "\\"Title\\"\\ntext"}
                                     -> make_queries: words of one passage and some from anywhere

Word number r comes up about as often as 1 / r (Zipf, 10 million words). The first 33 are the words that
English analysis drops, all others are made up of syllables; passages have 80 to 120 words. A block depends on
nothing but the seed and its number: a larger corpus begins with the smaller one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BLOCK_PASSAGES = 10_000
NUM_WORDS = 10_000_000
MIN_LENGTH, MAX_LENGTH = 80, 120  # words of a passage
FREQUENT_WORD_TEXT = """
the of and to in a is for it as was with that be on by at are this an not or but they will if such their there
then no into these
"""
FREQUENT_WORDS = FREQUENT_WORD_TEXT.split()
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrtvwxyz" for vowel in "aeiou"]
WIDTH = 9  # the longest word, four syllables, and a space


def _words(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The letters of words: uint8 [N, WIDTH], padded at the end, and how many count (with a space) [N]."""
    syllables = np.array([list(syllable.encode()) for syllable in SYLLABLES], dtype=np.uint8)
    num_syllables = 1 + (ranks >= 100).astype(np.int64) + (ranks >= 100**2) + (ranks >= 100**3)
    letters = np.full((len(ranks), WIDTH), ord(" "), dtype=np.uint8)
    for place in range(4):
        used = num_syllables > place
        letters[used, 2 * place : 2 * place + 2] = syllables[ranks[used] // 100**place % 100]
    lengths = 2 * num_syllables + 1
    for rank, word in enumerate(FREQUENT_WORDS):
        at = np.flatnonzero(ranks == rank)
        letters[at] = np.frombuffer(word.encode().ljust(WIDTH), dtype=np.uint8)
        lengths[at] = len(word) + 1
    return letters, lengths


def _text(ranks: np.ndarray) -> tuple[bytes, np.ndarray]:
    """All words one after the other, each with a space behind it, and where each starts [N + 1]."""
    letters, lengths = _words(ranks)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return letters[np.arange(WIDTH) < lengths[:, None]].tobytes(), starts


def _draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` word numbers, Zipf with exponent 1, counted from 0."""
    return np.exp(rng.random(count) * np.log(NUM_WORDS)).astype(np.int64) - 1


def block(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The passages of a block: word numbers, and the place of each passage's first word [N + 1]."""
    rng = np.random.default_rng([seed, number])
    lengths = rng.integers(MIN_LENGTH, MAX_LENGTH + 1, BLOCK_PASSAGES)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    return _draw(rng, int(bounds[-1])), bounds


def _lines(number: int, seed: int, count: int) -> Iterator[bytes]:
    """The first `count` lines of a block; the title is a passage's first two words."""
    ranks, bounds = block(number, seed)
    text, starts = _text(ranks)
    first = starts[bounds[:-1]].tolist()
    third = starts[bounds[:-1] + 2].tolist()
    last = starts[bounds[1:]].tolist()
    for i in range(count):
        row = number * BLOCK_PASSAGES + i
        title = text[first[i] : third[i] - 1].title()
        yield b'{"id": "%d", "contents": "\\"%s\\"\\n%s."}\n' % (row, title, text[first[i] : last[i] - 1])


def write_corpus(path: str | Path, num_passages: int, seed: int = 0) -> Path:
    """Writes the corpus to `path` in one move: a file of that name is whole. 620 bytes a passage."""
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    with partial.open("wb") as file:
        for number in range(-(-num_passages // BLOCK_PASSAGES)):
            file.writelines(_lines(number, seed, min(BLOCK_PASSAGES, num_passages - number * BLOCK_PASSAGES)))
    partial.rename(path)
    return path


def make_queries(num: int, seed: int = 0) -> list[str]:
    """`num` questions about the corpus of this seed, each about another passage, from the first on.

    A question has 3 to 6 words of its passage and 1 to 4 words from anywhere, frequent ones as in the text.
    """
    rng = np.random.default_rng([seed, 2**32])
    queries: list[str] = []
    for number in range(-(-num // BLOCK_PASSAGES)):
        ranks, bounds = block(number, seed)
        for row in rng.permutation(BLOCK_PASSAGES)[: num - len(queries)]:
            own = rng.choice(ranks[bounds[row] : bounds[row + 1]], rng.integers(3, 7), replace=False)
            chosen = rng.permutation(np.concatenate([own, _draw(rng, int(rng.integers(1, 5)))]))
            queries.append(_text(chosen)[0].decode().strip())
    return queries
