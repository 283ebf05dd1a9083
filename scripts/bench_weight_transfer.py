"""The ways of `rollout.weight_transfer` beside each other: seconds of an update, in one run.

    python scripts/bench_weight_transfer.py [--updates 8] [--dtypes bfloat16,float32] [--lr 1e-6]   Markdown

A process trains a random model of about 30 M weights, and another one takes its weights, both as actors of
Ray on this machine. After every step of AdamW the weights go all ways one after another, each time beginning
with another one. The first update of each way is left out: it sets up groups, files and memory.

"Stands still" is the time until the trainer can go on, "until there" until the other process has the tensors
in its memory; loading them into an engine comes on top, with all ways. Medians over the updates. Both
processes check that they have the same bits.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from scripts.bench.servers import ENVIRONMENT  # noqa: E402
from verl.single_controller.ray import init_ray  # noqa: E402
from verl.utils.weight_files import WeightReader, WeightWriter, bits_of  # noqa: E402
from verl.workers.rollout.collective import CollectiveReader, CollectiveSender, MeetingPoint  # noqa: E402

import ray  # noqa: E402  # isort: skip  (last: `verl` makes its settings)

WAYS = ("ray", "collective", "filesystem", "delta")
CPU = torch.device("cpu")
DEADLINE = 600.0
ANCHOR_EVERY = 50  # the default of rollout.anchor_every
Pairs = list[tuple[str, Tensor]]


def checksum(pairs: Pairs) -> int:
    """Return one number for all bits of the tensors."""
    value = 0
    for _, tensor in pairs:
        value = zlib.crc32(bits_of(tensor).data, value)
    return value


class SendingTrainer:
    """The process that trains."""

    def __init__(self, folder: Path, dtype: str, lr: float) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=24_576,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=5,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            tie_word_embeddings=True,
        )
        self.model = Qwen3ForCausalLM(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.dtype = getattr(torch, dtype)
        readers = ["rollout-0"]
        self.writers = {
            "filesystem": WeightWriter(folder / "filesystem", 1, readers),
            "delta": WeightWriter(folder / "delta", ANCHOR_EVERY, readers),
        }
        self.sender = CollectiveSender("127.0.0.1", 1, "gloo", CPU, DEADLINE)

    def num_weights(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def learn(self) -> int:
        """Make a step, and return the checksum of the weights in the rollouts' dtype."""
        tokens = torch.randint(0, 24_576, (2, 64))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return checksum([(name, tensor.to(self.dtype)) for name, tensor in self.weights()])

    def weights(self) -> Pairs:
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    def export(self, way: str, version: int) -> Any:
        """Do what `ActorRolloutRefWorker.export_weights` does on rank 0."""
        pairs = ((name, tensor.to(self.dtype)) for name, tensor in self.weights())
        if way == "collective":
            return self.sender.send_in_background(pairs, version)
        copies = [(name, tensor.to("cpu", copy=True)) for name, tensor in pairs]
        if way == "ray":
            return copies
        self.writers[way].write_in_background(copies, version)
        return self.writers[way].folder

    def go_on(self) -> None:
        """Answer when the process has nothing else to do."""


class Sampler:
    """The process that takes the weights."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.collective = CollectiveReader(0, CPU)
        self.readers: dict[str, WeightReader] = {}
        self.pairs: Pairs = []

    def take(self, way: str, given: Any, version: int) -> int:
        """Do what `RolloutWorker.load_weights` does, without an engine, and return the bytes that came."""
        if isinstance(given, MeetingPoint):
            before = self.collective.num_bytes
            self.pairs = self.collective.read(given, DEADLINE)
            return self.collective.num_bytes - before
        if isinstance(given, Path):
            reader = self.readers.setdefault(way, WeightReader(given, "rollout-0"))
            before = reader.num_bytes
            self.pairs = reader.read(version, DEADLINE)
            return reader.num_bytes - before
        self.pairs = given
        return sum(tensor.nbytes for _, tensor in given)

    def checksum(self) -> int:
        return checksum(self.pairs)


def measure(dtype: str, num_updates: int, lr: float) -> None:
    """Measure all ways with weights of a dtype, and print the rows of the table."""
    stands_still = defaultdict[str, list[float]](list)
    until_there = defaultdict[str, list[float]](list)
    megabytes = defaultdict[str, list[float]](list)
    environment = {"runtime_env": {"env_vars": ENVIRONMENT}, "num_cpus": 0.5}
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = ray.remote(SendingTrainer).options(**environment).remote(Path(folder), dtype, lr)
        sampler: Any = ray.remote(Sampler).options(**environment).remote()
        count = ray.get(trainer.num_weights.remote())
        for version in range(num_updates + 1):
            expected = ray.get(trainer.learn.remote())
            first = version % len(WAYS)
            for way in (*WAYS[first:], *WAYS[:first]):
                started = time.perf_counter()
                given = trainer.export.remote(way, version)
                taken = sampler.take.remote(way, given, version)
                ray.get(trainer.go_on.remote())
                still = time.perf_counter() - started
                num_bytes = ray.get(taken)
                there = time.perf_counter() - started
                if ray.get(sampler.checksum.remote()) != expected:
                    raise RuntimeError(f"{way} gave other bits in update {version}")
                if version > 0:
                    stands_still[way].append(still)
                    until_there[way].append(there)
                    megabytes[way].append(num_bytes / 1e6)
        ray.kill(trainer)
        ray.kill(sampler)
    for way in WAYS:
        still = stands_still[way]
        there = until_there[way]
        print(
            f"| `{way}` | {dtype} | {count / 1e6:.1f} | {median(megabytes[way]):.1f} "
            f"| {median(still):.3f} ({min(still):.3f} to {max(still):.3f}) "
            f"| {median(there):.3f} ({min(there):.3f} to {max(there):.3f}) |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=8, help="updates of each way (8)")
    parser.add_argument("--dtypes", default="bfloat16,float32", help="of the rollouts' weights")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW (1e-6)")
    options = parser.parse_args()
    with init_ray(num_cpus=2):
        print("| transfer | rollouts | M weights | MB of an update | stands still, s | until there, s |")
        print("|---" * 6 + "|")
        for dtype in options.dtypes.split(","):
            measure(dtype, options.updates, options.lr)


if __name__ == "__main__":
    main()
