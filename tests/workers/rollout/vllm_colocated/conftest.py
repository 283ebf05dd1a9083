"""Everything here needs vLLM, and shares its engines: a start costs some seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="vLLM is not installed (scripts/test_vllm.sh installs it)")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(missing)


@pytest.fixture(scope="session")
def engine_for(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """engine_for(model name, **arguments) -> a VllmEngine, the same one for the same arguments."""
    from vllm_models import KV_BYTES, write_config

    from verl.workers.rollout.vllm.colocated_engine import VllmEngine

    engines: dict[Any, VllmEngine] = {}

    def get(name: str, **arguments: Any) -> VllmEngine:
        key = (name, *sorted(arguments.items()))
        if key not in engines:
            defaults = {"max_num_seqs": 64, "max_model_len": 128, "kv_cache_memory_bytes": KV_BYTES}
            folder = write_config(name, tmp_path_factory.mktemp(name))
            engines[key] = VllmEngine(folder, **{**defaults, **arguments})
        return engines[key]

    yield get
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test closes its sessions; then no request and no block may be left in an engine."""
    yield
    if "engine_for" not in request.fixturenames:
        return
    from vllm_models import engines_in_use

    for engine in engines_in_use(request.getfixturevalue("engine_for")):
        stats = engine.stats()
        assert (stats["running"], stats["queued"], stats["parked"], stats["kv_used_share"]) == (0, 0, 0, 0)
