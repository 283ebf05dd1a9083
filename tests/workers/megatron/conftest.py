"""Tests that need megatron-core are skipped where it is not installed."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("megatron") is not None:  # importing it here would take seconds
        return
    for item in items:
        if item.get_closest_marker("megatron"):
            item.add_marker(pytest.mark.skip(reason="needs megatron-core"))
