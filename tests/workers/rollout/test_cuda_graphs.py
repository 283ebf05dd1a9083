"""Decode steps as graphs: buckets, padding, packed copies, replays; a graph here calls its function again."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from step_driver import sampling_rows
from torch import Tensor

from verl.workers.rollout.native.cuda.graphs import Capture, DecodeGraphs, bucket_of
from verl.workers.rollout.native.cuda.staging import upload
from verl.workers.rollout.native.step_batch import PrefillSpan, StepBatch

SCRATCH = 999


def _batch(count: int, blocks: int = 2, seed: int = 0) -> StepBatch:
    random = np.random.default_rng(seed)
    return StepBatch(
        token_ids=random.integers(0, 50, count),
        positions=random.integers(0, 60, count),
        places=random.integers(0, 500, count),
        num_decode=count,
        decode_tables=random.integers(0, 20, (count, blocks)).astype(np.int32),
        decode_lengths=random.integers(1, 60, count),
        spans=(),
        out_rows=np.arange(count),
    )


class _Recorder:
    """A `Capture` whose graphs run their function again, and a `run` that keeps what it saw."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []
        self.captured: list[int] = []
        self.pools = 0

    def run(self, tensors: dict[str, Tensor], truncates: bool) -> Tensor:
        self.seen.append({name: tensor.clone() for name, tensor in tensors.items()})
        names = ("token_ids", "uniform", "lengths")
        return torch.stack([tensors[name].to(torch.float64) for name in names])

    def new_capture(self) -> Capture:
        self.pools += 1
        return self.capture

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run()
        self.captured.append(result.shape[1])

        def replay() -> None:
            result.copy_(run())

        return replay, result

    def graphs(self) -> DecodeGraphs:
        return DecodeGraphs(self.run, self.new_capture, torch.device("cpu"), 4, SCRATCH)


def test_a_bucket_holds_its_batch_and_wastes_little() -> None:
    sizes = [bucket_of(count) for count in range(1, 513)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert all(size - count < (8 if count <= 256 else 32) for count, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 50


def test_a_step_gives_what_its_function_gives_for_the_rows_of_the_batch() -> None:
    recorder = _Recorder()
    graphs = recorder.graphs()
    for seed, count in enumerate((5, 7, 8, 3, 6)):
        batch, rows = _batch(count, seed=seed), sampling_rows(count)
        assert graphs.covers(batch)
        result = graphs.step(batch, rows, truncates=False)
        assert result is not None
        expected = np.stack([batch.token_ids, rows.uniform, batch.decode_lengths])
        assert np.array_equal(result.numpy(), expected)
    assert recorder.captured == [8, 4] and recorder.pools == 1


def test_padding_reads_one_position_and_writes_to_the_scratch_block() -> None:
    recorder = _Recorder()
    graphs = recorder.graphs()
    graphs.step(_batch(8, blocks=4), sampling_rows(8, temperature=0.5, top_k=3), truncates=True)
    batch = _batch(5, blocks=2, seed=1)
    graphs.step(batch, sampling_rows(5), truncates=True)
    seen = recorder.seen[-1]
    assert seen["places"].tolist() == [*batch.places.tolist(), *[SCRATCH] * 3]
    assert seen["lengths"].tolist() == [*batch.decode_lengths.tolist(), 1, 1, 1]
    assert torch.equal(seen["last"], seen["lengths"] - 1)
    assert torch.equal(seen["tables"][:5, :2], torch.from_numpy(batch.decode_tables))
    assert seen["tables"][5:].eq(0).all()
    assert seen["out_rows"].tolist() == seen["rows"].tolist() == list(range(8))
    assert seen["temperature"].tolist() == [1.0] * 8 and seen["top_k"].tolist() == [0] * 8


def test_truncating_steps_have_graphs_of_their_own() -> None:
    recorder = _Recorder()
    graphs = recorder.graphs()
    for truncates in (False, True, False):
        graphs.step(_batch(2), sampling_rows(2), truncates)
    assert len(recorder.captured) == 2


def test_steps_with_prefill_are_not_covered() -> None:
    batch = _batch(2)
    span = PrefillSpan(2, 3, 0, np.zeros(1, dtype=np.int32))
    mixed = StepBatch(**{**vars(batch), "spans": (span,)})
    graphs = _Recorder().graphs()
    assert graphs.covers(batch) and not graphs.covers(mixed) and not graphs.covers(_batch(0))
    assert not graphs.covers(_batch(600))


def test_forgotten_graphs_are_captured_again() -> None:
    recorder = _Recorder()
    graphs = recorder.graphs()
    graphs.step(_batch(2), sampling_rows(2), False)
    graphs.forget()
    graphs.step(_batch(2), sampling_rows(2), False)
    assert len(recorder.captured) == 2 and recorder.pools == 2


def test_a_capture_that_fails_is_said_once_and_steps_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    def fails(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(_Recorder().run, lambda: fails, torch.device("cpu"), 4, SCRATCH)
    with caplog.at_level(logging.WARNING):
        assert graphs.step(_batch(2), sampling_rows(2), False) is None
    assert not graphs.covers(_batch(2))
    (record,) = caplog.records
    assert "eagerly" in record.getMessage() and "capturing" in record.getMessage()


def test_uploaded_arrays_are_what_they_were() -> None:
    random = np.random.default_rng(0)
    arrays = {
        "a": random.integers(0, 9, 3),
        "b": random.integers(0, 9, (5, 7)).astype(np.int32),
        "c": np.zeros((0, 4), dtype=np.int32),
        "d": random.random(5),
        "e": random.random(1).astype(np.float32),
    }
    uploaded = upload(arrays, torch.device("cpu"))
    assert uploaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(uploaded[name].numpy(), array) and uploaded[name].numpy().dtype == array.dtype
