"""What the scheduler asks the model for in one step, as plain arrays: all that passes between the two.

    Scheduler (sessions, blocks, budget) -- StepBatch, SamplingRows --> ModelRunner (weights, KV, sampling)
                                         <------- Sampled ------------

KV state lives in a pool of `num_blocks` blocks of `block_size` positions per layer. A sequence has a table
of blocks: its position p lies in block table[p // block_size] at offset p % block_size, which is the flat
place table[p // block_size] * block_size + p % block_size of the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from verl.workers.rollout.native.sampler import SamplingRows


@dataclass(frozen=True)
class PrefillSpan:
    """A run of new tokens of one sequence: rows `first` .. `first + count` of the packed batch.

    Attributes:
        start: positions of the sequence that are in the pool already.
        table: int32 [blocks], the sequence's blocks, enough for start + count positions.
    """

    first: int
    count: int
    start: int
    table: np.ndarray


@dataclass(frozen=True)
class StepBatch:
    """T new tokens, packed without padding: one per decoding sequence first, then the spans.

    Attributes:
        token_ids, positions: int64 [T].
        places: int64 [T], where in the pool each token's keys and values go (flat).
        num_decode: sequences that decode, D; rows 0 .. D - 1.
        decode_tables: int32 [D, M], their blocks; entries beyond a sequence's own are 0 and not read.
        decode_lengths: int64 [D], positions to attend to, the new token included.
        spans: the prefill rows, in order. A span may read blocks that earlier spans of the batch fill (a
            shared prefix); decode rows read no blocks that spans fill.
        out_rows: int64 [O], rows that a token is sampled from: 0 .. D - 1, then the last row of each span
            that completes what its sequence has (a chunk in the middle of a long prompt has none). A row may
            stand there more than once: several sequences with an equal prompt sample from one row.

    Example: two sequences decode at positions 5 and 40, one prompt of 3 tokens is new, block_size 32:
    token_ids [9, 4, 11, 12, 13], positions [5, 40, 0, 1, 2], places [5, 72, 96, 97, 98], num_decode 2,
    decode_tables [[0, 0], [1, 2]], decode_lengths [6, 41], spans [PrefillSpan(2, 3, 0, [3])],
    out_rows [0, 1, 4].
    """

    token_ids: np.ndarray
    positions: np.ndarray
    places: np.ndarray
    num_decode: int
    decode_tables: np.ndarray
    decode_lengths: np.ndarray
    spans: Sequence[PrefillSpan]
    out_rows: np.ndarray


@dataclass(frozen=True)
class Sampled:
    """One token per entry of `out_rows`: int64 [O], and its two float64 [O] log-probs (see `Completion`)."""

    token_ids: np.ndarray
    log_probs: np.ndarray
    model_log_probs: np.ndarray


class ModelRunner(Protocol):
    """Weights, KV pool and sampling on one device. Knows nothing of sessions."""

    vocab_size: int
    block_size: int
    bytes_per_block: int  # keys and values of all layers

    def allocate(self, num_blocks: int) -> None:
        """Make the pool (what was in it is gone)."""

    def release_cache(self) -> None:
        """Give the pool's memory back."""

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks within the pool, in all layers."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take a whole set of parameters. ValueError for unknown, missing or wrongly shaped ones."""

    def release_weights(self) -> int:
        """Drop every reference to weights; returns the bytes of those that were the runner's own."""

    def step(self, batch: StepBatch, rows: SamplingRows) -> Sampled:
        """Run the model, fill the pool, sample. RuntimeError for log-probs that are not finite.

        Args:
            rows: sampling choices of the O entries of `batch.out_rows`, in their order.
        """
