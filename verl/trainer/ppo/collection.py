"""The collection of a step's trajectories: those of its prompts, and the rows that it learns from.

    begin: prompts -> (the trainer generates, with searches, and scores) -> add
        ^                                                                     |
        +---- num_missing: too few groups teach (filter_groups with refill) --+
    selected: the rows that the step learns from

Which prompts are asked, and which groups teach something, `PromptSelector` says (prompt_selector.py). All
rounds of a step use one policy. Surplus groups of the last round are trained as well, so that nothing that
teaches is thrown away: a step has `data.train_batch_size` groups or a few more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoints.run_state import RunStopped
from verl.config import Config
from verl.data.mixture import Mixture
from verl.data.rl_dataset import DataFailed, PromptSampler, RLHFDataset
from verl.environments.registry import SEARCH
from verl.planning.passes import Passes
from verl.protocol import DataProto, object_array
from verl.trainer.ppo.episodes import environment_metrics, environment_of
from verl.trainer.ppo.kinds import kind_metrics, kind_of
from verl.trainer.ppo.prompt_selector import GroupCounts, PromptSelector
from verl.trainer.ppo.scoring import scores_by, solved_rows, solved_share
from verl.verifiers.registry import verifier_metrics

TRAIN_STREAM = 0
VALIDATION_STREAM = 1
AHEAD_STREAM = 2
CUT = "cut"  # finish reason of a trajectory that a round did not wait for
# Older versions wrote groups that went on in the next step into one of these.
PARTIAL_GROUPS_FILES = ("partial_groups.npz", "partial_groups.pkl")
HISTORY_FILE = "prompt_history.npz"


def sampling_seeds(run_seed: int, stream: int, step: int, num_rows: int, round_: int = 0) -> torch.Tensor:
    """Return one 64-bit seed for each row of a step, [num_rows] int64.

    The seeds depend on the arguments alone: a resumed run draws what the undisturbed one would have drawn, on
    any number of processes.

    Args:
        run_seed: seed of the run.
        stream: what the rows are for, such as `TRAIN_STREAM`.
        step: number of the step.
        num_rows: number of seeds.
        round_: number of the generation, in a step that generates more than once.
    """
    words = np.random.SeedSequence([run_seed, stream, step, round_]).generate_state(num_rows, np.uint64)
    return torch.from_numpy(words.view(np.int64).copy())


def prompt_batch(rows: list[dict[str, Any]], uid_prefix: str) -> DataProto:
    """Return rows of `RLHFDataset` as a DataProto of non-tensors, with a `uid` for each prompt."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: object_array([row.get(name) for row in rows]) for name in names}
    columns["uid"] = object_array([f"{uid_prefix}-{i}" for i in range(len(rows))])
    return DataProto(None, columns)


def with_seeds(prompts: DataProto, seeds: torch.Tensor, **sampling: Any) -> DataProto:
    """Return the prompts ready to be generated from.

    Args:
        prompts: N rows.
        seeds: the column `sampling_seeds`, [N] int64.
        sampling: how to sample, as meta_info.
    """
    return DataProto.from_dict({"sampling_seeds": seeds}, prompts.non_tensor_batch, sampling)


def without_padding(batch: DataProto) -> DataProto:
    """Return the batch without the columns that are padding in every row, on both sides of its tensors.

    The function reads prompt_length and response_length.
    """
    width = batch.tensors["attention_mask"].shape[1]
    prompt_width = batch.tensors["prompts"].shape[1]
    first = prompt_width - int(batch.tensors["prompt_length"].max())
    end = prompt_width + max(int(batch.tensors["response_length"].max()), 1)
    narrow = batch.select()
    for key, tensor in batch.tensors.items():
        if key == "prompts":
            narrow.tensors[key] = tensor[:, first:]
        elif tensor.dim() > 1 and tensor.shape[1] == width:
            narrow.tensors[key] = tensor[:, first:end]
        elif tensor.dim() > 1:
            narrow.tensors[key] = tensor[:, : end - prompt_width]
    return narrow


class TrajectoryCollector:
    """A collector of the prompts and the rows of each step.

    It generates and scores nothing itself. The trainer asks it in each step:

        begin() -> groups that the first round asks for
        add(scored trajectories of a round); num_missing() -> groups of another round, 0: no other round
        selected() -> the rows that are learnt from

    The trajectories of a round are generated from `prompts`, or come from ahead of training (`drawn_ahead`).

    Args:
        config: the whole configuration.
        passes: what the run computes.
        dataset: the training prompts.
        sampler: says which prompts come next; it is told how often each was solved.
        trajectory_metrics: computes `env/*` from records of trajectories with searches.
        say: takes one line for the user.
    """

    def __init__(
        self,
        config: Config,
        passes: Passes,
        dataset: RLHFDataset | Mixture,
        sampler: PromptSampler,
        trajectory_metrics: Callable[[list[dict[str, Any]]], dict[str, float]],
        say: Callable[[str], None],
    ) -> None:
        self.config = config
        self.passes = passes
        self.dataset = dataset
        self.selector = PromptSelector(config, passes, sampler)
        self.trajectory_metrics = trajectory_metrics
        self.say = say
        self._rounds: list[DataProto] = []  # scored trajectories of each round of this step
        self._batch = DataProto(None)  # the rows of all these rounds
        self._usable = self._chosen = np.zeros(0, dtype=bool)  # masks of these rows
        self.take_state()

    # ---------------------------------------------------------------------------------- rounds of generation

    def begin(self) -> int:
        """Begin the collection of a step. Return how many groups its first round of generation asks for."""
        self._rounds = []
        return self.config.data.train_batch_size

    def add(self, scored: DataProto) -> None:
        """Take the scored trajectories of a round."""
        self._rounds.append(scored)
        overlong_filter = self.config.algorithm.overlong_filter
        self.selector.record(scored, usable_rows(scored, False, overlong_filter))
        self._batch = DataProto.concat(self._rounds)
        self._usable = usable_rows(self._batch, self.passes.compares_group, overlong_filter)
        self._chosen = self.selector.teaching_rows(self._batch, self._usable)

    def num_missing(self) -> int:
        """Return how many groups another round of generation asks for; 0 when the step has what it needs."""
        return self.selector.num_missing(self._counts(), self._asked())

    def _counts(self) -> GroupCounts:
        """Count the groups of this step so far."""
        uids = self._batch.non_tensor_batch["uid"]
        return GroupCounts(len(set(uids)), len(set(uids[self._chosen])), len(self._rounds))

    def prompts(self, step: int, count: int) -> DataProto:
        """Return the next `count` prompts, each as often as it is answered.

        Raises RunStopped if the training data can't give the prompts.
        """
        rollout = self.config.actor_rollout_ref.rollout
        round_number = len(self._rounds)
        try:
            indices = self.selector.take(count, sorted(self._asked()))
            prompts = self._answered(indices, f"step{step}.{round_number}" if round_number else f"step{step}")
        except DataFailed as error:
            raise RunStopped(f"step {step}: {error}") from error
        seeds = sampling_seeds(self.config.trainer.seed, TRAIN_STREAM, step, len(prompts), round_number)
        return self._with_sampling(prompts, seeds, rollout.do_sample, validate=False)

    def _asked(self) -> set[int]:
        """Return the rows of the dataset that this step has asked."""
        return {int(row) for batch in self._rounds for row in batch.non_tensor_batch["index"]}

    def drawn_ahead(self, number: int, count: int, asked: Sequence[int]) -> list[DataProto]:
        """Return the rows of each of the next `count` prompts, to be sampled ahead of their step.

        Args:
            number: number of the first of these groups; the seeds depend on it.
            count: number of prompts.
            asked: rows of the dataset that are under way.

        Raises:
            RunStopped: if there are not so many prompts.
        """
        try:
            self.selector.check_enough_left()
            indices = self.selector.take(count, asked)
            rows = [self._answered([index], f"group{number + i}") for i, index in enumerate(indices)]
        except DataFailed as error:
            raise RunStopped(f"group {number}: {error}") from error
        return [self._ahead(prompts, number + i, 0) for i, prompts in enumerate(rows)]

    def asked_again(self, prompts: DataProto, number: int, attempt: int) -> DataProto:
        """Return the rows of group `number` once more, with a name and seeds of their own."""
        columns = {name: x for name, x in prompts.non_tensor_batch.items() if name != "continuation"}
        columns["uid"] = object_array([f"group{number}.{attempt}"] * len(prompts))
        return self._ahead(DataProto(None, columns), number, attempt)

    def _ahead(self, prompts: DataProto, number: int, attempt: int) -> DataProto:
        seeds = sampling_seeds(self.config.trainer.seed, AHEAD_STREAM, number, len(prompts), attempt)
        do_sample = self.config.actor_rollout_ref.rollout.do_sample
        return self._with_sampling(prompts, seeds, do_sample, validate=False)

    def _answered(self, indices: Sequence[int], uid_prefix: str) -> DataProto:
        """Return rows of the dataset, each as often as it is answered.

        Raises DataFailed if the dataset can't give them.
        """
        rollout = self.config.actor_rollout_ref.rollout
        rows = [self.dataset[i] for i in indices]
        answers = [row.pop("num_answers", None) or rollout.n_agent * rollout.n for row in rows]
        return prompt_batch(rows, uid_prefix).select_idxs(np.repeat(np.arange(len(rows)), answers))

    def _with_sampling(
        self, prompts: DataProto, seeds: torch.Tensor, do_sample: bool, **more: bool
    ) -> DataProto:
        rollout = self.config.actor_rollout_ref.rollout
        sampling = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
        return with_seeds(prompts, seeds, do_sample=do_sample, **sampling, **more)

    # ----------------------------------------------------------------------------------- what is learnt

    def selected(
        self, step: int, seconds: float | None, version: int | None = None
    ) -> tuple[DataProto, dict[str, float]]:
        """Return the rows that the step learns from, and metrics of all that it generated.

        With thrift the batch's meta_info has the `solved_share` of all that the step generated.

        Args:
            step: the training step, for what is said to the user.
            seconds: generation time; None if the rows were sampled ahead.
            version: version of the policy that is trained; None for the newest one that sampled.

        Raises:
            RunStopped: if no row is trainable.
        """
        incomplete = self.selector.describe_incomplete(self._counts())
        if incomplete is not None:
            self.say(f"step {step}: {incomplete}")
        batch = self._batch
        chosen = self._chosen
        metrics = self._metrics(seconds)
        if not self._usable.any():
            raise RunStopped("no trajectory of this step has a token to learn from.")
        if not chosen.any():
            # All advantages are 0 then; the rest of the loss (entropy, KL) is as ever.
            chosen = self._usable
        newest = version
        if newest is None:
            newest = max(record["version_last"] or 0 for record in batch.non_tensor_batch["trajectory"])
        batch = batch if chosen.all() else batch.select_idxs(chosen)
        # Optimizer steps since each row's first token was sampled; 0 for a row without a token.
        first_versions = [record["version_first"] for record in batch.non_tensor_batch["trajectory"]]
        ages = [0 if first is None else newest - first for first in first_versions]
        metrics |= {"rollout/staleness/mean": float(np.mean(ages)), "rollout/staleness/max": float(max(ages))}
        if self.config.algorithm.thrift:
            share = solved_share(self._batch)
            batch.meta_info["solved_share"] = share
            metrics["thrift/guard"] = share
        self._rounds = []
        self._batch = DataProto(None)
        return batch, metrics

    def greedy_prompts(self, batch: DataProto, step: int) -> DataProto:
        """Return one row for each prompt of the batch, to be answered greedily (ReMax's baseline)."""
        uids = batch.non_tensor_batch["uid"].astype(str)
        first = np.unique(uids, return_index=True)[1]
        generated_columns = ("trajectory", "em", "f1", "reward_extra", "verdicts", "continuation")
        columns = [name for name in batch.non_tensor_batch if name not in generated_columns]
        prompts = batch.select([], columns).select_idxs(first)
        seeds = sampling_seeds(self.config.trainer.seed, TRAIN_STREAM, step, len(prompts))
        # As in validation, each row is alone with its prompt, so none is a straggler.
        return self._with_sampling(prompts, seeds, False, validate=True)

    def _metrics(self, seconds: float | None) -> dict[str, float]:
        """Return metrics of all trajectories that the step made, whether it learns from them or not."""
        batch = self._batch
        usable = self._usable
        algorithm = self.config.algorithm
        columns = batch.non_tensor_batch
        records = columns["trajectory"]
        uids = columns["uid"]
        reasons = [record["finish_reason"] for record in records]
        cut_groups = {uid for uid, reason in zip(uids, reasons, strict=True) if reason == CUT}
        num_sampled = float(batch.tensors["num_sampled"].sum())
        searches = [record for record in records if environment_of(record) == SEARCH]
        has_tokens = batch.tensors["num_sampled"].bool().tolist()
        extras = zip(columns["reward_extra"], has_tokens, strict=True)
        scores = [extra["score"] if is_sampled else None for extra, is_sampled in extras]
        metrics: dict[str, float] = batch.meta_info.pop("metrics", {})
        metrics |= {
            "env/cut_trajectories": float(reasons.count(CUT)),
            "env/cut_groups": float(len(cut_groups)),
            **(self.trajectory_metrics(searches) if searches else {}),
            **environment_metrics(records, scores),
            "env/left_out": float((~usable).sum()),
            "response_length/clip_ratio": reasons.count("length") / len(reasons),
            "prompt_length/clip_ratio": float(
                (batch.tensors["prompt_length"] >= self.config.data.max_start_length).float().mean()
            ),
            "perf/generated_tokens": num_sampled,
        }
        if seconds is not None:
            metrics["perf/generated_tokens_per_second"] = num_sampled / max(seconds, 1e-9)
        if num_sampled and seconds is not None:
            metrics["timing_per_token_ms/gen"] = seconds * 1000 / num_sampled
        if algorithm.overlong_filter:
            metrics["filter/overlong"] = float(reasons.count("length"))
        metrics |= self.selector.metrics(self._counts(), num_usable=len(set(uids[usable])))
        if isinstance(self.dataset, Mixture):
            sources = dict(zip(uids, columns["source"], strict=True))
            unsolved = set(uids[usable & ~solved_rows(batch)])
            metrics |= self.dataset.metrics(sources, scores_by(batch, "uid", usable), unsolved)
        metrics |= verifier_metrics(columns["verdicts"].tolist())
        metrics |= self._kind_metrics([row for row, score in enumerate(scores) if score is not None])
        if usable.any():
            extra = columns["reward_extra"][usable]
            names = [name for name, value in extra[0].items() if isinstance(value, int | float)]
            metrics |= {
                f"reward/{name}": float(np.mean([row[name] for row in extra]))
                for name in names
                if name not in ("score", "em", "f1") and all(row.get(name) is not None for row in extra)
            }
            metrics |= {
                "train/em": float(columns["em"][usable].astype(float).mean()),
                "train/f1": float(columns["f1"][usable].astype(float).mean()),
                "train/score": float(batch.tensors["outcome"].numpy()[usable].mean()),
                "train/searches": float(np.mean([record["num_searches"] for record in records[usable]])),
            }
        return metrics

    def _kind_metrics(self, judged: Sequence[int]) -> dict[str, float]:
        """Return `kinds/..` of the rows whose score is known, and `train/answered` of those with searches."""
        columns = self._batch.non_tensor_batch
        records = [columns["trajectory"][row] for row in judged]
        environments = [environment_of(record) for record in records]
        kinds = []
        for row, environment in zip(judged, environments, strict=True):
            hops = (columns["extra_info"][row] or {}).get("hops")
            kinds.append(kind_of(environment, columns["data_source"][row], hops))
        metrics = kind_metrics(
            kinds,
            [columns["uid"][row] for row in judged],
            [float(columns["em"][row]) for row in judged],
            [float(columns["reward_extra"][row]["score"]) for row in judged],
            [record["num_searches"] for record in records],
        )
        reasons = [
            record["finish_reason"]
            for record, environment in zip(records, environments, strict=True)
            if environment == SEARCH
        ]
        if reasons:
            metrics["train/answered"] = reasons.count("answer") / len(reasons)
            metrics["train/answered_of"] = float(len(reasons))
        return metrics

    # ------------------------------------------------------------------------------------------ checkpoints

    def take_state(self) -> None:
        """Note what the next step depends on, so that `save` may be called in the middle of it."""
        self._history = self.selector.history()

    def save(self, folder: Path) -> None:
        """Write what `take_state` noted into a checkpoint; the sampler's position is not part of it."""
        if self._history:
            np.savez(folder / HISTORY_FILE, allow_pickle=False, **self._history)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote.

        Raises ValueError if the sampler had other settings then, or if a file is damaged.
        """
        for name in PARTIAL_GROUPS_FILES:
            if (folder / name).exists():
                self.say(f"{folder / name} is of an older version; its rows are left out")
        history: dict[str, np.ndarray] = {}
        # Older versions wrote the second file.
        for path in (folder / HISTORY_FILE, folder / "difficulty_pools.npz"):
            if path.exists():
                with np.load(path) as stored:
                    history |= dict(stored)
        self.selector.load_history(history)
        self.take_state()


def usable_rows(batch: DataProto, compares_group: bool, overlong_filter: bool = False) -> np.ndarray:
    """Return which rows may be learnt from, [N] bool: those with at least one sampled token.

    A trajectory whose search failed, or that was not waited for, has no sampled token (its response_mask is
    all zero).

    Args:
        batch: scored rows.
        compares_group: whether the advantage is relative to the rows of the same uid. Then a row that is the
            last one left of a group is not usable either: without others to compare it with, its advantage
            would be its bare score.
        overlong_filter: whether trajectories that a limit of length has cut are left out too. Their reward
            says nothing about what they would have come to (DAPO, Yu et al. 2025, arXiv:2503.14476, section
            3.4).
    """
    usable = (batch.tensors["num_sampled"] > 0).numpy()
    if overlong_filter:
        records = batch.non_tensor_batch["trajectory"]
        usable &= np.array([record["finish_reason"] != "length" for record in records], dtype=bool)
    if compares_group:
        group = np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)[1]
        usable &= (np.bincount(group, usable)[group] > 1) | (np.bincount(group)[group] == 1)
    return usable


def with_greedy_baselines(batch: DataProto, greedy: DataProto) -> tuple[DataProto, dict[str, float]]:
    """Return the batch with reward_baselines [N] float32, and metrics.

    A row's baseline is the score of the greedy trajectory of its prompt. Rows of a prompt whose greedy
    trajectory could not be had (its search failed) leave the batch: there is nothing to compare them with.

    Raises RunStopped if no row is left.
    """
    greedy_uids = greedy.non_tensor_batch["uid"].astype(str)
    row_of = torch.from_numpy(np.searchsorted(greedy_uids, batch.non_tensor_batch["uid"].astype(str)))
    outcomes = greedy.tensors["outcome"]
    is_complete = greedy.tensors["num_sampled"] > 0
    batch.tensors["reward_baselines"] = outcomes[row_of]
    has_baseline = is_complete[row_of].numpy()
    if not has_baseline.any():
        raise RunStopped("no greedy trajectory (remax) of this step came to an end.")
    return batch if has_baseline.all() else batch.select_idxs(has_baseline), {
        "remax/baseline": float(outcomes[is_complete].mean()),
        "remax/left_out": float((~has_baseline).sum()),
    }
