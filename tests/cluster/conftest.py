"""The SLURM cluster that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Start a real SLURM of three nodes, and end it after the tests."""
    reason = missing()
    if reason is not None:
        pytest.skip(f"no SLURM: {reason}")
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
