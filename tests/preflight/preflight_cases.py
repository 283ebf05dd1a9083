"""For tests of the preflight: targets, one check at a time, and real troubles in a child process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import search_r1.llm_agent  # noqa: F401  (registers its environment)
from search_r1.search.probe import RetrievalProbe, ServerState
from verl.preflight.preflight import CHECKS
from verl.preflight.target import Finding, Target
from verl.trainer.config import load_config

ROOT = Path(__file__).resolve().parents[2]
BASE_MODEL = ROOT / "data_prep" / "base_model"
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
TWO_ON_RAY = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")
TWO_NODES = ("trainer.nnodes=2", "trainer.device=cpu")


def target_of(*overrides: str, **changes: Any) -> Target:
    """A run of the shipped model with these overrides."""
    model = [f"{block}.model.path={BASE_MODEL}" for block in ("actor_rollout_ref", "critic")]
    lengths = ["data.max_start_length=128", "data.max_prompt_length=1536", "algorithm.adv_estimator=grpo"]
    one_update = ["data.train_batch_size=256"]
    return Target(load_config([*model, *lengths, *one_update, *overrides]), **changes)


def find(name: str, target: Target) -> list[Finding]:
    """What one check finds."""
    return [replace(finding, check=name) for finding in CHECKS[name](target)]


class ScriptedProbe(RetrievalProbe):
    """Servers that answer as they are told to."""

    def __init__(self, *states: ServerState) -> None:
        self.states = states

    def servers(self, *_: Any) -> list[ServerState]:
        return list(self.states)


def in_child(look: Callable[[], list[Finding]], before: Callable[[], None], namespaces: int = 0) -> list[str]:
    """Lines of what `look` finds after `before`, in a process of its own and in new namespaces (CLONE_NEW*).

    Mounts made in CLONE_NEWNS are gone with the process.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        try:
            if namespaces:
                _enter(namespaces)
            before()
            answer: dict[str, Any] = {"lines": [finding.line for finding in look()]}
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
    return answer["lines"]


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
        in_child(list, lambda: None, namespaces=CLONE_NEWNS | CLONE_NEWNET)
    except AssertionError as error:
        return f"namespaces can't be made here: {str(error).splitlines()[-1]}"
    return None
