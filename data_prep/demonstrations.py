"""The pretraining samples of the tiny base model: reading, and a poor imitation of searching.

Each sample is a list of (text, trained) segments over a fresh pretraining world; segments are tokenised one
by one, as in a rollout. There are four kinds:

    echo      a list of names, then the same again: the quickest way to learn to copy
    pack      articles, then many short questions about them: the dense signal from which copying forms
    reading   a question, then documents, then notes that name what was found, and the answer: always right
    trace     the protocol of a rollout (search, information, ..., answer), demonstrated badly on purpose

In a trace the number of searches, each query and the answer are drawn without looking at what the question
needs, so that reinforcement learning finds a first success for every kind of question. A few traces are right
throughout. With the `PLAIN` wording there are no tags and no traces.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from data_prep.microworld import Entity, Question, World, ask
from data_prep.prompts import MICROWORLD_PROMPT, fill_prompt, format_observation, format_passages
from data_prep.relations import OF_KIND, RELATIONS, chains
from data_prep.tiny_tokenizer import END_TOKEN

Sample = list[tuple[str, bool]]  # (text, whether every token of it is trained)

NUM_SEARCHES = {0: 0.05, 1: 0.42, 2: 0.43, 3: 0.10}
RIGHT_TRACE = 0.03
RIGHT_ANSWER = 0.5
NOTE = 0.3  # a later query from the documents has a note before it in this share of the cases
PACK_SIZES = (0.6, 0.25, 0.1, 0.05)  # one to four articles


def _first_below(draw: float, choices: Sequence[tuple[float, str]]) -> str:
    """Return the first choice whose bound is above `draw`, a uniform number; the bounds rise to 1."""
    return next(choice for bound, choice in choices if draw < bound)


class Wording(NamedTuple):
    """The wording of a sample, with tags or without, and the shares of the kinds of samples.

    Attributes:
        tagged: whether there are tags.
        note: the words of a note; {} stands for the fact.
        answer: the words of an answer; {} stands for the value.
        first_shares: shares of echo, pack, reading and trace at the start of pretraining.
        last_shares: these shares once `mix` has reached 1.
    """

    tagged: bool
    note: str
    answer: str
    first_shares: tuple[float, ...]
    last_shares: tuple[float, ...]

    def observation(self, documents: list[Entity]) -> str:
        pairs = [(f'"{entity.name}"', entity.text) for entity in documents]
        return format_observation(pairs) if self.tagged else f"\n\n{format_passages(pairs)}\n\n"


_SHARES = (0.2, 0.5, 0.2, 0.1), (0.02, 0.13, 0.35, 0.5)
PROTOCOL = Wording(True, "<think> {}.</think>", "<answer> {}</answer>", *_SHARES)
PLAIN = Wording(False, "So {}.", "Answer: {}.", (0.2, 0.6, 0.2, 0.0), (0.02, 0.33, 0.65, 0.0))


class WorldSearch:
    """BM25 (k1 0.9, b 0.4) over the articles of a world, as the retrieval server does it."""

    def __init__(self, world: World) -> None:
        self.entities = list(world.values())
        self.postings: dict[str, list[tuple[int, float]]] = defaultdict(list)
        bags = [Counter(_words(f"{entity.name} {entity.text}")) for entity in self.entities]
        mean = sum(sum(bag.values()) for bag in bags) / len(bags)
        found_in = Counter(word for bag in bags for word in bag)
        for index, bag in enumerate(bags):
            norm = 0.9 * (0.6 + 0.4 * sum(bag.values()) / mean)
            for word, count in bag.items():
                idf = math.log(1 + (len(bags) - found_in[word] + 0.5) / (found_in[word] + 0.5))
                self.postings[word].append((index, idf * count / (count + norm)))

    def search(self, query: str, topk: int) -> list[Entity]:
        """Return the `topk` best articles, best first; ties go to the earlier article."""
        scores: dict[int, float] = defaultdict(float)
        for word in _words(query):
            for index, score in self.postings.get(word, ()):
                scores[index] += score
        best = sorted(scores, key=lambda index: (-scores[index], index))[:topk]
        return [self.entities[index] for index in best]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Demonstrator:
    """A student that draws samples over one world."""

    def __init__(self, world: World, rng: random.Random, topk: int = 2, wording: Wording = PROTOCOL) -> None:
        self.world = world
        self.rng = rng
        self.topk = topk
        self.wording = wording
        self.retriever = WorldSearch(world)
        self.entities = list(world.values())
        self.names = list(world)
        self.chains = {hops: chains(hops) for hops in (1, 2, 3)}
        self.by_kind = {kind: [e for e in self.entities if e.kind == kind] for kind in OF_KIND}

    def draw(self, mix: float) -> Sample:
        """Draw a sample of one of the four kinds (three without tags); `mix` in [0, 1] moves the shares."""
        ends = zip(self.wording.first_shares, self.wording.last_shares, strict=True)
        shares = [first + mix * (last - first) for first, last in ends]
        return self.rng.choices((self.echo, self.pack, self.reading, self.trace), shares)[0]()

    def question(self, hops: int) -> Question:
        """Draw a question over a chain of relations; the chains are drawn evenly."""
        while True:
            relations = self.rng.choice(self.chains[hops])
            start = self.rng.choice(self.by_kind[RELATIONS[relations[0]].subject])
            question = ask(self.rng, self.world, start, relations)
            if question is not None:
                return question

    def echo(self) -> Sample:
        """Return a list of names and words, then its parts again in another order.

        This is copying in its purest form.
        """
        items = [self.rng.choice(self.names) for _ in range(self.rng.randint(4, 10))]
        items += [v for n in items for v in self.world[n].facts.values() if self.rng.random() < 0.3]
        self.rng.shuffle(items)
        sample: Sample = [("".join(f" {item}" for item in items), False), ("\n", False)]
        for _ in range(2):
            begin = self.rng.randrange(len(items) - 1)
            again = items[begin:] + items[:begin]
            first, rest = " ".join(again).split(" ", 1)
            sample += [(f" {first}", False), (f" {rest}", True), ("\n", False)]
        return sample

    def pack(self) -> Sample:
        """Return one to four articles, connected where possible, then eight questions or notes."""
        documents = [self.rng.choice(self.entities)]
        for _ in range(self.rng.choices(range(4), PACK_SIZES)[0]):
            linked = [v for v in self.rng.choice(documents).facts.values() if v in self.world]
            name = self.rng.choice(linked if linked and self.rng.random() < 0.5 else self.names)
            if all(name != d.name for d in documents):
                documents.append(self.world[name])
        self.rng.shuffle(documents)
        sample: Sample = [(self.wording.observation(documents), False)]
        shown_names = {d.name for d in documents}
        for _ in range(8):
            document = self.rng.choice(documents)
            relation = self.rng.choice(OF_KIND[document.kind])
            names: tuple[str, ...] = (relation.name,)
            bridge = document.facts[relation.name]
            if bridge in shown_names and self.rng.random() < 0.7:
                names = (relation.name, self.rng.choice(OF_KIND[self.world[bridge].kind]).name)
            elif relation.phrases and self.rng.random() < 0.3:
                sample += [(self.note(document, relation.name), True), ("\n", False)]
                continue
            question = ask(self.rng, self.world, document, names)
            if question is not None:
                sample += [(fill_prompt(MICROWORLD_PROMPT, question.text), False)]
                sample += [(self.wording.answer.format(question.answer), True), ("\n", False)]
        return sample

    def note(self, entity: Entity, relation: str) -> str:
        """Return a note such as '<think> the director of Amber Harbor is Bratis Gildane.</think>'."""
        phrase = RELATIONS[relation].phrases[0].format(e=entity.name)
        return self.wording.note.format(f"{phrase} is {entity.facts[relation]}")

    def reading(self) -> Sample:
        """Return a question, documents, right notes and the right answer.

        The documents are those for the first steps of the question's chain, or for all steps. The right
        document comes first, as it does after a right query, except in one case of ten.
        """
        question = self.question(self.rng.choices((1, 2, 3), (0.4, 0.5, 0.1))[0])
        last = len(question.path) - 1
        sample: Sample = [(fill_prompt(MICROWORLD_PROMPT, question.text), False)]
        for step in range(self.rng.randint(0, last) + 1):
            gold = self.world[question.path[step]]
            nearest = self.retriever.search(gold.name, self.rng.choice((1, 2, 2)))
            shown = [gold, *(entity for entity in nearest if entity is not gold)]
            if self.rng.random() < 0.1:
                self.rng.shuffle(shown)
            sample.append((self.wording.observation(shown), False))
            if step == last:
                sample.append((self.wording.answer.format(question.answer), True))
            elif step == 0 or self.rng.random() < 0.8:
                sample.append((self.note(gold, question.relations[step]), True))
        return [*sample, (END_TOKEN, True)]

    def trace(self) -> Sample:
        """Return a rollout as a poor student would do it; see the module."""
        question = self.question(self.rng.choices((1, 2, 3), (0.45, 0.47, 0.08))[0])
        return self.search_demonstration(question, right=self.rng.random() < RIGHT_TRACE)

    def search_demonstration(self, question: Question, right: bool) -> Sample:
        """Return a rollout for a question, right throughout or poor.

        In a right one, each search names the next entity of the chain.
        """
        sample: Sample = [(fill_prompt(MICROWORLD_PROMPT, question.text), False)]
        count = len(question.path) if right else self.rng.choices(*zip(*NUM_SEARCHES.items(), strict=True))[0]
        seen: dict[str, Entity] = {}
        for turn in range(count):
            query, note = (question.path[turn], "") if right else self.draw_query(question, turn, seen)
            documents = self.retriever.search(query, self.topk)
            shown = self.wording.observation(documents)
            sample += [(f"{note}<search> {query}</search>", True), (shown, False)]
            seen |= {entity.name: entity for entity in documents}
        answer = question.answer if right else self.draw_answer(question, seen)
        return [*sample, (f"<answer> {answer}</answer>{END_TOKEN}", True)]

    def draw_query(self, question: Question, turn: int, seen: dict[str, Entity]) -> tuple[str, str]:
        """Return (query, note before it) of a poor student, drawn without looking at what is still needed."""
        draw = self.rng.random()
        words = question.text.rstrip("?").split()
        start = self.rng.randrange(len(words))
        fragment = " ".join(words[start : start + self.rng.randint(1, 4)])
        wrong = self.rng.choice(self.names)
        if turn == 0:
            return _first_below(draw, [(0.5, question.path[0]), (0.8, fragment), (1.0, wrong)]), ""
        if draw < 0.4 and seen:
            reached = [name for name in question.path[:-1] if name in seen]
            follows = reached and self.rng.random() < 0.7
            entity = self.world[reached[-1]] if follows else self.rng.choice(list(seen.values()))
            relation = self.rng.choice([r.name for r in OF_KIND[entity.kind] if r.phrases])
            note = self.note(entity, relation) if self.rng.random() < NOTE else ""
            return entity.facts[relation], note
        return _first_below(draw, [(0.6, question.path[0]), (0.85, fragment), (1.0, wrong)]), ""

    def draw_answer(self, question: Question, seen: dict[str, Entity]) -> str:
        """Return an answer of a poor student.

        It is the right one half of the time if it was found, else a value of the documents or the world.
        """
        values = [value for entity in seen.values() for value in entity.facts.values()]
        if question.answer in values and self.rng.random() < RIGHT_ANSWER:
            return question.answer
        return self.rng.choice(values or list(self.rng.choice(self.entities).facts.values()))
