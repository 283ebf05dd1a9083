"""Questions of three hops about a microworld, for a run that continues one which has learnt one and two hops.

    python -m data_prep.hops --seed 0 --out data/hops/seed0

    seed -> the four files of the microworld     see data_prep.microworld
         -> train_3hop.parquet                   about the training part of the same world
         -> test_4hop.parquet, test_5hop.parquet   longer chains than training ever shows
         -> settings.yaml                        keys of a run that name these files

As in the microworld, every name on the chain of a test question is held out.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from data_prep import microworld
from data_prep.files import run_command, write_parquet, write_settings


def write_hops(seed: int, out: Path, num_train: int, num_test: int) -> dict[str, int]:
    """Write everything into the folder `out`; return the number of rows of each file."""
    counts = microworld.write_world(seed, out, num_train, 2 * num_test, num_test)
    train_part, test_part = microworld.evaluation_world(seed)
    rng = random.Random(f"hops {seed}")
    row_sets = [("train_3hop", train_part, 3, num_train)]
    row_sets += [(f"test_{hops}hop", test_part, hops, num_test) for hops in (4, 5)]
    for name, world, hops, count in row_sets:
        rows = microworld.make_rows(microworld.draw_questions(rng, world, hops, count), name)
        counts[f"{name}.parquet"] = write_parquet(out / f"{name}.parquet", rows)
    files = {name.removesuffix(".parquet"): str(out.absolute() / name) for name in counts}
    settings = {
        # Half of the trajectories have three hops, in groups twice as large: a success is rare at first.
        "data.mixture": [
            {"name": "1-2hop", "path": files["train"], "ratio": 2, "n": 8},
            {"name": "3hop", "path": files["train_3hop"], "ratio": 1, "n": 16},
        ],
        "data.val_files": [files["test"], files["test_3hop"]],
        "data.extra_val_files": [files["test_4hop"], files["test_5hop"]],
    }
    write_settings(out, settings)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Questions of one to five hops about a microworld.")
    parser.add_argument("--seed", type=int, default=0, help="which world, 0 to 999 (default 0)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-train", type=int, default=4096, help="of 1 and 2 hops, and of 3 (4096)")
    parser.add_argument("--num-test", type=int, default=200, help="test rows of each hop count (default 200)")
    return run_command(parser, lambda options: write_hops(**vars(options)), argv)


if __name__ == "__main__":
    sys.exit(main())
