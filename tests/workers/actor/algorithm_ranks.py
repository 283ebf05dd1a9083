"""What one rank does in `test_algorithms_sharded.py`; child processes import it."""

import math

import torch
from algorithm_cases import SPLITS, ActorFactory, Steep, full_batch

from verl.trainer.ppo.batching import arrange_for_workers
from verl.workers.actor.dp_actor import PolicyObjective
from verl.workers.engine.training_engine import MicroBatchLoss

NUM_ROWS = 11  # not even: one rank gets a copy that takes part in nothing
CASES = {
    "gspo": {"policy_loss__loss_mode": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "kl_cov": {"policy_loss__loss_mode": "kl_cov", "policy_loss__kl_cov_ratio": 0.2},
    "clip_cov": {
        "policy_loss__loss_mode": "clip_cov",
        "policy_loss__clip_cov_ratio": 0.2,
        "policy_loss__clip_cov_lb": -1.0,
    },
    "prompt-mean": {"loss_agg_mode": "prompt-mean"},
    "echo": {"echo_coeff": 0.5},
    "distillation, KL": {
        "policy_loss__loss_mode": "distillation",
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "kl_loss_type": "k3+",
    },
    "rows without an advantage": {"entropy_coeff": 0.0},
    "no advantage at all": {"entropy_coeff": 0.0},
}


def rows_of(rank, world_size, case=""):
    """This rank's rows, as the trainer deals them out."""
    batch = full_batch(NUM_ROWS)
    if case == "no advantage at all":
        batch.batch["advantages"].zero_()
    arranged, _ = arrange_for_workers(batch, world_size, 1)
    arranged.meta_info["num_mini_batches"] = 1
    return arranged.chunk(world_size)[rank]


def updates(model_path, rank=0, world_size=1):
    """case -> (metrics, gradient)."""
    factory = ActorFactory(model_path, world_size)
    limits = SPLITS["rows of 3, padded"]
    return {
        case: factory.update(rows_of(rank, world_size, case), limits, **settings)
        for case, settings in CASES.items()
    }


def spoilt_updates(model_path, rank, world_size):
    """(skips in a row, the explanation) of two updates that are not finite on the last rank alone: for an
    advantage that is NaN, and for the gradient.
    """
    factory = ActorFactory(model_path, world_size)
    data = rows_of(rank, world_size)
    actor = factory.actor()
    is_last = rank == world_size - 1
    data.batch["advantages"][1, 0] = math.nan if is_last else 0.0
    metrics = actor.update_policy(data)
    seen = [(metrics["actor/num_skipped_in_a_row"], actor.loop.skipped_update)]
    actor = factory.actor()
    loss_of = PolicyObjective.loss_of

    def steep(self, part, outputs):
        loss, figures = loss_of(self, part, outputs)
        return MicroBatchLoss(Steep.apply(loss) if is_last and 1 in part.rows.tolist() else loss, figures)

    PolicyObjective.loss_of = steep
    metrics = actor.update_policy(rows_of(rank, world_size))
    PolicyObjective.loss_of = loss_of
    return [*seen, (metrics["actor/num_skipped_in_a_row"], actor.loop.skipped_update)]


def two_steps(model_path, rank=0, world_size=1):
    """Whole weights after two optimizer steps with rows that have no advantage, where gathered weights are
    kept from pass to pass.
    """
    kept = "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=false"
    factory = ActorFactory(model_path, world_size, kept)
    factory.actor(SPLITS["rows of 1"], entropy_coeff=0.0, ppo_epochs=2).update_policy(
        rows_of(rank, world_size)
    )
    return {name: tensor.clone() for name, tensor in factory.engine.weights()}


def bounded_steps(model_path, rank=0, world_size=1):
    """(metrics, whole weights) after two optimizer steps that a bound shortens: with weights gathered
    for each pass, and with weights that stay gathered.
    """
    results = []
    for reshards in ("true", "false"):
        kept = f"actor_rollout_ref.actor.fsdp_config.reshard_after_forward={reshards}"
        factory = ActorFactory(model_path, world_size, kept)
        actor = factory.actor(SPLITS["rows of 1"], max_step_kl=0.01, ppo_epochs=2)
        metrics = actor.update_policy(rows_of(rank, world_size))
        results.append((metrics, {name: tensor.clone() for name, tensor in factory.engine.weights()}))
    return results


def rank_main(rank, world_size, model_path, out):
    results = {"updates": updates(model_path, rank, world_size)}
    results["bounded"] = bounded_steps(model_path, rank, world_size)
    results["two steps"] = two_steps(model_path, rank, world_size)
    results["spoilt"] = spoilt_updates(model_path, rank, world_size)
    torch.save(results, out / f"rank{rank}.pt")
