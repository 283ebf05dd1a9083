"""A hand-made scheduler for tests of a `ModelRunner`: no queue, no budget, scattered blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl.workers.rollout.native.sampler import SamplingRows, uniforms
from verl.workers.rollout.native.step_batch import ModelRunner, PrefillSpan, Sampled, StepBatch


def sampling_rows(count: int, uniform: np.ndarray | None = None, **values: float) -> SamplingRows:
    """`count` equal rows; by default plain sampling at temperature 1 with seeds 0, 1, 2, ..."""

    def full(name: str, default: float, dtype: type = np.float64) -> np.ndarray:
        return np.full(count, values.get(name, default), dtype=dtype)

    if uniform is None:
        uniform = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64))
    return SamplingRows(
        full("temperature", 1.0), full("top_k", 0, np.int64), full("top_p", 1.0), full("min_p", 0.0), uniform
    )


class StepDriver:
    """Runs sequences side by side on a runner; `tokens[i]` is all that sequence i has so far."""

    def __init__(self, runner: ModelRunner, max_model_len: int, num_sequences: int, seed: int = 0) -> None:
        self.runner = runner
        blocks_each = -(-max_model_len // runner.block_size)
        order = np.random.default_rng(seed).permutation(blocks_each * num_sequences).astype(np.int32)
        self.tables = order.reshape(num_sequences, blocks_each)
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.stored = [0] * num_sequences
        self.steps = 0
        runner.allocate(len(order))

    def append(self, sequence: int, token_ids: Sequence[int]) -> None:
        self.tokens[sequence] += token_ids

    def step(self, sequences: Sequence[int], most: int = 10**9, **values: float) -> tuple[list[int], Sampled]:
        """One step of these sequences; at most `most` new tokens of each. Which of them sampled, and what."""
        new = {i: min(most, len(self.tokens[i]) - self.stored[i]) for i in sequences}
        decode = [i for i in sequences if new[i] == 1 and self.stored[i] > 0]
        ordered = decode + [i for i in sequences if i not in decode]
        spans, positions, rows, places, ready, out_rows = [], [], [], [], [], []
        num_rows = 0
        for i in ordered:
            where = np.arange(self.stored[i], self.stored[i] + new[i])
            positions.append(where)
            rows.append(np.array(self.tokens[i], dtype=np.int64)[where])
            size = self.runner.block_size
            places.append(self.tables[i][where // size].astype(np.int64) * size + where % size)
            if i not in decode:
                spans.append(PrefillSpan(num_rows, new[i], self.stored[i], self.tables[i]))
            num_rows += new[i]
            self.stored[i] += new[i]
            if self.stored[i] == len(self.tokens[i]):
                ready.append(i)
                out_rows.append(num_rows - 1)
        batch = StepBatch(
            token_ids=np.concatenate(rows),
            positions=np.concatenate(positions),
            places=np.concatenate(places),
            num_decode=len(decode),
            decode_tables=self.tables[decode],
            decode_lengths=np.array([self.stored[i] for i in decode], dtype=np.int64),
            spans=spans,
            out_rows=np.array(out_rows, dtype=np.int64),
        )
        uniform = uniforms(np.array(ready, dtype=np.uint64), np.full(len(ready), self.steps, dtype=np.uint64))
        self.steps += 1
        sampled = self.runner.step(batch, sampling_rows(len(ready), uniform, **values))
        for i, token in zip(ready, sampled.token_ids.tolist(), strict=True):
            self.tokens[i].append(token)
        return ready, sampled

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, most: int = 10**9, **values: float
    ) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
        """Sample `num_tokens` for each prompt: token ids, log-probs, log-probs of the plain model."""
        results: tuple[list, list, list] = tuple([[] for _ in prompts] for _ in range(3))  # type: ignore[assignment]
        for i, prompt in enumerate(prompts):
            self.append(i, prompt)
        while running := [i for i in range(len(prompts)) if len(results[0][i]) < num_tokens]:
            ready, sampled = self.step(running, most, **values)
            for row, i in enumerate(ready):
                results[0][i].append(int(sampled.token_ids[row]))
                results[1][i].append(float(sampled.log_probs[row]))
                results[2][i].append(float(sampled.model_log_probs[row]))
        return results
