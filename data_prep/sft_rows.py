"""Demonstrations of searching for supervised training: rows of text pieces, marked as trained or not.

    python -m data_prep.sft_rows --seed 0 --out data/microworld/seed0

    seed -> many small worlds -> questions and searches in each -> sft_train.parquet, sft_val.parquet

A share `--right-share` of them (0.8) are right throughout. The others are a poor student's on purpose
(`data_prep.demonstrations`), so that a model learns the protocol here and searching well by reinforcement
learning. Each world gives only a few rows: from many, a tiny model learns its names by heart and forgets how
to copy others. No name in these worlds is one that test questions are about.

A row has segments [{text, trained}, ...] from the prompt to the answer; question, answer, hops, and whether
the demonstration is right throughout.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.demonstrations import Demonstrator
from data_prep.files import run_command, write_parquet
from data_prep.microworld import pretraining_world
from data_prep.tiny_tokenizer import END_TOKEN

FIRST_SEED = 500_000_000  # seed of the first world; pretraining has seen none of these worlds
ROWS_PER_WORLD = 10
SHARE_OF_2_HOPS = 0.5


def demonstrations(seed: int, count: int, right_share: float) -> Iterator[dict[str, Any]]:
    """Yield `count` rows, the same for a seed.

    The end token is left out, because training adds that of its tokenizer.
    """
    rng = random.Random(f"demonstrations {seed}")
    for number in range(count):
        if number % ROWS_PER_WORLD == 0:
            world = pretraining_world(FIRST_SEED + seed * 1_000_000 + number)
            student = Demonstrator(world, rng)
        question = student.question(2 if rng.random() < SHARE_OF_2_HOPS else 1)
        right = rng.random() < right_share
        pieces = [
            (text.removesuffix(END_TOKEN), trained)
            for text, trained in student.search_demonstration(question, right)
        ]
        segments = [{"text": text, "trained": trained} for text, trained in pieces]
        question_fields = {"question": question.text, "answer": question.answer, "hops": len(question.path)}
        yield {"segments": segments, **question_fields, "right": right}


def write_rows(seed: int, out: Path, num_train: int, num_val: int, right_share: float) -> dict[str, int]:
    """Write both files into the folder `out`; return the number of rows of each.

    Raises ValueError for a bad number.
    """
    for name, count in (("--num-train", num_train), ("--num-val", num_val)):
        if count < 1:
            raise ValueError(f"{name} {count}: give at least 1")
    if not 0 <= right_share <= 1:
        raise ValueError(f"--right-share {right_share}: give a number from 0 to 1")
    rows = list(demonstrations(seed, num_train + num_val, right_share))
    # To train_sft.sh the file that is written last is the sign that both exist.
    row_sets = {"sft_val.parquet": rows[num_train:], "sft_train.parquet": rows[:num_train]}
    return {name: write_parquet(out / name, split_rows) for name, split_rows in row_sets.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Demonstrations of searching in microworlds.")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=3000, help="rows to train on (default 3000)")
    parser.add_argument("--num-val", type=int, default=200, help="rows for the validation loss (default 200)")
    parser.add_argument("--right-share", type=float, default=0.8, help="of those right throughout (0.8)")
    return run_command(parser, lambda options: write_rows(**vars(options)))


if __name__ == "__main__":
    sys.exit(main())
