"""The policy's update with turns as rows (`rollout.step_wise`) beside the update with whole trajectories.

    python scripts/bench_step_wise.py              CPU seconds of an update, Markdown

The shipped tiny model, one process and one thread. The batch is made of random tokens: `--trajectories` of
`--turns` turns in groups of 8 that begin with one prompt of 60 tokens; a turn samples 24 tokens, and 100
tokens of observation follow. The two ways take turns on the same batch, `--rounds` times, each with the
optimizer's step; medians. Beside them rows without shared beginnings ("no sharing"): every context computed
anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
import torch

from scripts.bench_model_step import Contender
from verl.protocol import DataProto, object_array
from verl.utils import packing

MODEL = Path(__file__).resolve().parents[1] / "data_prep" / "base_model"
GROUP, PROMPT, SAMPLED, OBSERVED = 8, 60, 24, 100


def batch_of(num_trajectories: int, num_turns: int) -> DataProto:
    """Trajectories with advantages and the turn of each token."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.tensor([1] * SAMPLED + [0] * OBSERVED)
    mask = turn.repeat(num_turns)[:-OBSERVED].repeat(num_trajectories, 1)  # nothing follows the last turn
    turn_ids = torch.arange(num_turns).repeat_interleave(len(turn))[: mask.shape[1]]
    ids = torch.randint(3, 2500, (num_trajectories, PROMPT + mask.shape[1]), generator=generator)
    ids[:, :PROMPT] = ids[torch.arange(num_trajectories) // GROUP * GROUP, :PROMPT]
    columns = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(ids.shape[1]).expand(ids.shape),
        "response_mask": mask,
        "advantages": torch.randn(num_trajectories, 1, generator=generator) * mask,
        "turn_ids": torch.where(mask.bool(), turn_ids, -1),
    }
    uids = object_array([str(row // GROUP) for row in range(num_trajectories)])
    return DataProto.from_dict(columns, {"uid": uids}, {"mini_batch_rows": num_trajectories})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = batch_of(options.trajectories, options.turns)
    whole = turns.select()
    del whole.tensors["turn_ids"]
    actor, sharing = Contender(str(MODEL), "fp32").actor, packing.WORTH_SHARING
    ways = {"whole trajectories": (whole, sharing), "turns as rows": (turns, sharing)}
    ways["no sharing"] = (turns, 0)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(options.rounds + 1):
        for way, (batch, packing.WORTH_SHARING) in ways.items():
            start = time.process_time()
            actor.update_policy(batch)
            if round_:  # the first one warms up
                seconds[way].append(time.process_time() - start)
    length = whole.tensors["input_ids"].shape[1]
    print(f"{options.trajectories} trajectories of {options.turns} turns, {length} tokens each\n")
    print("| rows | CPU s per update | times whole trajectories |\n|---|---|---|")
    for way, values in seconds.items():
        ratio = median(values) / median(seconds["whole trajectories"])
        print(f"| {way} | {median(values):.2f} ({min(values):.2f} to {max(values):.2f}) | {ratio:.2f} |")


if __name__ == "__main__":
    main()
