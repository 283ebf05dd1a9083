"""The relations of a microworld: what it can say, with the sentences and questions for each.

A relation leads from a kind of entity to another entity or to a plain value. In articles the cue comes before
the name ("Its director is X"), so that a small reader knows what the name is good for when it reads it. `{n}`
is the article's own name, `{v}` the value, `{e}` the entity (or the phrase for it) in a question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Relation(NamedTuple):
    """One relation: sentences for articles, questions, and phrases for its value in longer questions."""

    name: str
    subject: str  # kind of entity it starts from
    value: str  # kind of entity or plain value it leads to
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    phrases: tuple[str, ...] = ()  # empty: nothing leads on from the value


def _read(text: str) -> Iterator[Relation]:
    """Parse relations: a line "name: subject -> value", then a line each of sentences, questions and phrases.

    A line is "-" where there is none.
    """
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    for [head], *words in zip(*(lines[i::4] for i in range(4)), strict=True):
        name, subject, value = re.split(": | -> ", head)
        yield Relation(
            name, subject, value, *(tuple(cell for cell in parts if cell != "-") for parts in words)
        )


_ALL = list(_read(Path(__file__).with_name("relations.txt").read_text(encoding="utf-8")))
RELATIONS = {relation.name: relation for relation in _ALL}
KINDS = ("film", "novel", "company", "person", "place")
OF_KIND = {kind: [relation for relation in _ALL if relation.subject == kind] for kind in KINDS}

OPENINGS = {
    "film": ("{n} is a film.", "{n} is a feature film.", "{n} is a film that many people know."),
    "novel": ("{n} is a novel.", "{n} is a well known novel.", "{n} is a book of fiction."),
    "company": ("{n} is a company.", "{n} is a private company.", "{n} is an old company."),
    "person": ("{n} is a public figure.", "{n} is well known.", "{n} is an artist."),
    "place": ("{n} is a town.", "{n} is an old town.", "{n} is a small town."),
}
REMARKS = {
    "film": ("Critics liked it.", "It won a prize.", "It was shown at several festivals."),
    "novel": ("It sold well.", "Critics praised it.", "It was read in many schools."),
    "company": ("It has grown quickly.", "It has many shops.", "It is still run by a family."),
    "person": ("{p} likes to travel.", "{p} lives a quiet life.", "{p} won several prizes."),
    "place": ("It has an old market.", "Many people visit it.", "It is known for its gardens."),
}


def chains(hops: int) -> list[tuple[str, ...]]:
    """Return all sequences of relation names that fit together; none goes back over a marriage."""
    sequences: list[tuple[str, ...]] = [(relation.name,) for relation in _ALL]
    for _ in range(hops - 1):
        sequences = [
            (*chain, relation.name)
            for chain in sequences
            for relation in OF_KIND.get(RELATIONS[chain[-1]].value, [])
            if not (chain[-1] == relation.name == "spouse")
        ]
    return sequences
