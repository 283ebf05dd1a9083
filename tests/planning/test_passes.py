"""Nothing is computed whose result is not used, and nothing is missing that is."""

import pytest
from quick_config import config_with

from verl.planning.passes import Passes

NO_KL = "algorithm.kl_ctrl.kl_coef=0"
KL_LOSS = "actor_rollout_ref.actor.use_kl_loss=true"
CORRECTION = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
CRITIC = "critic"
REFERENCE = "reference"
GREEDY = "greedy"
TEACHER = "teacher"
ONE = "old: one update"
SEVERAL = "old: several updates"

# settings -> the passes of a step, beside generation and update
TABLE = [
    ("grpo", [NO_KL], {SEVERAL}),
    ("grpo", [], {REFERENCE, ONE, SEVERAL}),  # KL in the reward, by default
    ("grpo", [KL_LOSS], {REFERENCE, SEVERAL}),
    ("grpo", [KL_LOSS, "actor_rollout_ref.actor.kl_loss_coef=0"], {SEVERAL}),
    ("gae", [NO_KL], {CRITIC, SEVERAL}),
    ("gae", [], {CRITIC, REFERENCE, ONE, SEVERAL}),
    ("rloo", [NO_KL], {SEVERAL}),
    ("reinforce_plus_plus", [NO_KL], {SEVERAL}),
    ("reinforce_plus_plus_baseline", [NO_KL], {SEVERAL}),
    ("grpo_passk", [NO_KL], {SEVERAL}),
    ("opo", [NO_KL], {SEVERAL}),
    ("gpg", [NO_KL], {SEVERAL}),
    ("maxrl", [NO_KL], {SEVERAL}),
    ("rae", [NO_KL], {SEVERAL}),
    ("gdpo", [NO_KL, "algorithm.gdpo_reward_keys=[score]"], {SEVERAL}),
    ("remax", [NO_KL], {GREEDY, SEVERAL}),
    ("remax", [], {GREEDY, REFERENCE, ONE, SEVERAL}),
    ("optimal_token_baseline", [NO_KL], {ONE, SEVERAL}),
    ("tir_optimal_token_baseline", [NO_KL, f"{CORRECTION}.bypass_mode=true"], {ONE, SEVERAL}),
    ("grpo", [NO_KL, f"{CORRECTION}.rollout_is=token"], {ONE, SEVERAL}),
    ("grpo", [NO_KL, f"{CORRECTION}.rollout_rs=token"], {ONE, SEVERAL}),
    ("grpo", [NO_KL, f"{CORRECTION}.bypass_mode=true"], set()),
    ("grpo", [f"{CORRECTION}.bypass_mode=true"], {REFERENCE}),
    ("grpo", [NO_KL, f"{LOSS}=distillation"], {TEACHER, SEVERAL}),
    ("grpo", [NO_KL, f"{LOSS}=gspo"], {SEVERAL}),
    ("grpo", [NO_KL, "algorithm.turn_credit=0.5"], {SEVERAL}),
    ("gpg", [NO_KL, f"{LOSS}=gpg"], set()),
    ("grpo", [KL_LOSS, f"{LOSS}=sft"], {REFERENCE}),
    ("grpo", [f"{LOSS}=gpg"], {REFERENCE, ONE, SEVERAL}),
    ("grpo", [NO_KL, f"{LOSS}=gpg", f"{CORRECTION}.rollout_is=token"], {ONE, SEVERAL}),
]


@pytest.mark.parametrize(("estimator", "settings", "expected"), TABLE)
def test_a_configuration_makes_these_passes_and_no_other(estimator, settings, expected):
    passes = Passes(config_with(f"algorithm.adv_estimator={estimator}", *settings))
    made = {
        CRITIC: passes.needs_values,
        REFERENCE: passes.reference_log_probs(updates_actor=True),
        GREEDY: passes.greedy_rollouts,
        TEACHER: passes.needs_teacher,
        ONE: passes.old_log_probs(updates_actor=True, num_updates=1),
        SEVERAL: passes.old_log_probs(updates_actor=True, num_updates=2),
    }
    assert {name for name, is_made in made.items() if is_made} == expected


def test_while_the_critic_warms_up_only_what_the_reward_takes_is_computed():
    with_kl, without = (Passes(config_with("algorithm.adv_estimator=gae", *s)) for s in ([], [KL_LOSS]))
    assert with_kl.old_log_probs(False, 4) and with_kl.reference_log_probs(False)
    assert not without.old_log_probs(False, 4) and not without.reference_log_probs(False)


def test_a_run_that_only_validates_has_neither_critic_nor_reference():
    passes = Passes(config_with("algorithm.adv_estimator=gae", "trainer.val_only=true"))
    assert not passes.needs_values and not passes.needs_reference
