"""The algorithms, as pure functions: rewards go in, advantages and losses come out.

Shapes: N trajectories (rows), R response tokens (columns), all floats float32. `response_mask` [N, R] is 1
where the policy sampled the token and 0 on observations and padding. Whatever stands under a 0 (NaN too) has
no influence on any result here, and advantages and returns are 0 there.

    token_level_scores [N, R] --apply_kl_penalty--> token_level_rewards [N, R]
    AdvantageInputs --compute_advantage--> advantages, returns [N, R]
    LossInputs --policy_loss--> scalar;  vpreds, returns --compute_value_loss--> scalar

New estimators and losses are added with `register_adv_est` and `register_policy_loss`. The code is in
`verl.algos`; this module has all of it under the names that users import.
"""

# ruff: noqa: F401

from verl.algos.advantages import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    AdvantageInputs,
    RunningBaseline,
    add_turn_rewards,
    compute_advantage,
    estimator_inputs,
    get_adv_estimator_fn,
    register_adv_est,
    turn_advantages,
)
from verl.algos.aggregation import (
    LOSS_AGG_MODES,
    LossDenominator,
    agg_loss,
    compute_value_loss,
    denominator_counts,
    echo_loss,
    masked_whiten,
    prompt_counts,
)
from verl.algos.clipped_losses import (
    compute_policy_loss,
    compute_policy_loss_clip_cov,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_kl_cov,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from verl.algos.group_estimators import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.algos.importance_losses import (
    compute_policy_loss_aipo,
    compute_policy_loss_cispo,
    compute_policy_loss_distillation,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_importance_sampling,
    compute_policy_loss_ipo,
    compute_policy_loss_sft,
)
from verl.algos.kl_and_entropy import (
    KL_PENALTIES,
    KL_VALUES,
    AdaptiveEntropyController,
    AdaptiveKLController,
    EntropyController,
    FixedKLController,
    apply_kl_penalty,
    compute_entropy_loss,
    compute_kl_loss,
    get_entropy_controller,
    get_kl_controller,
    kl_penalty,
)
from verl.algos.policy_losses import (
    POLICY_LOSSES,
    LossInputs,
    get_policy_loss_fn,
    loss_traits,
    policy_loss,
    policy_loss_inputs,
    register_policy_loss,
)
from verl.algos.rollout_correction import (
    apply_rollout_correction,
    importance_weights,
    rejection_mask,
    take_out_rejected,
)
from verl.algos.token_estimators import (
    compute_gae_advantage_return,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
    compute_rae_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
