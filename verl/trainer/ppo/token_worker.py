"""The part of a step that looks at tokens and belongs to no model, in a process of its own.

    generated rows -> score -> ... log-probs, values ... -> advantages -> for_update -> figures, records
         |                                                      |
         +--- continuations, without_unfinished                 +--- in one place: needs all rows at once

With one process this is the driver's own. With worker processes it stands beside the driver, on the same
machine: it takes the columns over tokens from where the workers left them and leaves those that it makes to
them, so that the driver handles rows, scores and lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from omegaconf import DictConfig

from verl.protocol import DataProto
from verl.single_controller.base import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from verl.single_controller.factory import build_worker_groups
from verl.trainer.ppo import core_algos, metric_utils
from verl.trainer.ppo.advantage_inputs import advantage_inputs
from verl.trainer.ppo.algos.advantages import AdvantageFn
from verl.trainer.ppo.batching import arrangement
from verl.trainer.ppo.partial_groups import continuations, without_unfinished
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.run_state import RunStopped
from verl.trainer.ppo.scoring import SCORES, score, score_answers
from verl.trainer.ppo.update_columns import add_prompt_counts, observation_mask
from verl.utils.records.trajectories import TokenTexts, trajectory_records
from verl.utils.reward_score import REWARD_FUNCTIONS
from verl.workers.reward_manager import RewardManager

ADVANTAGE_COLUMNS = (
    "responses",
    "response_mask",
    "token_level_scores",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "values",
    "sum_pi_squared",
    "reward_baselines",
    "num_sampled",
)
FIGURE_COLUMNS = (
    "responses",
    "response_mask",
    "sampled_mask",
    "attention_mask",
    "token_level_scores",
    "token_level_rewards",
    "advantages",
    "returns",
    "values",
)
UPDATE_COLUMNS = ("input_ids", "attention_mask", "response_mask", "sampled_mask")
MADE_BY_ADVANTAGES = (
    "token_level_rewards",
    "advantages",
    "returns",
    "rollout_is_weights",
    "old_log_probs",
    "response_mask",
    "sampled_mask",
)


class TokenWork(Protocol):
    """What the collection of a step's trajectories has done where the tokens are; see `TokenWorker`."""

    def score(self, batch: DataProto) -> DataProto: ...

    def continuations(self, batch: DataProto) -> DataProto: ...

    def without_unfinished(self, batch: DataProto) -> DataProto: ...


class TokenWorker(Worker):
    """Scores, advantages, balancing, figures and records of a step.

    Each method takes the rows that it looks at and returns a DataProto with what it has made of them.

    Args:
        config: the whole configuration.
        tokenizer: the policy's.
        reward_fn, val_reward_fn: DataProto -> scores, in training and in validation.
        estimators, rewards: functions that were registered in the process that starts this one, by name.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        reward_fn: RewardManager,
        val_reward_fn: RewardManager,
        estimators: Mapping[str, AdvantageFn] | None = None,
        rewards: Mapping[str, Callable[[str, Any], float]] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.passes = config, Passes.of(config)
        self.tokenizer, self.reward_fn, self.val_reward_fn = tokenizer, reward_fn, val_reward_fn
        self.texts: TokenTexts | None = None
        for name, estimator in (estimators or {}).items():
            if name not in core_algos.ADV_ESTIMATORS:
                core_algos.register_adv_est(name)(estimator)
        for source, reward in (rewards or {}).items():
            REWARD_FUNCTIONS.setdefault(source, reward)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score(self, batch: DataProto) -> DataProto:
        """What `scoring.score` adds, and its figures as meta_info `metrics`."""
        figures = score(batch, self.reward_fn, self.config)
        return _made(batch, SCORES, ["em", "reward_extra"], {"metrics": figures})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score_answers(self, batch: DataProto) -> DataProto:
        """The scores of a validation, see `scoring.score_answers`."""
        return score_answers(batch, self.val_reward_fn)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def continuations(self, batch: DataProto) -> DataProto:
        """See `partial_groups.continuations`."""
        return continuations(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def without_unfinished(self, batch: DataProto) -> DataProto:
        """See `partial_groups.without_unfinished`."""
        return without_unfinished(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def advantages(
        self,
        batch: DataProto,
        step: int,
        kl_controller: core_algos.FixedKLController,
        running_baseline: core_algos.RunningBaseline,
    ) -> DataProto:
        """Rewards, advantages, returns; which tokens the update leaves out, and how it weighs the others.

        meta_info: `metrics`, and `kl_controller`, `running_baseline` as they are after this step.
        """
        algorithm, tensors = self.config.algorithm, batch.tensors
        given = dict(tensors.items())
        metrics = core_algos.apply_rollout_correction(batch, algorithm.rollout_correction)
        if self.passes.kl_in_reward:
            metrics |= core_algos.apply_kl_penalty(batch, kl_controller, algorithm.kl_penalty)
        else:
            tensors["token_level_rewards"] = tensors["token_level_scores"]
        inputs = advantage_inputs(batch, algorithm, self.passes, running_baseline)
        try:
            tensors["advantages"], tensors["returns"] = core_algos.compute_advantage(
                algorithm.adv_estimator, **inputs
            )
        except ValueError as error:  # rewards that the estimator can't take
            raise RunStopped(f"step {step}: {error}") from error
        if "baseline_keys" in inputs:
            rewards = tensors["token_level_rewards"]
            running_baseline.update(rewards, tensors["response_mask"], inputs["baseline_keys"])
        core_algos.take_out_rejected(batch)
        made = [name for name in MADE_BY_ADVANTAGES if tensors.get(name, None) is not given.get(name)]
        after = {"kl_controller": kl_controller, "running_baseline": running_baseline}
        return _made(batch, made, [], {"metrics": metrics} | after)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def for_update(
        self,
        batch: DataProto,
        num_replicas: int,
        mini_batch_rows: int,
        attention_length: float,
        counts_prompts: bool,
        learns_observations: bool,
    ) -> DataProto:
        """meta_info `arrangement`, see `batching.arrangement`; prompt_tokens and prompt_rows, and
        observation_mask, where they are asked for.
        """
        made = []
        if counts_prompts:
            add_prompt_counts(batch, mini_batch_rows)
            made += ["prompt_tokens", "prompt_rows"]
        if learns_observations:
            batch.tensors["observation_mask"] = observation_mask(batch)
            made += ["observation_mask"]
        found = arrangement(batch, num_replicas, mini_batch_rows, attention_length)
        return _made(batch, made, [], {"arrangement": found})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def figures(self, batch: DataProto, timer: metric_utils.Timer) -> DataProto:
        """meta_info `metrics`: see `metric_utils.step_metrics`."""
        return DataProto(meta_info={"metrics": metric_utils.step_metrics(batch, timer, self.passes.values)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def records(self, batch: DataProto, step: int, split: str) -> DataProto:
        """meta_info `records`: one of each row, see `trajectory_records`."""
        self.texts = self.texts or TokenTexts(self.tokenizer)
        records = trajectory_records(batch, self.texts, step, split, len(batch))
        return DataProto(meta_info={"records": records})


def chosen(batch: DataProto, tensors: Sequence[str], objects: Sequence[str] = ("uid",)) -> DataProto:
    """Those of the named tensors that the batch has, and these columns of objects."""
    present = [*batch.widths, *([] if batch.batch is None else batch.batch.keys())]
    return batch.select([name for name in tensors if name in present], objects, [])


def _made(batch: DataProto, tensors: list[str], objects: list[str], meta_info: dict[str, Any]) -> DataProto:
    made = batch.select(tensors, objects, [])
    made.meta_info = meta_info
    return made


def start_token_worker(
    backend: str, config: DictConfig, tokenizer: Any, reward_fn: RewardManager, val_reward_fn: RewardManager
) -> WorkerGroup:
    """A group of one `TokenWorker`: in this process, or with Ray beside it."""
    estimator = config.algorithm.adv_estimator
    worker = ClassWithInitArgs(
        TokenWorker,
        config=config,
        tokenizer=tokenizer,
        reward_fn=reward_fn,
        val_reward_fn=val_reward_fn,
        estimators={estimator: core_algos.get_adv_estimator_fn(estimator)},
        rewards=dict(REWARD_FUNCTIONS),
    )
    pool = ResourcePool([1])
    if backend == "ray":
        from verl.single_controller.ray.driver_node import DriverNode  # a local run does without ray

        pool = DriverNode()
    return build_worker_groups(backend, pool, {"tokens": worker}, columns_stay=True)["tokens"]
