"""Facts: what the doctor has seen, as plain data. Checks judge these, wherever and whenever they were seen.

    facts_*.py look at settings, machine, network, Ray, GPUs -> Facts -> JSON -> Facts -> checks

`to_json` and `from_json` keep them, so that facts recorded elsewhere can be judged. A value that could not be
seen is None: a check then finds nothing. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A folder that something is written to. `used_for`: what, for people.

    path: as asked for; it need not exist: all else is about its nearest parent that does. problem: why a
    small file could not be written there.
    """

    used_for: str
    path: str
    problem: str | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


@dataclass(frozen=True)
class Card:
    """A network card that is up. addresses: without those that only reach the next switch."""

    name: str
    addresses: tuple[str, ...]
    is_virtual: bool = False


@dataclass(frozen=True)
class Gpu:
    """What nvidia-smi says, and a short matmul. ecc_errors: uncorrected ones since the driver was loaded.

    needs_reset: rows or pages that are only put aside at the next reset. matmul_s: of one product (see
    gpu_probe). is_right: the same product twice gave the same bits. problem: why it could not be tried.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    ecc_errors: int | None = None
    needs_reset: bool = False
    matmul_s: float | None = None
    is_right: bool | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Server:
    """One retrieval server, as seen from one machine.

    problem: why a search got no documents. health: what GET /health says, {} for a server without it.
    holder: the program that listens on its port, where that is on this machine. host_addresses: of its name.
    """

    url: str
    problem: str | None = None
    health: dict[str, Any] = field(default_factory=dict)
    holder: str | None = None
    host_addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Software:
    """Versions. nccl_built: torch's own. nccl_loaded: library -> version that LD_LIBRARY_PATH or LD_PRELOAD
    put before it. cuda_driver: of the kernel's module, as 580.82.07."""

    python: str
    torch: str | None = None
    torch_cuda: str | None = None
    ray: str | None = None
    transformers: str | None = None
    nccl_built: str | None = None
    nccl_loaded: dict[str, str] = field(default_factory=dict)
    cuda_driver: str | None = None


@dataclass(frozen=True)
class Machine:
    """One machine: the one that the run is started on, or a node of its Ray cluster.

    num_cpus: cores that this process may use: affinity and control groups heeded. num_cpus_ray: what Ray
    counts. memory_bytes: of the machine; memory_limit_bytes: of the control group. clock_offset_s: ahead of
    the machine that asked, give or take clock_error_s. missing: paths of the run that are not there.
    """

    name: str
    addresses: tuple[str, ...]
    environment: dict[str, str]
    software: Software
    open_files: tuple[int, int]
    num_cpus: float
    num_cpus_ray: float
    memory_bytes: int
    memory_limit_bytes: int | None = None
    memory_free_bytes: int | None = None
    shm_bytes: int | None = None
    cards: tuple[Card, ...] = ()
    places: tuple[Place, ...] = ()
    servers: tuple[Server, ...] = ()
    missing: tuple[str, ...] = ()
    num_gpus: int | None = None
    gpus: tuple[Gpu, ...] = ()
    has_wandb_key: bool = False
    clock_offset_s: float = 0.0
    clock_error_s: float = 0.0

    def place(self, used_for: str) -> Place | None:
        return next((place for place in self.places if place.used_for == used_for), None)


@dataclass(frozen=True)
class RayNode:
    """A node as the cluster lists it."""

    name: str
    address: str
    num_cpus: float
    num_gpus: float
    object_store_bytes: int = 0
    is_alive: bool = True


@dataclass(frozen=True)
class RayCluster:
    """What is known of Ray. address: RAY_ADDRESS; started: addresses of clusters that `ray start` left here
    and that answer. problem: why the cluster at `address` can't be used; port_holder: what listens there.
    folder_problem, folder_note: why Ray can't put its files where it is told; where it puts them instead.
    silent: nodes that did not answer the doctor's task.
    """

    address: str | None
    started: tuple[str, ...] = ()
    problem: str | None = None
    port_holder: str | None = None
    folder_problem: str | None = None
    folder_note: str | None = None
    nodes: tuple[RayNode, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def alive(self) -> tuple[RayNode, ...]:
        return tuple(node for node in self.nodes if node.is_alive)


@dataclass(frozen=True)
class Model:
    """A model that the run reads. key: the setting. where: folder | cache | hub (not in the cache) | nowhere.

    num_params, dtype_bytes: of the weights' files (bytes of one number); max_positions: longest sequence by
    its config. missing: kinds of files that are not there (config, weights, tokenizer). problem: broken.
    """

    key: str
    path: str
    where: str
    num_params: int | None = None
    dtype_bytes: int | None = None
    max_positions: int | None = None
    missing: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Corpus:
    """The corpus that the run means (retriever.corpus_path): what `search_r1` tells one from another by."""

    path: str
    identity: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Index:
    """An index for the retrieval server (--index_path). problem: why it can't be used; on_gpu: it is dense,
    so it is searched on GPUs where there are some."""

    path: str
    num_bytes: int | None = None
    on_gpu: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Run:
    """The run that is meant. settings: dotted key -> value; program: name of its yaml file. mistakes: what
    validation says; notes: its lines on settings without effect, which the start of a run prints itself."""

    program: str
    settings: dict[str, Any]
    mistakes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    def get(self, key: str, default: Any = None) -> Any:
        """For keys that only one of the programs has."""
        return self.settings.get(key, default)

    @property
    def num_training_processes(self) -> int:
        return int(self["trainer.nnodes"]) * int(self["trainer.n_gpus_per_node"])

    @property
    def num_processes(self) -> int:
        """In all pools: with `trainer.rollout_pool` the rollout has processes of its own."""
        own = self.get("trainer.rollout_pool.n_gpus_per_node")
        apart = 0 if own is None else int(self["trainer.rollout_pool.nnodes"]) * int(own)
        return self.num_training_processes + apart

    @property
    def needs_ray(self) -> bool:
        backend = self["trainer.backend"]
        return backend == "ray" or (backend == "auto" and self.num_processes > 1)

    @property
    def searches(self) -> bool:
        return bool(self.get("do_search", False))

    @property
    def num_gpus_asked(self) -> int:
        """GPUs that it can't do without: with one process `auto` takes what is there."""
        device = self["trainer.device"]
        may_do_without = device == "cpu" or (device == "auto" and self.num_processes == 1)
        return 0 if may_do_without else self.num_processes


@dataclass(frozen=True)
class Facts:
    """Everything. nodes: machines of the cluster that were looked at, empty without one. data: setting ->
    file -> what is wrong with it. checkpoints_there: in the run's folder already.
    """

    here: Machine
    run: Run | None = None
    ray: RayCluster | None = None
    nodes: tuple[Machine, ...] = ()
    models: tuple[Model, ...] = ()
    data: dict[str, dict[str, str | None]] = field(default_factory=dict)
    checkpoints_there: int = 0
    corpus: Corpus | None = None
    index: Index | None = None

    @property
    def machines(self) -> tuple[Machine, ...]:
        """Where the run's processes would be."""
        return self.nodes or (self.here,)

    @property
    def uses_ray(self) -> bool:
        """Of a run; without one: whether a cluster waits for one."""
        return bool(self.nodes) if self.run is None else self.run.needs_ray

    @property
    def has_several_nodes(self) -> bool:
        return len(self.nodes) > 1 if self.run is None else self.run["trainer.nnodes"] > 1


def to_json(facts: Any) -> dict[str, Any]:
    return asdict(facts)


def from_json(kind: Any, value: Any) -> Any:
    """The dataclass `kind` from what `to_json` gave, also after a way through a file."""
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = [item.name for item in fields(kind) if item.name in value]
        return kind(**{name: from_json(hints[name], value[name]) for name in names})  # type: ignore[operator]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        is_class = [part for part in inner if part is not type(None)]
        return None if value is None else from_json(is_class[0], value)
    if origin is tuple:
        repeated = inner[0] if inner[-1] is Ellipsis else None
        return tuple(from_json(repeated or inner[i], item) for i, item in enumerate(value))
    return value
