"""Checks of what the native engine does on CUDA; each is a function of no arguments.

    TRITON_INTERPRET=1 python cuda_checks.py kernel_matches_reference      # on a CPU, in Triton's interpreter
    python cuda_checks.py kernel_matches_reference                         # on a GPU

`test_cuda_model.py` runs them, in processes of their own: the interpreter is chosen at Triton's import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rollout_models import make_model, random_prompts
from step_driver import StepDriver, sampling_rows
from test_cuda_sampler import NoWaiting
from torch import Tensor

from verl.workers.rollout.native.architecture import rotary_tables
from verl.workers.rollout.native.cuda import attention as cuda_attention
from verl.workers.rollout.native.cuda.model import CudaModel
from verl.workers.rollout.native.cuda.sampler import DeviceRows, row_arrays
from verl.workers.rollout.native.cuda.triton_attention import Tiles, paged_attention
from verl.workers.rollout.native.cuda.triton_sampler import draw_whole
from verl.workers.rollout.native.runner import PagedRunner
from verl.workers.rollout.native.sampler import SamplingRows, draw

LONGEST = 64
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")


def reference(query: Tensor, key: Tensor, value: Tensor, start: int, **options: Any) -> Tensor:
    """float64, position by position: query [Q, H, D] from position `start`, key and value [L, KV, D]."""
    rows = []
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    for position, row in enumerate(query.double(), start):
        first = 0 if options["window"] is None else max(0, position + 1 - options["window"])
        scores = torch.einsum("hd,lhd->hl", row, key[first : position + 1]) * options["scale"]
        if options["softcap"] is not None:
            scores = options["softcap"] * torch.tanh(scores / options["softcap"])
        rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), value[first : position + 1]))
    return torch.stack(rows)


def kernel_matches_reference() -> None:
    """Random ragged tables: decode with and without splits, prefill tiles, groups, windows, softcaps."""
    kinds = [  # heads, KV heads, head size, block size, window, softcap, splits, most query tokens
        (4, 2, 32, 16, None, None, 1, 1),
        (14, 2, 64, 32, None, None, 4, 1),
        (4, 4, 80, 32, 20, None, 3, 1),
        (8, 1, 32, 16, None, 5.0, 2, 1),
        (4, 2, 32, 16, None, None, 1, 16),
        (4, 2, 16, 16, 10, 5.0, 1, 8),
    ]
    dtypes = [(torch.float32, 1e-5), (torch.float16, 4e-3)]
    if DEVICE.type == "cuda":  # the interpreter does not multiply bfloat16
        dtypes.append((torch.bfloat16, 4e-2))
    for dtype, tolerance in dtypes:
        for seed, kind in enumerate(kinds):
            _check_kernel(dtype, tolerance, seed, *kind)


def _check_kernel(
    dtype: torch.dtype,
    tolerance: float,
    seed: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    num_splits: int,
    max_count: int,
) -> None:
    random = np.random.default_rng(seed)
    num_tiles, longest = 4, 150
    blocks_each = -(-longest // block_size)
    tables = random.permutation(num_tiles * blocks_each + 3)[: num_tiles * blocks_each]
    tables = torch.from_numpy(tables.reshape(num_tiles, -1).astype(np.int32)).to(DEVICE)
    lengths = random.integers(1, longest + 1, num_tiles)
    counts = np.minimum(lengths, random.integers(1, max_count + 1, num_tiles))
    firsts = np.concatenate(([0], counts.cumsum()[:-1]))
    generator = torch.Generator().manual_seed(seed)
    pools = torch.randn(
        2, num_tiles * blocks_each + 3, block_size, num_kv_heads, head_dim, generator=generator
    )
    keys, values = pools.to(DEVICE, dtype)
    query = 3 * torch.randn(int(counts.sum()), num_heads, head_dim, generator=generator)
    query = query.to(DEVICE, dtype)
    first, count, position = (
        torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (firsts, counts, lengths - counts)
    )
    tiles = Tiles(
        first, count, position, torch.arange(num_tiles, dtype=torch.int32, device=DEVICE), tables, max_count
    )
    out = torch.full_like(query, float("nan"))
    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": head_dim**-0.5}
    paged_attention(query, keys, values, tiles, out, num_splits=num_splits, **options)
    for i in range(num_tiles):
        positions = torch.arange(lengths[i], device=DEVICE)
        places = tables[i].long()[positions // block_size] * block_size + positions % block_size
        rows = slice(firsts[i], firsts[i] + counts[i])
        own = (pool.flatten(0, 1)[places] for pool in (keys, values))
        expected = reference(query[rows], *own, start=lengths[i] - counts[i], **options)
        torch.testing.assert_close(out[rows].double(), expected, atol=tolerance, rtol=tolerance)


def _on_device(rows: SamplingRows) -> DeviceRows:
    return DeviceRows(**{name: torch.from_numpy(x).to(DEVICE) for name, x in row_arrays(rows).items()})


def sampler_draws_what_the_cpu_draws() -> None:
    """Greedy, tempered and plain rows; vocabularies of less than a chunk, of whole chunks, and more."""
    for vocab, softcap in ((300, None), (8192, None), (9000, None), (5000, 3.0)):
        random = np.random.default_rng(vocab)
        logits = 2 * torch.randn(60, vocab, generator=torch.Generator().manual_seed(vocab))
        logits[:, 4096:4200] = float("-inf") if softcap is None else 0.0
        rows = sampling_rows(60, random.random(60))
        rows.temperature[:] = random.choice([0.0, 0.6, 1.0], 60)
        rows.uniform[:2] = 0.0, 1.0 - 2.0**-53
        on_device = _on_device(rows)
        tokens, log_probs, model_log_probs = draw_whole(logits.to(DEVICE), on_device, softcap).cpu()
        expected = draw(logits.clone() if softcap is None else softcap * torch.tanh(logits / softcap), rows)
        same = tokens == expected[0]
        assert same.float().mean() > 0.95 and same[torch.from_numpy(rows.temperature == 0.0)].all()
        for found, right in ((log_probs, expected[1]), (model_log_probs, expected[2])):
            torch.testing.assert_close(found[same], right[same].double(), atol=2e-5, rtol=0)
        plain = torch.from_numpy(rows.temperature != 0.6)
        assert torch.equal(log_probs[plain], model_log_probs[plain])


def sampler_follows_the_distribution() -> None:
    """Pearson's chi-square within 5 standard deviations, over tokens that are expected at least 5 times."""
    count, vocab = 600, 60
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    rows = sampling_rows(count, temperature=0.8)
    on_device = _on_device(rows)
    tokens = draw_whole(logits.repeat(count, 1).to(DEVICE), on_device, None)[0].long().cpu()
    expected = count * (logits / 0.8).double().softmax(-1)
    cells = expected >= 5
    counts = torch.bincount(tokens, minlength=vocab)
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def nan_shows_in_the_log_probs() -> None:
    logits = torch.randn(3, 5000)
    logits[1, 4500] = float("nan")
    rows = sampling_rows(3)
    on_device = _on_device(rows)
    tokens, log_probs, model_log_probs = draw_whole(logits.to(DEVICE), on_device, None).cpu()
    assert (
        torch.isfinite(log_probs).tolist() == torch.isfinite(model_log_probs).tolist() == [True, False, True]
    )
    assert ((tokens >= 0) & (tokens < 5000)).all()


def _fake_capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A graph that runs its function again, which must not wait for the device."""
    with NoWaiting():
        result = run().clone()

    def replay() -> None:
        result.copy_(run())

    return replay, result


def _runner(config: Any, graphs: bool) -> PagedRunner:
    """A runner that takes the CUDA way, also on CPU."""
    if DEVICE.type == "cuda":
        return PagedRunner(config, torch.float32, DEVICE, 16, LONGEST, enforce_eager=not graphs)
    runner = PagedRunner(config, torch.float32, "cpu", 16, LONGEST)
    tables = rotary_tables(config, runner.spec, LONGEST)
    model = CudaModel(
        runner.spec,
        tables,
        torch.float32,
        runner.device,
        16,
        LONGEST,
        graphs,
        new_capture=lambda: _fake_capture,
    )
    runner._model = runner._cuda = model
    return runner


def cuda_model_gives_what_the_cpu_gives() -> None:
    """Chunked prefill mixed with decode, eager and by graphs, new weights, for three architectures."""
    for name in ("qwen3", "gemma2", "mistral-sliding"):
        model, other = make_model(name), make_model(name, seed=1)
        results = []
        for runner in (
            PagedRunner(model.config, torch.float32, "cpu", 16, LONGEST),
            _runner(model.config, graphs=False),
            _runner(model.config, graphs=True),
        ):
            found = []
            for weights in (model, other):
                runner.update_weights(weights.named_parameters())
                driver = StepDriver(runner, LONGEST, 3)
                found.append(driver.generate(random_prompts(3, 12), 3, most=7))
            results.append(found)
        for version in range(2):
            tokens, log_probs, model_log_probs = results[0][version]
            for found in (results[1][version], results[2][version]):
                assert found[0] == tokens, name
                np.testing.assert_allclose(found[1], log_probs, atol=1e-4)
                np.testing.assert_allclose(found[2], model_log_probs, atol=1e-4)


def prefill_by_packed_keys_is_prefill_by_pages() -> None:
    """The arrays for a varlen kernel (gathered keys, ends) give what our own kernel gives."""
    real = cuda_attention.find_prefill

    def packed(query: Tensor, key: Tensor, value: Tensor, ends: Any, longest: Any, **options: Any) -> Tensor:
        assert longest == tuple(int(end.diff().max()) for end in ends)
        parts = []
        for i in range(len(ends[0]) - 1):
            q, k = (slice(int(end[i]), int(end[i + 1])) for end in ends)
            start = (k.stop - k.start) - (q.stop - q.start)
            parts.append(reference(query[q], key[k], value[k], start, **options))
        return torch.cat(parts).to(query.dtype)

    model = make_model("mistral-sliding")
    prompts = random_prompts(4, 20)
    results = []
    for find in (real, lambda geometry, softcap: ("reference", packed)):
        cuda_attention.find_prefill = find  # type: ignore[assignment]
        runner = _runner(model.config, graphs=False)
        runner.update_weights(model.named_parameters())
        results.append(StepDriver(runner, LONGEST, 4).generate(prompts, 4, most=7))
    assert results[0][0] == results[1][0]


if __name__ == "__main__":
    globals()[sys.argv[1]]()
