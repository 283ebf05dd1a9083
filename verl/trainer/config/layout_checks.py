"""Which processes may shard a model and share its tokens: checks of the FSDP2 keys against their number."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.trainer.config.keys import ACTOR, REF
from verl.trainer.ppo.passes import Passes


def check_divides(name: str, size: int, num_processes: int) -> None:
    """Raises ValueError unless the key `name`'s value (-1: all) divides the number of processes."""
    if size != -1 and (size < 1 or num_processes % size):
        raise ValueError(
            f"Found {name}={size} with {num_processes} processes (trainer.nnodes * trainer.n_gpus_per_node); "
            "expected a number that divides them."
        )


def check_layout(config: DictConfig, passes: Passes) -> None:
    """fsdp_size and ulysses_sequence_parallel_size of each model that the run has.

    Raises:
        ValueError: one does not divide the number of processes, or means nothing with Megatron.
    """
    num_processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    blocks = [(ACTOR, config.actor_rollout_ref.actor, config.actor_rollout_ref.actor.fsdp_config)]
    if passes.reference:
        blocks.append((REF, config.actor_rollout_ref.actor, config.actor_rollout_ref.ref.fsdp_config))
    if passes.values:
        blocks.append(("critic", config.critic, config.critic.model.fsdp_config))
    for name, block, fsdp in blocks:
        key = f"{name}{'.model' if name == 'critic' else ''}.fsdp_config.fsdp_size"
        if block.strategy == "megatron":
            if fsdp.fsdp_size != -1:
                raise ValueError(
                    f"Found {key}={fsdp.fsdp_size} with {name}.strategy=megatron, which does not shard "
                    f"weights so; expected -1, or {name}.strategy=fsdp."
                )
            continue
        check_divides(key, -1 if fsdp.fsdp_size >= num_processes else fsdp.fsdp_size, num_processes)
        check_divides(
            f"{name}.ulysses_sequence_parallel_size", block.ulysses_sequence_parallel_size, num_processes
        )
