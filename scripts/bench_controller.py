"""What the driver of a run costs: its CPU seconds a step with workers that answer at once.

    python scripts/bench_controller.py [--rows 512 4096 32768] [--algorithm grpo ppo] [--backend ray]

`RayPPOTrainer` makes whole steps, with groups of 8, two searches a trajectory, exact match as the reward, and
figures and records as in any run; the workers (scripts/bench/instant_workers.py) make trajectories up in no
time. Counted are the CPU seconds of the driver's process, all its threads, by phase (the median of the
steps). The budget is 2 % of a step that takes 0.1 s for each 1,000 tokens of each trajectory. Also the bytes
that the driver was sent and sent out, tensors over tokens apart, and what the process beside it takes.

With `--backend local` the workers are in the driver's process: what they take themselves is left out of the
phases in which they are called (they are phases of their own), and nothing is sent.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from scripts.bench.instant_workers import InstantCritic, InstantPolicy, prompt_rows  # noqa: E402
from search_r1.llm_agent.trajectory import env_metrics  # noqa: E402
from verl.protocol import DataProto  # noqa: E402
from verl.single_controller.base import ClassWithInitArgs  # noqa: E402
from verl.trainer.config.loading import load_config  # noqa: E402
from verl.trainer.ppo.metric_utils import Timer  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl.trainer.ppo.roles import ResourcePoolManager, Role, actor_role  # noqa: E402
from verl.workers.reward_manager import RewardManager  # noqa: E402

GROUP = 8
SHARE, SECONDS_PER_THOUSAND = 0.02, 0.1
MODEL = ROOT / "data_prep" / "base_model"
ALGORITHMS = {
    "grpo": ["algorithm.adv_estimator=grpo", "algorithm.kl_ctrl.kl_coef=0"],
    "ppo": ["algorithm.adv_estimator=gae", "algorithm.kl_ctrl.kl_coef=0.001"],
}
COUNTING = "counting bytes"
WORKERS = (
    "generate_sequences",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "update_actor",
    "update_critic",
)


def budget(rows: int, tokens: int) -> float:
    """CPU seconds that the driver may take for a step."""
    return SHARE * rows * tokens / 1000 * SECONDS_PER_THOUSAND


class Phases:
    """CPU seconds of this process by phase; a phase inside of another is counted on its own alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        now = time.process_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


def make_config(rows: int, tokens: int, algorithm: str, folder: str, *settings: str) -> DictConfig:
    """A step of `rows` trajectories, with four optimizer steps."""
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
            *ALGORITHMS[algorithm],
            *settings,
        ]
    )
    config.trainer.device = "cpu"
    return config


class StepTrainer(RayPPOTrainer):
    """Makes steps without validations and checkpoints between them."""

    phases: Phases

    def one_step(self, phases: Phases) -> None:
        """What `fit` does in a step, phase by phase."""
        self.phases, timer = phases, Timer()
        with phases("collect"):
            batch, metrics = self.collector.collect(self.state.step + 1, False, timer)
        with phases("passes"):
            batch = self._log_probs_and_values(batch, timer)
        with phases("advantages"):
            batch, _ = self._advantages(batch)
        with phases("update"):
            figures, _ = self._update(batch, timer)
        with phases("figures"):
            metrics = self._step_metrics(batch, timer) | metrics | figures
        self.state.step += 1
        with phases("records"):
            self.state.add_step(metrics, timer.seconds, 1.0)
            warnings = self.health.check(self.state.step, metrics)
            self.recorder.log_step(self.state, metrics, batch, self._records(batch, "train"), warnings)


def build(config: DictConfig, backend: str, rows: int, tokens: int, processes: int) -> StepTrainer:
    """A trainer whose workers answer at once."""
    config.trainer.backend = backend
    pools = ResourcePoolManager({"all": [processes]}, dict.fromkeys(Role, "all"), backend, use_gpu=False)
    pools.create_resource_pool()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    policy = ClassWithInitArgs(InstantPolicy, model=MODEL, width=tokens)
    dataset: Any = prompt_rows(MODEL, rows // GROUP)
    role = actor_role(with_reference=config.algorithm.kl_ctrl.kl_coef > 0)
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


class Traffic:
    """Bytes of calls and results that pass through the driver, while it is installed; by kind."""

    def __init__(self, trainer: StepTrainer) -> None:
        self.bytes: dict[str, int] = dict.fromkeys(("sent", "received", "tensors over tokens"), 0)
        self._trainer = trainer

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stands between the worker groups and Ray."""
        from verl.single_controller.ray import object_store

        start, plain_resolve = object_store.start_apart, object_store.resolve_apart

        def counting_start(actor: Any, method: str, call: Any) -> Any:
            self._add("sent", object_store.detach(call)[0])
            return start(actor, method, call)

        def counting_resolve(handles: Any, resolve: Any) -> Any:
            results = plain_resolve(handles, resolve)
            for result in results:
                self._add("received", object_store.detach(((result,), {}))[0])
            return results

        object_store.start_apart, object_store.resolve_apart = counting_start, counting_resolve
        try:
            yield
        finally:
            object_store.start_apart, object_store.resolve_apart = start, plain_resolve

    def _add(self, way: str, call: Any) -> None:
        with self._trainer.phases(COUNTING):
            self.bytes[way] += len(pickle.dumps(call, protocol=5))
            for value in (*call[0], *call[1].values()):
                if isinstance(value, DataProto) and value.batch is not None:
                    over_tokens = [tensor for tensor in value.batch.values() if tensor.dim() > 1]
                    self.bytes["tensors over tokens"] += sum(t.nbytes for t in over_tokens)


def measure(
    rows: int, algorithm: str, backend: str = "ray", tokens: int = 1500, steps: int = 1, processes: int = 2
) -> dict[str, Any]:
    """CPU seconds of the driver for a step, by phase (`seconds`) and in all (`total`), the bytes that passed
    through it in a step, and what the process beside it took (`beside`). Ray must be up.
    """
    folder = tempfile.mkdtemp(prefix="bench_controller_")
    trainer = build(make_config(rows, tokens, algorithm, folder), backend, rows, tokens, processes)
    found: list[dict[str, float]] = []
    traffic, beside = Traffic(trainer), {}
    try:
        trainer.init_workers()
        trainer.recorder.start(trainer.state, None)
        if backend == "local":
            hide_workers(trainer)
        with traffic.installed() if backend == "ray" else nullcontext():
            process = process_of(trainer) if backend == "ray" else None
            before = sum(process.cpu_times()[:2]) if process else 0.0
            for _ in range(steps):
                phases = Phases()
                trainer.one_step(phases)
                found.append(dict(phases.seconds))
            if process:
                seconds = sum(process.cpu_times()[:2]) - before
                beside = {"seconds": seconds / steps, "gb": process.memory_info().rss / 1e9}
    finally:
        trainer.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    by_phase = {name: median(step.get(name, 0.0) for step in found) for name in found[0]}
    return {
        "rows": rows,
        "algorithm": algorithm,
        "backend": backend,
        "seconds": by_phase,
        "total": sum(own(by_phase).values()),
        "budget": budget(rows, tokens),
        "bytes": {name: count // steps for name, count in traffic.bytes.items()},
        "beside": beside,
        "driver_peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def own(seconds: dict[str, float]) -> dict[str, float]:
    """The phases that are the driver's work."""
    return {name: value for name, value in seconds.items() if name not in (*WORKERS, COUNTING)}


def process_of(trainer: StepTrainer) -> psutil.Process:
    """The process beside the driver."""
    group: Any = trainer.tokens
    return psutil.Process(group.owner._rank_places[0].pid)


def hide_workers(trainer: StepTrainer) -> None:
    """Counts the local workers' own seconds apart."""
    for group in (trainer.actor_rollout_wg, getattr(trainer, "critic_wg", None)):
        for method in WORKERS:
            if group is not None and method in group._method_names:
                inner = getattr(group, method)

                def counted(*args: Any, inner: Any = inner, method: str = method, **kwargs: Any) -> Any:
                    with trainer.phases(method):
                        return inner(*args, **kwargs)

                setattr(group, method, counted)


def show(result: dict[str, Any], before: dict[str, Any] | None) -> None:
    phases = "  ".join(f"{name} {value:.2f}" for name, value in own(result["seconds"]).items())
    name = f"{result['algorithm']}, {result['backend']}, {result['rows']:,} rows"
    growth = ""
    if before is not None:
        per_row = result["total"] / result["rows"] / (before["total"] / before["rows"])
        growth = f"; {per_row:.2f} times as much a row as with {before['rows']:,}"
    print(
        f"{name}: {result['total']:.2f} CPU s of {result['budget']:.2f} allowed "
        f"({result['total'] / result['budget']:.0%}){growth}\n  {phases}",
        flush=True,
    )
    if result["beside"]:
        megabytes = "  ".join(f"{name} {count / 1e6:.2f} MB" for name, count in result["bytes"].items())
        beside = f"{result['beside']['seconds']:.1f} CPU s, {result['beside']['gb']:.1f} GB"
        print(f"  through the driver: {megabytes}; its peak memory {result['driver_peak_gb']:.2f} GB")
        print(f"  the process beside it: {beside}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 4096, 32768], help="trajectories a step")
    parser.add_argument("--algorithm", nargs="+", default=["grpo", "ppo"], choices=list(ALGORITHMS))
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument("--tokens", type=int, default=1500, help="longest trajectory, prompt included")
    parser.add_argument("--steps", type=int, default=1, help="steps that are measured")
    parser.add_argument("--processes", type=int, default=2, help="worker processes (ray)")
    parser.add_argument("--json", help="file for the results, a line each")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    session: Any = None
    if asked.backend == "ray":
        from verl.single_controller.ray import init_ray

        session = init_ray(num_cpus=asked.processes, log_to_driver=False)
    try:
        for algorithm in asked.algorithm:
            before = None
            for rows in asked.rows:
                processes = asked.processes if asked.backend == "ray" else 1
                result = measure(rows, algorithm, asked.backend, asked.tokens, asked.steps, processes)
                show(result, before)
                before = result
                if asked.json:
                    with open(asked.json, "a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
    finally:
        if session is not None:
            session.shutdown()


if __name__ == "__main__":
    main()
