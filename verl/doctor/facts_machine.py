"""One machine, this one: what a run would find here. Runs in the driver, and as a task on each Ray node."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.doctor.facts import Machine
from verl.doctor.facts_gpu import count_gpus, look_at_gpus, look_at_software
from verl.doctor.facts_limits import look_at_limits
from verl.doctor.facts_network import look_at_cards
from verl.doctor.facts_places import hub_folder, look_at_place
from verl.doctor.facts_retriever import Question, look_at_servers
from verl.doctor.proxies import VARIABLES, without_password
from verl.utils.tracking import has_wandb_key

# Variables that checks look at; none of them is a secret.
KEPT = re.compile(
    r"RAY_(ADDRESS|TMPDIR|EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES|OBJECT_STORE_ALLOW_SLOW_STORAGE)|TMPDIR|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT)|TRANSFORMERS_OFFLINE|XDG_CACHE_HOME|"
    r"(NCCL|GLOO|TP)_SOCKET_IFNAME|NCCL_IB_HCA|CUDA_VISIBLE_DEVICES|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|"
    r"OMP_NUM_THREADS|WANDB_(MODE|BASE_URL)|MASTER_(ADDR|PORT)|WORLD_SIZE|SLURM_(JOB_ID|NNODES|NODELIST)"
)


@dataclass(frozen=True)
class Order:
    """What to look at. servers: how the run asks them; None: not at all. paths: that must be there.
    places: use -> folder that is written to. with_gpus: also nvidia-smi and a matmul, which take seconds."""

    servers: Question | None = None
    paths: tuple[str, ...] = ()
    places: tuple[tuple[str, str], ...] = ()
    with_gpus: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Order:
        asked = value["servers"]
        return cls(
            None if asked is None else Question(**asked),
            tuple(value["paths"]),
            tuple((use, path) for use, path in value["places"]),
            value["with_gpus"],
        )


def look_at_machine(order: Order) -> Machine:
    """This machine now. Takes about a tenth of a second without GPUs when the servers answer."""
    limits, cards = look_at_limits(), look_at_cards()
    environment = kept_environment(os.environ)
    places = [*order.places, ("home", "~")]
    if str(hub_folder(os.environ)) != str(hub_folder({})):
        places.append(("hub cache", str(hub_folder(os.environ))))
    return Machine(
        name=socket.gethostname(),
        addresses=tuple(address for card in cards for address in card.addresses),
        environment=environment,
        software=look_at_software(os.environ),
        open_files=limits.open_files,
        num_cpus=limits.num_cpus,
        num_cpus_ray=limits.num_cpus_ray,
        memory_bytes=limits.memory_bytes,
        memory_limit_bytes=limits.memory_limit_bytes,
        memory_free_bytes=limits.memory_free_bytes,
        shm_bytes=_shm_bytes(),
        cards=cards,
        places=tuple(look_at_place(used_for, path) for used_for, path in places),
        servers=() if order.servers is None else look_at_servers(order.servers),
        missing=tuple(path for path in order.paths if not Path(path).expanduser().exists()),
        num_gpus=count_gpus(),
        gpus=look_at_gpus() if order.with_gpus else (),
        has_wandb_key=has_wandb_key(),
    )


def kept_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What checks may see of the environment: no passwords, no keys."""
    return {
        name: without_password(value) if name in VARIABLES or "://" in value else value
        for name, value in environment.items()
        if name in VARIABLES or KEPT.fullmatch(name)
    }


def _shm_bytes() -> int | None:
    """Free room in /dev/shm, as Ray asks for it."""
    try:
        sizes = os.statvfs("/dev/shm")
    except OSError:
        return None
    return sizes.f_bavail * sizes.f_frsize
