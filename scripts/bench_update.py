"""Trained tokens per CPU second, and memory, of one policy update: this project, TRL, a padded step.

    python scripts/bench_update.py --trl-python ENV/bin/python [--sizes tiny 5M 36M] [--json FILE]
    python scripts/bench_update.py --trl-python ENV/bin/python --memory
    python scripts/bench_update.py --alike 0 0.15 0.5 0.8 --lengths 200 200 --sizes tiny

The same model, the same trajectories (lengths 50 to 1500, 60 % of their tokens retrieved text that is not
trained, groups of 8 with one prompt), the same loss (clipped, mean over the sampled tokens, on-policy),
float32, one thread, one step of AdamW. Each run is a process of its own; the contenders take turns,
`--rounds` times; a run that is interrupted prints what it has. Trained tokens are the sampled ones. Losses
and gradients are compared.

    ours            DataParallelPPOActor.update_policy                   scripts/bench/update_ours.py
    TRL             GRPOTrainer.compute_loss, padded as TRL pads         .../update_trl.py
    TRL, sorted     the same, rows of like length together, each micro-batch cut to its longest (--sorted)
    padded          Hugging Face model, full logits, all rows padded to the longest of the step
    padded, sorted  the same, rows of like length together (--sorted)    .../update_padded.py

With `--alike` ours alone is timed on groups whose trajectories begin alike, with such shares of their tokens.

TRL has an environment of its own: `pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench.update_task import Measured, UpdateTask, draw_trajectories  # noqa: E402

OURS, TRL, TRL_SORTED, PADDED, PADDED_SORTED = "ours", "TRL", "TRL, sorted", "padded", "padded, sorted"
SCRIPTS = {OURS: "ours", TRL: "trl", TRL_SORTED: "trl", PADDED: "padded", PADDED_SORTED: "padded"}
# hidden width, layers, feed-forward width, vocabulary, groups of trajectories
SIZES = {
    "tiny": (128, 3, 384, 2560, 4),
    "5M": (256, 4, 1024, 4096, 2),
    "36M": (512, 6, 1536, 32_000, 1),
    "152k": (128, 2, 384, 151_936, 1),
    "test": (32, 1, 64, 200, 1),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True)
class Run:
    size: str
    contender: str
    micro_batch: int
    trained_tokens: int
    measured: Measured

    @property
    def cpu_s(self) -> float:
        """Of a step; the first one warms up if there are more."""
        return median(self.measured.cpu_s[1:] or self.measured.cpu_s)

    @property
    def per_cpu_s(self) -> float:
        return self.trained_tokens / self.cpu_s

    @property
    def memory_mb(self) -> float:
        return self.measured.peak_mb - self.measured.before_mb


def write_model(folder: Path, size: str) -> str:
    """A model folder: the shipped model for "tiny", else random weights; returns its path."""
    if size == "tiny":
        return str(ROOT / "data_prep" / "base_model")
    width, layers, inner, vocabulary, _ = SIZES[size]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 32 if width < 128 else width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=32 if width < 128 else 64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return str(folder)


def run_once(contender: str, trl_python: str | None, folder: Path, task: UpdateTask) -> Measured:
    """Raises RuntimeError with the end of its output if the contender fails."""
    (folder / "task.json").write_text(json.dumps(asdict(task)), encoding="utf-8")
    python = trl_python if SCRIPTS[contender] == "trl" else sys.executable
    assert python is not None
    command = [python, str(ROOT / "scripts" / "bench" / f"update_{SCRIPTS[contender]}.py"), str(folder)]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-3000:]}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def difference(folder: Path, reference: dict[str, torch.Tensor]) -> float:
    """Of the gradient that the last run left, from the reference, relative to the reference's norm."""
    found = torch.load(folder / "gradient.pt", weights_only=True)
    if found.keys() != reference.keys():
        raise ValueError(f"other parameters: {sorted(found.keys() ^ reference.keys())[:4]}")
    error = sum((found[k].double() - reference[k].double()).square().sum() for k in reference)
    size = sum(reference[k].double().square().sum() for k in reference)
    return float((error / size) ** 0.5)


def measure_size(
    size: str,
    contenders: list[str],
    options: argparse.Namespace,
    task: UpdateTask,
    folder: Path,
    runs: list[Run],
) -> None:
    """All rounds of all contenders at one size, added to `runs`; compares loss and gradient of each."""
    vocabulary, groups = SIZES[size][3:]
    batch = draw_trajectories(groups, options.group, *options.lengths, 0.6, vocabulary, seed=0)
    torch.save(batch, folder / "batch.pt")
    trained = int(batch["response_mask"].sum())
    losses: dict[str, float] = {}
    reference: dict[str, torch.Tensor] = {}
    for number in range(options.rounds):
        shift = number % len(contenders) if number else 0  # ours first in the first round: the reference
        for contender in contenders[shift:] + contenders[:shift]:
            is_sorted = contender.endswith("sorted")
            given = replace(task, sorts_by_length=is_sorted)
            measured = run_once(contender, options.trl_python, folder, given)
            runs.append(Run(size, contender, options.micro_batch, trained, measured))
            losses.setdefault(contender, measured.loss)
            text = f"{size}, round {number + 1}, {contender}: {measured}"
            if task.keeps_gradient:
                reference = reference or torch.load(folder / "gradient.pt", weights_only=True)
                off = difference(folder, reference)
                text += f", gradient differs by {off:.1e}"
                if off > 1e-4 or abs(measured.loss - losses[contenders[0]]) > 1e-4:
                    raise RuntimeError(f"{contender} computes another loss or gradient: {text}")
            print(text, file=sys.stderr, flush=True)


def table(runs: list[Run], contenders: list[str], speed: bool) -> str:
    """Medians over the rounds, Markdown, of what was measured; a ratio is ours against the contender's."""
    head = ["model", "step", "trained tokens per CPU second", "ours is", "CPU s per step", "tokens computed"]
    if not speed:
        head = ["model", "step", "micro-batch", "peak memory of a step, MB", "ours is"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for size in dict.fromkeys(run.size for run in runs):
        rounds = {c: [run for run in runs if (run.size, run.contender) == (size, c)] for c in contenders}
        rounds = {c: found for c, found in rounds.items() if found}
        figure = {c: median(r.per_cpu_s if speed else r.memory_mb for r in rounds[c]) for c in rounds}
        for contender in rounds:
            ratio = figure[OURS] / figure[contender]
            first = rounds[contender][0]
            if speed:
                seconds = median(run.cpu_s for run in rounds[contender])
                cells = [size, contender, f"{figure[contender]:.0f}", f"{ratio:.2f} x", f"{seconds:.2f}"]
                cells.append(f"{first.measured.processed_tokens:,}")
            else:
                micro_batch = "2,048 tokens" if contender == OURS else f"{first.micro_batch} rows"
                cells = [size, contender, micro_batch, f"{figure[contender]:.0f}", f"{ratio:.2f} x"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def alike_table(options: argparse.Namespace) -> str:
    """Our step on groups whose trajectories have a beginning in common, Markdown; medians over the rounds."""
    lines = ["| model | tokens in common | CPU s per step | less than with none |", "|---|---|---|---|"]
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            task = UpdateTask(write_model(folder / "model", size), 1, False, options.steps, False)
            seconds: dict[float, list[float]] = {share: [] for share in options.alike}
            for share in [share for _ in range(options.rounds) for share in options.alike]:
                vocabulary, groups = SIZES[size][3:]
                batch = draw_trajectories(
                    groups, options.group, *options.lengths, 0.6, vocabulary, seed=0, alike=share
                )
                torch.save(batch, folder / "batch.pt")
                measured = run_once(OURS, None, folder, task)
                seconds[share].append(median(measured.cpu_s[1:] or measured.cpu_s))
        first = median(seconds[options.alike[0]])
        for share, found in seconds.items():
            lines.append(f"| {size} | {share:.0%} | {median(found):.2f} | {first / median(found):.2f} x |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="interpreter with TRL; without it TRL is left out")
    parser.add_argument("--sizes", nargs="+", choices=[s for s in SIZES if s != "152k"], default=["tiny"])
    parser.add_argument("--sorted", action="store_true", help="also the contenders sorted by length")
    parser.add_argument("--memory", action="store_true", help="memory with a vocabulary of 152k, no timing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="in a run; the first of several warms up")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows, of the padded contenders and TRL")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs=2, default=[50, 1500])
    parser.add_argument("--alike", type=float, nargs="+", help="shares of a trajectory; times ours alone")
    parser.add_argument("--json", type=Path, help="also write every run here")
    options = parser.parse_args(arguments)
    if options.alike:
        print(alike_table(options))
        return 0
    contenders = [OURS, *([TRL, TRL_SORTED] if options.trl_python else []), PADDED, PADDED_SORTED]
    if options.memory:
        contenders.remove(PADDED)
        options.sizes, options.steps, options.rounds = ["152k"], 1, 1
    elif not options.sorted:
        contenders = [contender for contender in contenders if not contender.endswith("sorted")]
    runs: list[Run] = []
    is_whole = False
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for size in options.sizes:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                model = write_model(folder / "model", size)
                task = UpdateTask(model, options.micro_batch, False, options.steps, not options.memory)
                measure_size(size, contenders, options, task, folder, runs)
        is_whole = True
    except KeyboardInterrupt:
        print("interrupted; what was measured:", file=sys.stderr)
    if options.json:
        rows = [asdict(run) for run in runs]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(table(runs, contenders, speed=not options.memory))
    return 0 if is_whole else 130


if __name__ == "__main__":
    sys.exit(main())
