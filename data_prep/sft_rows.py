"""Demonstrations of searching for supervised training: rows of text pieces, marked as trained or not.

    python -m data_prep.sft_rows --seed 0 --out data/microworld/seed0

    seed -> many small worlds -> questions and searches in each -> sft_train.parquet, sft_val.parquet

`--right-share` of them (0.8) are right throughout. The others are imperfect on purpose: a poor student's
(`data_prep.demonstrations`), who often asks for the wrong thing and answers wrongly, so that a model learns
the protocol here and searching well by reinforcement learning. Each world gives a few rows only: from many
rows about one world a tiny model learns its names by heart and forgets how to copy others. The worlds are of
the kind that pretraining uses: no name in them is one that test questions are about.

A row: segments [{text, trained}, ...] from the prompt to the answer; question, answer, hops, and whether the
demonstration is right throughout.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.demonstrations import Demonstrator, Sample
from data_prep.files import write_parquet
from data_prep.microworld import Question, pretraining_world
from data_prep.tiny_tokenizer import END_TOKEN

FIRST_SEED = 500_000_000  # of the worlds: none that pretraining has seen
ROWS_PER_WORLD = 10
RIGHT_SHARE = 0.8
SHARE_OF_2_HOPS = 0.5


def demonstrations(seed: int, count: int, right_share: float) -> Iterator[dict[str, Any]]:
    """`count` rows, the same for a seed."""
    rng = random.Random(f"demonstrations {seed}")
    for number in range(count):
        if number % ROWS_PER_WORLD == 0:
            world = pretraining_world(FIRST_SEED + seed * 1_000_000 + number)
            student = Demonstrator(world, rng)
        question = student.question(2 if rng.random() < SHARE_OF_2_HOPS else 1)
        right = rng.random() < right_share
        yield make_demonstration(question, student.search(question, right), right)


def make_demonstration(question: Question, sample: Sample, right: bool) -> dict[str, Any]:
    """One parquet row. The end token is left out: training adds that of its tokenizer."""
    return {
        "segments": [{"text": text.removesuffix(END_TOKEN), "trained": trained} for text, trained in sample],
        "question": question.text,
        "answer": question.answer,
        "hops": len(question.path),
        "right": right,
    }


def write_rows(seed: int, out: Path, num_train: int, num_val: int, right_share: float) -> dict[str, int]:
    """Write both files into the folder `out`; returns the number of rows of each."""
    for name, count in (("--num-train", num_train), ("--num-val", num_val)):
        if count < 1:
            raise ValueError(f"{name} {count}: give at least 1")
    if not 0 <= right_share <= 1:
        raise ValueError(f"--right-share {right_share}: give a number from 0 to 1")
    rows = list(demonstrations(seed, num_train + num_val, right_share))
    # train_sft.sh takes the file that is written last for a sign that both are there
    parts = {"sft_val.parquet": rows[num_train:], "sft_train.parquet": rows[:num_train]}
    return {name: write_parquet(out / name, part) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Demonstrations of searching in microworlds.")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=3000, help="rows to train on (default 3000)")
    parser.add_argument("--num-val", type=int, default=200, help="rows for the validation loss (default 200)")
    parser.add_argument(
        "--right-share",
        type=float,
        default=RIGHT_SHARE,
        help=f"share of demonstrations that are right throughout (default {RIGHT_SHARE})",
    )
    args = parser.parse_args()
    try:
        counts = write_rows(args.seed, args.out, args.num_train, args.num_val, args.right_share)
    except ValueError as error:
        parser.error(str(error))
    for name, count in counts.items():
        print(f"{args.out / name}: {count} rows")


if __name__ == "__main__":
    main()
