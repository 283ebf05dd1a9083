"""Prompts of several sources, drawn by ratio.

    data.mixture -> Mixture[i] (rows of all sources, one after the other)
    MixtureSampler -> how many prompts of the next ones are of each source, and which these are

However many prompts are drawn, the number of prompts of a source stays within one of its share of all prompts
drawn so far. The error does not grow. Which sources get the odd prompts of a step, and the order of the rows
in it, follow from (seed, number of the draw).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl.config import Config
from verl.config.keys import as_list
from verl.config.mixture import Source, sources_of
from verl.data.difficulty_pools import DifficultyPools
from verl.data.rl_dataset import PromptSampler, RLHFDataset, row_settings
from verl.data.row_cells import Row, is_missing, reward_cell
from verl.data.streaming import RowStream, StreamSampler, is_large
from verl.utils.rows import truth_struct


class Mixture:
    """The rows of several sources as one data set: those of the first, of the second, ...

    Attributes:
        sources: the sources.
        datasets: the rows of each source.
        weights: the weight of each source among the prompts; the weights add up to 1.
        starts: the index of each source's first row.
    """

    def __init__(
        self, sources: Sequence[Source], datasets: Sequence[RLHFDataset], weights: Sequence[float]
    ) -> None:
        self.sources = sources
        self.datasets = datasets
        self.weights = np.array(weights) / sum(weights)
        self.starts = np.cumsum([0, *(dataset.index_end for dataset in datasets)])

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self.datasets)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row as `RLHFDataset` has it, with two more entries.

        They are `source` (str, the name of its source) and `num_answers` (int; None stands for the run's own
        number).
        """
        number = self.source_of(index)
        source = self.sources[number]
        row = self.datasets[number][index - int(self.starts[number])]
        return row | {"index": index, "source": source.name, "num_answers": source.n}

    def metrics(
        self,
        source_of_group: Mapping[Any, str],
        scores: Mapping[Any, Sequence[float]],
        unsolved: Collection[Any],
    ) -> dict[str, float]:
        """Return the metrics `data/<name>/` of each source.

        They are the `share` of the prompts, the mean `score` of its answers that can be learnt from, and the
        share of its groups that are `solved`.

        Args:
            source_of_group: group -> name of its source.
            scores: group -> scores of its answers that can be learnt from.
            unsolved: groups with an answer that is not solved.
        """
        metrics: dict[str, float] = {}
        for source in self.sources:
            groups = [group for group, name in source_of_group.items() if name == source.name]
            scored = [group for group in groups if group in scores]
            metrics[f"data/{source.name}/share"] = len(groups) / len(source_of_group)
            if scored:
                num_solved = sum(group not in unsolved for group in scored)
                all_scores = np.concatenate([scores[group] for group in scored])
                metrics[f"data/{source.name}/score"] = float(np.mean(all_scores))
                metrics[f"data/{source.name}/solved"] = num_solved / len(scored)
        return metrics

    def source_of(self, index: int) -> int:
        """Return the number of the source of a row."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1


@dataclass(frozen=True)
class RowAdapter:
    """A function that completes a source's rows.

    It adds the source's name, verifier and environment where a row names none.
    """

    source: Source

    def __call__(self, row: Row) -> Row:
        source = self.source
        row = dict(row)
        if is_missing(row.get("data_source")):
            row["data_source"] = source.name
        if source.env_class is not None and is_missing(row.get("env_class")):
            row["env_class"] = source.env_class
        named_reward = reward_cell(row)
        reward = None if named_reward is None else named_reward[1]
        if source.verifier is not None:
            reward = with_verifier(reward or {}, source.verifier)
        elif reward is None:
            reward = {"style": "rule", "ground_truth": None}  # the environment has the reward
        return row | {"reward_model": reward}


def with_verifier(reward_model: dict[str, Any], name: str) -> dict[str, Any]:
    """Add a verifier to a row's reward_model if it names none.

    The verifier's label is the row's ground truth, or its golden answers.
    """
    truth = reward_model.get("ground_truth")
    struct = truth_struct(truth)
    truth = truth if struct is None else struct
    if isinstance(truth, Mapping) and truth.get("verifiers") is not None:
        return reward_model
    label = truth["target"] if isinstance(truth, Mapping) and truth.get("target") is not None else truth
    label = label.tolist() if isinstance(label, np.ndarray) else label
    label = label[0] if isinstance(label, list) and len(label) == 1 else label
    entries = dict(truth) if isinstance(truth, Mapping) else {}
    return reward_model | {"ground_truth": entries | {"verifiers": [verifier_entry(name, label)]}}


def verifier_entry(name: str, label: Any, weight: float = 1.0) -> dict[str, Any]:
    """Return an entry of `reward_model.ground_truth.verifiers`.

    Labels are text, because parquet needs one type.
    """
    text = label if isinstance(label, str) else json.dumps(label, default=np.ndarray.tolist)
    return {"name": name, "label": text, "weight": weight}


class MixtureSampler(PromptSampler):
    """A sampler that draws from each source by its share.

    It has a sampler for each source, whose row numbers start from 0.
    """

    def __init__(
        self, mixture: Mixture, samplers: Sequence[PromptSampler], batch_size: int, shuffle: bool, seed: int
    ) -> None:
        super().__init__(len(mixture), batch_size, shuffle, seed, samplers[0].retire_solved)
        self.mixture = mixture
        self.samplers = dict(zip((source.name for source in mixture.sources), samplers, strict=True))
        self.num_draws = 0
        self.drawn = np.zeros(len(samplers), dtype=np.int64)  # prompts of each source so far

    def take(self, count: int, skip: Sequence[int] = ()) -> list[int]:
        """Return the next `count` rows of all sources, in random order.

        No row comes twice, and none of `skip`, while its source has others. A source with fewer rows than its
        share of a step gives rows again.
        """
        rng = np.random.default_rng([self.seed, self.num_draws])
        counts = self._counts(count, rng)
        starts = self.mixture.starts.tolist()
        rows: list[int] = []
        for number, (sampler, start) in enumerate(zip(self.samplers.values(), starts, strict=False)):
            skipped = [row - start for row in skip if self.mixture.source_of(row) == number]
            if counts[number]:
                rows += [start + row for row in sampler.take(int(counts[number]), skipped)]
        self.num_draws += 1
        self.drawn += counts
        return [rows[i] for i in rng.permutation(count)] if self.shuffle else rows

    def _counts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return the number of prompts of each source among the next `count`, [sources] int64.

        A source without remaining prompts gives none, and the others take its share.
        """
        self.check_enough_left(count)
        has_prompts = np.array([sampler.num_left > 0 for sampler in self.samplers.values()])
        weights = np.where(has_prompts, self.mixture.weights, 0.0)
        targets = weights / weights.sum() * (self.drawn[has_prompts].sum() + count) - self.drawn
        counts = np.where(has_prompts, np.maximum(np.floor(targets), 0), 0).astype(np.int64)
        while counts.sum() != count:
            step = 1 if counts.sum() < count else -1
            behind = step * (targets - counts) + rng.random(len(counts)) * 1e-6
            behind[~has_prompts if step > 0 else counts == 0] = -np.inf
            counts[int(behind.argmax())] += step
        return counts

    @property
    def num_left(self) -> int:
        return sum(sampler.num_left for sampler in self.samplers.values())

    def num_fresh(self, asked: Collection[int]) -> int:
        rows_of_sources: list[list[int]] = [[] for _ in self.samplers]
        for row in asked:
            number = self.mixture.source_of(row)
            rows_of_sources[number].append(row - int(self.mixture.starts[number]))
        samplers = self.samplers.values()
        return sum(sampler.num_fresh(rows) for sampler, rows in zip(samplers, rows_of_sources, strict=True))

    def record(
        self, rows: Sequence[int], scores: Sequence[float], still_informative: Collection[int] = ()
    ) -> None:
        samplers = list(self.samplers.values())
        for row, score in zip(rows, scores, strict=True):
            number = self.mixture.source_of(row)
            row_of_source = row - int(self.mixture.starts[number])
            informative_rows: Collection[int] = {row_of_source} if row in still_informative else ()
            samplers[number].record([row_of_source], [score], informative_rows)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the sources' samplers: counts are added up, shares are averaged."""
        total = defaultdict[str, float](float)
        for sampler in self.samplers.values():
            for name, value in sampler.metrics().items():
                total[name] += value / len(self.samplers) if name.startswith("pools/") else value
        return dict(total)

    def history(self) -> dict[str, np.ndarray]:
        histories = [(source, sampler.history()) for source, sampler in self.samplers.items()]
        return {f"{source}/{name}": arrays[name] for source, arrays in histories for name in arrays}

    def load_history(self, history: Mapping[str, np.ndarray]) -> None:
        for source, sampler in self.samplers.items():
            names = [name for name in history if name.startswith(f"{source}/")]
            sampler.load_history({name.removeprefix(f"{source}/"): history[name] for name in names})

    def close(self) -> None:
        for sampler in self.samplers.values():
            sampler.close()

    def state_dict(self) -> dict[str, Any]:
        sources = {source: sampler.state_dict() for source, sampler in self.samplers.items()}
        return {"num_draws": self.num_draws, "drawn": self.drawn.tolist(), "sources": sources}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if list(state.get("sources", {})) != list(self.samplers):
            earlier = ", ".join(state.get("sources", ["data.train_files"]))
            raise ValueError(
                f"Found the sources {', '.join(self.samplers)} in data.mixture, but the checkpoint was made "
                f"with {earlier}; a run keeps the data it began with. Use these, or trainer.resume_mode=none."
            )
        self.num_draws = int(state["num_draws"])
        self.drawn = np.array(state["drawn"], dtype=np.int64)
        for source, sampler in self.samplers.items():
            sampler.load_state_dict(state["sources"][source])


def training_rows(config: Config, tokenizer: Any) -> RLHFDataset | Mixture:
    """Read the rows of data.mixture or data.train_files.

    Raises ValueError where `RLHFDataset` or `Source` do.
    """
    data = config.data
    settings = row_settings(config)

    def read(
        files: Sequence[Path], adapt: Callable[[Row], Row] | None = None, num_rows: int | None = None
    ) -> RLHFDataset:
        streams = data.streaming
        if streams is None:
            streams = (
                num_rows is None and not config.prompt_selection.difficulty_pools.enable and is_large(files)
            )
        if not streams:
            return RLHFDataset([str(file) for file in files], tokenizer, settings, num_rows, adapt)
        rows = RowStream(files, tokenizer, settings, adapt)
        rows.limit_rows(num_rows)
        return rows

    if data.mixture is None:
        files = [Path(file).expanduser() for file in as_list(data.train_files)]
        return read(files, num_rows=data.train_data_num)
    sources = sources_of(config)
    datasets = []
    weights = []
    for source in sources:
        if source.env is None:
            dataset = read(source.files, RowAdapter(source))
        else:
            from verl.environments.adapters import verifiers_rows

            rows = verifiers_rows(source.env["id"], source.env.get("args") or {})
            dataset = RLHFDataset(rows, tokenizer, settings, adapt=RowAdapter(source))
        weights.append(source.weight(len(dataset)))
        dataset.limit_rows(source.rows_to_use(len(dataset)))
        datasets.append(dataset)
    return Mixture(sources, datasets, weights)


def prompt_sampler(rows: RLHFDataset | Mixture, config: Config) -> PromptSampler:
    """Return the sampler that draws a run's prompts from its rows.

    Raises ValueError if there are fewer rows than a step takes.
    """
    data = config.data
    batch_size = config.data.train_batch_size
    seed = config.trainer.seed
    retire = config.prompt_selection.retire_solved
    pools = config.prompt_selection.difficulty_pools

    def of(rows: RLHFDataset, count: int) -> PromptSampler:
        order = (count, data.shuffle_train_dataloader, seed)
        if isinstance(rows, RowStream):
            return StreamSampler(rows, batch_size, *order, retire)
        if pools.enable:
            return DifficultyPools(pools, len(rows), *order, retire)
        return PromptSampler(len(rows), *order, retire)

    if not isinstance(rows, Mixture):
        return of(rows, batch_size)
    samplers = [of(dataset, 1) for dataset in rows.datasets]
    return MixtureSampler(rows, samplers, batch_size, data.shuffle_train_dataloader, seed)
