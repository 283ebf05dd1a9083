"""Where a run's processes live: here or in Ray, with GPUs or without. Reads the `trainer` block alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

if TYPE_CHECKING:
    from verl.single_controller.ray import RaySession


def place(config: DictConfig) -> None:
    """Fill in `trainer.backend` and `trainer.device` where they are `auto`, from what is there.

    Raises:
        ValueError: GPUs are asked for that are not there.
    """
    trainer = config.trainer
    processes = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.backend == "auto":
        trainer.backend = "local" if processes == 1 else "ray"
    if trainer.device == "cpu":
        return
    if trainer.backend == "ray":
        import ray  # a local run does without it

        num_gpus, where = int(ray.cluster_resources().get("GPU", 0)), "the Ray cluster"
    else:
        num_gpus, where = torch.cuda.device_count(), "this machine"
    if trainer.device == "auto" and processes == 1:
        trainer.device = "cuda" if num_gpus else "cpu"
    elif num_gpus < processes:
        raise ValueError(
            f"found {num_gpus} GPUs on {where}, but trainer.nnodes={trainer.nnodes} and "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} ask for {processes}. Set "
            "trainer.n_gpus_per_node, or trainer.device=cpu to train in processes without a GPU."
        )
    trainer.device = "cpu" if num_gpus == 0 else "cuda"


def start_ray(config: DictConfig) -> RaySession | None:
    """A Ray session if this run needs one (more than one process, or `trainer.backend=ray`), else None."""
    processes = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if config.trainer.backend == "local" or (config.trainer.backend == "auto" and processes == 1):
        return None
    from verl.single_controller.ray import init_ray  # a local run does without it

    return init_ray()
