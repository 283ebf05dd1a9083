"""Sums in the form of gsm8k's rows, worked column by column, with carries from turn to turn.

    seed -> two numbers of three digits -> train.parquet, test.parquet

A row has prompt, env_class gsm8k_multi_turn, reward_spec {method, ground_truth}, max_turns (one a column).
One pair of numbers in five is only for tests: no training row and no demonstration has it.

    345+678   turn 1: 5+8+0=13;3   turn 2: 4+7+1=12;23   turn 3: 3+6+1=10;#### 1023
    101+102   turn 1: 1+2+0=03;3   turn 2: 0+0+0=00;03   turn 3: 1+1+0=02;#### 203
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from data_prep.files import write_parquet
from data_prep.names import is_held_out

NUM_DIGITS = 3
PROMPT = "Question: How much is\n{sum}?\n"  # a line break, because a blank and a digit can be one token

Pair = tuple[int, int]


def draw_pair(rng: random.Random, held_out: bool) -> Pair:
    """Draw two numbers of `NUM_DIGITS` digits; with `held_out`, a pair that is only for tests."""
    low = 10 ** (NUM_DIGITS - 1)
    high = 10**NUM_DIGITS - 1
    while True:
        pair = rng.randint(low, high), rng.randint(low, high)
        if is_held_out(f"{pair[0]}+{pair[1]}") == held_out:
            return pair


def fill_sum(pair: Pair) -> str:
    return PROMPT.format(sum=f"{pair[0]}+{pair[1]}")


def student_turns(rng: random.Random, pair: Pair, right_share: float) -> list[str]:
    """Return what a student writes in each turn.

    Each column's sum is right with the probability `right_share`, else it is a number from 0 to 19. The
    student goes on with what it wrote.
    """
    carry = 0
    done = ""
    turns = []
    for column in range(NUM_DIGITS):
        left_digit, right_digit = (number // 10**column % 10 for number in pair)
        total = left_digit + right_digit + carry if rng.random() < right_share else rng.randrange(20)
        text = f"{left_digit}+{right_digit}+{carry}={total:02d};"
        carry = total // 10
        last = column == NUM_DIGITS - 1
        done = f"{total if last else total % 10}{done}"
        turns.append(f"{text}{'#### ' if last else ''}{done}")
    return turns


def drill(rng: random.Random, count: int = 24) -> list[tuple[str, bool]]:
    """Return single columns without mistakes, as (text, trained) segments: the quickest way to learn them."""
    segments = [(PROMPT[: PROMPT.index("{")], False)]
    for _ in range(count):
        left_digit = rng.randrange(10)
        right_digit = rng.randrange(10)
        carry = rng.randrange(2)
        segments += [
            (f"{left_digit}+{right_digit}+{carry}=", False),
            (f"{left_digit + right_digit + carry:02d};", True),
        ]
    return segments


def make_row(pair: Pair, split: str = "train", index: int = 0) -> dict[str, Any]:
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": fill_sum(pair)}],
        "env_class": "gsm8k_multi_turn",
        "reward_spec": {"method": "rule", "ground_truth": str(sum(pair))},
        "max_turns": NUM_DIGITS,
        "extra_info": {"split": split, "index": index, "question": f"{pair[0]}+{pair[1]}"},
    }


def write_rows(seed: int, out: Path, num_train: int, num_test: int) -> dict[str, int]:
    """Write both files into the folder `out`, the same for a seed; return the number of rows of each."""
    counts = {}
    for split, count in (("train", num_train), ("test", num_test)):
        rng = random.Random(f"arithmetic {split} {seed}")
        pairs = [draw_pair(rng, held_out=split == "test") for _ in range(count)]
        rows = [make_row(pair, split, index) for index, pair in enumerate(pairs)]
        counts[f"{split}.parquet"] = write_parquet(out / f"{split}.parquet", rows)
    return counts
