"""What one rank does in tests of LoRA and Muon over several processes; run by `ranks.run_ranks`."""

import torch
from sharded_ranks import go_on, my_rows
from tiny_training import gradients_of, make_actor, make_config, make_critic, save
from torch.distributed.fsdp import FSDPModule

from verl.workers.actor.dp_actor import compute_log_prob
from verl.workers.engine.reference import Reference

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
LORA = [f"{MODEL}.lora_rank=4"]
MUON = [f"{ACTOR}.optim.name=muon"]
KEEP = [f"{ACTOR}.fsdp_config.reshard_after_forward=false"]
KINDS = {
    "lora": LORA,
    "lora, checkpointing": [*LORA, f"{MODEL}.enable_gradient_checkpointing=true"],
    "lora, kept": [*LORA, *KEEP],
    "lora, muon": [*LORA, *MUON],
    "muon": MUON,
    "muon, kept": [*MUON, *KEEP],
}


def make(model_path, kind, world_size=1):
    """An actor of micro-batches of two rows, two optimizer steps a mini-batch of 6; B of LoRA is not 0."""
    size = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", f"{ACTOR}.ppo_mini_batch_size=6"]
    actor = make_actor(make_config(model_path, f"{ACTOR}.use_kl_loss=true", *size, *KINDS[kind]), world_size)
    if actor.engine.adapters is not None:
        with torch.no_grad():
            for number, parameter in enumerate(actor.engine.adapters.parameters().values()):
                parameter.fill_(0.01 * (number % 5 + 1))
    return actor


def updates(model_path, rank=0, world_size=1):
    """kind -> (metrics, gradients) of an update, and (metrics, whole weights) after a real one."""
    results = {}
    for kind in KINDS:
        actor = make(model_path, kind, world_size)
        data = my_rows(rank, world_size)
        held = gradients_of(actor.engine, lambda actor=actor, data=data: actor.update_policy(data))
        results[kind] = held, go_on(make(model_path, kind, world_size))
    return results


def reset_references(model_path, kind, rank, world_size, out):
    """Log-probs: the policy's at a reset, its reference's after another update, and those of the reference
    that another process loads.
    """
    actor, other = (make(model_path, kind, world_size) for _ in range(2))
    own = make(model_path, "muon", world_size).engine if kind == "muon" else None
    others_own = make(model_path, "muon", world_size).engine if kind == "muon" else None

    def log_probs(engine):
        return compute_log_prob(engine, my_rows(rank, world_size), actor.limits, 1.0)

    reference = Reference(actor.engine, own)
    loaded = Reference(other.engine, others_own)
    actor.update_policy(my_rows(rank, world_size))
    results = [log_probs(actor.engine)]
    reference.reset()
    actor.update_policy(my_rows(rank, world_size))
    reference.save(out / kind)
    loaded.load(out / kind)
    for each in (reference, loaded):
        with each.active() as engine:
            results.append(log_probs(engine))
    return [*results, log_probs(actor.engine)]


def critic_update(model_path, rank=0, world_size=1):
    size = f"{ACTOR}.ppo_mini_batch_size=6"  # the critic's follows it
    critic = make_critic(make_config(model_path, "critic.model.lora_rank=4", size), world_size)
    return gradients_of(critic.engine, lambda: critic.update_critic(my_rows(rank, world_size)))


def first_run(rank, world_size, model_path, out):
    """Every kind's updates; then, of the usual model, checkpoints of two kinds, from which a run goes on."""
    results = {"updates": updates(model_path, rank, world_size)}
    if "gemma3" in str(model_path):  # it is asked for these alone
        return torch.save(results, out / f"rank{rank}.pt")
    for kind in ("lora", "muon"):
        actor = make(model_path, kind, world_size)
        actor.update_policy(my_rows(rank, world_size))
        save(actor.engine, out / kind)
        log_probs = compute_log_prob(actor.engine, my_rows(rank, world_size), actor.limits, 1.0)
        results[kind] = log_probs, go_on(actor)
        resumed = make(model_path, kind, world_size)
        resumed.engine.load(out / kind)
        results[kind, "resumed"] = go_on(resumed)
    for kind in ("lora", "muon"):
        results[kind, "reference"] = reset_references(model_path, kind, rank, world_size, out)
    results["critic"] = critic_update(model_path, rank, world_size)
    results["gathered"] = _gathered_after_passes(model_path, rank, world_size)
    torch.save(results, out / f"rank{rank}.pt")


def _gathered_after_passes(model_path, rank, world_size):
    """(in the middle of an update, at its end): whether a layer's weights are whole on this rank."""
    actor = make(model_path, "muon, kept", world_size)
    layer = next(m for m in actor.engine.module.model.modules() if isinstance(m, FSDPModule))
    seen = []
    backward = actor.engine._backward

    def watched(loss, is_last):
        backward(loss, is_last)
        seen.append((is_last, _is_whole(layer)))

    actor.engine._backward = watched
    actor.update_policy(my_rows(rank, world_size, num_mini_batches=2))  # of two micro-batches each
    return seen, _is_whole(layer)


def _is_whole(layer):
    return not any(hasattr(p, "full_tensor") for p in layer.parameters())
