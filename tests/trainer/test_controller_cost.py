"""What a step costs the driver when the workers answer at once: see scripts/bench_controller.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scripts.bench_controller import Phases, budget, build, make_config, measure

pytestmark = [pytest.mark.slow, pytest.mark.ray]

TOKENS = 300


@pytest.fixture(scope="module")
def ray_runs():
    backend = pytest.importorskip("verl.single_controller.ray")
    with backend.init_ray(num_cpus=2, log_to_driver=False):
        yield


@pytest.fixture
def trainer(ray_runs, tmp_path):
    trainer = build(make_config(64, TOKENS, "ppo", str(tmp_path)), "ray", 64, TOKENS, processes=2)
    try:
        trainer.init_workers()
        trainer.recorder.start(trainer.state, None)
        yield trainer
    finally:
        trainer.shutdown()


def test_no_column_over_tokens_reaches_the_driver_and_none_is_left_behind(trainer, monkeypatch):
    """Tensors come into a process by unpickling a batch, or by fetching stored columns."""
    from ray._private.worker import global_worker

    from verl import protocol
    from verl.utils.stored_columns import Column

    received: list[torch.Size] = []
    from_array = protocol.from_array

    def noting(array: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = from_array(array, dtype)
        received.append(tensor.shape)
        return tensor

    def refused(column: Column) -> torch.Tensor:
        raise AssertionError("the driver fetched a column over tokens")

    monkeypatch.setattr(protocol, "from_array", noting)
    monkeypatch.setattr(Column, "tensor", refused)
    held = []
    for _ in range(3):
        trainer.one_step(Phases())
        held.append(len(global_worker.core_worker.get_all_reference_counts()))
    assert received and all(len(shape) == 1 for shape in received)
    assert held[2] <= held[1], held


def test_the_drivers_cost_grows_no_faster_than_the_number_of_trajectories(ray_runs):
    few, many = (measure(rows, "grpo", tokens=TOKENS) for rows in (128, 512))
    assert many["total"] < budget(512, 1500)
    assert many["total"] <= 4 * few["total"] * 1.5
    assert many["bytes"]["tensors over tokens"] == 0
