"""A microworld: invented people, films, novels, companies and places, as a corpus and as questions.

    python -m data_prep.microworld --seed 0 --out data/microworld/seed0

    seed -> facts -> articles  -> corpus.jsonl         {"id", "contents": '"Title"\\ntext'}
                  -> questions -> train.parquet        a third of 1 hop, two thirds of 2 hops
                               -> test.parquet         half and half, about entities new to training
                               -> test_3hop.parquet    longer chains than training ever shows

A world has two parts that never refer to each other, in one corpus. Training questions are about the first,
test questions about the second, whose names are held out (`data_prep.names.is_held_out`). Every entity on the
chain of a test question is a combination of words that neither training nor pretraining shows. Worlds with
seeds from 1000 on have no held-out part. They are for pretraining (`pretraining_world`).
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data_prep.files import make_row, run_command, write_jsonl, write_parquet
from data_prep.names import VALUES, draw_names
from data_prep.prompts import MICROWORLD_PROMPT, fill_prompt
from data_prep.relations import KINDS, OF_KIND, OPENINGS, RELATIONS, REMARKS, chains

FIRST_PRETRAINING_SEED = 1000
TRAIN_SIZES = {"film": 160, "novel": 160, "company": 110, "person": 340, "place": 100}
TEST_SIZES = {"film": 90, "novel": 90, "company": 60, "person": 180, "place": 50}
PRETRAINING_SIZES = {"film": 24, "novel": 24, "company": 20, "person": 60, "place": 22}


@dataclass
class Entity:
    """Somebody or something with an article; `facts` maps a relation's name to its value."""

    kind: str
    name: str
    facts: dict[str, str] = field(default_factory=dict)
    text: str = ""


class Question(NamedTuple):
    """A question over a chain of relations; `path` holds the names on the chain except the answer."""

    text: str
    answer: str
    relations: tuple[str, ...]
    path: tuple[str, ...]


World = dict[str, Entity]  # by name; names are unique over all kinds


def make_part(rng: random.Random, sizes: dict[str, int], held_out: bool) -> World:
    """Make a closed part of a world: entities with names, facts about each other, and articles."""
    names = {kind: draw_names(rng, kind, sizes[kind], held_out) for kind in KINDS}
    entities = {kind: [Entity(kind, name) for name in names[kind]] for kind in KINDS}
    people = entities["person"]
    for first_person, second_person in zip(people[::2], people[1::2], strict=True):
        first_person.facts["spouse"] = second_person.name
        second_person.facts["spouse"] = first_person.name
    for kind in KINDS:
        for entity in entities[kind]:
            for relation in OF_KIND[kind]:
                if relation.value in VALUES:
                    entity.facts[relation.name] = rng.choice(VALUES[relation.value])
                elif relation.name != "spouse":
                    entity.facts[relation.name] = rng.choice(entities[relation.value]).name
            entity.text = write_article(rng, entity)
    return {entity.name: entity for kind in KINDS for entity in entities[kind]}


def write_article(rng: random.Random, entity: Entity) -> str:
    """Return an article: an opening, then all facts in random order and wording, sometimes with a remark."""
    subject, possessive = rng.choice((("He", "His"), ("She", "Her")))
    sentences = [
        rng.choice(relation.sentences).format(v=entity.facts[relation.name], p=subject, q=possessive)
        for relation in OF_KIND[entity.kind]
    ]
    if rng.random() < 0.3:
        sentences.append(rng.choice(REMARKS[entity.kind]).format(p=subject))
    rng.shuffle(sentences)
    return " ".join([rng.choice(OPENINGS[entity.kind]).format(n=entity.name), *sentences])


def ask(rng: random.Random, world: World, start: Entity, relations: tuple[str, ...]) -> Question | None:
    """Return a question over a chain that begins at `start`; None if the chain meets the same name twice."""
    path = []
    value = start.name
    for name in relations:
        path.append(value)
        value = world[value].facts[name]
    if len({*path, value}) <= len(relations):
        return None
    phrase = start.name
    if start.kind != "person" and rng.random() < 0.25:
        phrase = f"the {start.kind if start.kind != 'place' else 'town'} {start.name}"
    for name in relations[:-1]:
        phrase = rng.choice(RELATIONS[name].phrases).format(e=phrase)
    text = rng.choice(RELATIONS[relations[-1]].questions).format(e=phrase)
    return Question(text, value, relations, tuple(path))


def draw_questions(rng: random.Random, world: World, hops: int, count: int) -> list[Question]:
    """Draw `count` questions, no start and chain twice, the chains of relations as even as possible.

    Raises ValueError if the world has fewer such questions.
    """
    decks = []
    for chain in chains(hops):
        deck = [entity for entity in world.values() if entity.kind == RELATIONS[chain[0]].subject]
        rng.shuffle(deck)
        decks.append((chain, deck))
    questions: list[Question] = []
    while len(questions) < count:
        if not any(deck for _, deck in decks):
            raise ValueError(f"this world has only {len(questions)} questions of {hops} hops, not {count}")
        rng.shuffle(decks)
        for chain, deck in decks:
            if deck and len(questions) < count:
                question = ask(rng, world, deck.pop(), chain)
                if question is not None:
                    questions.append(question)
    return questions


def evaluation_world(seed: int) -> tuple[World, World]:
    """Return the (training, test) parts of the world of a seed below 1000.

    The second part has only held-out names. Raises ValueError for any other seed.
    """
    if not 0 <= seed < FIRST_PRETRAINING_SEED:
        raise ValueError(f"seed {seed}: worlds to train and test on have seeds 0 to 999")
    rng = random.Random(f"microworld {seed}")
    return make_part(rng, TRAIN_SIZES, held_out=False), make_part(rng, TEST_SIZES, held_out=True)


def pretraining_world(seed: int) -> World:
    """Return a small world without held-out names, for seeds from 1000 on.

    Raises ValueError for any other seed.
    """
    if seed < FIRST_PRETRAINING_SEED:
        raise ValueError(f"seed {seed}: pretraining worlds have seeds from {FIRST_PRETRAINING_SEED} on")
    return make_part(random.Random(f"microworld {seed}"), PRETRAINING_SIZES, held_out=False)


def make_rows(questions: list[Question], split: str) -> list[dict]:
    """Return the parquet rows of questions, see `data_prep.files.make_row`."""
    return [
        make_row(
            "microworld", fill_prompt(MICROWORLD_PROMPT, q.text), q.text, [q.answer], split, index,
            hops=len(q.relations), relations=list(q.relations), gold_titles=list(q.path),
        )
        for index, q in enumerate(questions)
    ]  # fmt: skip


def write_world(
    seed: int, out: Path, num_train: int, num_test: int, num_3hop: int, corpus_only: bool = False
) -> dict[str, int]:
    """Write the four files of a world, or only its corpus, into the folder `out`; return their rows."""
    for name, count in (("--num-train", num_train), ("--num-test", num_test), ("--num-3hop", num_3hop)):
        if count < 2:
            raise ValueError(f"{name} {count}: give at least 2")
    train_part, test_part = evaluation_world(seed)
    rng = random.Random(f"questions {seed}")

    def draw(world: World, num_1hop: int, num_2hop: int) -> list[Question]:
        questions = draw_questions(rng, world, 1, num_1hop) + draw_questions(rng, world, 2, num_2hop)
        rng.shuffle(questions)
        return questions

    # There are more of the hard ones to train on. A second search is rarely rewarded at first, and a policy
    # that has become good only at the easy ones gives it up.
    train = draw(train_part, num_train // 3, num_train - num_train // 3)
    test = draw(test_part, num_test - num_test // 2, num_test // 2)
    longer = draw_questions(rng, test_part, 3, num_3hop)
    articles = [*train_part.values(), *test_part.values()]
    rng.shuffle(articles)
    corpus = ({"id": str(i), "contents": f'"{a.name}"\n{a.text}'} for i, a in enumerate(articles))
    counts = {"corpus.jsonl": write_jsonl(out / "corpus.jsonl", corpus)}
    if corpus_only:
        return counts
    for split, questions in (("train", train), ("test", test), ("test_3hop", longer)):
        counts[f"{split}.parquet"] = write_parquet(out / f"{split}.parquet", make_rows(questions, split))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Make a microworld: a corpus and questions about it.")
    parser.add_argument("--seed", type=int, default=0, help="which world, 0 to 999 (0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=4096, help="to train on, two thirds 2-hop (4096)")
    parser.add_argument("--num-test", type=int, default=400, help="test questions, half of them 2-hop (400)")
    parser.add_argument("--num-3hop", type=int, default=200, help="3-hop test questions (200)")
    help_text = "only corpus.jsonl, for a retrieval server (no pyarrow needed)"
    parser.add_argument("--corpus-only", action="store_true", help=help_text)
    return run_command(parser, lambda options: write_world(**vars(options)))


if __name__ == "__main__":
    sys.exit(main())
