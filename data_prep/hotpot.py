"""Questions of two hops that a given corpus can answer, for evaluation.

    python -m data_prep.hotpot --corpus D/corpus.jsonl --questions hotpot_dev_v1_simplified.json --out D

    questions without passages -> titles that each names -> pairs of passages that fit -> test_2hop.parquet
    passages "X is a film directed by Y" and "Y (born ..)" -> questions made of them -> test_films.parquet

HotpotQA's simplified files ({question, answer, type}) do not say which passages a question was made of. A
pair is taken for its gold passages by these rules, and all other questions are left out:

    comparison  the question names both titles, and no other
    bridge      the question names one title; the passage of another holds the answer, the first does not;
                and one of them names the other's title

A title is named where it appears letter by letter, without what it has in parentheses. A title of a single
word is named only in quotation marks. Of several pairs, the one that shares most words with the question
counts. A corpus that was made for other questions answers few of HotpotQA's.

The films' questions ask "In what year was the director of X born?" of any corpus with such passages.
`extra_info.gold_titles` names both passages in their order.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import files, prompts
from data_prep.squad import PROMPTS

TYPES = ("comparison", "bridge")
_WORD = re.compile(r"\w+")
_FILM = re.compile(r".{,90}?\b(?:is|was) an? [^,.]{,90}?\bfilm\b[^.]{,120}?\bdirected by (?=\w)")
_BIRTH_YEAR = re.compile(r"[^().]*\([^()]*?(?<!\d)(1[789]\d\d)")  # the first year in the first parentheses
_ANOTHER = re.compile(r",? and [A-Z]|, [A-Z]")  # a name after a director's: there are several directors


class TitledPassage(NamedTuple):
    id: str
    title: str
    name: str  # the title without its parentheses
    text: str


class TitleIndex:
    """The passages of a corpus, and the titles that texts name."""

    def __init__(self, corpus: Path) -> None:
        self.passages: list[TitledPassage] = []
        self.of_name: dict[str, list[TitledPassage]] = defaultdict(list)
        self.by_word: dict[str, list[str]] = defaultdict(list)  # first word -> names, the longest first
        for where, record in files.read_records(corpus):
            contents = files.get_field(record, "contents", str, where)
            title, _, text = contents.partition("\n")
            title = title.strip().strip('"')
            name = re.sub(r"\s*\([^)]*\)$", "", title)
            self.passages.append(TitledPassage(files.get_field(record, "id", str, where), title, name, text))
            self.of_name[name].append(self.passages[-1])
        for name in sorted(self.of_name, key=len, reverse=True):
            if word := _WORD.match(name):
                self.by_word[word[0]].append(name)
        self.links = {passage.id: set(self.named(passage.text)) for passage in self.passages}

    def named(self, text: str) -> list[str]:
        """Return the names that appear in a text, none inside of another, in their order."""
        names = []
        end = 0
        for word in _WORD.finditer(text):
            for name in self.by_word.get(word[0], ()) if word.start() >= end else ():
                stop = word.start() + len(name)
                is_name = " " in name or text[: word.start()].endswith(('"', "'"))
                if is_name and text.startswith(name, word.start()) and not text[stop : stop + 1].isalnum():
                    names.append(name)
                    end = stop
                    break
        return list(dict.fromkeys(names))


def gold_passages(titles: TitleIndex, question: str, answer: str, kind: str) -> list[TitledPassage]:
    """Return the two passages that a question of HotpotQA seems to be made of; [] if there are none."""
    words = set(_WORD.findall(question.lower()))
    named = titles.named(question)
    holds = re.compile(rf"(?<!\w){re.escape(answer)}(?!\w)", re.IGNORECASE)
    pairs: list[list[TitledPassage]] = []
    if kind == "comparison" and len(named) == 2:
        pairs = [[a, b] for a in titles.of_name[named[0]] for b in titles.of_name[named[1]]]
    elif kind == "bridge":
        firsts = [p for name in named for p in titles.of_name[name] if not holds.search(p.text)]
        seconds = [p for p in titles.passages if firsts and holds.search(f"{p.title} {p.text}")]
        for first in firsts:
            candidates = (p for p in seconds if p.name != first.name)
            linked = titles.links[first.id]
            pairs += [[first, p] for p in candidates if p.name in linked or first.name in titles.links[p.id]]

    def shared(pair: list[TitledPassage]) -> int:
        return len(words & set(_WORD.findall(" ".join(f"{p.title} {p.text}" for p in pair).lower())))

    return max(pairs, key=shared, default=[])


def hotpot_rows(titles: TitleIndex, questions: Path, template: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each question whose passages are in the corpus, and print how many these are."""
    seen = Counter[str]()
    num_rows = Counter[str]()
    for where, record in files.read_records(questions):
        texts = (files.get_field(record, key, str, where).strip() for key in ("question", "answer", "type"))
        question, answer, kind = texts
        if kind not in TYPES or not question or not answer:
            raise ValueError(f"{where}: expected a question, an answer and one of the types {TYPES}")
        seen[kind] += 1
        if gold := gold_passages(titles, question, answer, kind):
            question = files.tidy_question(question)
            ids = [passage.id for passage in gold]
            prompt = prompts.fill_prompt(template, question)
            extra = {"gold_ids": ids, "hops": 2, "type": kind}
            yield files.make_row("hotpotqa", prompt, question, [answer], "test", num_rows.total(), **extra)
            num_rows[kind] += 1
    print(
        ", ".join(f"{kind}: {num_rows[kind]} of {seen[kind]} questions have both passages" for kind in TYPES)
    )


def film_rows(titles: TitleIndex, template: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each film whose director is named once in the corpus, with a year of birth."""
    count = 0
    for film in titles.passages:
        if match := _FILM.match(film.text):
            name = next(iter(titles.named(film.text[match.end() :])), "")
            end = match.end() + len(name)
            sole = film.text[match.end() : end] == name and not _ANOTHER.match(film.text, end)
            people = titles.of_name[name] if name and sole else []
            if len(people) == 1 and (year := _BIRTH_YEAR.match(people[0].text)):
                question = f"In what year was the director of {film.title} born?"
                prompt = prompts.fill_prompt(template, question)
                extra = {"gold_ids": [film.id, people[0].id], "gold_titles": [film.name, name], "hops": 2}
                yield files.make_row("films", prompt, question, [year[1]], "test", count, **extra)
                count += 1


def convert(corpus: Path, questions: Path | None, out: Path, template: str) -> dict[str, int]:
    """Write test_films.parquet and, with `questions`, test_2hop.parquet; return how many rows they have.

    Raises ValueError if there is no row.
    """
    titles = TitleIndex(corpus)
    row_sets = {"test_films.parquet": list(film_rows(titles, template))}
    if questions is not None:
        row_sets["test_2hop.parquet"] = list(hotpot_rows(titles, questions, template))
    if not any(row_sets.values()):
        raise ValueError(f"{corpus} has no film with its director, and both passages of no question")
    for name in (name for name, rows in row_sets.items() if not rows):
        (out / name).unlink(missing_ok=True)  # an earlier command may have left it
    return {name: files.write_parquet(out / name, rows) for name, rows in row_sets.items() if rows}


def main() -> int:
    parser = argparse.ArgumentParser(description="Questions of two hops that a corpus can answer.")
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="corpus.jsonl, as data_prep.squad makes it")
    add("--questions", type=Path, help="HotpotQA's, JSON or JSON lines of {question, answer, type}")
    add("--out", type=Path, required=True, help="folder to write to")
    add("--prompt", choices=sorted(PROMPTS), default="search", help="as in data_prep.squad")
    return files.run_command(
        parser, lambda given: convert(given.corpus, given.questions, given.out, PROMPTS[given.prompt])
    )


if __name__ == "__main__":
    sys.exit(main())
