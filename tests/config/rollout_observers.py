"""What rollouts in processes of their own do with a configuration; see `key_observers`."""

from __future__ import annotations

import random
import tempfile
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from played_rollouts import Played, Prompts

from search_r1.llm_agent.generation import build_agent
from verl.checkpoints.run_state import store_of
from verl.config import Config, replace_values
from verl.planning.passes import Passes
from verl.planning.placement import build_pools, roles_of
from verl.single_controller.base import ClassWithInitArgs
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.ppo.stream import RolloutStream, weight_folder
from verl.utils.weight_files import WeightReader, versions_in
from verl.workers.fsdp_workers import ActorRolloutRefWorker
from verl.workers.rollout_worker import RolloutWorker


def stream(config: Config) -> Any:
    """Which groups three steps train with rollouts ahead of which some never end, and in which pools."""
    pools = build_pools(config, roles_of(Passes(config))).resource_pool_spec
    played = Played(random.Random(0), 1, 0.1, 0.3)
    prompts = Prompts(1)
    config = replace_values(config, {"data.train_batch_size": 4})
    tools: Any = (config, prompts, played, 3, lambda line: None)
    ahead: Any = RolloutStream(*tools)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl.trainer.ppo.stream.time.monotonic", lambda: 1.0 + 100 * played.now)
        ahead.send_weights(0, None)
        trained = []
        for step in (1, 2, 3):
            ahead.take(4)
            trained.append([(group.number, group.attempt, group.version_first) for group in ahead.taken])
            ahead.send_weights(step, None)
    return pools, trained, round(played.now, 1)


def rollout_process(config: Config) -> Any:
    """How a process that samples takes new weights."""
    block = config.actor_rollout_ref
    worker = RolloutWorker(block, partial(build_agent, config), config.trainer.async_training, "cpu")
    worker.start_rollout(4, "float32")
    asked: Future[bool] = Future()
    worker.service.load_weights = lambda load, turns_end_first: asked.set_result(turns_end_first)  # type: ignore[method-assign]
    try:
        worker.load_weights([[]], 1)
        return worker.engine.keeps_kv, asked.result(30)
    finally:
        worker.close()


def weights_sent(config: Config) -> Any:
    """Where three versions of the weights go to for rollouts, and which of them are whole."""
    folder = weight_folder(config)
    block = config.actor_rollout_ref
    policy: Any = LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, block, "actor", device="cpu"))
    try:
        policy.init_model()
        for version in range(3):
            given = policy.export_weights(version, folder).get()[0]
        if folder is None:
            return len(given)
        WeightReader(folder, "rollout-0").read(2, 30)
        manifests = [(folder / str(version) / "manifest.json").read_text() for version in versions_in(folder)]
        return given, ["full" in manifest for manifest in manifests]
    finally:
        policy.shutdown()


def uploads(config: Config) -> Any:
    """What lies elsewhere after two checkpoints, or that the place is away."""
    with tempfile.TemporaryDirectory() as folder:
        values = {"trainer.default_local_dir": f"{folder}/run"}
        Path(folder, "far").mkdir()
        if config.trainer.remote_dir is not None:
            values["trainer.remote_dir"] = f"file://{folder}/far"
        config = replace_values(config, values)
        store = store_of(config.trainer)
        store.start_uploads(config.trainer.remote_keep, config.trainer.upload_deadline)
        for step in (1, 2):
            store.begin(step)
            store.commit(step)
        limit = None if store.uploads is None else store.uploads.deadline
        store.ended_well = True
        store.end_uploads()
        return limit, sorted(path.name for path in Path(folder, "far").rglob("*"))
