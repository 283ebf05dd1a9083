"""Whole GRPO steps (rollout with searches, reward, update): this project beside TRL's GRPOTrainer.

    python scripts/bench_grpo_step.py --trl-python ENV/bin/python          CPU seconds a step, Markdown
    python scripts/bench_grpo_step.py --trl-python ENV/bin/python --trl float32 mixed bfloat16 \\
        --config configs/real_model_grpo.yaml --data data/real_model-seed0/rows --micro-batch 4 \\
        --model verl_checkpoints/real_model-seed0/sft/huggingface --steps 2 --warm-up 1 \\
        data.train_batch_size=2 actor_rollout_ref.rollout.n_agent=4 \\
        actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-9
    python scripts/bench_grpo_step.py --trl-python ENV/bin/python --steps 2 --warm-up 1 --rounds 1 \\
        --cells 1.3M:2048:128:8 30M:512:128:8           steps without searches, a line for each cell

The shipped tiny model learns on a microworld, or --model on the questions and the corpus of --data. Both
sides get the same weights, questions in the same order, group and batch sizes, lengths, clipping, learning
rate (constant), AdamW, reward (exact match) and BM25 server, no KL, and one thread each. Ours is `python -m
verl.trainer.main_ppo` with --config. Theirs is `GRPOTrainer.train` with its tool loop
(scripts/bench/grpo_step_trl.py), in each of the ways of --trl: `float32`, `mixed` (bf16=True, TRL's default:
weights in fp32, autocast), `bfloat16` (the weights too, which lose small updates) or `vllm` (mixed, vLLM
generates in the same process).

They take turns, `--rounds` times, each in a process of its own, whose CPU time is read whenever it has
written a step down. The first steps (`--warm-up`) don't count. In TRL a turn without an action ends the
trajectory (ours answers with a hint), so its trajectories are shorter. Therefore the table has the CPU time
of a context token too. A learning rate of next to nothing keeps both policies as they are, and so their
trajectories alike. `vllm` needs CUDA (docs/benchmarks.md says what happens on a CPU).

--cells SIZE:PROMPT:COMPLETION:GROUP measures steps of one question without searches: a random Qwen2 of that
size (scripts/bench/random_models.py), prompts of exactly so many tokens, completions of at most so many (a
random model rarely ends earlier), a group of so many, and a reward that depends on the letters alone. TRL
takes --micro-batch trajectories in a backward pass, or the whole group if they are fewer.

TRL has an environment of its own: `pip install trl==1.16.0 transformers==5.23.0 torch==2.13.0`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import pandas as pd  # noqa: E402
import psutil  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from data_prep.microworld import write_world  # noqa: E402
from scripts.bench.random_models import SHIPPED_MODEL, SIZES, write_random_qwen2  # noqa: E402
from scripts.bench.servers import ENVIRONMENT, bm25_server, running  # noqa: E402
from verl.config import Config  # noqa: E402
from verl.config.loading import load_config  # noqa: E402
from verl.utils.json_files import read_lines  # noqa: E402

OURS = "ours"
WAYS = ["float32", "mixed", "bfloat16", "vllm"]
MORE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
MORE_ENVIRONMENT |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
MORE_ENVIRONMENT |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# Settings that turn off search cost, thrift, entropy bonus, schedule of the learning rate, weight decay,
# validation and checkpoints.
WITHOUT = """data.shuffle_train_dataloader=false actor_rollout_ref.rollout.temperature=1
    reward_model.search_cost=0 algorithm.thrift=0 actor_rollout_ref.actor.entropy_coeff=0
    algorithm.kl_ctrl.kl_coef=0 actor_rollout_ref.actor.optim.warmup_style=constant
    actor_rollout_ref.actor.optim.weight_decay=0 trainer.val_before_train=false trainer.test_freq=-1
    trainer.save_freq=-1 trainer.device=cpu trainer.backend=local trainer.nnodes=1
    trainer.n_gpus_per_node=1 data.val_data_num=1"""


def our_settings(options: argparse.Namespace, data: Path) -> list[str]:
    """Return --config's settings and the command line's, at TRL's temperature and without what TRL lacks."""
    settings = [f"@{options.config}", f"actor_rollout_ref.model.path={options.model}", *WITHOUT.split()]
    settings += [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
    # There is one more step, because the last one validates and saves, and is not waited for.
    return [*settings, f"trainer.total_training_steps={options.steps + 1}", *options.overrides]


def trl_task(config: Config, options: argparse.Namespace, data: Path) -> dict[str, Any]:
    """Return what scripts/bench/grpo_step_trl.py is told of the settings of `our_settings`."""
    actor = config.actor_rollout_ref.actor
    lengths = config.data
    rows = [
        {"prompt": row["prompt"][0]["content"], "answers": list(row["golden_answers"])}
        for row in pd.read_parquet(data / "train.parquet").to_dict("records")
    ]
    return {
        "model": str(options.model),
        "rows": rows,
        "steps": options.steps,
        "prompts_per_step": lengths.train_batch_size,
        "group": config.actor_rollout_ref.rollout.n_agent,
        "micro_batch": options.micro_batch,
        "max_completion": lengths.max_prompt_length - lengths.max_start_length,
        "max_context": lengths.max_prompt_length + lengths.max_response_length,
        "max_response_length": lengths.max_response_length,
        "max_obs_length": lengths.max_obs_length,
        "max_turns": config.max_turns,
        "topk": config.retriever.topk,
        "lr": actor.optim.lr,
        "clip": [actor.clip_ratio_low or actor.clip_ratio, actor.clip_ratio_high or actor.clip_ratio],
    }


class Cell(NamedTuple):
    """A step without searches: the model's size, tokens of the prompt and of a completion, and the group."""

    size: str
    prompt: int
    completion: int
    group: int

    @classmethod
    def of(cls, text: str) -> Cell:
        """Read SIZE:PROMPT:COMPLETION:GROUP."""
        size, *numbers = text.split(":")
        if size not in SIZES or len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
            expected = f"SIZE:PROMPT:COMPLETION:GROUP with a size of {', '.join(SIZES)}"
            raise argparse.ArgumentTypeError(f"Found {text!r}; expected {expected}.")
        return cls(size, *map(int, numbers))


def write_prompts(cell: Cell, folder: Path, num_prompts: int) -> None:
    """Write train.parquet and test.parquet with prompts of exactly so many tokens of random words."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    candidates = (tokenizer.decode([token]) for token in range(len(tokenizer)))
    words = [
        word
        for word in candidates
        if word.startswith(" ") and word[1:].isalpha() and len(tokenizer.encode(word)) == 1
    ]
    draw = random.Random(0)
    rows = []
    for number in range(num_prompts):
        text = "".join(draw.choices(words, k=cell.prompt))
        assert len(tokenizer.encode(text)) == cell.prompt
        row = {"data_source": "text", "prompt": [{"role": "user", "content": text}]}
        row |= {"reward_model": {"ground_truth": {"target": ["-"]}}, "extra_info": {"index": number}}
        rows.append(row | {"golden_answers": ["-"]})
    for name in ("train", "test"):
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")


def cell_settings(cell: Cell, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return our settings of a cell, with the rows and the model of a folder."""
    actor = "actor_rollout_ref.actor"
    settings = WITHOUT.split()
    settings += [f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/test.parquet"]
    settings += [f"actor_rollout_ref.model.path={folder}/model", "algorithm.adv_estimator=grpo"]
    settings += ["environment.env_class=single_turn", "do_search=false", "data.train_batch_size=1"]
    settings += [f"data.max_start_length={cell.prompt}", f"data.max_response_length={cell.completion}"]
    settings += [f"data.max_prompt_length={cell.prompt + cell.completion}"]
    settings += [
        f"actor_rollout_ref.rollout.n_agent={cell.group}",
        f"{actor}.ppo_mini_batch_size={cell.group}",
    ]
    settings += [f"{actor}.ppo_micro_batch_size_per_gpu={cell.group}", f"{actor}.optim.lr=1e-9"]
    settings += [f"custom_reward_function.path={ROOT}/scripts/bench/text_reward.py"]
    return [*settings, f"trainer.total_training_steps={options.steps + 1}", *options.overrides]


def measure_cell(cell: Cell, options: argparse.Namespace) -> str:
    """Measure both sides by turns; return the cell's lines of a table, one for each way of TRL."""
    runs: dict[str, list[Any]] = {OURS: []}
    runs |= {f"TRL {way}": [] for way in options.trl} if options.trl_python else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_random_qwen2(cell.size, folder / "model")
        write_prompts(cell, folder, options.steps + 2)
        settings = cell_settings(cell, options, folder)
        config = load_config(settings)
        options = argparse.Namespace(**vars(options) | {"model": folder / "model"})
        options.micro_batch = min(options.micro_batch, cell.group)
        task = trl_task(config, options, folder) | {"reward": str(ROOT / "scripts/bench/text_reward.py")}
        measure_rounds(runs, options, folder, settings, task)
    costs = {}
    tokens = {}
    for contender, rounds in runs.items():
        costs[contender] = median(cost_of_step(cpu, options.warm_up) for cpu, _ in rounds)
        written = [row for _, rows in rounds for row in rows[options.warm_up :]]
        key = "response_length/mean" if contender == OURS else "sampled_tokens"
        tokens[contender] = mean(row[key] for row in written)
    head = f"| {cell.size} | {cell.prompt:,} | {cell.completion} | {cell.group}"
    head += f" | {costs[OURS]:.2f} | {tokens[OURS]:.0f}"
    lines = [
        f"{head} | {way} | {costs[way]:.2f} | {tokens[way]:.0f} | {costs[way] / costs[OURS]:.1f} |"
        for way in runs
        if way != OURS
    ]
    return "\n".join(lines or [f"{head} | | | | |"])


def cost_of_step(cpu_seconds: list[float], warm_up: int) -> float:
    """Return the mean CPU seconds of the steps after the warm-up."""
    return (cpu_seconds[-1] - cpu_seconds[warm_up - 1]) / (len(cpu_seconds) - warm_up)


def measure_rounds(
    runs: dict[str, list[Any]],
    options: argparse.Namespace,
    folder: Path,
    settings: list[str],
    task: dict[str, Any],
) -> None:
    """Run each contender once a round, in alternating order, and add what `run` returns to `runs`."""
    for seed in range(options.rounds):
        for contender in list(runs)[:: 1 if seed % 2 == 0 else -1]:
            run_dir = folder / f"{contender}-{seed}"
            run_dir.mkdir()
            records = run_dir / "metrics.jsonl"
            if contender == OURS:
                command = [sys.executable, "-m", "verl.trainer.main_ppo", *settings]
                command += [f"trainer.seed={seed}", f"trainer.default_local_dir={run_dir}"]
            else:
                of_round = {"records": str(records), "seed": seed, "way": contender.split()[1]}
                (run_dir / "task.json").write_text(json.dumps(task | of_round), encoding="utf-8")
                program = str(ROOT / "scripts" / "bench" / "grpo_step_trl.py")
                command = [options.trl_python, program, str(run_dir / "task.json")]
            runs[contender].append(run(command, records, options.steps))
            steps = " ".join(f"{second:.1f}" for second in runs[contender][-1][0])
            message = f"round {seed + 1}, {contender}: CPU s after each step {steps}"
            print(message, file=sys.stderr, flush=True)


def run(command: list[str], records: Path, steps: int) -> tuple[list[float], list[dict[str, float]]]:
    """Run a command; return the CPU seconds of the process after each step, and what it wrote of each step.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
    log = records.with_suffix(".log")
    environment = os.environ | ENVIRONMENT | MORE_ENVIRONMENT
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    cpu_seconds: list[float] = []
    try:
        while process.poll() is None and len(cpu_seconds) < steps:
            done = records.read_text(encoding="utf-8").count("\n") if records.exists() else 0
            if done > len(cpu_seconds):
                cpu_seconds.append(sum(psutil.Process(process.pid).cpu_times()[:2]))
            time.sleep(0.005)
        if len(cpu_seconds) < steps:
            end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}\n{end}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return cpu_seconds, read_lines(records)[:steps]


def table(
    runs: dict[str, list[tuple[list[float], list[dict[str, float]]]]],
    warm_up: int,
    trajectories_per_step: int,
) -> str:
    """Return medians over the rounds in Markdown; the figures of a token are means.

    `trajectories_per_step` is the number of trajectories of a step.
    """
    lines = ["| contender | CPU s per step | times ours | sampled tokens each | context tokens each "]
    lines[0] += "| CPU ms per context token | times ours |"
    lines.append("|---" * 7 + "|")
    ours: tuple[float, float] | None = None
    for name, rounds in runs.items():
        costs = [cost_of_step(cpu, warm_up) for cpu, _ in rounds]
        rows = [row for _, written in rounds for row in written[warm_up:]]
        if name == OURS:
            for row in rows:
                row["sampled_tokens"] = row["response_length/mean"]
                row["context_tokens"] = row["sampled_tokens"] + row["prompt_length/mean"]
                row["context_tokens"] += row["state_tokens/total"] / trajectories_per_step
        sampled, context = (mean(row[key] for row in rows) for key in ("sampled_tokens", "context_tokens"))
        cost = median(costs)
        token = 1000 * mean(costs) / trajectories_per_step / context
        ours = ours or (cost, token)
        lines.append(
            f"| {name} | {cost:.2f} ({min(costs):.2f} to {max(costs):.2f}) | {cost / ours[0]:.2f} "
            f"| {sampled:.1f} | {context:.1f} | {token:.2f} | {token / ours[1]:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of both")
    parser.add_argument("--trl-python", help="interpreter with TRL (default: ours alone)")
    parser.add_argument("--trl", nargs="+", default=["float32"], choices=WAYS)
    parser.add_argument("--micro-batch", type=int, default=32, help="trajectories of a backward pass of TRL")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "microworld_grpo.yaml")
    parser.add_argument("--model", type=Path, default=ROOT / "data_prep" / "base_model")
    parser.add_argument("--data", type=Path, help="folder with train.parquet, test.parquet and corpus.jsonl")
    parser.add_argument("--steps", type=int, default=8, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", nargs="+", type=Cell.of, help="SIZE:PROMPT:COMPLETION:GROUP, see above")
    options = parser.parse_intermixed_args()
    if options.cells:
        print(
            "| model | prompt | completion | group | ours, CPU s | tokens | beside | CPU s | tokens | times |"
        )
        print("|---" * 10 + "|", flush=True)
        for cell in options.cells:
            print(measure_cell(cell, options), flush=True)
        return 0
    runs: dict[str, list[Any]] = {OURS: []}
    runs |= {f"TRL {way}": [] for way in options.trl} if options.trl_python else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = options.data.resolve() if options.data else folder
        if not options.data:
            write_world(0, folder, num_train=6000, num_test=2, num_3hop=2)
        settings = our_settings(options, data)
        config = load_config([*settings, "retriever.url=http://127.0.0.1:1/retrieve"])
        task = trl_task(config, options, data)
        with running(bm25_server(data / "corpus.jsonl"), folder / "server.log") as (port, _):
            url = f"http://127.0.0.1:{port}/retrieve"
            measure_rounds(runs, options, folder, [*settings, f"retriever.url={url}"], task | {"url": url})
            num_trajectories = task["prompts_per_step"] * task["group"]
            print(table(runs, options.warm_up, num_trajectories))
    return 0


if __name__ == "__main__":
    sys.exit(main())
