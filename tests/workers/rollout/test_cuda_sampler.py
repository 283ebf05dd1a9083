"""The sampler of captured steps draws what the CPU sampler draws, and never looks at a value on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from step_driver import sampling_rows
from torch.utils._python_dispatch import TorchDispatchMode

from verl.workers.rollout.native.cuda.sampler import DeviceRows, draw_on_device, row_arrays
from verl.workers.rollout.native.sampler import SamplingRows, draw, truncates, uniforms

VOCAB = 300
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")


class NoWaiting(TorchDispatchMode):
    """Fails on operations that would make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(waits in name for waits in _WAITS), f"{name} waits for the device"
        if "index" in name:
            indices = args[1] if isinstance(args[1], (list, tuple)) else ()
            assert not any(x is not None and x.dtype == torch.bool for x in indices), f"{name} by a mask"
        return func(*args, **(kwargs or {}))


def _on_device(rows: SamplingRows) -> DeviceRows:
    return DeviceRows(**{name: torch.from_numpy(array) for name, array in row_arrays(rows).items()})


def _draw_on_device(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    any_truncates = bool(truncates(rows, logits.shape[1]).any())
    on_device = _on_device(rows)
    with NoWaiting():
        return draw_on_device(logits.clone(), on_device, any_truncates)


def _mixed_rows(count: int, seed: int) -> SamplingRows:
    random = np.random.default_rng(seed)
    return SamplingRows(
        temperature=random.choice([0.0, 0.5, 1.0, 1.7], count),
        top_k=random.choice([0, 1, 5, VOCAB + 9], count),
        top_p=random.choice([1.0, 0.3, 0.9], count),
        min_p=random.choice([0.0, 0.0, 0.1], count),
        uniform=random.random(count),
    )


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_all_kinds_draw_the_tokens_and_log_probs_of_the_cpu_sampler(seed: int) -> None:
    logits = 2 * torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = _mixed_rows(200, seed)
    tokens, log_probs, model_log_probs = _draw_on_device(logits, rows)
    expected = draw(logits.clone(), rows)
    same = tokens == expected[0]
    assert same.float().mean() > 0.98  # rounding may move a draw across the border between two tokens
    for found, right in ((log_probs, expected[1]), (model_log_probs, expected[2])):
        assert torch.allclose(found[same], right[same].double(), atol=2e-5)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.0}, {"temperature": 0.7}])
def test_without_truncation_nothing_is_sorted_and_the_draws_are_the_same(values: dict[str, float]) -> None:
    logits = 2 * torch.randn(100, VOCAB, generator=torch.Generator().manual_seed(9))
    rows = sampling_rows(100, **values)
    tokens, log_probs, _ = _draw_on_device(logits, rows)
    expected = draw(logits.clone(), rows)
    assert (tokens == expected[0]).float().mean() > 0.98
    assert float(log_probs.mean()) == pytest.approx(float(expected[1].mean()), abs=0.05)


def test_samples_follow_the_truncated_distribution() -> None:
    count = 20000
    logits = 2 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64))
    rows = sampling_rows(count, uniform, temperature=0.8, top_k=40, top_p=0.95)
    tokens, log_probs, _ = _draw_on_device(logits.repeat(count, 1), rows)
    reported = torch.zeros(VOCAB, dtype=torch.float64)
    reported[tokens.long()] = log_probs.exp()
    counts = torch.bincount(tokens.long(), minlength=VOCAB)
    expected = reported * count
    assert float(reported.sum()) == pytest.approx(1.0, abs=0.01)
    cells = expected >= 5
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
