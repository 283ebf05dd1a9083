"""The benchmark of rollout engines: its workload, and its table."""

from __future__ import annotations

from scripts.bench_rollout import table, workload


def test_the_workload_is_uneven_and_its_seed_decides_it() -> None:
    prompts, lengths = workload(100, 64, 96, seed=3)
    assert (prompts, lengths) == workload(100, 64, 96, seed=3)
    assert prompts != workload(100, 64, 96, seed=4)[0]
    assert (min(lengths), max(lengths)) == (32, 160)
    assert abs(sum(lengths) / 64 - 96) < 1
    assert all(0 <= token < 100 for prompt in prompts for token in prompt)


def test_the_table_has_medians_and_ratios_of_medians() -> None:
    def runs(*seconds: float) -> list[dict[str, float]]:
        return [{"tokens": 100, "cpu_seconds": s} for s in seconds]

    cell = {"native": runs(0.1, 0.2, 0.5), "vllm": runs(0.5, 1.0, 2.0), "ceiling": runs(0.05)}
    text = table([{"model": "tiny", "dtype": "float32", "cells": {"8": cell}}])
    assert text.splitlines()[-1] == "| tiny | float32 | 8 | 500 | 100 | - | 5.00 | - | 0.25 |"
