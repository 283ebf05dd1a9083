"""What one of four ranks does in tests of hybrid sharding and sequence parallelism; run by
`ranks.run_ranks`.
"""

import torch
from sharded_ranks import NUM_ROWS, VARIANTS, go_on, my_rows, settings
from tiny_training import make_actor, make_config, make_critic, whole
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from verl.config import replace_values
from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine.snapshot import BackgroundWriter

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
SIZES = {  # (fsdp_size, sequence parallel), and the variant of `sharded_ranks`
    "replicated": (1, 1, "packed"),
    "hybrid": (2, 1, "rows of 1"),
    "sharded over all": (-1, 1, "packed"),
    "sequence parallel 2": (-1, 2, "packed"),
    "sequence parallel 4": (4, 4, "padded"),
    "both": (2, 2, "rows of 1"),
}
KINDS = {
    "plain": [],
    "kept gathered": [f"{ACTOR}.fsdp_config.reshard_after_forward=false"],
    "muon": [f"{ACTOR}.optim.name=muon"],
    "lora, checkpointing": [f"{MODEL}.lora_rank=4", f"{MODEL}.enable_gradient_checkpointing=true"],
}
CASES = [*((layout, "plain") for layout in SIZES), *(("both", kind) for kind in KINDS if kind != "plain")]


def overrides(fsdp_size, sequence):
    return [
        f"{ACTOR}.fsdp_config.fsdp_size={fsdp_size}",
        f"critic.model.fsdp_config.fsdp_size={fsdp_size}",
        f"{ACTOR}.ulysses_sequence_parallel_size={sequence}",
        f"critic.ulysses_sequence_parallel_size={sequence}",
    ]


def config_of(model_path, layout, kind, world_size):
    fsdp_size, sequence, variant = SIZES[layout]
    sizes = overrides(fsdp_size, sequence) if world_size > 1 else []
    one_step = f"{ACTOR}.ppo_mini_batch_size={NUM_ROWS}"
    return make_config(
        model_path, f"{ACTOR}.use_kl_loss=true", one_step, *VARIANTS[variant], *KINDS[kind], *sizes
    )


def actor_of(model_path, layout, kind, world_size):
    actor = make_actor(config_of(model_path, layout, kind, world_size), world_size)
    if actor.engine.adapters is not None:
        with torch.no_grad():
            for number, parameter in enumerate(actor.engine.adapters.parameters().values()):
                parameter.fill_(0.01 * (number % 5 + 1))
    return actor


def update(worker):
    """One optimizer step: (metrics, whole gradients, whole weights after it)."""
    engine = worker.engine
    seen = {}
    step = engine.step

    def recorded(discard=False):
        trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
        seen.update({name: whole(p.grad).clone() for name, p in trained.items()})
        return step(discard)

    engine.step = recorded
    data = my_rows(engine.data.rank, engine.data.size, num_mini_batches=1)
    metrics = worker.update_policy(data) if hasattr(worker, "update_policy") else worker.update_critic(data)
    return metrics, seen, {name: tensor.clone() for name, tensor in engine.weights()}


def results_of(model_path, world_size=1):
    """(layout, kind) -> what `update` gives."""
    results = {
        (layout, kind): update(actor_of(model_path, layout, kind, world_size)) for layout, kind in CASES
    }
    critic = make_critic(config_of(model_path, "both", "plain", world_size), world_size)
    return results | {("both", "critic"): update(critic)}


def stay_gathered_while_written(engine, model_path, folder):
    """Whether weights that a pass has gathered are still there when a thread has written a checkpoint."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    snapshots = [
        engine.snapshot(folder),
        engine.snapshot_hf(folder / "hf", tokenizer, model_path, folder),
    ]
    engine.module.unshard()
    for snapshot in snapshots:
        snapshot.write()
    stayed = not any(isinstance(p, DTensor) for p in engine.module.model.base_model.norm.parameters())
    engine.module.reshard()
    return stayed


def run(rank, world_size, model_path, out):
    """Every case; then going on from the checkpoint that two ranks wrote, and from one of this layout's own,
    which is written while the next update runs.
    """
    results = {"cases": results_of(model_path, world_size)}
    sizes = ("fsdp_config.fsdp_size", "ulysses_sequence_parallel_size")
    values = {f"actor_rollout_ref.actor.{size}": 2 for size in sizes}
    config = replace_values(settings(model_path, "packed"), values)
    resumed = make_actor(config, world_size)
    again = make_actor(config, world_size)
    resumed.engine.load(out / "checkpoint")
    folder = out / "checkpoint_of_4"
    writer = BackgroundWriter()
    snapshots = [
        resumed.engine.snapshot(folder),
        resumed.engine.snapshot_hf(
            folder / "hf", AutoTokenizer.from_pretrained(model_path), model_path, folder
        ),
    ]
    writer.write(snapshots, folder, background=True)
    data = resumed.engine.data
    log_probs = compute_log_prob(resumed.engine, my_rows(data.rank, data.size), resumed.limits, 1.0)
    results["log_probs"] = data, log_probs
    results["next"] = go_on(resumed)
    writer.is_done(wait=True)
    results["stay gathered"] = stay_gathered_while_written(
        resumed.engine, model_path, out / "checkpoint_again"
    )
    writer.close()
    torch.distributed.barrier()  # rank 0's thread has the Hugging Face folder to write besides
    again.engine.load(folder)
    results["next, again"] = go_on(again)
    torch.save(results, out / f"rank{rank}_of_4.pt")
