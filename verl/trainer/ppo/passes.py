"""Which passes a configuration needs before the update, and why: nothing is computed that is not used.

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

from dataclasses import dataclass

from verl.algos.advantages import estimator_inputs
from verl.algos.policy_losses import policy_loss_inputs
from verl.algos.rollout_correction import check_correction, corrects
from verl.config import Config


@dataclass(frozen=True)
class Passes:
    """What a run computes; made by `Passes.of`.

    Attributes:
        estimator_inputs: the arguments of `compute_advantage` that the estimator takes.
        values: a critic. compares_group: an advantage is relative to the other rows of its prompt.
        greedy_rollouts: one greedy trajectory for each prompt.
        reference: log-probs of the reference. kl_in_reward: its KL is taken off the rewards.
        teacher: log-probs of `actor_rollout_ref.teacher`.
        corrects: rollout correction by weights or rejection. bypass: old log-probs are the rollout engine's.
        sum_pi_squared: the old-log-prob pass gives this too.
        has_ratio: the policy loss can't do without old log-probs.
        reward_keys: components of the reward that are looked at one by one (gdpo).
        turn_credit: weight of the rewards of single turns.
        step_wise: each turn is a row of the policy's update.
    """

    estimator_inputs: frozenset[str]
    values: bool
    compares_group: bool
    greedy_rollouts: bool
    reference: bool
    kl_in_reward: bool
    teacher: bool
    corrects: bool
    bypass: bool
    sum_pi_squared: bool
    has_ratio: bool
    reward_keys: tuple[str, ...]
    turn_credit: float
    step_wise: bool

    @classmethod
    def of(cls, config: Config) -> Passes:
        """Reads the whole configuration. ValueError for an estimator or a loss that is not there,
        or a rollout correction that can't be."""
        algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
        check_correction(algorithm.rollout_correction, config.actor_rollout_ref.rollout)
        inputs = estimator_inputs(algorithm.adv_estimator)
        with_turns = estimator_inputs(algorithm.adv_estimator, algorithm.turn_credit)
        kl_in_reward = not actor.use_kl_loss and algorithm.kl_ctrl.kl_coef > 0
        loss_inputs = policy_loss_inputs(actor.policy_loss.loss_mode)
        trains = not config.trainer.val_only
        return cls(
            estimator_inputs=frozenset(with_turns),
            values=trains and "values" in inputs,
            compares_group="index" in inputs,
            greedy_rollouts="reward_baselines" in inputs,
            reference=trains and (kl_in_reward or (actor.use_kl_loss and actor.kl_loss_coef > 0)),
            kl_in_reward=kl_in_reward,
            teacher="teacher_log_prob" in loss_inputs,
            corrects=corrects(algorithm.rollout_correction),
            bypass=algorithm.rollout_correction.bypass_mode,
            sum_pi_squared="sum_pi_squared" in inputs,
            has_ratio="old_log_prob" in loss_inputs,
            reward_keys=tuple(algorithm.gdpo_reward_keys or ()) if "reward_components" in inputs else (),
            turn_credit=algorithm.turn_credit,
            step_wise=config.actor_rollout_ref.rollout.step_wise,
        )

    def old_log_probs(self, updates_actor: bool, num_updates: int) -> bool:
        """Whether a step makes the pass for old log-probs.

        Args:
            updates_actor: the step trains the actor (not in `trainer.critic_warmup`).
            num_updates: optimizer steps on the actor. With a single one its ratio is 1 anyway.
        """
        if self.sum_pi_squared:
            return True
        if self.bypass:
            return False
        in_advantages = self.kl_in_reward or "old_log_probs" in self.estimator_inputs
        return in_advantages or self.corrects or (self.has_ratio and updates_actor and num_updates > 1)

    def reference_log_probs(self, updates_actor: bool) -> bool:
        """Whether a step makes the reference's pass: in the critic's warm-up only for KL in the reward."""
        return self.kl_in_reward or (self.reference and updates_actor)
