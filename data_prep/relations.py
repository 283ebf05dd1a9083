"""What a microworld can say: its relations, with the sentences and questions for each.

A relation leads from a kind of entity to another entity or to a plain value. In articles the cue stands
before the name ("Its director is X"): a small reader then knows what the name is good for when it reads it.
`{n}` is the article's own name, `{v}` the value, `{e}` the entity (or the phrase for it) in a question.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """One relation: sentences for articles, questions, and phrases for its value in longer questions."""

    name: str
    subject: str  # kind of entity it starts from
    value: str  # kind of entity or plain value it leads to
    sentences: tuple[str, ...]
    questions: tuple[str, ...]
    phrases: tuple[str, ...] = ()  # empty: nothing leads on from the value


TABLE = """
director: film -> person
    Its director is {v}. | It was directed by {v}. | The director was {v}.
    Who directed {e}? | Who is the director of {e}? | Who was the director of {e}?
    the director of {e} | the person who directed {e}
star: film -> person
    The lead role is played by {v}. | Its star is {v}. | The leading actor was {v}.
    Who plays the lead role in {e}? | Who is the star of {e}? | Who was the leading actor in {e}?
    the star of {e} | the leading actor of {e}
studio: film -> company
    It was made by the studio {v}. | The studio behind it is {v}. | Its studio was {v}.
    Which studio made {e}? | Which is the studio behind {e}?
    the studio behind {e} | the studio that made {e}
year: film -> year
    It was released in {v}. | It came out in {v}. | The year of its release is {v}.
    In which year was {e} released? | When did {e} come out?
    -
author: novel -> person
    Its author is {v}. | It was written by {v}. | The writer was {v}.
    Who wrote {e}? | Who is the author of {e}? | Who is the writer of {e}?
    the author of {e} | the person who wrote {e}
publisher: novel -> company
    Its publisher is {v}. | It was published by {v}. | The book was brought out by {v}.
    Which company published {e}? | Which is the publisher of {e}?
    the publisher of {e} | the company that published {e}
setting: novel -> place
    The story is set in {v}. | It takes place in {v}. | Its setting is {v}.
    Where is {e} set? | Where does {e} take place?
    the setting of {e} | the town where {e} is set
founder: company -> person
    Its founder is {v}. | It was founded by {v}. | The company was started by {v}.
    Who founded {e}? | Who is the founder of {e}? | Who started {e}?
    the founder of {e} | the person who founded {e}
city: company -> place
    Its headquarters are in {v}. | It is based in {v}. | Its head office is in {v}.
    Where is {e} based? | Where are the headquarters of {e}?
    the town where {e} is based | the town with the headquarters of {e}
product: company -> product
    It makes {v}. | Its main product is {v}. | It is known for making {v}.
    What does {e} make? | What is the main product of {e}?
    -
birthplace: person -> place
    {p} was born in {v}. | {q} birthplace is {v}. | {p} was born in the town of {v}.
    Where was {e} born? | What is the birthplace of {e}?
    the birthplace of {e} | the town where {e} was born
spouse: person -> person
    {p} is married to {v}. | {q} spouse is {v}. | {p} married {v}.
    Who is {e} married to? | Who is the spouse of {e}?
    the spouse of {e} | the person married to {e}
instrument: person -> instrument
    {p} plays the {v}. | {q} instrument is the {v}. | {p} learnt to play the {v}.
    Which instrument does {e} play? | What instrument is played by {e}?
    -
river: place -> river
    It lies on the river {v}. | Its river is the {v}. | It was built on the river {v}.
    Which river flows through {e}? | On which river does {e} lie?
    -
mayor: place -> person
    Its mayor is {v}. | The mayor is {v}. | It elected as its mayor {v}.
    Who is the mayor of {e}? | Who was elected mayor of {e}?
    the mayor of {e} | the person elected mayor of {e}
region: place -> region
    It is a part of the region {v}. | It belongs to the region of {v}. | Its region is {v}.
    In which region is {e}? | Which region does {e} belong to?
    -
"""
"""name: subject -> value, then a line each of sentences, questions and phrases, - where there is none."""


def _read_table() -> list[Relation]:
    lines = [[part.strip() for part in line.split("|")] for line in TABLE.strip("\n").split("\n")]
    relations = []
    for [head], sentences, questions, phrases in zip(
        lines[::4], lines[1::4], lines[2::4], lines[3::4], strict=True
    ):
        name, _, ends = head.partition(": ")
        subject, _, value = ends.partition(" -> ")
        words = tuple(phrase for phrase in phrases if phrase != "-")
        relations.append(Relation(name, subject, value, tuple(sentences), tuple(questions), words))
    return relations


_ALL = _read_table()
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
    """All sequences of relation names that fit together; never back over a marriage or the like."""
    sequences: list[tuple[str, ...]] = [(relation.name,) for relation in _ALL]
    for _ in range(hops - 1):
        sequences = [
            (*chain, relation.name)
            for chain in sequences
            for relation in OF_KIND.get(RELATIONS[chain[-1]].value, [])
            if not (chain[-1] == relation.name == "spouse")
        ]
    return sequences
