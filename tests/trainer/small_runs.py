"""A run of the whole program on a small world: its command line, and what it wrote."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"


def arguments(world: Path, url: str, run_dir: Path, **settings: object) -> list[str]:
    values = {
        "data.train_files": world / "train.parquet",
        "data.val_files": world / "test.parquet",
        "data.train_batch_size": 4,
        "data.max_start_length": 64,
        "data.max_prompt_length": 512,
        "data.max_response_length": 24,
        "data.max_obs_length": 200,
        "actor_rollout_ref.model.path": BASE_MODEL,
        "actor_rollout_ref.rollout.n_agent": 4,
        "actor_rollout_ref.rollout.search_delay_steps": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
        "actor_rollout_ref.actor.ppo_micro_batch_size": 8,
        "actor_rollout_ref.actor.optim.lr": 1e-4,
        "algorithm.adv_estimator": "grpo",
        "algorithm.kl_ctrl.kl_coef": 0,
        "critic.ppo_micro_batch_size": 8,
        "retriever.url": url,
        "retriever.topk": 2,
        "max_turns": 3,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.default_local_dir": run_dir,
        "trainer.device": "cpu",
        "trainer.progress": "plain",
    }
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    return [f"{key}={value}" for key, value in values.items()]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
