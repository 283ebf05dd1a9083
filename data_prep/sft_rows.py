"""Demonstrations of searching for supervised training: rows of text pieces, marked as trained or not.

    python -m data_prep.sft_rows --seed 0 --out data/microworld/seed0

    training questions of the world -> searches over its whole corpus -> sft_train.parquet, sft_val.parquet

`--right-share` of them (0.8) are right throughout. The others are imperfect on purpose: a poor student's
(`data_prep.demonstrations`), who often asks for the wrong thing and answers wrongly, so that a model learns
the protocol here and searching well by reinforcement learning. Questions are about the training part of the
world alone, and no name of its test part is in any trained text (documents may hold some: they are not
trained).

A row: segments [{text, trained}, ...] from the prompt to the answer; question, answer, hops, and whether the
demonstration is right throughout.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.demonstrations import Demonstrator, Retriever, Sample
from data_prep.files import write_parquet
from data_prep.microworld import Question, draw_questions, evaluation_world
from data_prep.tiny_tokenizer import END_TOKEN

RIGHT_SHARE = 0.8
SHARE_OF_2_HOPS = 0.5


def demonstrations(seed: int, count: int, right_share: float) -> Iterator[dict[str, Any]]:
    """`count` rows over questions of the world's training part, each question once; the same for a seed."""
    train_part, test_part = evaluation_world(seed)
    rng = random.Random(f"demonstrations {seed}")
    num_2_hops = round(count * SHARE_OF_2_HOPS)
    questions = draw_questions(rng, train_part, 1, count - num_2_hops)
    questions += draw_questions(rng, train_part, 2, num_2_hops)
    rng.shuffle(questions)
    student = Demonstrator(train_part, rng)
    student.retriever = Retriever(train_part | test_part)
    for question in questions:
        right = rng.random() < right_share
        sample = student.search(question, right)
        while names_any(sample, test_part):  # a poor student may go on from a document of the other part
            sample = student.search(question, right)
        yield make_demonstration(question, sample, right)


def names_any(sample: Sample, world: dict[str, Any]) -> bool:
    """Whether the trained text of a sample has a name of this world in it."""
    text = " ".join(piece for piece, trained in sample if trained)
    return any(name in text for name in world)


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
    parts = {"sft_train.parquet": rows[:num_train], "sft_val.parquet": rows[num_train:]}
    return {name: write_parquet(out / name, part) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Demonstrations of searching in a microworld.")
    parser.add_argument("--seed", type=int, default=0, help="which world, 0 to 999 (default 0)")
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
