"""What a step costs the driver when the workers answer at once: see scripts/bench_controller.py."""

from __future__ import annotations

import pytest

from scripts.bench_controller import budget, measure

pytestmark = [pytest.mark.slow, pytest.mark.ray]


def test_the_drivers_cost_stays_within_its_allowance():
    backend = pytest.importorskip("verl.single_controller.ray")
    with backend.init_ray(num_cpus=2, log_to_driver=False):
        measure(64, "ppo", tokens=300)  # what is loaded once
        assert measure(512, "ppo", tokens=300)["total"] < budget(512, 1500)
