"""The algorithms, as pure functions: rewards go in, advantages and losses come out.

Shapes: N trajectories (rows), R response tokens (columns), all floats float32. `response_mask` [N, R] is 1
where the policy sampled the token and 0 on observations and padding. Whatever stands under a 0 (NaN too) has
no influence on any result here, and advantages and returns are 0 there.

    token_level_scores [N, R] --apply_kl_penalty--> token_level_rewards [N, R]
    token_level_rewards, values, uid --compute_advantage--> advantages, returns [N, R]
    log_prob, old_log_prob, advantages --compute_policy_loss--> scalar;  vpreds, returns
    --compute_value_loss--> scalar

New estimators and losses are added with `register_adv_est` and `register_policy_loss`.
"""

from verl.trainer.ppo.algos.advantages import (
    ADV_ESTIMATORS,
    AdvantageEstimator,
    compute_advantage,
    estimator_inputs,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.trainer.ppo.algos.aggregation import (
    LOSS_AGG_MODES,
    LossDenominator,
    agg_loss,
    denominator_counts,
    masked_whiten,
    prompt_counts,
)
from verl.trainer.ppo.algos.baselines import (
    RunningBaseline,
    compute_rae_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.trainer.ppo.algos.clipped_losses import (
    compute_policy_loss,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from verl.trainer.ppo.algos.covariance_losses import (
    compute_policy_loss_clip_cov,
    compute_policy_loss_kl_cov,
)
from verl.trainer.ppo.algos.entropy import (
    AdaptiveEntropyController,
    EntropyController,
    compute_entropy_loss,
    get_entropy_controller,
)
from verl.trainer.ppo.algos.gae import (
    compute_gae_advantage_return,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.trainer.ppo.algos.groups import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_maxrl_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from verl.trainer.ppo.algos.importance_losses import (
    compute_policy_loss_aipo,
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_importance_sampling,
    compute_policy_loss_ipo,
)
from verl.trainer.ppo.algos.kl import (
    KL_PENALTIES,
    KL_VALUES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    compute_kl_loss,
    get_kl_controller,
    kl_penalty,
)
from verl.trainer.ppo.algos.policy_losses import (
    POLICY_LOSSES,
    get_policy_loss_fn,
    get_selection_fn,
    policy_loss,
    policy_loss_inputs,
    register_policy_loss,
    vanishes_with_advantage,
)
from verl.trainer.ppo.algos.rollout_correction import (
    apply_rollout_correction,
    importance_weights,
    rejection_mask,
    take_out_rejected,
)
from verl.trainer.ppo.algos.supervised_losses import (
    compute_policy_loss_distillation,
    compute_policy_loss_sft,
    echo_loss,
)
from verl.trainer.ppo.algos.token_baseline import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)
from verl.trainer.ppo.algos.turns import add_turn_rewards, turn_advantages
from verl.trainer.ppo.algos.value_loss import compute_value_loss

__all__ = [
    "ADV_ESTIMATORS",
    "KL_PENALTIES",
    "KL_VALUES",
    "LOSS_AGG_MODES",
    "POLICY_LOSSES",
    "AdaptiveEntropyController",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "EntropyController",
    "FixedKLController",
    "LossDenominator",
    "RunningBaseline",
    "add_turn_rewards",
    "agg_loss",
    "apply_kl_penalty",
    "apply_rollout_correction",
    "compute_advantage",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_kl_loss",
    "compute_maxrl_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss",
    "compute_policy_loss_aipo",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_distillation",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_importance_sampling",
    "compute_policy_loss_ipo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_sft",
    "compute_policy_loss_vanilla",
    "compute_rae_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_value_loss",
    "denominator_counts",
    "echo_loss",
    "estimator_inputs",
    "get_adv_estimator_fn",
    "get_entropy_controller",
    "get_kl_controller",
    "get_policy_loss_fn",
    "get_selection_fn",
    "importance_weights",
    "kl_penalty",
    "masked_whiten",
    "policy_loss",
    "policy_loss_inputs",
    "prompt_counts",
    "register_adv_est",
    "register_policy_loss",
    "rejection_mask",
    "take_out_rejected",
    "turn_advantages",
    "vanishes_with_advantage",
]
