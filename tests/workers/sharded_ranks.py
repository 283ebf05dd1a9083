"""What one rank does in tests of several processes; run by `ranks.run_ranks`."""

from unittest import mock

import torch
from tiny_training import gradients_of, make_actor, make_batch, make_config, make_critic, save
from torch.distributed.tensor import DTensor

from verl.trainer.ppo.batching import arrange_for_workers
from verl.workers.actor.dp_actor import compute_log_prob

NUM_ROWS = 11  # no multiple of 2 or 3: some ranks get a copy that takes part in nothing
VARIANTS = {
    "packed": [],
    "rows of 1": [
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "token budget": [
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=25",
        "critic.ppo_max_token_len_per_gpu=25",
    ],
    "padded": ["actor_rollout_ref.model.use_remove_padding=false", "critic.model.use_remove_padding=false"],
}
NUM_STEPS = 5  # before the checkpoint
BF16 = "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16"
COMMON = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.ppo_mini_batch_size=5"]


def settings(model_path, variant):
    return make_config(model_path, *COMMON, *VARIANTS[variant])


def my_rows(rank, world_size, seed=0, num_mini_batches=3):
    """Return this rank's rows of the batch, as the trainer deals them out (mini-batches of 4, 4 and 3)."""
    arranged, _ = arrange_for_workers(make_batch(NUM_ROWS, seed), world_size, num_mini_batches)
    arranged.meta_info["num_mini_batches"] = num_mini_batches
    return arranged.chunk(world_size)[rank]


def updates(model_path, rank=0, world_size=1):
    """variant -> (metrics, gradients) of an actor's and a critic's update on this rank's rows."""
    results = {}
    for variant in VARIANTS:
        config = settings(model_path, variant)
        for kind, make in (("actor", make_actor), ("critic", make_critic)):
            worker = make(config, world_size)
            run = worker.update_policy if kind == "actor" else worker.update_critic
            data = my_rows(rank, world_size)
            results[variant, kind] = gradients_of(worker.engine, lambda run=run, data=data: run(data))
    return results


def bf16_update(model_path, rank=0, world_size=1, checkpoints=False):
    """(metrics, gradient) of one optimizer step that is computed in bfloat16, on this rank's rows."""
    steps = [BF16, f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_ROWS}"]
    steps += ["actor_rollout_ref.model.enable_gradient_checkpointing=true"] * checkpoints
    actor = make_actor(make_config(model_path, *steps), world_size)
    return gradients_of(
        actor.engine, lambda: actor.update_policy(my_rows(rank, world_size, num_mini_batches=1))
    )


def bf16_run(rank, world_size, model_path, out):
    each = [bf16_update(model_path, rank, world_size, checkpoints) for checkpoints in (False, True)]
    torch.save(each, out / f"rank{rank}.pt")


def stream(model_path, stored, rank=0, world_size=1):
    """(types of what the layers take, log-probs) of a model that computes in bfloat16 by Hugging Face's
    layers, as on CUDA, with weights stored in a type.
    """
    dtype = f"actor_rollout_ref.actor.fsdp_config.model_dtype={stored}"
    with mock.patch("verl.workers.engine.cpu_layers.use_cpu_layers", lambda module: False):
        actor = make_actor(make_config(model_path, BF16, dtype), world_size)
    types = set()
    for layer in actor.engine.module.model.base_model.layers:
        layer.register_forward_pre_hook(lambda layer, arguments: types.add(arguments[0].dtype))
    return types, compute_log_prob(actor.engine, make_batch(8), actor.limits, 1.0)


def stream_run(rank, world_size, model_path, out):
    torch.save(stream(model_path, "fp32", rank, world_size), out / f"rank{rank}.pt")


def go_on(actor):
    """One more update; returns (metrics, whole weights after it)."""
    metrics = actor.update_policy(my_rows(actor.engine.data.rank, actor.engine.data.size))
    return metrics, {name: tensor.clone() for name, tensor in actor.engine.weights()}


def first_run(rank, world_size, model_path, out):
    """Updates of every variant; then NUM_STEPS real ones, a checkpoint, another update."""
    results = {"updates": updates(model_path, rank, world_size)}
    actor = make_actor(settings(model_path, "packed"), world_size)
    for seed in range(NUM_STEPS):
        actor.update_policy(my_rows(rank, world_size, seed))
    save(actor.engine, out / "checkpoint")
    results["weights"] = {name: tensor.clone() for name, tensor in actor.engine.weights()}
    results["gathered_as"] = set()
    gather = DTensor.full_tensor

    def gather_and_note(tensor):
        results["gathered_as"].add(tensor.dtype)
        return gather(tensor)

    with mock.patch.object(DTensor, "full_tensor", gather_and_note):
        results["cast"] = {name: tensor.clone() for name, tensor in actor.engine.weights(torch.bfloat16)}
    results["next"] = go_on(actor)
    torch.save(results, out / f"rank{rank}.pt")
