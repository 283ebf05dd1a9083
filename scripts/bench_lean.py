"""Measure by a simulated clock whether rollouts ahead of training lean to short trajectories.

    python scripts/bench_lean.py [--ahead 1,2,4,8] [--update 0.25,1] [--sigma 1] [--steps 120] [--seeds 0]

Prints a Markdown table, which also has the time of a step. The run's own `RolloutStream` begins, chooses,
drops and asks again. Only prompts and processes are simulated, so that the numbers are the same on every
machine. A group takes a lognormal time with a mean of 1, which is its length too, and runs at that speed
whatever runs beside it. Half of the variance of the logarithm belongs to the prompt, so that a prompt that is
asked again tends to be slow again. The other half is new with every attempt. A trajectory has four turns of
equal length.

"in time" is `too_old=drop`, "masked" is `too_old=mask`, "ready first" is a batch that waits for no group and
drops what is too old. "lean" is the mean number of tokens that a trajectory is trained on, divided by the
mean length of the first answers to the prompts that are due in these steps; 1 means that length decides
nothing. "async/lean" is the mean of that metric of a run. "dropped" is the share of finished groups that are
dropped.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import torch  # noqa: E402

from verl.config import Config, load_config, replace_values  # noqa: E402
from verl.protocol import DataProto, object_array  # noqa: E402
from verl.trainer.ppo.stream import PromptGroup, RolloutStream  # noqa: E402
from verl.workers.rollout_worker import MEMBER  # noqa: E402

NUM_TURNS = 4
TOKENS = 1000  # tokens of a group of length 1
PROMPT_SHARE = 0.5  # share of the variance of a length's logarithm that belongs to the prompt


class Lengths:
    """Lognormal lengths with a mean of 1, by group and attempt."""

    def __init__(self, seed: int, sigma: float) -> None:
        self.seed = seed
        self.sigma = sigma

    def of(self, number: int, attempt: int) -> float:
        """Return the length of a group; it depends only on the seed and on the arguments."""
        prompt_draw = random.Random(f"{self.seed} prompt {number}").gauss(0.0, 1.0)
        attempt_draw = random.Random(f"{self.seed} attempt {number} {attempt}").gauss(0.0, 1.0)
        normal = math.sqrt(PROMPT_SHARE) * prompt_draw + math.sqrt(1.0 - PROMPT_SHARE) * attempt_draw
        return math.exp(self.sigma * normal - self.sigma**2 / 2)


class SimulatedPrompts:
    """The collector's part: prompts 0, 1, 2, .. with one trajectory each."""

    def drawn_ahead(self, number: int, count: int, asked: Iterable[int]) -> list[DataProto]:
        """Return the next prompts; a group and its prompt have the same number here."""
        return [self._row(number + offset, 0) for offset in range(count)]

    def asked_again(self, prompts: DataProto, number: int, attempt: int) -> DataProto:
        """Return the prompt of a group for another attempt."""
        return self._row(number, attempt)

    def _row(self, number: int, attempt: int) -> DataProto:
        columns = {"uid": [f"{number}.{attempt}"], "index": [number], "raw_prompt_ids": [[1]]}
        return DataProto.from_dict({"sampling_seeds": torch.zeros(1, dtype=torch.int64)}, columns)


class Delivered:
    """The future of a call that arrives at once."""

    def get(self) -> None:
        """Return at once."""


@dataclass
class SimulatedRow:
    """A trajectory under way."""

    uid: str
    begun: float
    length: float

    @property
    def end(self) -> float:
        """Return the time at which the trajectory is over."""
        return self.begun + self.length


class SimulatedRollouts:
    """The workers' part: one process with a clock, for any number of trajectories at once."""

    world_size = 1

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.now = 0.0
        self.rows: list[SimulatedRow] = []
        self.loaded: list[float] = []  # version -> time from which the process samples with it

    def load_weights(self, weights: Any, version: int) -> Delivered:
        """Take in weights in the midst of turns."""
        assert version == len(self.loaded)
        self.loaded.append(self.now)
        return Delivered()

    def submit(self, entries: list[DataProto]) -> Delivered:
        """Begin a trajectory."""
        uid = entries[0].non_tensor_batch["uid"][0]
        number, attempt = map(int, uid.split("."))
        self.rows.append(SimulatedRow(uid, self.now, self.lengths.of(number, attempt)))
        return Delivered()

    def poll(self, seconds: float) -> list[DataProto]:
        """Return the trajectories that are over.

        If there are none, the clock goes on until there is one.
        """
        self.now = max(self.now, min(row.end for row in self.rows))
        ended = [row for row in self.rows if row.end <= self.now]
        self.rows = [row for row in self.rows if row.end > self.now]
        records = [self._record(row) for row in ended]
        columns = {
            "uid": [row.uid for row in ended],
            MEMBER: [0] * len(ended),
            "trajectory": object_array(records),
        }
        return [DataProto.from_dict({"response_mask": torch.ones(len(ended), 1)}, columns)]

    def figures(self) -> list[dict[str, float]]:
        """Return no figures of an engine."""
        return []

    def _record(self, row: SimulatedRow) -> dict[str, Any]:
        tokens = max(NUM_TURNS, round(row.length * TOKENS))
        bounds = [tokens * turn // NUM_TURNS for turn in range(NUM_TURNS + 1)]
        turns = []
        for turn in range(NUM_TURNS):
            version = self._version_at(row.begun + row.length * turn / NUM_TURNS)
            turns.append({"version_first": version, "start": bounds[turn], "end": bounds[turn + 1]})
        return {"version_first": turns[0]["version_first"], "turns": turns, "finish_reason": "answer"}

    def _version_at(self, moment: float) -> int:
        return max(version for version, since in enumerate(self.loaded) if since <= moment)


class ReadyFirst(RolloutStream):
    """The stream with batches that wait for no group."""

    def _batch(self, count: int) -> list[PromptGroup]:
        ready = sorted(self.ready, key=lambda group: group.number)
        return ready[:count] if len(ready) >= count else []


KINDS: dict[str, tuple[type[RolloutStream], str]] = {
    "ready first": (ReadyFirst, "drop"),
    "in time": (RolloutStream, "drop"),
    "masked": (RolloutStream, "mask"),
}


@dataclass
class Outcome:
    """The figures of a simulated run."""

    lean: float
    metric: float
    dropped: float
    seconds: float  # time of a step


def settings_of(ahead: int, groups: int, too_old: str) -> Config:
    """Return the configuration of a run whose steps train so many groups."""
    config = load_config([])
    values = {"data.train_batch_size": groups, "trainer.async_training.max_staleness": ahead}
    config = replace_values(config, {**values, "trainer.async_training.too_old": too_old})
    return config


def simulate(
    kind: str, ahead: int, update: float, steps: int, groups: int = 16, sigma: float = 1.0, seed: int = 0
) -> Outcome:
    """Run the stream and return its figures.

    The first third of the steps, in which the queue fills, is left out, and so are the last `ahead` + 1
    steps, for which no more groups are begun.

    Args:
        kind: one of KINDS.
        ahead: trainer.async_training.max_staleness.
        update: the time that a step takes beside its wait for groups.
        steps: steps of the run.
        groups: groups of a step.
        sigma: standard deviation of a length's logarithm.
        seed: seed of the lengths.
    """
    stream_class, too_old = KINDS[kind]
    lengths = Lengths(seed, sigma)
    rollouts = SimulatedRollouts(lengths)
    workers: Any = rollouts
    prompts: Any = SimulatedPrompts()
    weights: Any = None
    stream = stream_class(settings_of(ahead, groups, too_old), prompts, workers, steps, lambda line: None)
    stream.send_weights(0, weights)
    first = steps // 3 + 1
    end = steps - ahead
    num_dropped = 0.0
    num_tokens = 0
    leans = []
    for step in range(1, end):
        if step == first:
            started = rollouts.now
        stream.take(groups)
        metrics = stream.metrics()
        if step >= first:
            oldest = stream.gate.oldest(stream.version) if too_old == "mask" else None
            num_tokens += sum(group.num_sampled(oldest) for group in stream.taken)
            num_dropped += metrics["async/dropped"]
            leans.append(metrics["async/lean"])
        rollouts.now += update
        stream.send_weights(step, weights)
    num_trained = (end - first) * groups
    drawn = mean(lengths.of(number, 0) for number in range((first - 1) * groups, (end - 1) * groups))
    trained = num_tokens / num_trained / TOKENS
    dropped = num_dropped / (num_dropped + num_trained)
    return Outcome(trained / drawn, mean(leans), dropped, (rollouts.now - started) / (end - first))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ahead", default="1,2,4,8", help="values of trainer.async_training.max_staleness")
    parser.add_argument("--update", default="0.25,1", help="times of an update; a group takes 1 on average")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of a length's logarithm")
    parser.add_argument("--groups", type=int, default=16, help="groups of a step (16)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run (120)")
    parser.add_argument("--seeds", default="0", help="seeds of the lengths (0)")
    options = parser.parse_args()
    ahead = [int(k) for k in options.ahead.split(",")]
    if options.steps < 2 * max(ahead) + 6:
        parser.error(f"--steps: found {options.steps}, expected at least {2 * max(ahead) + 6}")
    print("| update | k | batches | lean | async/lean | dropped | time of a step |")
    print("|---" * 7 + "|")
    for update in map(float, options.update.split(",")):
        for k in ahead:
            for kind in KINDS:
                outcomes = []
                for seed in map(int, options.seeds.split(",")):
                    run = simulate(kind, k, update, options.steps, options.groups, options.sigma, seed)
                    outcomes.append(run)
                lean = mean(outcome.lean for outcome in outcomes)
                metric = mean(outcome.metric for outcome in outcomes)
                dropped = mean(outcome.dropped for outcome in outcomes)
                seconds = mean(outcome.seconds for outcome in outcomes)
                figures = f"{lean:.3f} | {metric:.3f} | {dropped:.3f} | {seconds:.2f}"
                print(f"| {update:g} | {k} | {kind} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
