"""Random ragged multi-turn batches for the tests of advantages and losses: one hypothesis strategy.

    @given(ragged_batches())
    def test_...(batch):
        advantages = batch.randn("advantages")          # [N, R] float32, reproducible by name
        dirty = batch.with_garbage(advantages)          # the same with NaN wherever nothing was sampled

hypothesis draws the shape (rows, turns, lengths, groups); numbers come from a generator seeded by the drawn
seed and a name, so that examples shrink fast.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

EMPTY = "empty"
ONE_TOKEN = "one token"
ONE_TURN = "one turn"
MULTI_TURN = "multi-turn"
EQUAL = "equal"
BINARY = "binary"
GRADED = "graded"
DENSE = "dense"


@dataclass(frozen=True)
class RaggedBatch:
    """N trajectories of at most R response tokens.

    Attributes:
        response_mask: [N, R] int64; rows are runs of sampled tokens with observations between them. Some are
            empty or masked entirely, some hold one token.
        turn_ids: [N, R] int64, the turn of each sampled token, from 0; -1 elsewhere.
        uids: the group of each row; groups stand in random order, some are of one row.
        scores: [N] float32 outcome rewards; often equal within a group.
        rewards: [N, R] float32; the score on the last sampled token, or (dense) a reward on each.
        seed: of the numbers.
    """

    response_mask: Tensor
    turn_ids: Tensor
    uids: list[str]
    scores: Tensor
    rewards: Tensor
    seed: int

    @property
    def num_rows(self) -> int:
        return self.response_mask.shape[0]

    @property
    def width(self) -> int:
        return self.response_mask.shape[1]

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + zlib.crc32(name.encode()))

    def randn(self, name: str, *shape: int) -> Tensor:
        """Normal numbers, [N, R] unless a shape is given; the same name gives the same numbers."""
        return torch.randn(*(shape or self.response_mask.shape), generator=self.generator(name))

    def rand(self, name: str, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), as `randn`."""
        return torch.rand(*(shape or self.response_mask.shape), generator=self.generator(name))

    def log_probs(self, name: str) -> Tensor:
        """[N, R] log-probabilities between -4 and 0."""
        return -4.0 * self.rand(name) ** 2

    def with_garbage(self, x: Tensor, value: float = float("nan")) -> Tensor:
        """x [N, R] with `value` wherever no token was sampled."""
        return x.masked_fill(self.response_mask == 0, value)

    def rows(self, order: list[int]) -> RaggedBatch:
        """The same rows in another order, or some of them (numbers drawn by name do not move along)."""
        return replace(
            self,
            response_mask=self.response_mask[order],
            turn_ids=self.turn_ids[order],
            uids=[self.uids[i] for i in order],
            scores=self.scores[order],
            rewards=self.rewards[order],
        )


@st.composite
def _row_turns(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(sampled tokens, observation tokens after them) of each turn of one row."""
    kind = draw(st.sampled_from([MULTI_TURN, MULTI_TURN, MULTI_TURN, ONE_TURN, ONE_TOKEN, EMPTY]))
    if kind == EMPTY:  # nothing at all, or observations and rejected tokens only
        return [(0, draw(st.integers(0, 3)))]
    if kind == ONE_TOKEN:
        return [(1, 0)]
    if kind == ONE_TURN:
        return [(draw(st.integers(2, 6)), 0)]
    sampled = st.integers(1, 4)
    observed = st.integers(1, 3)
    turns = [(draw(sampled), draw(observed)) for _ in range(draw(st.integers(1, 3)))]
    ends_with_observation = draw(st.booleans())
    return turns if ends_with_observation else [*turns, (draw(sampled), 0)]


@st.composite
def ragged_batches(draw: st.DrawFn, max_rows: int = 8, max_groups: int = 3) -> RaggedBatch:
    """Draws a `RaggedBatch` of 1 to `max_rows` rows in at most `max_groups` groups."""
    num_rows = draw(st.sampled_from([n for n in (1, 2, 3, 5, 6, 7, 8) if n <= max_rows]))
    turns = [draw(_row_turns()) for _ in range(num_rows)]
    width = max(1, max(sum(map(sum, row)) for row in turns) + draw(st.integers(0, 2)))
    response_mask = torch.zeros(num_rows, width, dtype=torch.int64)
    turn_ids = torch.full((num_rows, width), -1)
    for i, row in enumerate(turns):
        start = 0
        for turn, (sampled, observed) in enumerate(row):
            response_mask[i, start : start + sampled] = 1
            turn_ids[i, start : start + sampled] = turn
            start += sampled + observed
    # two datasets may hold the same row number: groups must not mix
    names = [f"step1/{('nq', 'hotpotqa')[g % 2]}/{g // 2}" for g in range(max_groups)]
    uids = [names[draw(st.integers(0, max_groups - 1))] for _ in range(num_rows)]
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    kind = draw(st.sampled_from([BINARY, BINARY, GRADED, EQUAL, DENSE]))
    if kind == BINARY:
        scores = torch.randint(0, 2, (num_rows,), generator=generator).float()
    elif kind == EQUAL:
        scores = torch.full((num_rows,), 0.7)
    else:
        scores = torch.randn(num_rows, generator=generator)
    if kind == DENSE:
        rewards = torch.randn(num_rows, width, generator=generator)
        rewards = rewards.masked_fill(response_mask == 0, 0.0)
        scores = rewards.sum(dim=-1)
    else:
        rewards = torch.zeros(num_rows, width)
        for i in range(num_rows):
            sampled = response_mask[i].nonzero().flatten().tolist()
            if sampled:
                rewards[i, sampled[-1]] = scores[i]
    return RaggedBatch(response_mask, turn_ids, uids, scores, rewards, seed)
