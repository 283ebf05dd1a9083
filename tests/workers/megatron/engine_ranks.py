"""What one rank does in tests of engines over Megatron (gloo, CPU), and the same in one FSDP2 process."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from megatron_ranks import Layout
from tiny_training import CPU, make_actor, make_batch, make_config, make_critic, save_hf

from verl.config import replace_values
from verl.trainer.ppo.batching import arrange_for_workers
from verl.workers.actor.dp_actor import DataParallelPPOActor, compute_log_prob
from verl.workers.critic.dp_critic import DataParallelPPOCritic
from verl.workers.engine.update_loop import MicroBatchLimits

NUM_ROWS = 11  # no multiple of 2: a replica gets a copy that takes part in nothing
NUM_UPDATES = 2
MINI_BATCH = 6
COMMON = [
    "actor_rollout_ref.actor.use_kl_loss=true",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={MINI_BATCH}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
    "critic.ppo_micro_batch_size_per_gpu=3",
    "critic.optim.lr=0.01",
    "actor_rollout_ref.actor.grad_clip=0.5",
    "actor_rollout_ref.actor.max_step_kl=0.01",  # shortens each of these steps
    "actor_rollout_ref.actor.optim.warmup_style=cosine",
]


@dataclass(frozen=True)
class Case:
    """A model of `megatron_ranks.MODELS` and how it is cut; kind: actor or critic. in_full: with
    references, folders and a step that is skipped. parked: the optimizer's state is away where no step needs
    it, as on CUDA with `optimizer_offload`; with a reference and a folder of then, and no resume.
    """

    model: str
    layout: Layout
    kind: str
    overrides: tuple[str, ...] = ()
    in_full: bool = False
    parked: bool = False


@dataclass
class Result:
    """What a run of updates gave.

    before, after: what the model says of the replica's rows (log-probs or values) at the start and at the
    end. metrics: of each update. averages: AdamW's first averages after the first update: the gradient's.
    start, saved, weights: at the start, before and after the last update. resumed: metrics of the last
    update, from the other kind's checkpoint. reset, reloaded: what a reference says that was reset, and one
    that was read again. skipped: metrics of an update that is not finite.
    """

    replica: int
    num_replicas: int
    before: torch.Tensor
    metrics: list = field(default_factory=list)
    start: dict = field(default_factory=dict)
    averages: dict = field(default_factory=dict)
    saved: dict = field(default_factory=dict)
    weights: dict = field(default_factory=dict)
    after: torch.Tensor | None = None
    resumed: dict = field(default_factory=dict)
    reset: torch.Tensor | None = None
    reloaded: torch.Tensor | None = None
    skipped: dict = field(default_factory=dict)


def settings(folder, *overrides):
    config = make_config(folder, *COMMON, *overrides)
    length = "actor_rollout_ref.actor.optim.total_training_steps"  # a run sets the number of its steps there
    return replace_values(config, {length: 10})


def rows_of(seed, replica, num_replicas):
    """A replica's rows of a batch, as the trainer deals them out. In batch 1 the policy sampled in one row of
    each mini-batch alone, so that other replicas have no loss token.
    """
    batch = make_batch(NUM_ROWS, seed=seed)
    if seed == 1:
        batch.batch["response_mask"][[row for row in range(NUM_ROWS) if row % MINI_BATCH]] = 0
    count = -(-NUM_ROWS // MINI_BATCH)
    arranged, _ = arrange_for_workers(batch, num_replicas, count)
    arranged.meta_info["num_mini_batches"] = count
    return arranged.chunk(num_replicas)[replica]


def make_megatron(kind, config, layout: Layout, trained=True):
    """An actor or a critic over a MegatronEngine; or a frozen one."""
    from verl.workers.engine.loading import Precision
    from verl.workers.megatron.megatron_engine import MegatronEngine
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
    )
    optim = block.optim if trained else None
    engine = MegatronEngine(built, model, precision, fsdp_config, CPU, optim, block.grad_clip)
    limits = MicroBatchLimits.from_config(block, "ppo", CPU, not model.use_remove_padding)
    if is_actor:
        rollout = config.actor_rollout_ref.rollout
        return DataParallelPPOActor(block, engine, limits, rollout.temperature, rollout.n)
    return DataParallelPPOCritic(block, engine, limits)


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


def tensors_of(kind, engine, what):
    """Hugging Face name -> whole tensor: "param" the weights, "exp_avg" AdamW's first averages."""
    if hasattr(engine, "whole_tensors"):
        with engine.loaded(optimizer=True):
            return {name: x.clone() for name, x in engine.whole_tensors(what)}
    prefix = "model." if kind == "actor" else ""
    return {
        name.removeprefix(prefix): (p if what == "param" else engine.optimizer.state[p][what])
        .detach()
        .clone()
        for name, p in engine.module.named_parameters()
    }


def run_updates(kind, worker, folder) -> Result:
    """All updates; a checkpoint of before the last one in `folder`."""
    engine = worker.engine
    rows = rows_of(0, engine.data.rank, engine.data.size)
    result = Result(engine.data.rank, engine.data.size, look(kind, worker, rows))
    result.start = tensors_of(kind, engine, "param")
    for seed in range(NUM_UPDATES):
        if seed == NUM_UPDATES - 1:
            engine.snapshot(folder).write()
            result.saved = tensors_of(kind, engine, "param")
        result.metrics.append(update(kind, worker, seed))
        if seed == 0:
            result.averages = tensors_of(kind, engine, "exp_avg")
    result.weights = tensors_of(kind, engine, "param")
    result.after = look(kind, worker, rows)
    return result


def load_and_update(kind, worker, folder):
    """The last update from a checkpoint of `run_updates`; returns its metrics."""
    worker.engine.load(folder)
    return update(kind, worker, NUM_UPDATES - 1)


def run_case(case: Case, config, model_folder, folder, other) -> Result:
    """folder: where checkpoints go; other: a checkpoint of one process."""
    kind = case.kind
    worker = make_megatron(kind, config, case.layout)
    if case.parked:
        worker.engine._update_state.append(worker.engine.optimizer.state_storage())
        worker.engine._park()
    result = run_updates(kind, worker, folder)
    if case.parked:
        save_hf(worker.engine, folder / "huggingface", None, model_folder)
        reference = make_megatron(kind, config, case.layout, trained=False)
        reference.engine.copy_weights(worker.engine)
        result.reset = look(kind, reference, rows_of(0, result.replica, result.num_replicas))
        return result
    if case.in_full:
        save_hf(worker.engine, folder / "huggingface", None, model_folder)
        worker.engine.snapshot_hf(folder / "before", None, model_folder, folder).write()
        with patch("verl.workers.engine.checkpoint.MAX_FILE_SIZE", 3000):
            save_hf(worker.engine, folder / "many files", None, model_folder)
        rows = rows_of(0, result.replica, result.num_replicas)
        reference = make_megatron(kind, config, case.layout, trained=False)
        reference.engine.copy_weights(worker.engine)
        reference.engine.save_weights(folder / "reference")
        result.reset = look(kind, reference, rows)
        reference = make_megatron(kind, config, case.layout, trained=False)
        reference.engine.load_weights(folder / "reference")
        result.reloaded = look(kind, reference, rows)
        poisoned = rows_of(0, result.replica, result.num_replicas)
        poisoned.batch["advantages"][0, 0] = torch.inf
        result.skipped = worker.update_policy(poisoned)
    result.resumed = load_and_update(kind, make_megatron(kind, config, case.layout), other)
    return result


@contextmanager
def noting_sums(begun):
    """Notes of each sum of gradients over processes whether it begins only when it is waited for."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets

    from verl.workers.megatron import optimizer

    waits = []
    start = Buckets.start_grad_sync
    finish = Buckets.finish_grad_sync

    def begin(*args, **kwargs):
        begun.append(bool(waits))
        return start(*args, **kwargs)

    def wait(*args, **kwargs):
        waits.append(1)
        finish(*args, **kwargs)
        waits.pop()

    small = partial(optimizer.DistributedDataParallelConfig, bucket_size=300)  # several, as of a real model
    sums = patch.multiple(Buckets, start_grad_sync=begin, finish_grad_sync=wait)
    with sums, patch.object(optimizer, "DistributedDataParallelConfig", small):
        yield


def run_cases(rank, world_size, out: Path, cases, configs, folders, one: Path):
    """cases, configs: name -> Case, and its settings (which take long to read); folders: of models; one: with
    one process's checkpoints. Writes what it found.
    """
    from verl.workers.megatron import parallel_state

    results = {"sums": []}
    for name, case in cases.items():
        other = one / f"{case.model} {case.kind}"
        with noting_sums(results["sums"]):
            results[name] = run_case(case, configs[name], folders[case.model], out / name, other)
        parallel_state.destroy()
    torch.save(results, out / f"rank{rank}.pt")
