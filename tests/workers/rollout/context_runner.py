"""A model for tests of the scheduler: its pool keeps tokens, and what it samples is a hash of all it reads.

Where a real model keeps keys and values this one keeps (token, position, weight version). The logits after a
token are a hash of the whole context, read through the block tables, so KV state that is stale, missing or
another session's changes them. Besides, whatever is read or written is checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.workers.rollout.native.cpu_sampler import draw
from verl.workers.rollout.native.step_batch import Sampled, StepBatch
from verl.workers.rollout.sampler import SamplingRows

VOCAB = 11
_FACTORS = np.random.default_rng(0).integers(0, 2**63, 4096, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_CHOICES = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def logits(hashes: np.ndarray, versions: np.ndarray) -> Tensor:
    """float32 [A, VOCAB] in -3..3. Args: uint64 [A] sums of `terms` over a context; int64 [A] versions."""
    x = hashes + versions.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
    x = x[:, None] * np.uint64(2) + _CHOICES
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(factor)
    return torch.from_numpy(((x >> np.uint64(40)).astype(np.float32) / (1 << 24) - 0.5) * 6)


def terms(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """uint64: what each token adds to the hash of its context (sums wrap around)."""
    return (tokens + 1).astype(np.uint64) * _FACTORS[positions]


class ContextRunner:
    """In the place of a `PagedRunner`, as described above. `load_weights` takes [("version", tensor)].

    If `fails` is set, the next step raises in its middle.
    """

    vocab_size = VOCAB
    bytes_per_block = 10
    device = torch.device("cpu")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.fails = False
        self._version: int | None = None
        self._pool: np.ndarray | None = None  # int64 [positions, 3]: token, position, version

    def allocate(self, num_blocks: int) -> None:
        assert self._pool is None, "allocated twice"
        self._pool = np.full((num_blocks * self.block_size, 3), -1)

    def release_cache(self) -> None:
        self._pool = None

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert self._pool is not None
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets)
        blocks = self._pool.reshape(-1, self.block_size, 3)
        blocks[list(targets)] = blocks[list(sources)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._version = int(dict(weights)["version"])

    def release_weights(self) -> int:
        freed = 0 if self._version is None else 1000
        self._version = None
        return freed

    def step(self, batch: StepBatch, rows: SamplingRows) -> Sampled:
        assert self._pool is not None and self._version is not None
        num_rows = len(batch.token_ids)
        num_decode = batch.num_decode
        assert num_rows and len(batch.positions) == len(batch.places) == num_rows
        assert batch.places.min() >= 0 and batch.places.max() < len(self._pool)
        self._pool[batch.places, 0] = batch.token_ids
        self._pool[batch.places, 1] = batch.positions
        self._pool[batch.places, 2] = self._version
        if self.fails:
            self.fails = False
            raise RuntimeError("as asked")
        writer = np.full(len(self._pool), -1)
        writer[batch.places] = np.arange(num_rows)
        assert np.array_equal(writer[batch.places], np.arange(num_rows)), "two rows write one place"

        lengths = np.array([*batch.decode_lengths, *(span.start + span.count for span in batch.spans)])
        last_rows = np.array([*range(num_decode), *(span.first + span.count - 1 for span in batch.spans)])
        self._check_rows(batch)
        hashes = self._read(batch, lengths, last_rows, writer)
        which = np.searchsorted(last_rows, batch.out_rows)
        assert np.array_equal(last_rows[which], batch.out_rows), "sampled from a row that ends no sequence"
        assert np.array_equal(which[:num_decode], np.arange(num_decode))
        assert len(rows.uniform) == len(which)
        if not len(which):
            return Sampled(np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0))
        return Sampled(*draw(logits(hashes[which], np.full(len(which), self._version)), rows))

    def _check_rows(self, batch: StepBatch) -> None:
        size = self.block_size
        num_decode = batch.num_decode
        blocks = -(-batch.decode_lengths // size)
        beyond = np.arange(batch.decode_tables.shape[1]) >= blocks[:, None]
        assert batch.decode_tables.dtype == np.int32 and not batch.decode_tables[beyond].any()
        assert np.array_equal(batch.positions[:num_decode] + 1, batch.decode_lengths)
        row = num_decode
        for span in batch.spans:
            assert span.first == row and span.count > 0 and span.table.dtype == np.int32
            where = np.arange(span.start, span.start + span.count)
            assert np.array_equal(batch.positions[row : row + span.count], where)
            places = span.table[where // size] * size + where % size
            assert np.array_equal(batch.places[row : row + span.count], places)
            row += span.count
        assert row == len(batch.token_ids)

    def _read(
        self, batch: StepBatch, lengths: np.ndarray, last_rows: np.ndarray, writer: np.ndarray
    ) -> np.ndarray:
        """The hash of each sequence's context, uint64 [D + spans]."""
        assert self._pool is not None
        size = self.block_size
        num_decode = batch.num_decode
        longest = int(lengths.max())
        tables = np.zeros((len(lengths), -(-longest // size)), dtype=np.int64)
        width = min(tables.shape[1], batch.decode_tables.shape[1])
        tables[:num_decode, :width] = batch.decode_tables[:, :width]
        for index, span in enumerate(batch.spans, num_decode):
            tables[index, : len(span.table)] = span.table
        positions = np.arange(longest)
        places = tables[:, positions // size] * size + positions % size
        read = positions < lengths[:, None]
        tokens, where, versions = np.moveaxis(self._pool[places], 2, 0)
        assert (versions[read] == self._version).all(), "read a place that this version never wrote"
        assert (where == positions)[read].all(), "read a place that holds another position"
        by = np.where(read, writer[places], -1)
        assert (by <= last_rows[:, None]).all(), "read a place that a later row fills"
        own = np.arange(num_decode)[:, None]
        assert ((by[:num_decode] == -1) | (by[:num_decode] == own)).all(), "a decode row reads a span's"
        return np.where(read, terms(tokens, np.broadcast_to(positions, tokens.shape)), np.uint64(0)).sum(1)
