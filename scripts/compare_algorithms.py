"""Does it learn? A run of each algorithm on each seed, as a table with intervals over the questions.

    python scripts/compare_algorithms.py --steps 30                      the microworld, all of them
    python scripts/compare_algorithms.py --only cispo lora --seeds 0     some of them
    python scripts/compare_algorithms.py --real --data data/real_model-seed0/rows \\
        --start verl_checkpoints/real_model-seed0/sft/huggingface --untaught data/real_model-seed0/model

The last one says what each part of scripts/real_model.sh is good for, with the settings of
configs/real_model_*.yaml: RL beside more supervised training, without the supervised start, and so on.

Each run is `train_grpo.sh` (`train_ppo.sh` for one with a critic) with a few overrides, which this file
holds. They are all that differs from the recipe. On the microworld, runs without a critic take two optimizer
steps per batch, so that the probability ratio, in which most of them differ, is not 1 in the second step.
`sft_only` continues supervised training for as long as the first algorithm took, with its evaluations.

Exact match is measured on the test questions at the end, sampled at temperature 1 and greedily. A question's
figure is its mean over the seeds that asked it. Intervals (95 %) draw as many questions as there are, with
replacement, 10,000 times. `change` is the difference from the first algorithm on the same questions, sampled.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has a missing package)
import numpy as np  # noqa: E402

from scripts.real_model_report import add_line, format_interval  # noqa: E402
from verl.records.figures import mean_with_interval  # noqa: E402
from verl.utils.json_files import read_lines  # noqa: E402

ADVANTAGE = "algorithm.adv_estimator="
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode="
TWO_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=5e-4"
ALGORITHMS = {  # name -> what is added to the command line
    "gae": "trainer.critic_warmup=3",
    "grpo": f"{TWO_UPDATES} {ADVANTAGE}grpo",
    "rloo": f"{TWO_UPDATES} {ADVANTAGE}rloo",
    "reinforce_plus_plus": f"{TWO_UPDATES} {ADVANTAGE}reinforce_plus_plus",
    "gspo": f"""{TWO_UPDATES} {LOSS}gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
        actor_rollout_ref.actor.clip_ratio_low=0.03 actor_rollout_ref.actor.clip_ratio_high=0.04""",
    "cispo": f"{TWO_UPDATES} {LOSS}cispo",
    "aipo": f"{TWO_UPDATES} {LOSS}aipo",
    "lora": """actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.optim.lr=3e-3
        actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.model.lora_alpha=32""",
}

CRITIC = """actor_rollout_ref.rollout.n_agent=1 algorithm.adv_estimator=gae trainer.critic_warmup=2
    prompt_selection.filter_groups.enable=false"""
ANSWERS = 8  # answers to each question of a real run, except with PPO
REAL = {  # the same for a real model, on configs/real_model_grpo.yaml
    "grpo": "",
    "sft_only": "",
    "no_supervised_start": "",
    "kl_to_reference": "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001",
    "ppo": f"{CRITIC} critic.optim.lr=1e-5 critic.ppo_max_token_len_per_gpu=8192",  # one answer each
    "lora": """actor_rollout_ref.actor.optim.lr=1e-4 actor_rollout_ref.model.lora_rank=16
        actor_rollout_ref.model.lora_alpha=32""",
}
Run = dict[tuple[str, str], float]  # (mode, question) -> exact match


def real_settings(name: str, questions: int) -> str:
    """Return what is added to the command line of a real model's run with so many questions a step."""
    rows = ANSWERS * questions
    batch = f"data.train_batch_size={rows if name == 'ppo' else questions}"
    return f"{batch} actor_rollout_ref.actor.ppo_mini_batch_size={rows} {REAL[name]}"


def run(name: str, seed: int, options: argparse.Namespace, seconds: float) -> tuple[Run, float]:
    """Run an algorithm; return the exact match of each question at its end, and its wall seconds.

    `sft_only` trains for `seconds`. Raises CalledProcessError if the run failed.
    """
    began = time.monotonic()
    experiment = f"compare-{'real-' if options.real else ''}{name}-seed{seed}"
    environment = os.environ | {"SEED": str(seed), "EXPERIMENT_NAME": experiment, "OMP_NUM_THREADS": "1"}
    settings = f"""trainer.total_training_steps={options.steps} trainer.test_freq=-1 trainer.save_freq=-1
        trainer.resume_mode=none trainer.progress=plain
        {real_settings(name, options.questions) if options.real else ALGORITHMS[name]}
        {" ".join(options.overrides)}"""
    kind = "ppo" if name in ("gae", "ppo") else "grpo"
    start = options.start
    if options.real:
        environment["DATA_DIR"] = str(options.data)
        start = options.untaught if name == "no_supervised_start" else start
        settings = f"--config configs/real_model_grpo.yaml {settings}"
    done = ROOT / "verl_checkpoints" / experiment / "compared_seconds.txt"
    if not options.resume:
        done.unlink(missing_ok=True)
    if name == "sft_only" and not done.is_file():
        experiment += "-training"
        training = """train_sft.sh --config configs/real_model_sft.yaml trainer.total_training_steps=100000
            trainer.save_freq=-1 trainer.resume_mode=none trainer.progress=plain"""
        training_environment = environment | {"EXPERIMENT_NAME": experiment, "BASE_MODEL": str(start)}
        process = subprocess.Popen(["bash", *training.split()], env=training_environment, cwd=ROOT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:  # on SIGUSR1 it ends its step and writes a checkpoint
            process.send_signal(signal.SIGUSR1)
            process.wait()
        folders = (ROOT / "verl_checkpoints" / experiment).glob("global_step_*/worker/huggingface")
        start = max(folders, key=lambda folder: folder.stat().st_mtime)
        settings += " trainer.val_only=true"
    if start is not None:
        environment["BASE_MODEL"] = str(start)
    if not done.is_file():
        subprocess.run(["bash", f"train_{kind}.sh", *settings.split()], env=environment, cwd=ROOT, check=True)
        done.write_text(str(time.monotonic() - began))
    lines = read_lines(done.with_name("validation.jsonl"))
    by_mode: dict[str, dict[str, dict]] = {}
    for line in lines:
        if line["questions"] == "val" and line["step"] == lines[-1]["step"]:
            add_line(by_mode.setdefault(line["mode"], {}), line)
    ems = {(mode, question): by_mode[mode][question]["em"] for mode in by_mode for question in by_mode[mode]}
    return ems, float(done.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of all runs with RL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--real", action="store_true", help="a real model; needs the folders below")
    parser.add_argument("--questions", type=int, default=16, help="a step with --real (PPO: 8 times so many)")
    parser.add_argument("--start", type=Path, help="model after its supervised start")
    parser.add_argument("--untaught", type=Path, help="model before it")
    parser.add_argument("--data", type=Path, help="folder of train.parquet, test.parquet, sft_train.parquet")
    parser.add_argument("--resume", action="store_true", help="a run that has ended is not made again")
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS | REAL))
    options = parser.parse_intermixed_args()
    for name in ("start", "untaught", "data") if options.real else ():
        if getattr(options, name) is None:
            parser.error(f"found --real without --{name}; expected a folder of scripts/real_model.sh")
        setattr(options, name, getattr(options, name).absolute())
    names = options.only or list(REAL if options.real else ALGORITHMS)
    means: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in names}
    seconds = dict.fromkeys(names, 0.0)
    for seed in options.seeds:
        first = 0.0
        for name in names:
            ems, wall = run(name, seed, options, first)
            first = first or wall
            seconds[name] = seconds[name] + wall
            for question, em in ems.items():
                means[name].setdefault(question, []).append(em)
    print("| algorithm | seeds | EM sampled | EM greedy | change | wall s a seed |\n" + "|---" * 6 + "|")
    for name in names:
        em, before = ({q: float(np.mean(ems)) for q, ems in means[n].items()} for n in (name, names[0]))
        sampled, greedy = ([em[q] for q in em if q[0] == mode] for mode in ("sampled", "greedy"))
        changes = [em[q] - before[q] for q in em if q[0] == "sampled" and q in before]
        signs = ((sampled, ""), (greedy, ""), (changes, "+"))
        cells = [format_interval(mean_with_interval(np.array(values)), sign) for values, sign in signs]
        wall = seconds[name] / len(options.seeds)
        print(f"| {name} | {len(options.seeds)} | {' | '.join(cells)} | {wall:.0f} |")


if __name__ == "__main__":
    main()
