"""What is to be checked: a run, or without one this machine and the Ray cluster at RAY_ADDRESS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from verl.config.keys import at
from verl.trainer.placement import needs_ray, num_processes
from verl.trainer.ppo.passes import Passes

SFT = "sft_trainer"


class SearchSide(Protocol):
    """What the program hands in to look at the search side (`search_r1.search.probe.RetrievalProbe`)."""

    def servers(
        self, urls: str | Sequence[str], topk: int, timeout: float, use_proxy: bool
    ) -> Sequence[Any]: ...

    def corpus(self, path: str) -> dict[str, Any]: ...

    def index(self, path: str) -> tuple[int, bool]: ...


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
    """The Ray that the run would use. address: RAY_ADDRESS; started: addresses of clusters that `ray start`
    left here and that answer. problem: why the cluster at `address` can't be used; port_holder: what listens
    there. silent: nodes that did not run the preflight's task.
    """

    address: str | None
    started: tuple[str, ...] = ()
    problem: str | None = None
    port_holder: str | None = None
    nodes: tuple[RayNode, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def alive(self) -> list[RayNode]:
        return [node for node in self.nodes if node.is_alive]


@dataclass(frozen=True)
class Target:
    """What the checks look at.

    Attributes:
        config: the run's configuration; None: no run is meant. program: name of its schema.
        probe: looks at the search side; None: nothing of it is checked.
        index_path: an index that the retrieval server is to load on this machine.
        is_thorough: also what takes seconds: GPUs by nvidia-smi, and the other nodes.
        at_start: a run starts right after this; its settings are validated, and their notes printed.
        cluster: None where nothing needs Ray. reports: MachineReport of its machines, once they were asked.
        notes: on keys of the command line that change nothing.
        run_folder, model_folders: absolute, by the driver: nodes have another working folder.
    """

    config: Any | None
    program: str = "ppo_trainer"
    probe: SearchSide | None = None
    index_path: str | None = None
    is_thorough: bool = False
    at_start: bool = False
    cluster: Cluster | None = None
    reports: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    run_folder: str = field(init=False, default="")
    model_folders: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.config is not None:
            folder = Path(self.config.trainer.default_local_dir).expanduser().absolute()
            models = {
                str(Path(path).absolute()): None for path in self.models.values() if Path(path).is_dir()
            }
            object.__setattr__(self, "run_folder", str(folder))
            object.__setattr__(self, "model_folders", tuple(models))

    @property
    def is_policy_run(self) -> bool:
        """A run that is not supervised."""
        return self.config is not None and self.program != SFT

    @property
    def passes(self) -> Passes:
        """Of a policy run."""
        return Passes.of(self.config)  # type: ignore[arg-type]

    @property
    def searches(self) -> bool:
        return self.is_policy_run and bool(self.config.do_search)  # type: ignore[union-attr]

    @property
    def needs_ray(self) -> bool:
        """A run that is on Ray; without a run: a cluster waits for one."""
        if self.config is None:
            return self.cluster is not None and bool(self.cluster.nodes)
        return needs_ray(self.config)

    @property
    def has_several_nodes(self) -> bool:
        if self.config is None:
            return self.cluster is not None and len(self.cluster.alive) > 1
        return bool(self.config.trainer.nnodes > 1)

    @property
    def num_gpus_asked(self) -> int:
        """GPUs that the run can't do without: with one process `auto` takes what is there."""
        assert self.config is not None
        device, processes = self.config.trainer.device, num_processes(self.config)
        may_do_without = device == "cpu" or (device == "auto" and processes == 1)
        return 0 if may_do_without else processes

    @property
    def models(self) -> dict[str, str]:
        """Setting -> model (a folder, or owner/name on the hub), of those that the run loads, each once."""
        config = self.config
        if config is None:
            return {}
        keys = ["model.partial_pretrain"]
        if self.is_policy_run:
            keys = ["actor_rollout_ref.model.path"]
            keys += ["critic.model.path"] if self.passes.values else []
            keys += ["actor_rollout_ref.teacher.path"] if self.passes.teacher else []
        once: dict[str, str] = {}
        for key in keys:
            path = at(config, key)
            if path is not None and path not in once.values():  # null: the check of the settings says so
                once[key] = path
        return once

    @property
    def has_models(self) -> bool:
        """Whether all models are here, in a folder or in the hub's cache."""
        return all(local_folder(model) is not None for model in self.models.values())


def local_folder(model: str) -> Path | None:
    """The files of a model: a folder, or those of the hub's cache; None: it would have to be fetched."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
