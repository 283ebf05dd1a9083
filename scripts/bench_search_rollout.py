"""Multi-turn search trajectories per CPU second: this project's rollout, a lock-step loop, TRL's tool loop.

    python scripts/bench_search_rollout.py --trl-python ENV/bin/python

The shipped tiny model answers questions of a microworld, with searches in it; all contenders get the same
weights, prompts, lengths and number of turns, and the same BM25 server, which adds a delay to each call. Each
run is a process of its own with one thread; the contenders take turns, `--rounds` times. Counted is the CPU
time of the client's process during generation, after a warm-up; the server's is shown beside it.

    ours       LLMGenerationManager on the native engine, SearchClient   scripts/bench/search_rollout_ours.py
    lock-step  Search-R1's way of working on transformers' `generate`    .../search_rollout_lockstep.py
    TRL        the generation part of its GRPOTrainer, with a tool       .../search_rollout_trl.py

A turn without an action: the first two tell the model what it can do and go on, TRL ends the trajectory. This
and more is said below the table (`NOTES`). Each contender draws its own random numbers.

TRL has an environment of its own: `pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data_prep.microworld import draw_questions, evaluation_world, write_world  # noqa: E402
from data_prep.prompts import MICROWORLD_PROMPT, fill_prompt  # noqa: E402
from scripts.bench.load import cpu_seconds  # noqa: E402
from scripts.bench.search_rollout_task import Measured, Task  # noqa: E402
from scripts.bench.servers import PORT, RunningServer, running  # noqa: E402

WORLD_SEED = 999
GROUP = 8
OURS, LOCK_STEP, TRL = "ours", "lock-step", "TRL"
NOTES = {
    OURS: "a turn without an action is answered with a hint and the trajectory goes on; equal queries are "
    "sent to the server once.",
    LOCK_STEP: "written for this comparison after Search-R1's way of working, on transformers' `generate` "
    "(Search-R1 itself generates with vLLM); without stop strings, so it samples tokens that it cuts off; "
    "a turn without an action goes on as ours.",
    TRL: "the generation part of GRPOTrainer on transformers' `generate`; a turn without an action ends the "
    "trajectory, so some are shorter than ours.",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}


@dataclasses.dataclass
class Run:
    """One run of one contender at one delay."""

    measured: Measured
    server_cpu_s: float

    @property
    def per_cpu_s(self) -> float:
        return self.measured.trajectories / self.measured.cpu_s


def questions(num: int) -> list[str]:
    """Prompts of the evaluation world, half of one hop and half of two."""
    rng = random.Random(0)
    held_out = evaluation_world(WORLD_SEED)[1]
    drawn = [q for hops in (1, 2) for q in draw_questions(rng, held_out, hops, -(-num // 2))]
    rng.shuffle(drawn)
    return [fill_prompt(MICROWORLD_PROMPT, question.text) for question in drawn[:num]]


@contextlib.contextmanager
def server(folder: Path, delay_ms: float) -> Iterator[RunningServer]:
    """The retrieval server of the world in `folder`."""
    command = [sys.executable, str(ROOT / "scripts/bench/search_rollout_server.py")]
    command += ["--corpus_path", str(folder / "corpus.jsonl"), "--port", PORT, "--delay_ms", str(delay_ms)]
    with running("retrieval server", command, folder / "server.log", ENVIRONMENT) as server:
        yield server


def command_of(contender: str, trl_python: str | None) -> list[str]:
    scripts = ROOT / "scripts/bench"
    if contender == TRL:
        assert trl_python is not None
        return [trl_python, str(scripts / "search_rollout_trl.py")]
    name = {OURS: "search_rollout_ours.py", LOCK_STEP: "search_rollout_lockstep.py"}[contender]
    return [sys.executable, str(scripts / name)]


def run_once(command: list[str], task: Task, server: RunningServer, folder: Path) -> Run:
    """Raises RuntimeError with the end of its output if the contender fails."""
    path = folder / "task.json"
    path.write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
    before = cpu_seconds(server.pid)
    done = subprocess.run(
        [*command, str(path)], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return Run(Measured.parse(done.stdout.strip().splitlines()[-1]), cpu_seconds(server.pid) - before)


def table(runs: dict[tuple[float, str], list[Run]]) -> str:
    """Medians over the rounds, Markdown."""
    columns = ["delay per call", "contender", "trajectories per CPU second", "ours is", "CPU s", "wall s"]
    columns += ["server CPU s", "searches each", "sampled tokens each (kept)", "answered"]
    lines = [_row(columns), "|---" * len(columns) + "|"]
    for (delay, contender), rounds in runs.items():
        speeds = [run.per_cpu_s for run in rounds]
        ratio = median(run.per_cpu_s for run in runs[delay, OURS]) / median(speeds)
        measured = [run.measured for run in rounds]
        num = sum(m.trajectories for m in measured)
        sampled = sum(m.counts.sampled_tokens for m in measured) / num
        kept = sum(m.counts.kept_tokens for m in measured) / num
        cells = [f"{delay:g} ms", contender, f"{median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"]
        cells += [f"{ratio:.2f} x", f"{median(m.cpu_s for m in measured):.2f}"]
        cells += [
            f"{median(m.wall_s for m in measured):.2f}",
            f"{median(r.server_cpu_s for r in rounds):.2f}",
        ]
        cells += [f"{sum(m.counts.searches for m in measured) / num:.2f}", f"{sampled:.1f} ({kept:.1f})"]
        cells.append(f"{sum(m.counts.answers for m in measured) / num:.2f}")
        lines.append(_row(cells))
    return "\n".join(lines)


def notes(contenders: list[str]) -> str:
    """What the table's figures don't show of how each contender works."""
    return "\n".join(f"{contender}: {NOTES[contender]}" for contender in contenders)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "data_prep" / "base_model"))
    parser.add_argument("--trajectories", type=int, default=256, help=f"in groups of {GROUP} of one question")
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 50.0, 500.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl-python", help="interpreter with TRL; without it TRL is left out")
    parser.add_argument("--json", type=Path, help="also write every run here")
    options = parser.parse_args()
    contenders = [OURS, LOCK_STEP] + ([TRL] if options.trl_python else [])
    prompts = questions(options.trajectories // GROUP + 2)
    runs: dict[tuple[float, str], list[Run]] = {
        (delay, contender): [] for delay in options.delays_ms for contender in contenders
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(WORLD_SEED, folder, num_train=2, num_test=2, num_3hop=2)
        for delay, number in (
            (delay, number) for delay in options.delays_ms for number in range(options.rounds)
        ):
            with server(folder, delay) as running_server:
                task = Task(
                    model=options.model,
                    url=f"http://127.0.0.1:{running_server.port}/retrieve",
                    warm_up=[prompt for prompt in prompts[:2] for _ in range(GROUP)],
                    prompts=[prompt for prompt in prompts[2:] for _ in range(GROUP)],
                    seed=number,
                )
                for contender in (
                    contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
                ):
                    run = run_once(command_of(contender, options.trl_python), task, running_server, folder)
                    runs[delay, contender].append(run)
                    print(
                        f"{delay:g} ms, round {number + 1}, {contender}: {run}", file=sys.stderr, flush=True
                    )
    if options.json:
        rows = [
            {"delay_ms": delay, "contender": contender, **dataclasses.asdict(run)}
            for (delay, contender), rounds in runs.items()
            for run in rounds
        ]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(f"{table(runs)}\n\n{notes(contenders)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
