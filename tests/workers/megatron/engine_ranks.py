"""What one rank does in tests of engines over Megatron (gloo, CPU), and the same in one FSDP2 process."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from megatron_ranks import Layout
from tiny_training import CPU, make_actor, make_batch, make_config, make_critic

from verl.trainer.ppo.batching import arrange_for_workers
from verl.workers.actor.dp_actor import DataParallelPPOActor, compute_log_prob
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.micro_batches import MicroBatchLimits

NUM_ROWS = 11  # no multiple of 2: a replica gets a copy that takes part in nothing
NUM_UPDATES = 3
MINI_BATCH = 6
COMMON = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
    "critic.forward_micro_batch_size_per_gpu=2",
    "critic.optim.lr=0.01",
    "actor_rollout_ref.actor.grad_clip=0.5",
    "actor_rollout_ref.actor.optim.warmup_style=cosine",
    "actor_rollout_ref.actor.optim.total_training_steps=10",
]


@dataclass
class Result:
    """What a run of updates gave, for one kind of model.

    metrics: of each update. averages: AdamW's first averages after the first update: the gradient's.
    weights: after the last update. before: what the model says of the rows before any (log-probs or values).
    """

    before: torch.Tensor
    metrics: list = field(default_factory=list)
    averages: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)


def settings(folder, *overrides):
    return make_config(folder, *COMMON, *overrides)


def rows_of(seed, replica, num_replicas):
    """A replica's rows of a batch, as the trainer deals them out."""
    arranged, _ = arrange_for_workers(make_batch(NUM_ROWS, seed=seed), num_replicas, MINI_BATCH)
    return arranged.chunk(num_replicas)[replica]


def make_megatron(kind, config, layout: Layout):
    """An actor or a critic over a MegatronEngine."""
    from verl.workers.engine.precision import Precision
    from verl.workers.megatron.engine import MegatronEngine
    from verl.workers.megatron.model import build_model
    from verl.workers.megatron.settings import ParallelSizes

    is_actor = kind == "actor"
    block = config.actor_rollout_ref.actor if is_actor else config.critic
    model = config.actor_rollout_ref.model if is_actor else config.critic.model
    fsdp_config = block.fsdp_config if is_actor else block.model.fsdp_config
    precision = Precision.from_config(fsdp_config, CPU)
    built = build_model(
        model,
        ParallelSizes(layout.tensor, layout.pipeline, layout.context),
        CPU,
        precision.compute,
        is_actor,
        layout.sequence,
        layout.layers_per_virtual_stage,
    )
    engine = MegatronEngine(built, model, precision, fsdp_config, CPU, block.optim, block.grad_clip)
    limits = [
        MicroBatchLimits.from_config(block, kind, prefix, CPU, model.use_remove_padding)
        for prefix in (["ppo"] if is_actor else ["ppo", "forward"])
    ]
    if is_actor:
        rollout = config.actor_rollout_ref.rollout
        return DataParallelPPOActor(block, engine, limits[0], rollout.temperature, rollout.n)
    return DataParallelPPOCritic(block, engine, *limits)


def make_plain(kind, config):
    """The same over a TrainEngine in this process."""
    return make_actor(config) if kind == "actor" else make_critic(config)


def look(kind, worker, rows):
    """Log-probs or values of the rows."""
    if kind == "actor":
        return compute_log_prob(worker.engine, rows, worker.limits, 1.0)
    return worker.compute_values(rows)


def update(kind, worker, seed):
    """One training step on the replica's rows of batch `seed`; returns its metrics."""
    rows = rows_of(seed, worker.engine.data.rank, worker.engine.data.size)
    return worker.update_policy(rows) if kind == "actor" else worker.update_critic(rows)


def averages_of(engine):
    """Hugging Face name -> AdamW's first average, whole."""
    if hasattr(engine, "whole_tensors"):
        return {name: x.clone() for name, x in engine.whole_tensors("exp_avg")}
    states = {name: engine.optimizer.state[p] for name, p in engine.module.named_parameters()}
    return {name: state["exp_avg"].clone() for name, state in states.items()}


def run_updates(kind, worker) -> Result:
    engine = worker.engine
    result = Result(look(kind, worker, rows_of(0, engine.data.rank, engine.data.size)))
    for seed in range(NUM_UPDATES):
        result.metrics.append(update(kind, worker, seed))
        if seed == 0:
            result.averages = averages_of(engine)
    result.weights = {name: x.clone() for name, x in engine.weights()}
    return result


def run_cases(rank, world_size, out: Path, cases):
    """cases: name -> (folder, layout, kind). Writes what this rank found."""
    from verl.workers.megatron import parallel_state

    results = {}
    for name, (folder, layout, kind) in cases.items():
        worker = make_megatron(kind, settings(folder), layout)
        results[name] = run_updates(kind, worker)
        parallel_state.destroy()
    torch.save(results, out / f"rank{rank}.pt")
