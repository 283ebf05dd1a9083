"""The placement of a run: its roles, their pools, and where the processes live (here, or in Ray).

    decide_machine_settings(config)
                       returns a configuration in which `auto` is replaced by what the machine has, and
                       `fastest` by what was measured when the run began
    build_pools(...)   one pool of trainer.nnodes x trainer.n_gpus_per_node processes with actor, reference,
                       critic, and the rollout; with rollouts apart a pool of rollout.num_processes for
                       these, on any nodes, each with the devices of one engine

The driver is in no pool: it is the process that was started, or with `python -m verl.rl` an actor of its own
(orchestrator.py).
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from verl.checkpoints.run_state import store_of
from verl.config import Config, SFTConfig, read_yaml, replace_values
from verl.config.keys import flatten
from verl.planning.passes import Passes
from verl.single_controller.base import ResourcePool
from verl.single_controller.names import SAMPLER, TRAINER, RunNames
from verl.utils.device import bf16_speedup
from verl.workers.engine.loading import FASTEST, load_hf_config
from verl.workers.rollout import build

if TYPE_CHECKING:
    from verl.single_controller.ray import RaySession

AnyConfig = TypeVar("AnyConfig", Config, SFTConfig)
_DTYPE_KEY = "mixed_precision.param_dtype"
TRAINING_POOL = "global_pool"
SAMPLING_POOL = "rollout_pool"  # its processes don't talk to each other: they may be on any nodes
ROLES_OF_POOLS = {TRAINING_POOL: TRAINER, SAMPLING_POOL: SAMPLER}  # in the names of a pool's processes
MIN_BF16_SPEEDUP = 1.3  # times as fast as fp32: with less, rounding is not worth it, and chance might decide


class Role(Enum):
    """The task of a worker; its value is the name of the worker group.

    No worker here has verl's `RefPolicy` (the reference lives with the actor) or `RewardModel` (neural reward
    models are refused).
    """

    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"


@dataclass
class ResourcePoolManager:
    """The pools of a run, made from a specification, and which of them each role has."""

    resource_pool_spec: dict[str, list[int]]  # pool -> processes on each node, e.g. {"global_pool": [8, 8]}
    mapping: dict[Role, str]  # role -> pool. Roles of one pool share its processes.
    backend: str = "ray"  # or "local": one in-process worker
    # Whether a process of a pool takes a GPU; None: it does if this machine has one.
    use_gpu: bool | None = None
    num_cpus_per_process: float = 0.25  # of Ray's CPUs, reserved by each process
    # Pools whose processes hold a rollout engine each, on any nodes -> GPUs of each engine.
    engine_pools: dict[str, int] = field(default_factory=dict)
    names: RunNames | None = None  # of the run's processes on Ray
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Make the pools; those of Ray reserve nothing before the first worker group is built in them."""
        use_gpu = torch.cuda.is_available() if self.use_gpu is None else self.use_gpu
        for name, process_on_nodes in self.resource_pool_spec.items():
            if self.backend == "ray":
                from verl.single_controller.ray import RayResourcePool

                is_of_engines = name in self.engine_pools
                pool: ResourcePool = RayResourcePool(
                    process_on_nodes,
                    use_gpu,
                    num_cpus_per_process=self.num_cpus_per_process,
                    gpus_per_process=self.engine_pools.get(name, 1),
                    strategy="PACK" if is_of_engines else "STRICT_SPREAD",
                )
            else:
                pool = ResourcePool(process_on_nodes)
            pool.names = self.names
            pool.role = ROLES_OF_POOLS.get(name, name)
            self.resource_pool_dict[name] = pool

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """Return the pool to which `role` is mapped."""
        return self.resource_pool_dict[self.mapping[role]]


def num_sampling(config: Config | SFTConfig) -> int:
    """Return how many processes sample and do not train.

    There are 0 if the processes that train also sample.
    """
    if isinstance(config, SFTConfig):
        return 0
    rollout = config.actor_rollout_ref.rollout
    return rollout.num_processes if rollout.placement == "apart" else 0


def samples_apart(config: Config | SFTConfig) -> bool:
    """Return whether processes of their own sample."""
    return num_sampling(config) > 0


def gpus_of_sampling(config: Config | SFTConfig) -> int:
    """Return how many GPUs the processes that sample and do not train take, if the run is on GPUs."""
    if isinstance(config, SFTConfig) or not samples_apart(config):
        return 0
    block = config.actor_rollout_ref
    return num_sampling(config) * build.devices_per_engine(block.rollout, block.model, "cuda")


def roles_of(passes: Passes) -> list[Role]:
    """Return the roles that live in each process that trains."""
    actor = Role.ActorRolloutRef if passes.needs_reference else Role.ActorRollout
    return [actor, Role.Critic] if passes.needs_values else [actor]


def processes_on_nodes(config: Config | SFTConfig) -> list[int]:
    """Return how many processes run on each node."""
    return [config.trainer.n_gpus_per_node] * config.trainer.nnodes


def run_names(config: Config | SFTConfig) -> RunNames:
    """Return the names of a run's processes on Ray."""
    return RunNames.of(config.trainer.experiment_name, config.trainer.default_local_dir)


def build_pools(config: Config, roles: list[Role]) -> ResourcePoolManager:
    """Build the pool of all roles that train, and that of the processes that sample, if there are any.

    Nothing is reserved yet.

    Args:
        config: the whole configuration.
        roles: the roles that train.
    """
    spec = {TRAINING_POOL: processes_on_nodes(config)}
    mapping = dict.fromkeys(roles, TRAINING_POOL)
    engine_pools = {}
    if samples_apart(config):
        spec[SAMPLING_POOL] = [1] * num_sampling(config)
        mapping[Role.Rollout] = SAMPLING_POOL
        on_gpus = config.trainer.device == "cuda"
        engine_pools[SAMPLING_POOL] = gpus_of_sampling(config) // num_sampling(config) if on_gpus else 0
    pools = ResourcePoolManager(
        resource_pool_spec=spec,
        mapping=mapping,
        backend=config.trainer.backend,
        use_gpu=config.trainer.device == "cuda",
        num_cpus_per_process=config.trainer.cpus_per_process,
        engine_pools=engine_pools,
        names=run_names(config),
    )
    pools.create_resource_pool()
    return pools


def num_processes(config: Config | SFTConfig) -> int:
    """Return the number of worker processes that train; supervised training has no others."""
    return sum(processes_on_nodes(config))


def decide_machine_settings(config: AnyConfig) -> AnyConfig:
    """Return the configuration with the settings filled in that are left to the machine.

    Where `trainer.backend` and `trainer.device` are `auto`, they follow what the machine or the cluster has.
    Where `param_dtype` is `fastest`, a type is filled in. It is the same for every role and process, and for
    a run that goes on from a checkpoint, also on another machine.

    Raises ValueError if the run asks for more GPUs than there are.
    """
    if config.trainer.backend == "auto":
        backend = "ray" if needs_ray(config) else "local"
        config = replace_values(config, {"trainer.backend": backend})
    if config.trainer.device != "cpu":
        config = replace_values(config, {"trainer.device": _device(config)})
    trainer = config.trainer
    fastest = [key for key, value in flatten(config).items() if key.endswith(_DTYPE_KEY) and value == FASTEST]
    if not fastest:
        return config
    checkpoints = store_of(trainer)
    folder = checkpoints.find_resume(trainer.resume_mode, trainer.resume_from_path)
    if folder is not None and not folder.exists():  # the checkpoint is at the remote place
        checkpoints.lock()
        folder = checkpoints.find_whole(trainer.resume_mode, trainer.resume_from_path)
        checkpoints.unlock()
    if dtype := _dtype_of_run(folder, fastest):
        print(f"computing in {dtype}, as the run of {folder} did", flush=True)
    elif trainer.device == "cpu":
        model = config.model if isinstance(config, SFTConfig) else config.actor_rollout_ref.model
        sizes = load_hf_config(model).get_text_config()
        speedup = bf16_speedup(sizes.hidden_size, getattr(sizes, "intermediate_size", 4 * sizes.hidden_size))
        dtype = "bf16" if speedup >= MIN_BF16_SPEEDUP else "fp32"
        print(
            f"computing in {dtype}: products in bf16 are {speedup:.2g} times as fast as in fp32 here",
            flush=True,
        )
    return replace_values(config, dict.fromkeys(fastest, dtype or "bf16"))


def _dtype_of_run(folder: Path | None, keys: list[str]) -> str | None:
    """Return the value of one of the keys in the config.yaml of a checkpoint's run, or None."""
    if folder is None or not (record := folder.parent / "config.yaml").is_file():
        return None
    for key in keys:
        value: Any = read_yaml(record)
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value in ("fp32", "bf16"):
            return value
    return None


def _device(config: Config | SFTConfig) -> str:
    """Return "cuda" or "cpu" for a run that may use GPUs."""
    trainer = config.trainer
    if trainer.backend == "ray":
        import ray  # a local run does without it

        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        where = "the Ray cluster"
    else:
        num_gpus = torch.cuda.device_count()
        where = "this machine"
    if num_gpus == 0 and trainer.device == "auto" and num_processes(config) == 1:
        return "cpu"
    sampling_gpus = gpus_of_sampling(config)
    wanted = num_processes(config) + sampling_gpus
    if trainer.device == "auto" and num_processes(config) == 1:
        return "cuda" if num_gpus >= wanted else "cpu"
    if num_gpus < wanted:
        sampling = f" with rollout.num_processes={num_sampling(config)} ({sampling_gpus} GPUs)"
        raise ValueError(
            f"found {num_gpus} GPUs on {where}, but trainer.nnodes={trainer.nnodes} and "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}{sampling * (sampling_gpus > 0)} ask for "
            f"{wanted}. Set "
            "trainer.n_gpus_per_node, or trainer.device=cpu to train in processes without a GPU."
        )
    return "cpu" if num_gpus == 0 else "cuda"


def process_variables(config: Config) -> dict[str, str]:
    """Return environment variables for a run's processes.

    On CUDA, processes that share a layer's matrices (tensor parallel) get one queue. Kernels then start in
    the order in which they were called, so that communication begins before the product that it runs beside
    takes the whole GPU. On CPU, where others sample beside training, each process gets its share of the
    cores.
    """
    actor = config.actor_rollout_ref.actor
    shared = actor.strategy == "megatron" and actor.megatron.tensor_model_parallel_size > 1
    if config.trainer.device == "cuda":
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if shared else {}
    if not samples_apart(config):
        return {}
    processes = num_processes(config) + num_sampling(config)
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def needs_ray(config: Config | SFTConfig) -> bool:
    """Return whether this run is on Ray: it has more than one process, or `trainer.backend=ray`."""
    backend = config.trainer.backend
    return backend == "ray" or (backend == "auto" and (num_processes(config) > 1 or samples_apart(config)))


def start_ray(config: Config | SFTConfig) -> AbstractContextManager[RaySession | None]:
    """Start a Ray session if this run needs one, to be ended with the run."""
    if not needs_ray(config):
        return nullcontext()
    from verl.single_controller.ray import init_ray  # a local run does without it

    return init_ray()
