"""Facts for tests of the doctor: a healthy machine and run with changes; real troubles in a child."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from verl.doctor.facts import Card, Facts, Machine, Model, Place, Run, Server, Software
from verl.doctor.facts_run import run_of
from verl.doctor.findings import Finding
from verl.doctor.registry import diagnose
from verl.trainer.config import load_config

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"
URL = "http://10.0.0.7:8000/retrieve"
CORPUS = {"num_bytes": 100, "sample_sha256": "a" * 64}
CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWUTS = 0x00020000, 0x40000000, 0x04000000


@cache
def _default_settings() -> dict[str, Any]:
    return run_of(load_config([]), "ppo_trainer").settings


def run_with(settings: dict[str, Any] | None = None, **facts: Any) -> Run:
    """A run with the defaults and these settings, by dotted name."""
    known = _default_settings()
    assert not settings or settings.keys() <= known.keys()
    model = {f"{block}.model.path": str(BASE_MODEL) for block in ("actor_rollout_ref", "critic")}
    one_update = {"data.train_batch_size": 256, "algorithm.adv_estimator": "grpo"}
    lengths = {"data.max_start_length": 128, "data.max_prompt_length": 4096}
    values = known | model | one_update | lengths | {"retriever.url": URL} | (settings or {})
    return Run("ppo_trainer", values, **facts)


def machine_with(**changes: Any) -> Machine:
    """A machine of a healthy cluster: 64 cores, 256 GB, one card, no GPU."""
    healthy = Machine(
        name="node1",
        addresses=("10.0.0.1",),
        environment={},
        software=Software("3.11.7", "2.13.0", "13.0", "2.60.0", "5.23.0", "2.28.3"),
        open_files=(65536, 65536),
        num_cpus=64.0,
        num_cpus_ray=64.0,
        memory_bytes=256 * 10**9,
        memory_free_bytes=200 * 10**9,
        shm_bytes=120 * 10**9,
        cards=(Card("eth0", ("10.0.0.1",)), Card("docker0", ("172.17.0.1",), is_virtual=True)),
        places=(
            Place("run folder", "/data/run", free_bytes=10**12, total_bytes=10**13),
            Place("Ray's files", "/tmp", free_bytes=10**11, total_bytes=10**12),
            Place("home", "~", free_bytes=10**11, total_bytes=10**12),
        ),
        servers=(Server(URL, health={"status": "ready", "corpus": CORPUS}, host_addresses=("10.0.0.7",)),),
        num_gpus=0,
    )
    return replace(healthy, **changes)


def facts_with(settings: dict[str, Any] | None = None, here: Machine | None = None, **facts: Any) -> Facts:
    """A healthy run's facts, with these changes."""
    model = Model("actor_rollout_ref.model.path", str(BASE_MODEL), "folder", 10**6, 4, 32768)
    given = {"models": (model,), "run": run_with(settings)} | facts
    return Facts(here=here or machine_with(), **given)


def found(facts: Facts, *only: str) -> list[Finding]:
    return diagnose(facts, only=only)


def in_child(look: Callable[[], Any], *, namespaces: int = 0) -> Any:
    """What `look` gives (JSON values) in a process of its own, in new namespaces (CLONE_NEW*); raises what it
    raised there. Mounts made in CLONE_NEWNS are gone with the process.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            if namespaces:
                _enter(namespaces)
            answer = {"value": look()}
        except BaseException:  # told to the parent, whose test fails with it
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = json.loads(file.read() or '{"error": "the child died"}')
    os.waitpid(process, 0)
    assert "error" not in answer, answer["error"]
    return answer["value"]


def _enter(namespaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if namespaces & CLONE_NEWNS:
        sh("mount", "--make-rprivate", "/")
    if namespaces & CLONE_NEWNET:
        sh("ip", "link", "set", "lo", "up")


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def can_unshare() -> str | None:
    """Why namespaces can't be made here; None if they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "namespaces and mounts need Linux and root"
    try:
        in_child(lambda: None, namespaces=CLONE_NEWNS | CLONE_NEWNET)
    except AssertionError as error:
        return f"namespaces can't be made here: {str(error).splitlines()[-1]}"
    return None
