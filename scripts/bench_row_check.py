"""CPU and wall-clock seconds of the look at all rows before a run, beside the tokenizer alone.

    python scripts/bench_row_check.py --questions NQ-open.dev.jsonl --model MODEL_FOLDER
    python scripts/bench_row_check.py --rows 50000 --rounds 3

Makes --rows rows of a search run (parquet) from natural questions ({"question", "answer"} lines of NQ-open),
which are repeated with a number behind them until there are enough; without --questions, from the questions
of the microworld. Each round measures two ways, by turns:

- the tokenizer alone: the rendered prompts are in memory, and `encode_batch_fast` encodes them in chunks of
  512, with as many threads as the tokenizers library takes on the cores of the process;
- the look (`RowCheck.check`): reads, renders, encodes and scores the rows of the file, remembering nothing.

Prints a table in Markdown: medians over the rounds, and the median of the ratios of a round. The first round
is a warm-up and doesn't count.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from data_prep.microworld import write_world  # noqa: E402
from verl.config.loading import load_config  # noqa: E402
from verl.data import row_check  # noqa: E402
from verl.data.rl_dataset import RLHFDataset, row_settings  # noqa: E402
from verl.data.row_check import RowCheck  # noqa: E402
from verl.utils import hf_tokenizer  # noqa: E402
from verl.verifiers.registry import Verifiers  # noqa: E402
from verl.verifiers.verifier import VerifierSettings  # noqa: E402

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you "
    "get new information. After reasoning, if you find you lack some knowledge, you can call a search engine "
    "by <search> query </search>. Write the answer inside <answer> and </answer>. Question: {}\n"
)


def write_rows(path: Path, questions: list[tuple[str, list[str]]], num_rows: int) -> None:
    """Write rows of a search run, each with a question of its own."""
    rows = []
    for number in range(num_rows):
        question, answers = questions[number % len(questions)]
        text = question if number < len(questions) else f"{question} ({number // len(questions)})"
        rows.append(
            {
                "data_source": "nq",
                "prompt": [{"role": "user", "content": PROMPT.format(text)}],
                "ability": "fact-reasoning",
                "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
                "extra_info": {"split": "train", "index": number},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), path)


def microworld_questions(folder: Path) -> list[tuple[str, list[str]]]:
    """Return the training questions of the microworld of seed 0, with their answers."""
    write_world(0, folder, num_train=6000, num_test=100, num_3hop=2)
    rows = pq.read_table(folder / "train.parquet").to_pylist()
    return [(row["prompt"][-1]["content"], row["reward_model"]["ground_truth"]["target"]) for row in rows]


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds (all threads) and the wall-clock seconds of some work."""
    cpu_start = time.process_time()
    wall_start = time.perf_counter()
    work()
    return time.process_time() - cpu_start, time.perf_counter() - wall_start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--questions", type=Path, help="jsonl file of {question, answer}")
    parser.add_argument(
        "--model", default=str(ROOT / "data_prep" / "base_model"), help="folder of the tokenizer"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.questions is None:
            questions = microworld_questions(folder)
        else:
            lines = options.questions.read_text().splitlines()
            questions = [(record["question"], record["answer"]) for record in map(json.loads, lines)]
        path = folder / "rows.parquet"
        write_rows(path, questions, options.rows)
        config = load_config(
            [
                f"data.train_files={path}",
                f"data.val_files={path}",
                f"actor_rollout_ref.model.path={options.model}",
            ]
        )
        tokenizer = hf_tokenizer(options.model, correct_pad_token=False)
        verifiers = Verifiers(VerifierSettings(config.verifiers, folder))
        dataset = RLHFDataset(str(path), tokenizer, row_settings(config), None)
        backend = tokenizer.backend_tokenizer
        texts = [
            row_check.prompt_text(tokenizer, dataset.read_row(row).messages)
            for _, row in dataset.rows_to_check()
        ]

        def tokenizer_alone() -> None:
            for start in range(0, len(texts), 512):
                backend.encode_batch_fast(texts[start : start + 512], add_special_tokens=False)

        def look() -> None:
            check = RowCheck.of(config, [dataset], tokenizer, len(tokenizer), verifiers)
            check.key = lambda: None  # type: ignore[method-assign]  # what is remembered would not be looked at
            check.check()

        costs: dict[str, list[tuple[float, float]]] = {"the tokenizer alone": [], "the look": []}
        ways: dict[str, Callable[[], None]] = {"the tokenizer alone": tokenizer_alone, "the look": look}
        for number in range(options.rounds + 1):
            for way in sorted(ways, reverse=number % 2 == 0):
                seconds = seconds_of(ways[way])
                if number > 0:
                    costs[way].append(seconds)
        verifiers.close()
    print(f"{options.rows} rows, tokenizer of {Path(options.model).name}")
    print("| way | CPU s, median | wall-clock s, median |\n|---|---|---|")
    for way, pairs in costs.items():
        print(f"| {way} | {median(cpu for cpu, _ in pairs):.2f} | {median(wall for _, wall in pairs):.2f} |")
    rounds = list(zip(costs["the look"], costs["the tokenizer alone"], strict=True))
    ratios = [median(look[kind] / alone[kind] for look, alone in rounds) for kind in range(2)]
    print(f"| ratio | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
