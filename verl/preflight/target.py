"""What is to be checked: a run, or without one this machine and the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from verl.config import Config, SFTConfig, at
from verl.trainer.placement import needs_ray, num_processes
from verl.trainer.ppo.passes import Passes
from verl.utils.dataset.row_environments import searches


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster lists it."""

    name: str
    address: str
    num_cpus: float
    num_gpus: float
    is_alive: bool


@dataclass(frozen=True)
class Cluster:
    """The Ray that the run would use.

    Attributes:
        address: RAY_ADDRESS. started: addresses of clusters that `ray start` left here and that answer.
        problem: why the cluster at `address` can't be used. silent: nodes that did not run our task.
    """

    address: str | None
    started: tuple[str, ...] = ()
    problem: str | None = None
    nodes: tuple[RayNode, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def alive(self) -> list[RayNode]:
        return [node for node in self.nodes if node.is_alive]


@dataclass(frozen=True)
class Target:
    """What the checks look at.

    Attributes:
        config: the run's configuration; None: no run is meant.
        probe: asks retrieval servers (`search_r1.search.probe.RetrievalProbe`); None: they are not asked.
        index_path: an index that the retrieval server is to load on this machine.
        is_thorough: also what takes seconds: GPUs by their driver, and the other nodes.
        at_start: a run starts right after this; its settings are validated, and their notes printed.
        cluster: None where nothing needs Ray. versions: of packages, by the nodes that were asked.
        notes: on keys of the command line that change nothing.
        run_folder, model_folders: absolute, by the driver: nodes have another working folder.
    """

    config: Config | SFTConfig | None
    probe: Any = None
    index_path: str | None = None
    is_thorough: bool = False
    at_start: bool = False
    cluster: Cluster | None = None
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run_folder: str = field(init=False, default="")
    model_folders: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.config is not None:
            folder = Path(self.config.trainer.default_local_dir).expanduser().absolute()
            models = [str(Path(path).absolute()) for path in self.models.values() if Path(path).is_dir()]
            object.__setattr__(self, "run_folder", str(folder))
            object.__setattr__(self, "model_folders", tuple(models))

    @cached_property
    def servers(self) -> Sequence[Any]:
        """State of each retrieval server of the run (`RetrievalProbe.servers`), as seen from this machine."""
        config = self.config
        if self.probe is None or not isinstance(config, Config) or not searches(config):
            return []
        block = config.retriever
        return self.probe.servers(block.url, block.topk, block.timeout, block.use_proxy)

    @property
    def needs_ray(self) -> bool:
        """A run that is on Ray; without a run: a cluster waits for one."""
        if self.config is None:
            return self.cluster is not None and bool(self.cluster.nodes)
        return needs_ray(self.config)

    @property
    def num_gpus_asked(self) -> int:
        """GPUs that the run can't do without: with one process `auto` takes what is there."""
        assert self.config is not None
        device, processes = self.config.trainer.device, num_processes(self.config)
        return 0 if device == "cpu" or (device == "auto" and processes == 1) else processes

    @property
    def models(self) -> dict[str, str]:
        """Setting -> model (a folder, or owner/name on the hub), of those that the run loads, each once."""
        config = self.config
        if config is None:
            return {}
        if isinstance(config, SFTConfig):
            keys = ["model.partial_pretrain"]
        else:
            passes = Passes.of(config)
            keys = ["actor_rollout_ref.model.path"]
            keys += ["critic.model.path"] * passes.values
            keys += ["actor_rollout_ref.teacher.path"] * passes.teacher
        once: dict[str, str] = {}
        for key in keys:
            path = at(config, key)
            if path is not None and path not in once.values():  # null: the check of the settings says so
                once[key] = path
        return once

    @property
    def has_models(self) -> bool:
        """Whether all models are here, in a folder or in the hub's cache."""
        return None not in map(local_folder, self.models.values())


def local_folder(model: str) -> Path | None:
    """The files of a model: a folder, or those of the hub's cache; None: it would have to be fetched."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
