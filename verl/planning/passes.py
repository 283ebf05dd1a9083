"""The passes that a configuration needs before the update, and why: nothing unused is computed.

    asked for by                                             -> pass
    estimator takes values                                   -> the critic's values (and its update)
    estimator takes reward_baselines                         -> a greedy rollout of each prompt
    KL in the loss or in the reward, its coefficient above 0 -> the reference's log-probs
    policy loss takes teacher_log_prob                       -> the teacher's log-probs
    policy loss takes old_log_prob (not gpg, sft) and there  -> old log-probs
      are several updates in a step; KL in the reward;
      weights or rejection of rollout_correction; estimator
      takes old_log_probs or sum_pi_squared

A run that only validates (`trainer.val_only`) has no critic and no reference. In `bypass_mode` the rollout
engine's log-probs are the old ones, so only sum_pi_squared still asks for the pass.
"""

from __future__ import annotations

from pathlib import Path

from verl.algos.advantages import estimator_inputs
from verl.algos.policy_losses import policy_loss_inputs
from verl.algos.rollout_correction import check_correction, needs_correction
from verl.config import Config
from verl.config.policy import Actor
from verl.config.schema import Critic
from verl.data.row_environments import environments_of, searches
from verl.environments.registry import SEARCH


class Passes:
    """The computations of a run, derived from the whole configuration.

    Raises ValueError for an estimator or a loss that does not exist, or a rollout correction that can't be.
    """

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        actor = config.actor_rollout_ref.actor
        check_correction(algorithm.rollout_correction, config.actor_rollout_ref.rollout)
        inputs = estimator_inputs(algorithm.adv_estimator)
        loss_inputs = policy_loss_inputs(actor.policy_loss.loss_mode)
        trains = not config.trainer.val_only
        self.turn_credit = algorithm.turn_credit  # the weight of the rewards of single turns
        # The names of all that the estimator takes.
        self.estimator_inputs = estimator_inputs(algorithm.adv_estimator, self.turn_credit)
        self.needs_values = trains and "values" in inputs  # there is a critic
        self.compares_group = "index" in inputs  # an advantage is relative to the other rows of its prompt
        self.greedy_rollouts = "reward_baselines" in inputs  # each prompt has a greedy trajectory
        self.kl_in_reward = not actor.use_kl_loss and algorithm.kl_ctrl.kl_coef > 0
        kl_in_loss = actor.use_kl_loss and actor.kl_loss_coef > 0
        # Whether log-probs of the reference are needed, and those of actor_rollout_ref.teacher.
        self.needs_reference = trains and (self.kl_in_reward or kl_in_loss)
        self.needs_teacher = "teacher_log_prob" in loss_inputs
        # Whether rollout correction weights or rejects.
        self.has_rollout_correction = needs_correction(algorithm.rollout_correction)
        self.bypass = algorithm.rollout_correction.bypass_mode  # old log-probs are the rollout engine's
        self.sum_pi_squared = "sum_pi_squared" in inputs  # the old-log-prob pass gives this too
        self.has_ratio = "old_log_prob" in loss_inputs  # the policy loss can't do without old log-probs
        # Components of the reward that are looked at one by one (gdpo).
        self.reward_keys = tuple(algorithm.gdpo_reward_keys or ()) if "reward_components" in inputs else ()
        # Whether each turn is a row of the policy's update.
        self.step_wise: bool = config.actor_rollout_ref.rollout.step_wise

    def old_log_probs(self, updates_actor: bool, num_updates: int) -> bool:
        """Return whether a step makes the pass for old log-probs.

        Args:
            updates_actor: whether the step trains the actor (it does not in `trainer.critic_warmup`).
            num_updates: optimizer steps of the actor; with a single one the ratio is 1 anyway.
        """
        if self.sum_pi_squared:
            return True
        if self.bypass:
            return False
        in_advantages = self.kl_in_reward or "old_log_probs" in self.estimator_inputs
        return (
            in_advantages
            or self.has_rollout_correction
            or (self.has_ratio and updates_actor and num_updates > 1)
        )

    def reference_log_probs(self, updates_actor: bool) -> bool:
        """Return whether a step makes the reference's pass.

        In the critic's warm-up it does so only for a KL in the reward.
        """
        return self.kl_in_reward or (self.needs_reference and updates_actor)

    def banner(
        self, config: Config, rows: tuple[int, int], steps: tuple[int, int], num_processes: int
    ) -> str:
        """Return a description of the run, for its first lines.

        Args:
            config: the whole configuration.
            rows: number of training rows, and of validation rows.
            steps: number of steps that are done, and of all steps.
            num_processes: number of processes that train.
        """
        trainer = config.trainer
        actor = config.actor_rollout_ref.actor
        answers = config.actor_rollout_ref.rollout.n_agent * config.actor_rollout_ref.rollout.n
        files = config.data.train_files if config.data.mixture is None else "data.mixture"
        lines = [
            f"model: {config.actor_rollout_ref.model.path}",
            f"data: {rows[0]} training and {rows[1]} validation questions of {files}",
            f"algorithm: {config.algorithm.adv_estimator}, loss {actor.policy_loss.loss_mode}, learning rate "
            f"{actor.optim.lr:g}",
            f"batch: {config.data.train_batch_size} questions with {answers} answers each, mini-batches of "
            f"{actor.ppo_mini_batch_size}; {steps[1]} steps, {steps[0]} of them done",
            f"processes: {num_processes} ({trainer.backend}, {trainer.device})",
            f"folder: {Path(trainer.default_local_dir).expanduser()}",
        ]
        names = environments_of(config)
        if names != {SEARCH}:
            lines.append(f"environments: {', '.join(sorted(names))}")
        if searches(config):
            lines.append(f"retriever: {config.retriever.url}")
        if self.needs_values and steps[0] < trainer.critic_warmup:
            lines.append(
                f"the first {trainer.critic_warmup} steps train the critic alone (trainer.critic_warmup); "
                "the policy learns from then on"
            )
        return "\n".join(lines)


def num_mini_batches(config: Config, num_rows: int, block: Actor | Critic) -> int:
    """Return the number of mini-batches into which the actor or the critic (`block`) divides a batch.

    `num_rows` counts the rows of all processes.

    There are as many mini-batches as are needed if each has at most the configured size. A batch that holds
    more rows than planned (groups of the step before have joined it) has larger ones: a few rows too many
    must not get an optimizer step of their own.
    """
    rollout = config.actor_rollout_ref.rollout
    planned = config.data.train_batch_size * rollout.n_agent * rollout.n
    size = block.ppo_mini_batch_size * rollout.n
    if num_rows > planned:
        planned_count = -(-planned // size)
        size = -(-num_rows // planned_count)
    return -(-num_rows // size)
