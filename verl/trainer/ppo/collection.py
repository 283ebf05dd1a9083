"""One step's trajectories: generated, scored, and chosen among.

    prompts -> generate (with searches) -> score -> usable, informative rows -> the batch of the step
        ^                                              |
        +---- too few groups that teach something -----+   (algorithm.filter_groups with refill)

A step's rounds of generation use one policy. Surplus groups of the last round are trained as well, so that
nothing that teaches is thrown away: a step has `data.train_batch_size` groups or a few more. A group that a
round did not wait for (`rollout.keep_partial`) goes on in the next round, the last round's in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.trainer.ppo.batching import (
    TRAIN_STREAM,
    prompt_batch,
    sampling_seeds,
    with_samples,
    without_padding,
)
from verl.trainer.ppo.data_selection import (
    count_groups,
    informative_rows,
    prompts_to_draw,
    solve_rates,
    usable_rows,
)
from verl.trainer.ppo.metric_utils import Timer
from verl.trainer.ppo.partial_groups import PartialGroups, newest_version, staleness, straggler_metrics
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.run_state import RunStopped
from verl.trainer.ppo.scoring import reward_means, values_named
from verl.trainer.ppo.token_worker import TokenWork
from verl.utils.dataset.difficulty_pools import FILE_NAME as POOLS_FILE
from verl.utils.dataset.difficulty_pools import DifficultyPools
from verl.utils.dataset.rl_dataset import PromptSampler, RLHFDataset


class TrajectoryCollector:
    """Makes the batch of each step.

    Args:
        config: the whole configuration. passes: what it asks for.
        generate: gen_batch -> trajectories; may raise RunStopped.
        tokens: gives the process that scores and looks at tokens. trajectory_metrics: records of
            trajectories -> `env/*`.
        dataset, sampler: the training prompts and which of them come next. A `DifficultyPools` hears how
            often each was solved.
        say: takes one line for the user.

    Attributes:
        partial_groups: the groups that the next generation goes on with.
    """

    def __init__(
        self,
        config: DictConfig,
        passes: Passes,
        generate: Callable[[DataProto], DataProto],
        tokens: Callable[[], TokenWork],
        trajectory_metrics: Callable[[list[dict[str, Any]]], dict[str, float]],
        dataset: RLHFDataset,
        sampler: PromptSampler,
        say: Callable[[str], None],
    ) -> None:
        self.config, self.passes, self.generate, self.tokens = config, passes, generate, tokens
        self.trajectory_metrics, self.say = trajectory_metrics, say
        self.dataset, self.sampler = dataset, sampler
        self.pools = sampler if isinstance(sampler, DifficultyPools) else None
        self.partial_groups = PartialGroups(
            lambda batch: tokens().continuations(batch), lambda batch: tokens().without_unfinished(batch)
        )

    def collect(self, step: int, is_last: bool, timer: Timer) -> tuple[DataProto, dict[str, float]]:
        """The rows that step number `step` learns from, with their scores, and figures of all that were made.

        Raises:
            RunStopped: there is nothing to learn from.
        """
        wanted = count = self.config.data.train_batch_size
        rounds: list[DataProto] = []
        while True:
            rounds.append(self._round(step, len(rounds), self._next_rows(count, rounds), is_last, timer))
            batch = DataProto.concat(rounds)
            usable = usable_rows(batch, self.passes.compares_group, self.config.algorithm.overlong_filter)
            chosen = self._informative(batch, usable)
            found = count_groups(batch.non_tensor_batch["uid"], chosen)
            num_asked = len(set(batch.non_tensor_batch["uid"]))
            if found >= wanted or not self._may_go_on(len(rounds), num_asked):
                break
            count = prompts_to_draw(wanted, found, num_asked)
        if self._refills and found < wanted:
            self.say(
                f"step {step}: {found} of {wanted} groups teach something after {len(rounds)} rounds of "
                f"generation and {num_asked} prompts (algorithm.filter_groups.max_num_gen_batches); the step "
                "goes on with these"
            )
        metrics = self._figures(batch, usable, chosen, len(rounds), timer)
        if not usable.any():
            raise RunStopped(f"Step {step}: no trajectory has a token to learn from.")
        if not chosen.any():
            chosen = usable  # all advantages are 0 then; the rest of the loss (entropy, KL) is as ever
        version = newest_version(batch)
        batch = batch if chosen.all() else batch.select_idxs(chosen)
        if self.passes.greedy_rollouts:
            batch, greedy_metrics = self._with_baselines(batch, step, timer)
            metrics |= greedy_metrics
        ages = staleness(batch, version)
        metrics |= {"rollout/staleness/mean": float(ages.mean()), "rollout/staleness/max": float(ages.max())}
        return without_padding(batch), metrics

    def save(self, folder: Path) -> None:
        """Writes what the next step depends on, but for the sampler's position, into a checkpoint."""
        self.partial_groups.save(folder)
        if self.pools is not None:
            self.pools.save(folder)

    def load(self, folder: Path) -> None:
        """Takes what `save` wrote. ValueError if there were pools then and are none now, or the other way."""
        self.partial_groups.load(folder)
        if self.pools is not None:
            self.pools.load(folder)
        elif (folder / POOLS_FILE).exists():
            raise ValueError(
                f"Found {POOLS_FILE} with data.difficulty_pools.enable=false; a run keeps the data order it "
                "began with. Set it to true, or trainer.resume_mode=none."
            )

    # -------------------------------------------------------------------------------------------- generation

    def _next_rows(self, count: int, rounds: list[DataProto]) -> list[int]:
        """The next `count` rows of the data set, not those that a round of this step has asked already."""
        if self.pools is None:
            return self.sampler.take(count)
        asked = {int(row) for batch in rounds for row in batch.non_tensor_batch["index"]}
        return self.pools.take(count, sorted(asked))

    def _round(self, step: int, number: int, indices: list[int], is_last: bool, timer: Timer) -> DataProto:
        """Asks these prompts, and goes on with the groups that were kept; scores what is complete.

        Returns whole groups, with figures of the generation as meta_info `metrics`.
        """
        rollout = self.config.actor_rollout_ref.rollout
        rows = [self.dataset[i] for i in indices]
        name = f"step{step}" if number == 0 else f"step{step}.{number}"
        prompts = prompt_batch(rows, name).repeat(rollout.n_agent * rollout.n, interleave=True)
        prompts, continuation = self.partial_groups.join(prompts)
        keeps = rollout.keep_partial and not is_last
        with timer("gen"):
            seeds = sampling_seeds(self.config.trainer.seed, TRAIN_STREAM, step, len(prompts), number)
            gen_batch = self._gen_batch(prompts, seeds, rollout.do_sample, keeps)
            if continuation is not None:
                gen_batch.non_tensor_batch["continuation"] = continuation
            batch = self.partial_groups.take(with_samples(prompts, self.generate(gen_batch)))
        with timer("reward"):
            figures = self._score(batch)
        batch.meta_info["metrics"] = batch.meta_info.get("metrics", {}) | figures
        if self.pools is not None:
            extra = batch.non_tensor_batch["reward_extra"]
            usable = usable_rows(batch, False, self.config.algorithm.overlong_filter)
            rates = solve_rates(batch, np.array([row["score"] for row in extra]), usable)
            self.pools.record(list(rates), list(rates.values()))
        return batch

    def _score(self, batch: DataProto) -> dict[str, float]:
        """Adds the scores to a batch; returns figures of them."""
        scored = self.tokens().score(batch)
        figures: dict[str, float] = scored.meta_info.pop("metrics")
        batch.union(scored)
        return figures

    def _gen_batch(
        self, prompts: DataProto, seeds: torch.Tensor, do_sample: bool, keep_partial: bool
    ) -> DataProto:
        rollout = self.config.actor_rollout_ref.rollout
        gen_batch = DataProto.from_dict(
            tensors={"sampling_seeds": seeds},
            non_tensors={name: prompts.non_tensor_batch[name] for name in ("raw_prompt_ids", "uid")},
        )
        gen_batch.meta_info = {
            "do_sample": do_sample,
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "validate": False,
            "keep_partial": keep_partial,
        }
        return gen_batch

    def _with_baselines(
        self, batch: DataProto, step: int, timer: Timer
    ) -> tuple[DataProto, dict[str, float]]:
        """Adds reward_baselines [N] float32, the score of one greedy trajectory of each row's prompt (ReMax).

        Rows of a prompt whose greedy trajectory could not be had (its search failed) leave the batch: there
        is nothing to compare them with.
        """
        uids = batch.non_tensor_batch["uid"]
        names, first = np.unique(uids.astype(str), return_index=True)
        columns = [
            name for name in batch.non_tensor_batch if name not in ("trajectory", "em", "reward_extra")
        ]
        prompts = batch.select([], columns).select_idxs(first)
        with timer("gen_max"):
            seeds = sampling_seeds(self.config.trainer.seed, TRAIN_STREAM, step, len(prompts))
            gen_batch = self._gen_batch(prompts, seeds, do_sample=False, keep_partial=False)
            gen_batch.meta_info["validate"] = True  # each is alone with its prompt: none is a straggler
            greedy = with_samples(prompts, self.generate(gen_batch))
        with timer("reward"):
            self._score(greedy)
        outcomes, complete = greedy.tensors["outcome"], greedy.tensors["num_sampled"] > 0
        row_of = torch.from_numpy(np.searchsorted(names, uids.astype(str)))
        batch.tensors["reward_baselines"] = outcomes[row_of]
        kept = complete[row_of].numpy()
        if not kept.any():
            raise RunStopped(f"Step {step}: no greedy trajectory (remax) came to an end.")
        return batch if kept.all() else batch.select_idxs(kept), {
            "remax/baseline": float(outcomes[complete].mean()),
            "remax/left_out": float((~kept).sum()),
        }

    # --------------------------------------------------------------------------------------------- selection

    @property
    def _refills(self) -> bool:
        return self.config.algorithm.filter_groups.enable and self.config.algorithm.filter_groups.refill

    def _may_go_on(self, num_rounds: int, num_asked: int) -> bool:
        """Whether a step that lacks groups asks more: within its rounds, and not more than there are rows."""
        limit = self.config.algorithm.filter_groups.max_num_gen_batches or num_rounds + 1
        return self._refills and num_rounds < limit and num_asked < len(self.dataset)

    def _informative(self, batch: DataProto, usable: np.ndarray) -> np.ndarray:
        if not self.config.algorithm.filter_groups.enable:
            return usable
        return informative_rows(self._compared_values(batch), batch.non_tensor_batch["uid"], usable)

    def _compared_values(self, batch: DataProto) -> np.ndarray:
        """What the members of a group must differ in, [N] or [N, K] (`algorithm.filter_groups.metric`)."""
        metric, keys = self.config.algorithm.filter_groups.metric, self.passes.reward_keys
        if metric is None and keys:
            columns = [values_named(batch, name, "algorithm.gdpo_reward_keys") for name in keys]
            return np.stack(columns, axis=1)
        if metric in (None, "seq_reward"):
            return batch.tensors["outcome"].double().numpy()
        if metric == "acc" and "acc" not in batch.non_tensor_batch["reward_extra"][0]:
            metric = "em"
        return values_named(batch, metric, "algorithm.filter_groups.metric")

    def _figures(
        self, batch: DataProto, usable: np.ndarray, chosen: np.ndarray, num_rounds: int, timer: Timer
    ) -> dict[str, float]:
        """Figures of all trajectories that the step has made, those that are not learnt from too."""
        columns, seconds = batch.non_tensor_batch, timer.seconds["gen"]
        records, uids = columns["trajectory"], columns["uid"]
        metrics: dict[str, float] = batch.meta_info.pop("metrics", {})
        metrics |= straggler_metrics(batch) | {"env/kept_groups": float(self.partial_groups.num_groups)}
        metrics |= self.trajectory_metrics(list(records)) | {"env/left_out": float((~usable).sum())}
        if self.config.algorithm.overlong_filter:
            cut = [record["finish_reason"] == "length" for record in records]
            metrics["filter/overlong"] = float(sum(cut))
        if self.config.algorithm.filter_groups.enable:
            groups, kept = count_groups(uids, usable), count_groups(uids, chosen)
            metrics |= {
                "filter/groups": float(groups),
                "filter/groups_left_out": float(groups - kept),
                "filter/num_gen_batches": float(num_rounds),
                "groups/effective_share": kept / max(groups, 1),
            }
        if self.pools is not None:
            metrics |= self.pools.metrics()
        if usable.any():
            metrics |= reward_means(batch, usable) | {
                "train/em": float(columns["em"][usable].astype(float).mean()),
                "train/score": float(batch.tensors["outcome"].numpy()[usable].mean()),
                "train/searches": float(np.mean([record["num_searches"] for record in records[usable]])),
            }
        num_sampled = float(batch.tensors["num_sampled"].sum())
        return metrics | {
            "perf/generated_tokens": num_sampled,
            "perf/generated_tokens_per_second": num_sampled / max(seconds, 1e-9),
        }
