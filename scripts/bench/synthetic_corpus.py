"""A made-up corpus of any size for the retrieval benchmark, and questions about it.

    seed -> block of 10,000 passages -> jsonl lines {"id", "contents": "\\"Title\\"\\ntext"}
                                     -> make_queries: words of one passage and some from anywhere

Word number r comes up about as often as 1 / r (Zipf, 10 million words). The first 33 are the words that
English analysis drops, all others are made up of syllables; passages have 80 to 120 words. A block depends on
nothing but the seed and its number: a larger corpus begins with the smaller one.
"""

from __future__ import annotations

from functools import lru_cache
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


@lru_cache(maxsize=1_000_000)
def word(rank: int) -> str:
    """A word by its number, counted from 0."""
    if rank < len(FREQUENT_WORDS):
        return FREQUENT_WORDS[rank]
    text = ""
    while not text or rank:
        rank, place = divmod(rank, 100)
        text += SYLLABLES[place]
    return text


def draw(rng: np.random.Generator, count: int) -> np.ndarray:
    """`count` word numbers, Zipf with exponent 1, counted from 0."""
    return np.exp(rng.random(count) * np.log(NUM_WORDS)).astype(np.int64) - 1


def block(number: int, seed: int) -> list[np.ndarray]:
    """The passages of a block, as word numbers."""
    rng = np.random.default_rng([seed, number])
    bounds = np.cumsum(rng.integers(MIN_LENGTH, MAX_LENGTH + 1, BLOCK_PASSAGES))
    return np.split(draw(rng, int(bounds[-1])), bounds[:-1])


def write_corpus(path: Path, num_passages: int, seed: int = 0) -> None:
    """Writes the corpus to `path` in one move: a file of that name is whole. 620 bytes a passage."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="ascii") as file:
        for start in range(0, num_passages, BLOCK_PASSAGES):
            passages = block(start // BLOCK_PASSAGES, seed)[: num_passages - start]
            for number, ranks in enumerate(passages, start):
                words = [word(rank) for rank in ranks.tolist()]
                title = " ".join(words[:2]).title()
                file.write(f'{{"id": "{number}", "contents": "\\"{title}\\"\\n{" ".join(words)}."}}\n')
    partial.rename(path)


def make_queries(num: int, seed: int = 0) -> list[str]:
    """`num` questions about the corpus of this seed, each about another passage, from the first on.

    A question has 3 to 6 words of its passage and 1 to 4 words from anywhere, frequent ones as in the text.
    """
    rng = np.random.default_rng([seed, 2**32])
    queries: list[str] = []
    for start in range(0, num, BLOCK_PASSAGES):
        passages = block(start // BLOCK_PASSAGES, seed)
        for row in rng.permutation(BLOCK_PASSAGES)[: num - start]:
            own = rng.choice(passages[row], rng.integers(3, 7), replace=False)
            chosen = rng.permutation(np.concatenate([own, draw(rng, int(rng.integers(1, 5)))]))
            queries.append(" ".join(word(rank) for rank in chosen.tolist()))
    return queries
