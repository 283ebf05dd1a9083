"""Searching, sums and SQL for one run of the tiny model, with demonstrations to start from.

    python -m data_prep.mixture --seed 0 --out data/mixture/seed0

    seed -> corpus.jsonl, train.parquet, test.parquet    the microworld (data_prep.microworld)
         -> sums/                additions over several turns (data_prep.arithmetic)
         -> sql/                 the microworld as tables (data_prep.microworld_sql)
         -> sft_train.parquet    demonstrations of all three
         -> settings.yaml        keys of a run that name these files

The model has never seen a sum or a query, so it starts from demonstrations. These are imperfect on purpose:
reinforcement learning has to find out what is right. They are played against the environments, so that the
student reads what a policy will read. No demonstration has a sum or a name of the tests. Among them are
drills (single columns of sums) and samples of the model's pretraining, so that it does not forget how to read
and search.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import arithmetic, microworld, microworld_sql
from data_prep.demonstrations import Demonstrator, Sample
from data_prep.files import run_command, write_parquet, write_settings
from data_prep.sft_rows import FIRST_SEED
from data_prep.tiny_tokenizer import END_TOKEN
from verl.environments import make

ROWS_PER_WORLD = 24
SHARES = {"search": 0.33, "sums": 0.31, "drill": 0.12, "sql": 0.24}
RIGHT_SEARCH = 0.3  # share of searches that are right throughout; the others are as in pretraining
RIGHT_COLUMN = 0.7  # share of a sum's columns that are right
RIGHT_QUERY = 0.35  # share of queries for the right column of a table
DB_ID = "demonstrations"


def play(env: Any, prompt: str, turns: list[str], end: str) -> Sample:
    """Return the segments of an episode in which a student writes these turns; `end` closes each of them."""
    sample: Sample = [(prompt, False)]
    for text in turns:
        # The number is a piece of its own, because a blank and a digit can be one token.
        head, mark, number = (text + end).partition("#### ")
        sample += [(piece, True) for piece in (head + mark, number) if piece]
        output = env.step(text)
        if output["done"]:
            break
        sample += [(message["content"], False) for message in output["observations"]]
    env.close()
    return sample


def demonstrations(seed: int, count: int, folder: Path) -> Iterator[Sample]:
    """Yield `count` samples, the same for a seed; `folder` is for databases while they are made."""
    rng = random.Random(f"mixture {seed}")
    settings = {"db_path": str(folder)}
    for number in range(count):
        if number % ROWS_PER_WORLD == 0:
            world = microworld.pretraining_world(FIRST_SEED + seed * 1_000_000 + number)
            student = Demonstrator(world, rng)
            microworld_sql.write_database(world, microworld_sql.database_file(folder, DB_ID))
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        question = student.question(rng.choice((1, 2)))
        if kind == "search":
            right = rng.random() < RIGHT_SEARCH
            yield student.search_demonstration(question, right=True) if right else student.draw(1.0)
        elif kind == "drill":
            yield arithmetic.drill(rng)
        elif kind == "sums":
            pair = arithmetic.draw_pair(rng, held_out=False)
            env = make("gsm8k_multi_turn", extras=arithmetic.make_row(pair))
            turns = arithmetic.student_turns(rng, pair, RIGHT_COLUMN)
            yield play(env, arithmetic.fill_sum(pair), turns, END_TOKEN)
        else:
            env = make("text2sql", env_config=settings, extras=microworld_sql.make_row(question, DB_ID))
            turns = microworld_sql.student_turns(rng, question, RIGHT_QUERY)
            yield play(env, microworld_sql.fill_question(question), turns, "")


def write_mixture(
    seed: int, out: Path, num_train: int, num_test: int, num_demonstrations: int
) -> dict[str, int]:
    """Write everything into the folder `out`; return the number of rows of each file.

    Raises ValueError if there are to be no demonstrations.
    """
    if num_demonstrations < 1:
        raise ValueError(f"--num-demonstrations {num_demonstrations}: give at least 1")
    counts = microworld.write_world(seed, out, num_train, num_test, num_3hop=2)
    for folder_name, write in (("sums", arithmetic.write_rows), ("sql", microworld_sql.write_tables)):
        files = write(seed, out / folder_name, num_train, num_test)
        counts |= {f"{folder_name}/{name}": count for name, count in files.items()}
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"segments": [{"text": text, "trained": trained} for text, trained in sample if text]}
            for sample in demonstrations(seed, num_demonstrations, Path(folder))
        ]
    counts["sft_train.parquet"] = write_parquet(out / "sft_train.parquet", rows)
    top = out.absolute()
    folders = {"search": top, "sums": top / "sums", "sql": top / "sql"}
    paths = {name: str(folder / "train.parquet") for name, folder in folders.items()}
    settings = {
        "data.mixture": [{"name": name, "path": path, "ratio": 1} for name, path in paths.items()],
        "data.val_files": [str(folder / "test.parquet") for folder in folders.values()],
        "environment.env_config": {"text2sql": {"db_path": str(top / "sql" / "databases")}},
    }
    write_settings(out, settings)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Searching, sums and SQL for one run, with demonstrations.")
    parser.add_argument("--seed", type=int, default=0, help="of everything random, 0 to 999 (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=4096, help="training rows of each (default 4096)")
    parser.add_argument("--num-test", type=int, default=200, help="test rows of each (default 200)")
    parser.add_argument("--num-demonstrations", type=int, default=10000, help="of all (default 10000)")
    return run_command(parser, lambda options: write_mixture(**vars(options)), argv)


if __name__ == "__main__":
    sys.exit(main())
