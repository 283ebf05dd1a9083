"""The compiled kernels against the same arithmetic in torch, at sizes that leave remainders everywhere."""

from __future__ import annotations

import hashlib
import inspect
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from verl.workers.rollout.native import cpu_kernel, cpu_sampler
from verl.workers.rollout.native.cpu_kernel import as_array, share_rows
from verl.workers.rollout.native.torch_model import masked_attention

DTYPES = [torch.float32, torch.bfloat16]
EPS = np.float32(1e-6)


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the rounding of the stored dtype."""
    rounding = 2**-7 if found.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(found.float(), expected.float(), rtol=rounding, atol=rounding)


def test_exp_is_exact_to_two_units_and_keeps_nan() -> None:
    x = np.concatenate([np.linspace(-86, 0, 20001), [-np.inf, np.nan]]).astype(np.float32)
    found = np.array([cpu_kernel.exp_nonpositive(value) for value in x])
    expected = np.exp(x[:-2].astype(np.float64))
    assert float(np.abs(found[:-2] / expected - 1).max()) < 2.5e-7
    assert found[-2] == 0.0
    assert np.isnan(found[-1])


def test_a_forked_process_has_threads_of_its_own() -> None:
    x = np.zeros((16, 4), dtype=np.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        share_rows(_fill, 16, x)
        child = multiprocessing.get_context("fork").Process(target=share_rows, args=(_fill, 16, x))
        child.start()
        child.join(20)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(threads)
        child.kill()


def _fill(first: int, last: int, x: np.ndarray) -> None:
    x[first:last] = 1.0


def test_the_samplers_file_changes_with_what_its_kernels_call() -> None:
    """numba compiles a kernel anew when its own file has changed, not when one has that it calls."""
    calls = (cpu_kernel.exp_nonpositive.py_func, cpu_kernel._load, cpu_kernel._compiled)
    text = "".join(inspect.getsource(function) for function in calls)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    assert digest == cpu_sampler.KERNEL_DIGEST, (
        f"write {digest} there, so that no machine goes on with old code"
    )


DRAW = """
import hashlib, numpy as np, torch
from verl.workers.rollout.native import cpu_sampler
from verl.workers.rollout.sampler import SamplingRows
logits = torch.randn(64, 4099, generator=torch.Generator().manual_seed(0))
none = np.zeros(64)
rows = SamplingRows(none + 1.1, none.astype(np.int64), none + 1, none, np.arange(64) / 64)
print(hashlib.sha256(b"".join(part.tobytes() for part in cpu_sampler.draw(logits, rows))).hexdigest())
"""


@pytest.mark.slow
def test_a_kernel_rounds_alike_where_it_was_compiled_and_where_it_is_loaded(tmp_path: Path) -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", DRAW],
            env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert list(tmp_path.rglob("*.nbc")) and said[0] == said[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 37])
def test_decode_attention_reads_the_blocks_of_each_sequence(dtype: torch.dtype, window: int | None) -> None:
    lengths = [1, 5, 131, 64, 500]
    block_size = 13
    heads = 6
    kv_heads = 2
    size = 20
    per_row = -(-max(lengths) // block_size)
    order = np.random.default_rng(0).permutation(per_row * len(lengths)).astype(np.int32)
    tables = order.reshape(len(lengths), per_row)
    keys, values = (_random(len(order) * block_size, kv_heads, size, dtype=dtype, seed=s) for s in (1, 2))
    qkv = _random(len(lengths), heads + 2 * kv_heads, size, dtype=dtype)
    out = torch.zeros(len(lengths), heads, size, dtype=dtype)
    share_rows(
        cpu_kernel.attend,
        len(lengths),
        as_array(qkv),
        heads,
        as_array(keys),
        as_array(values),
        tables,
        np.array(lengths),
        block_size,
        np.float32(0.3),
        window or cpu_kernel.NO_WINDOW,
        as_array(out),
    )
    for row, length in enumerate(lengths):
        where = np.arange(length)
        places = torch.from_numpy(
            tables[row][where // block_size].astype(np.int64) * block_size + where % block_size
        )
        expected = masked_attention(
            qkv[row, :heads][None, None],
            keys[places][None],
            values[places][None],
            torch.tensor([[length - 1]]),
            window,
            0.3,
        )
        _close(out[row], expected[0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_add_what_they_are_given_first(dtype: torch.dtype) -> None:
    x = _random(5, 37)
    delta = _random(5, 37, dtype=dtype, seed=1)
    weight = _random(37)
    other = _random(37, seed=2)
    expected_x = x + delta.float()
    normed = torch.zeros(5, 37, dtype=dtype)
    found_x = x.clone()
    arguments = found_x.numpy(), as_array(delta), weight.numpy(), EPS, as_array(normed)
    cpu_kernel.add_norm(0, 5, *arguments)
    _close(found_x, expected_x)
    _close(normed, F.rms_norm(expected_x, (37,), weight, float(EPS)))

    expected_x = x + F.rms_norm(delta.float(), (37,), other, float(EPS))
    found_x = x.clone()
    cpu_kernel.norm_add_norm(
        0, 5, found_x.numpy(), as_array(delta), other.numpy(), weight.numpy(), EPS, as_array(normed)
    )
    _close(found_x, expected_x)
    _close(normed, F.rms_norm(expected_x, (37,), weight, float(EPS)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_torchs(dtype: torch.dtype) -> None:
    gate_up = 4 * _random(3, 2 * 41, dtype=dtype)
    out = torch.zeros(3, 41, dtype=dtype)
    gates, ups = gate_up.float().chunk(2, -1)
    cpu_kernel.gate(0, 3, as_array(gate_up), cpu_kernel.SILU, as_array(out))
    _close(out, F.silu(gates) * ups)
    cpu_kernel.gate(0, 3, as_array(gate_up), cpu_kernel.GELU_TANH, as_array(out))
    _close(out, F.gelu(gates, approximate="tanh") * ups)


def test_bfloat16_is_rounded_to_nearest() -> None:
    x = _random(2, 502)
    stored = torch.zeros(2, 502, dtype=torch.bfloat16)
    ones = np.ones(502, dtype=np.float32)
    scale = np.float32(1) / np.sqrt((x.numpy() ** 2).mean(1, dtype=np.float64))
    cpu_kernel.norm(0, 2, x.numpy(), ones, np.float32(0), as_array(stored))
    exact = x.double() * torch.from_numpy(scale.astype(np.float64))[:, None]
    error = (stored.double() - exact).abs() / exact.abs()
    assert float(error.max()) <= 2**-8 * 1.001  # half a unit in the last place
