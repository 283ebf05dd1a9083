"""What the driver of a run costs: its CPU seconds a step with workers that answer at once.

    python scripts/bench_controller.py [--rows 512 4096 32768] [--algorithm grpo ppo] [--backend ray]

`RayPPOTrainer.fit` makes whole steps, with groups of 8, two searches a trajectory, exact match as the reward,
and metrics and records as in any run, without validations and checkpoints; the workers
(scripts/bench/instant_workers.py) make trajectories up in no time. Counted are the CPU seconds of the
driver's process, all its threads, by phase; the rows that go to the workers and come back are packed and
unpacked within them. The budget is 2 % of a step that takes 0.1 s for each 1,000 tokens of each trajectory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import verl  # noqa: E402, F401  # isort: skip  (first: it says which Python has what is missing)
from transformers import AutoTokenizer  # noqa: E402

from scripts.bench.instant_workers import InstantCritic, InstantPolicy, prompt_rows  # noqa: E402
from search_r1.llm_agent.trajectory import env_metrics  # noqa: E402
from verl.config import Config, load_config  # noqa: E402
from verl.single_controller.base import ClassWithInitArgs  # noqa: E402
from verl.trainer.placement import ResourcePoolManager, Role  # noqa: E402
from verl.trainer.ppo import metric_utils  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.workers.reward_manager import RewardManager  # noqa: E402

GROUP = 8
SHARE, SECONDS_PER_THOUSAND = 0.02, 0.1
MODEL = ROOT / "data_prep" / "base_model"
ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.kl_ctrl.kl_coef=0.001"],
}


def budget(rows: int, tokens: int) -> float:
    """CPU seconds that the driver may take for a step."""
    return SHARE * rows * tokens / 1000 * SECONDS_PER_THOUSAND


class CpuTimer(metric_utils.Timer):
    """Stands where the step's timer does and counts CPU seconds of this process."""

    last: CpuTimer

    def __init__(self) -> None:
        super().__init__()
        CpuTimer.last = self

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] += time.process_time() - start


def make_config(rows: int, tokens: int, algorithm: str, folder: str, *settings: str) -> Config:
    """One step of `rows` trajectories, with four optimizer steps."""
    config = load_config(
        [
            f"actor_rollout_ref.model.path={MODEL}",
            f"data.train_batch_size={rows // GROUP}",
            f"actor_rollout_ref.rollout.n_agent={GROUP}",
            f"data.max_prompt_length={tokens}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={rows // 4}",
            f"critic.ppo_mini_batch_size={rows // 4}",
            "actor_rollout_ref.actor.use_kl_loss=false",
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[]",
            "trainer.val_only=false",
            "trainer.val_before_train=false",
            "trainer.critic_warmup=0",
            "trainer.total_training_steps=1",
            *ALGORITHMS[algorithm],
            *settings,
        ]
    )
    config.trainer.device = "cpu"
    return config


class StepTrainer(RayPPOTrainer):
    """Makes steps without validations and checkpoints between them."""

    def _validate_step(self, when: str) -> tuple[dict[str, float], None]:
        return {}, None

    def _save_checkpoint(self) -> None:
        pass


def build(config: Config, backend: str, rows: int, tokens: int, processes: int) -> StepTrainer:
    """A trainer whose workers answer at once."""
    config.trainer.backend = backend
    pools = ResourcePoolManager({"all": [processes]}, dict.fromkeys(Role, "all"), backend, use_gpu=False)
    pools.create_resource_pool()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    policy = ClassWithInitArgs(InstantPolicy, model=MODEL, width=tokens)
    dataset: Any = prompt_rows(MODEL, rows // GROUP)
    role = Role.ActorRolloutRef if config.algorithm.kl_ctrl.kl_coef > 0 else Role.ActorRollout
    return StepTrainer(
        config=config,
        tokenizer=tokenizer,
        role_worker_mapping={role: policy, Role.Critic: ClassWithInitArgs(InstantCritic)},
        resource_pool_manager=pools,
        reward_fn=RewardManager(tokenizer),
        val_reward_fn=RewardManager(tokenizer),
        trajectory_metrics=env_metrics,
        train_dataset=dataset,
        val_dataset=dataset[:1],
    )


def measure(
    rows: int, algorithm: str, backend: str = "ray", tokens: int = 1500, processes: int = 2
) -> dict[str, Any]:
    """CPU seconds of the driver for a step: by phase (`seconds`), and in all (`total`). Ray must be up."""
    folder = tempfile.mkdtemp(prefix="bench_controller_")
    plain_timer, metric_utils.Timer = metric_utils.Timer, CpuTimer  # type: ignore[misc]
    trainer = build(make_config(rows, tokens, algorithm, folder), backend, rows, tokens, processes)
    try:
        trainer.init_workers()
        start = time.process_time()
        trainer.fit()
        total = time.process_time() - start
    finally:
        metric_utils.Timer = plain_timer  # type: ignore[misc]
        trainer.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "rows": rows,
        "algorithm": algorithm,
        "backend": backend,
        "seconds": dict(CpuTimer.last.seconds),
        "total": total,
        "budget": budget(rows, tokens),
        "driver_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def show(result: dict[str, Any]) -> None:
    phases = "  ".join(f"{name} {value:.2f}" for name, value in result["seconds"].items())
    name = f"{result['algorithm']}, {result['backend']}, {result['rows']:,} rows"
    total, allowed = result["total"], result["budget"]
    print(
        f"{name}: {total:.2f} CPU s of {allowed:.2f} allowed ({total / allowed:.0%}); peak memory "
        f"{result['driver_peak_gb']:.2f} GB\n  {phases}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096, 32768], help="trajectories a step")
    parser.add_argument("--algorithm", nargs="+", default=["grpo", "ppo"], choices=list(ALGORITHMS))
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument("--tokens", type=int, default=1500, help="longest trajectory, prompt included")
    parser.add_argument("--processes", type=int, default=2, help="worker processes (ray)")
    parser.add_argument("--json", help="file for the results, a line each")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    session: Any = None
    if options.backend == "ray":
        from verl.single_controller.ray import init_ray

        session = init_ray(num_cpus=options.processes, log_to_driver=False)
    try:
        for algorithm in options.algorithm:
            for rows in options.rows:
                processes = options.processes if options.backend == "ray" else 1
                result = measure(rows, algorithm, options.backend, options.tokens, processes)
                show(result)
                if options.json:
                    with open(options.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
    finally:
        if session is not None:
            session.shutdown()


if __name__ == "__main__":
    main()
