"""Contradictions between estimator, data selection and the rest are refused, with what to do."""

import pytest

from verl.config import load_config
from verl.trainer.config import validate

GROUP = "actor_rollout_ref.rollout.n_agent"
FILTER = "prompt_selection.filter_groups"
POOLS = "prompt_selection.difficulty_pools"
STEP_WISE = "actor_rollout_ref.rollout.step_wise=true"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
OVERLONG = "reward_model.overlong_buffer"
KEYS = "algorithm.gdpo_reward_keys=[score,format]"
NO_KL = "algorithm.kl_ctrl.kl_coef=0"


@pytest.fixture()
def check(good):
    """check(estimator, *settings): validates a run with these."""

    def validated(estimator: str, *settings: str) -> None:
        batches = ("actor_rollout_ref.actor.ppo_mini_batch_size=32", f"{GROUP}=4")
        validate(load_config([*good, f"algorithm.adv_estimator={estimator}", *batches, *settings]))

    return validated


@pytest.mark.parametrize(
    "settings",
    [
        ("grpo",),
        ("gae",),
        ("remax", NO_KL),
        ("gdpo", NO_KL, KEYS, "algorithm.gdpo_reward_weights=[1,0.5]"),
        ("maxrl", NO_KL),
        ("grpo", f"{FILTER}.enable=true", f"{FILTER}.metric=acc"),
        ("rloo", f"{FILTER}.enable=true", f"{FILTER}.max_num_gen_batches=1"),
        ("grpo", f"{OVERLONG}.enable=true", "algorithm.overlong_filter=true"),
        ("gae", f"{POOLS}.enable=true", f"{POOLS}.easy_share=0.5", f"{POOLS}.hard_share=0.5"),
        ("grpo", "algorithm.turn_credit=0.5"),
        ("grpo", "algorithm.turn_credit=0.5", STEP_WISE),
        ("remax", NO_KL, STEP_WISE),
        ("rloo", STEP_WISE, f"{LOSS}=gspo"),
        ("rloo", f"{GROUP}=1", "trainer.val_only=true"),
    ],
)
def test_settings_that_fit_together_pass(settings, check):
    check(*settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("rloo", f"{GROUP}=1"), "group of 1 .*rloo.*Set actor_rollout_ref.rollout.n_agent"),
        (("grpo_passk", f"{GROUP}=1"), "group of 1 .*grpo_passk"),
        (
            ("gae", STEP_WISE),
            "step_wise=true with algorithm.adv_estimator=gae, which credits .* in later turns",
        ),
        (("reinforce_plus_plus", STEP_WISE), "adv_estimator=reinforce_plus_plus, .* Set step_wise=false"),
        (("tir_optimal_token_baseline", STEP_WISE), "tir_optimal_token_baseline, which credits"),
        (("remax", STEP_WISE), "adv_estimator=remax, .* or algorithm.kl_ctrl.kl_coef=0"),
        (("grpo", STEP_WISE, f"{LOSS}=dro_sequence"), "loss_mode=dro_sequence, .* or loss_mode=dro"),
        (("remax", "actor_rollout_ref.rollout.do_sample=false"), "do_sample=false .*expected do_sample=true"),
        (("gdpo", NO_KL), "gdpo_reward_keys=null with algorithm.adv_estimator=gdpo; expected the names"),
        (("grpo", KEYS), "gdpo_reward_keys=.* with algorithm.adv_estimator=grpo; .*null for every other"),
        (("gdpo", NO_KL, KEYS, "algorithm.gdpo_reward_weights=[1]"), "expected a number for each key"),
        (("gdpo", KEYS), "kl_coef=0.001 with algorithm.adv_estimator=gdpo.*Set algorithm.kl_ctrl.kl_coef=0"),
        (("gdpo", NO_KL, KEYS, "reward_model.search_cost=0.1"), "search_cost=0.1 .*one by one"),
        (("maxrl",), "kl_coef=0.001 with algorithm.adv_estimator=maxrl.*must not be negative"),
        (("maxrl", NO_KL, f"{OVERLONG}.enable=true"), "overlong_buffer.enable=true .*maxrl"),
        (("grpo", f"{OVERLONG}.enable=true", f"{OVERLONG}.len=512"), "every last turn .*for example 128"),
        (("grpo", "algorithm.turn_credit=1", "do_search=false"), "a single turn; expected 0"),
        (("gae", f"{FILTER}.enable=true"), "adv_estimator=gae, which does not compare"),
        (("remax", f"{FILTER}.enable=true"), "adv_estimator=remax, which does not compare"),
        (("grpo", f"{FILTER}.enable=true", f"{GROUP}=1"), "one trajectory a prompt.*n_agent"),
        (("grpo", f"{FILTER}.metric=acc"), "metric=acc without prompt_selection.filter_groups.enable=true"),
        (
            ("grpo", f"{FILTER}.enable=true", f"{FILTER}.metric=seq_final_reward"),
            "the reward with the KL in it.*expected seq_reward, acc",
        ),
        (("grpo", "actor_rollout_ref.teacher.path=/t"), "teacher.path=/t with .*loss_mode=vanilla"),
        (
            ("grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=distillation"),
            "teacher.path=null with .*distillation; expected a teacher",
        ),
        (("grpo", f"{POOLS}.easy_share=0.6", f"{POOLS}.hard_share=0.6"), "expected at most 1 together"),
    ],
)
def test_a_contradiction_says_what_was_found_and_what_to_do(settings, words, check):
    with pytest.raises(ValueError, match=words):
        check(*settings)
