"""Sampling: the right distribution, the right log-prob of it, and randomness that is a pure function."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from verl.workers.rollout import sampler
from verl.workers.rollout.native import cpu_sampler
from verl.workers.rollout.sampler import SamplingRows, inverse_cdf, truncate, uniforms

Draw = Callable[[torch.Tensor, SamplingRows], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def _compiled(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    before = logits.clone()
    tokens, *log_probs = (torch.from_numpy(x) for x in cpu_sampler.draw(logits, rows))
    assert torch.equal(logits.view(torch.int16), before.view(torch.int16)), (
        "the compiled sampler must leave the logits alone"
    )
    return tokens, *log_probs


@pytest.fixture(params=[sampler.draw, _compiled], ids=["torch", "compiled"])
def draw(request: pytest.FixtureRequest) -> Draw:
    return request.param


def sampling_rows(count: int, uniform: np.ndarray | None = None, **values: float) -> SamplingRows:
    """`count` equal rows; by default plain sampling at temperature 1 with seeds 0, 1, 2, ..."""

    def full(name: str, default: float, dtype: type = np.float64) -> np.ndarray:
        return np.full(count, values.get(name, default), dtype=dtype)

    if uniform is None:
        uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64))
    return SamplingRows(
        full("temperature", 1.0), full("top_k", 0, np.int64), full("top_p", 1.0), full("min_p", 0.0), uniform
    )


def _chi_square_is_plausible(counts: torch.Tensor, probs: torch.Tensor) -> bool:
    """Pearson's statistic within 5 standard deviations of its mean, over cells that expect at least 5."""
    total = counts.sum()
    expected = probs * total
    cells = expected >= 5
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    freedom = int(cells.sum()) - 1
    return abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5


def test_uniforms_are_uniform_and_a_pure_function_of_seed_and_counter() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 200)
    counters = np.tile(np.arange(200, dtype=np.uint64), 100)
    values = uniforms(seeds, counters)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = torch.from_numpy(np.bincount((values * 50).astype(int), minlength=50))
    assert _chi_square_is_plausible(counts.double(), torch.full((50,), 1 / 50, dtype=torch.float64))
    table = values.reshape(100, 200)
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03  # neighbouring seeds
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.03  # neighbouring counters
    shuffled = np.random.default_rng(0).permutation(len(seeds))
    assert (uniforms(seeds[shuffled], counters[shuffled]) == values[shuffled]).all()


@pytest.mark.parametrize("vocab", [5, 64, 97, 1000, 20000])
def test_inverse_cdf_is_where_the_running_sum_passes_u(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(50, vocab, generator=generator) * (torch.rand(50, vocab, generator=generator) < 0.5)
    probs[:, vocab // 2] += 0.01
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    running = probs.double().cumsum(-1)
    token = inverse_cdf(probs, uniform)[:, None]
    assert (probs.gather(1, token) > 0).all()
    target = uniform[:, None] * running[:, -1:]
    slack = 1e-6 * running[:, -1:]
    assert (running.gather(1, token) > target - slack).all()
    assert (running.gather(1, token) - probs.double().gather(1, token) <= target + slack).all()


@pytest.mark.parametrize(
    "values", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.7}, {"min_p": 0.05, "temperature": 1.5}]
)
def test_samples_follow_the_distribution_whose_log_prob_is_reported(
    draw: Draw, values: dict[str, float]
) -> None:
    count = 40000
    logits = 2 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    tokens, log_probs, model_log_probs = draw(logits.repeat(count, 1), sampling_rows(count, **values))
    torch.testing.assert_close(model_log_probs.float(), logits.log_softmax(-1)[tokens], atol=1e-5, rtol=0)
    reported = torch.zeros(200, dtype=torch.float64)
    reported[tokens] = log_probs.double().exp()
    counts = torch.bincount(tokens, minlength=200).double()
    assert float(reported.sum()) == pytest.approx(1.0, abs=0.01)
    assert _chi_square_is_plausible(counts, reported)


def _reference(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Kept tokens by the definition, one row, in Python."""
    order = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    kept = order[:top_k] if top_k > 0 else order
    probs = dict(zip(kept, logits[kept].double().softmax(-1).tolist(), strict=True))
    nucleus = []
    mass = 0.0
    for token in kept:
        if mass < top_p:
            nucleus.append(token)
        mass += probs[token]
    best = max(probs.values())
    result = torch.zeros(len(logits), dtype=torch.bool)
    result[[token for token in nucleus if probs[token] >= min_p * best]] = True
    return result


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (1, 1.0, 0.0),
        (9, 1.0, 0.0),
        (0, 0.01, 0.0),
        (0, 0.6, 0.0),
        (12, 0.6, 0.0),
        (0, 1.0, 0.2),
        (12, 0.9, 0.1),
    ],
)
def test_truncation_keeps_what_the_definition_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = 2 * torch.randn(20, 60, generator=torch.Generator().manual_seed(2))
    cut = truncate(
        logits,
        torch.full((20,), top_k),
        torch.full((20,), top_p, dtype=torch.float64),
        torch.full((20,), min_p, dtype=torch.float64),
    )
    for row in range(20):
        kept = _reference(logits[row], top_k, top_p, min_p)
        assert torch.equal(torch.isfinite(cut[row]), kept)
        assert torch.equal(cut[row][kept], logits[row][kept])


def test_greedy_rows_take_the_largest_logit_and_report_the_plain_softmax(draw: Draw) -> None:
    logits = torch.randn(6, 60, generator=torch.Generator().manual_seed(5))
    rows = sampling_rows(6)
    rows.temperature[:] = [0.0, 1.0, 0.0, 0.5, 0.0, 1.0]
    rows.top_k[0] = 2
    tokens, log_probs, _ = draw(logits.clone(), rows)
    expected = logits.log_softmax(-1)
    for row in (0, 2, 4):
        assert tokens[row] == logits[row].argmax()
        assert float(log_probs[row]) == pytest.approx(float(expected[row].max()), abs=1e-5)


@pytest.mark.parametrize("vocab", [3, 64, 97, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_samplers_draw_the_same_tokens(vocab: int, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(500, vocab, generator=torch.Generator().manual_seed(6))).to(dtype)
    rows = sampling_rows(500)
    rows.temperature[::3] = 0.6
    rows.temperature[1::7] = 0.0
    rows.top_k[::4] = 5
    rows.top_p[::5] = 0.8
    rows.min_p[::6] = 0.1
    expected = sampler.draw(logits.float().clone(), rows)
    drawn = _compiled(logits, rows)
    same = drawn[0] == expected[0]
    assert same.float().mean() > 0.99  # a draw on the border of two tokens may fall to either
    for ours, theirs in zip(drawn[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours[same].float(), theirs[same].float(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_broken_logits_show_in_the_log_probs(draw: Draw, bad: float, temperature: float) -> None:
    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(7))
    logits[1, 70] = logits[2, 129] = bad
    logits[3] = bad
    _, log_probs, model_log_probs = draw(logits, sampling_rows(4, temperature=temperature))
    assert torch.isfinite(log_probs).tolist() == [True, False, False, False]
    assert torch.isfinite(model_log_probs).tolist() == [True, False, False, False]


def test_rows_are_the_same_when_threads_share_them() -> None:
    logits = torch.randn(100, 300, generator=torch.Generator().manual_seed(8))
    rows = sampling_rows(100, temperature=0.9)
    alone = _compiled(logits, rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = _compiled(logits, rows)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_nothing_is_read_back_from_the_device() -> None:
    """The host can go on while a GPU samples: tensors of the device `meta` have no values to read."""
    rows = SamplingRows(
        temperature=np.array([1.0, 0.0, 0.7, 1.3]),
        top_k=np.array([0, 0, 5, 0]),
        top_p=np.array([1.0, 1.0, 0.9, 1.0]),
        min_p=np.array([0.0, 0.0, 0.0, 0.1]),
        uniform=np.array([0.1, 0.2, 0.3, 0.4]),
    )
    for drawn in sampler.draw_in_pieces(torch.empty(4, 97, device="meta"), rows):
        assert drawn.shape == (4,) and drawn.is_meta
