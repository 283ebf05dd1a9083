"""Shows that training works on real questions, with the tiny base model and with a large vocabulary.

    python scripts/check_real_data.py --squad xquad.en.json --passages 2wikimultihopqa_corpus.json

Makes a corpus and rows from the files, serves the corpus, and for each of two models goes through two GRPO
steps with validation and checkpoints, then starts the same run again for a third one: it must go on from
step 2. The models: the shipped tiny one, and one of Qwen2.5-0.5B's shape with random weights (24 layers,
width 896, 152k words; it answers nothing right, but it costs what a real one costs). Prints the memory of the
largest process.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_resume import ROOT, retrieval_server

TINY = ROOT / "data_prep" / "base_model"


def write_random_model(folder: Path) -> None:
    """A Hugging Face folder of Qwen2.5-0.5B's shape with random weights and the tiny model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def train(model: Path, data: Path, url: str, run_dir: Path, steps: int) -> None:
    """One call of the program, up to `steps` training steps; an error if it fails."""
    settings = {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "test.parquet",
        "data.val_data_num": 4,
        "data.train_batch_size": 2,
        "data.max_start_length": 256,
        "data.max_prompt_length": 800,
        "data.max_response_length": 16,
        "data.max_obs_length": 160,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.n_agent": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 4,
        "actor_rollout_ref.actor.use_kl_loss": "true",
        "algorithm.adv_estimator": "grpo",
        "retriever.url": url,
        "max_turns": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 1,
        "trainer.max_ckpt_to_keep": 1,
        "trainer.default_local_dir": run_dir,
        "trainer.device": "cpu",
        "trainer.progress": "plain",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{k}={v}" for k, v in settings.items())]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        sys.exit(f"the run ended with status {done.returncode}")


def check(name: str, model: Path, data: Path, url: str, run_dir: Path) -> None:
    started = time.monotonic()
    train(model, data, url, run_dir, steps=2)
    lines = (run_dir / "metrics.jsonl").read_text()
    train(model, data, url, run_dir, steps=3)
    after = (run_dir / "metrics.jsonl").read_text()
    steps = [json.loads(line)["step"] for line in after.splitlines()]
    if steps != [0, 1, 2, 3] or not after.startswith(lines):
        sys.exit(f"{name}: the second start did not go on from step 2; steps in metrics.jsonl: {steps}")
    summary = json.loads((run_dir / "summary.json").read_text())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"{name}: 2 steps, stopped, resumed for a third; "
        f"{summary['num_val_questions']} validation questions; "
        f"{time.monotonic() - started:.0f} s; largest process so far {peak:.1f} GB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--squad", required=True, nargs="+", help="question files in SQuAD's format")
    parser.add_argument("--passages", nargs="*", default=[], help="files with lists of {title, text}")
    parser.add_argument(
        "--tiny-only", action="store_true", help="leave the model with the large vocabulary out"
    )
    options = parser.parse_args()
    squad, passages = (
        [str(Path(file).resolve()) for file in files] for files in (options.squad, options.passages)
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = folder / "data"
        command = [sys.executable, "-m", "data_prep.squad", "--prompt", "short"]
        command += ["--squad", *squad, "--out", str(data)]
        if passages:
            command += ["--passages", *passages]
        subprocess.run(command, cwd=ROOT, check=True)
        with retrieval_server(data / "corpus.jsonl") as url:
            check("tiny base model", TINY, data, url, folder / "tiny")
            if not options.tiny_only:
                write_random_model(folder / "large_vocabulary")
                check("Qwen2.5-0.5B's shape", folder / "large_vocabulary", data, url, folder / "large")
                shutil.rmtree(folder / "large_vocabulary")


if __name__ == "__main__":
    main()
