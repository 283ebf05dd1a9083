"""The selection of prompts in a run: which are asked next, and which groups of answers teach something.

    take -> (the collector has the prompts answered and scored) -> record, teaching_rows
      ^                                                                |
      +---- num_missing: how many groups are lacking, if some teach ---+
            nothing (filter_groups)

    record: prompts that are solved are not asked again (retire_solved); the others become easy, normal or
        hard ones (difficulty_pools)

The keys are those of `prompt_selection` (verl/config/prompt_selection.py); docs/prompts.md explains them. The
order of the prompts is that of a `PromptSampler` (verl/data/rl_dataset.py) or of `DifficultyPools`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verl.config import Config
from verl.config.prompt_selection import FILTER
from verl.data.rl_dataset import PromptSampler
from verl.planning.passes import Passes
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import can_save_searches, scores_by, values_named


class GroupCounts(NamedTuple):
    """The numbers of a step's groups so far.

    Attributes:
        num_groups: groups that were asked.
        num_teaching: those of them that teach something.
        num_rounds: rounds of generation in which they were asked.
    """

    num_groups: int
    num_teaching: int
    num_rounds: int


class PromptSelector:
    """The prompts of a run's steps.

    Args:
        config: the whole configuration.
        passes: what the run computes.
        sampler: says which prompts come next; it is told how often each was solved.
    """

    def __init__(self, config: Config, passes: Passes, sampler: PromptSampler) -> None:
        self.filters = config.prompt_selection.filter_groups
        self.has_thrift = config.algorithm.thrift > 0
        self.num_wanted = config.data.train_batch_size
        self.reward_keys = passes.reward_keys
        self.sampler = sampler

    def take(self, count: int, asked: Sequence[int]) -> list[int]:
        """Return the next `count` rows of the dataset, none of `asked` as long as there are others.

        Raises DataFailed if the training data can't give them.
        """
        return self.sampler.take(count, asked)

    def check_enough_left(self) -> None:
        """Raise DataFailed if too many prompts are retired for a step."""
        self.sampler.check_enough_left(self.num_wanted)

    def record(self, scored: DataProto, usable: np.ndarray) -> None:
        """Record the mean score of each prompt's usable trajectories.

        With thrift a prompt teaches something, whatever its mean score, while its right answers differ in
        searches.

        Args:
            scored: the scored trajectories of a round.
            usable: which of them count, [N] bool.
        """
        scores = scores_by(scored, "index", usable)
        still_informative = set[int]()
        if self.has_thrift:
            can_save = can_save_searches(scored, usable)
            still_informative = {int(row) for row in scored.non_tensor_batch["index"][can_save]}
        means = [sum(group) / len(group) for group in scores.values()]
        self.sampler.record(list(map(int, scores)), means, still_informative)

    def teaching_rows(self, batch: DataProto, usable: np.ndarray) -> np.ndarray:
        """Return which usable rows teach something, [N] bool.

        With `filter_groups` these are the rows of groups whose members differ, or whose right answers differ
        in searches, if that gives them an advantage (`algorithm.thrift`). Without it they are all usable
        rows.
        """
        if not self.filters.enable:
            return usable
        compared = self._compared_values(batch)
        informative = informative_rows(compared, batch.non_tensor_batch["uid"], usable)
        if self.has_thrift:
            informative |= can_save_searches(batch, usable)
        return informative

    def _compared_values(self, batch: DataProto) -> np.ndarray:
        """Return the numbers in which the members of a group must differ, [N] or [N, K] float64."""
        metric = self.filters.metric
        if metric is None and self.reward_keys:
            columns = [values_named(batch, name, "algorithm.gdpo_reward_keys") for name in self.reward_keys]
            return np.stack(columns, axis=1)
        if metric is None or metric == "seq_reward":
            outcomes: np.ndarray = batch.tensors["outcome"].double().numpy()
            return outcomes
        if metric == "acc" and "acc" not in batch.non_tensor_batch["reward_extra"][0]:
            metric = "em"
        return values_named(batch, metric, f"{FILTER}.metric")

    def num_missing(self, counts: GroupCounts, asked: Collection[int]) -> int:
        """Return how many groups another round of generation asks for; 0 when the step has what it needs.

        There is one round, unless `filter_groups` has groups that teach nothing replaced. It ends early when
        its rounds or the prompts that the step has not asked are used up.

        Args:
            counts: the step's groups so far.
            asked: rows of the dataset that the step has asked.
        """
        if not self._is_incomplete(counts):
            return 0
        num_fresh = self.sampler.num_fresh(asked)
        rounds_left = (self.filters.max_num_gen_batches or math.inf) - counts.num_rounds
        if rounds_left <= 0 or num_fresh <= 0 or counts.num_groups >= self.sampler.num_rows:
            return 0
        if self.sampler.num_left < self.num_wanted:
            return 0
        # Ask for as many groups as the share so far says are needed, but for no more at once than without
        # a filter, and for no more than there are prompts that this step has not asked.
        share = max(counts.num_teaching, 1) / counts.num_groups
        num_needed = max(1, math.ceil((self.num_wanted - counts.num_teaching) / share))
        return min(self.num_wanted, num_fresh, num_needed)

    def _is_incomplete(self, counts: GroupCounts) -> bool:
        """Return whether a step that may ask more prompts has too few groups that teach something."""
        may_ask_more = self.filters.enable and self.filters.refill
        return may_ask_more and counts.num_teaching < self.num_wanted

    def describe_incomplete(self, counts: GroupCounts) -> str | None:
        """Return a line for the user if a step goes on with fewer groups than it should have, else None."""
        if not self._is_incomplete(counts):
            return None
        return (
            f"{counts.num_teaching} of {self.num_wanted} groups teach something after {counts.num_rounds} "
            f"rounds of generation and {counts.num_groups} prompts "
            f"({FILTER}.max_num_gen_batches); the step goes on with these"
        )

    def metrics(self, counts: GroupCounts, num_usable: int) -> dict[str, float]:
        """Return the metrics of the selection.

        Args:
            counts: the step's groups.
            num_usable: groups with a row that can be learnt from.
        """
        metrics: dict[str, float] = {}
        if self.filters.enable:
            metrics = {
                "filter/groups": float(num_usable),
                "filter/groups_left_out": float(num_usable - counts.num_teaching),
                "filter/num_gen_batches": float(counts.num_rounds),
                "groups/effective_share": counts.num_teaching / max(num_usable, 1),
            }
        return metrics | self.sampler.metrics()

    def history(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint needs to know of the prompts, besides the sampler's position."""
        return self.sampler.history()

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        """Restore what `history` returned. Raise ValueError if the sampler had other settings then."""
        self.sampler.load_history(history)


def informative_rows(values: np.ndarray, uids: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Return the usable rows of groups whose members differ in some value, [N] bool.

    A group whose members all have the same reward gives every token an advantage of 0 (DAPO's dynamic
    sampling, arXiv:2503.14476, eq. 11, leaves out groups that are all right or all wrong).

    Args:
        values: the K numbers that are compared, [N] or [N, K] float; rows that are not usable are not read.
        uids: the group of each row.
        usable: which rows are usable, [N] bool.
    """
    values = values.reshape(len(values), -1)
    group = np.unique(uids.astype(str), return_inverse=True)[1]
    highest = np.full(values.shape, -np.inf)
    lowest = np.full(values.shape, np.inf)
    np.maximum.at(highest, group[usable], values[usable])
    np.minimum.at(lowest, group[usable], values[usable])
    differs: np.ndarray = np.any(highest > lowest, axis=1)
    return usable & differs[group]
