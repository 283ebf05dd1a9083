"""A microworld as SQL tables, with questions in the form of text2sql's rows.

    seed -> both parts of the world (data_prep.microworld) -> a database each
         -> questions about the training part -> train.parquet    half of 1 hop, half of 2 hops
         -> questions about the test part     -> test.parquet     names that training never shows

A database has a table for each kind of entity, with the columns `name` and its relations. It is where the
environment with db_path <out>/databases looks for it. A row has prompt, env_class text2sql, db_id, data,
reward_spec {method, ground_truth: the right query}, max_turns.
"""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

from data_prep.files import write_parquet
from data_prep.microworld import Question, World, draw_questions, evaluation_world
from data_prep.relations import KINDS, OF_KIND, RELATIONS

PROMPT = "Tables: {tables}\nQuestion: {question}\n"
MAX_TURNS = 3


def write_database(world: World, path: Path) -> None:
    """Write the world to a SQLite file; an existing one is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    with connection:
        for kind in KINDS:
            columns = ["name", *(relation.name for relation in OF_KIND[kind])]
            connection.execute(f"create table {kind} ({', '.join(f'{name} text' for name in columns)})")
            entities = [entity for entity in world.values() if entity.kind == kind]
            connection.executemany(
                f"insert into {kind} values ({', '.join('?' * len(columns))})",
                [[entity.name, *(entity.facts[name] for name in columns[1:])] for entity in entities],
            )
    connection.close()


def database_file(folder: Path, db_id: str) -> Path:
    """Return where the text2sql environment with `db_path` = folder looks for the database."""
    return folder / "spider" / "database" / db_id / f"{db_id}.sqlite"


def select(relation: str, name: str) -> str:
    """Return a query for one fact; `name` is a quoted name, or a query in brackets."""
    return f"select {relation} from {RELATIONS[relation].subject} where name={name}"


def gold_query(question: Question) -> str:
    """Return one query for the whole chain of a question, each hop inside of the next."""
    name = f"'{question.path[0]}'"
    for relation in question.relations[:-1]:
        name = f"({select(relation, name)})"
    return select(question.relations[-1], name)


def fill_question(question: Question) -> str:
    """Return the prompt, with the name in quotation marks, as it will be in the query."""
    text = question.text.replace(question.path[0], f'"{question.path[0]}"')
    return PROMPT.format(tables=", ".join(KINDS), question=text)


def student_turns(rng: random.Random, question: Question, right_share: float) -> list[str]:
    """Return what a poor student writes in each turn.

    Half of the time it first writes a query for the first hop, to look at its result. Then it writes a
    solution. A query asks for the right column with the probability `right_share`, else for any column of its
    table.
    """
    first = question.relations[0]
    last = question.relations[-1]

    def query(relation: str, name: str) -> str:
        columns = [relation_of_kind.name for relation_of_kind in OF_KIND[RELATIONS[relation].subject]]
        return select(relation if rng.random() < right_share else rng.choice(columns), name)

    start = f"'{question.path[0]}'"
    turns = []
    bridge = start if len(question.path) == 1 else f"({query(first, start)})"
    if rng.random() < 0.5:
        looked_up = query(first, start)
        turns.append(f"<think> {first}</think><sql>{looked_up}</sql>")
        if len(question.path) > 1 and looked_up == select(first, start):
            bridge = f"'{question.path[1]}'"
    return [*turns, f"<think> {last}</think><solution>{query(last, bridge)}</solution>"]


def make_row(question: Question, db_id: str, split: str = "train", index: int = 0) -> dict[str, Any]:
    return {
        "data_source": "microworld_sql",
        "prompt": [{"role": "user", "content": fill_question(question)}],
        "env_class": "text2sql",
        "db_id": db_id,
        "data": "spider",
        "reward_spec": {"method": "rule", "ground_truth": gold_query(question)},
        "max_turns": MAX_TURNS,
        "extra_info": {"split": split, "index": index, "hops": len(question.relations)},
    }


def write_tables(seed: int, out: Path, num_train: int, num_test: int) -> dict[str, int]:
    """Write both databases and both files into the folder `out`; return the number of rows of each file."""
    rng = random.Random(f"sql questions {seed}")
    counts = {}
    splits = zip(("train", "test"), evaluation_world(seed), (num_train, num_test), strict=True)
    for split, world, count in splits:
        db_id = f"microworld_{seed}_{split}"
        write_database(world, database_file(out / "databases", db_id))
        longer = draw_questions(rng, world, 2, count - count // 2)
        questions = draw_questions(rng, world, 1, count // 2) + longer
        rng.shuffle(questions)
        rows = [make_row(question, db_id, split, index) for index, question in enumerate(questions)]
        counts[f"{split}.parquet"] = write_parquet(out / f"{split}.parquet", rows)
    return counts
