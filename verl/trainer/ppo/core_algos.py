"""The algorithms, as pure functions: rewards go in, advantages and losses come out.

Shapes: N trajectories (rows), R response tokens (columns), all floats float32. `response_mask` [N, R] is 1
where the policy sampled the token and 0 on observations and padding. Whatever stands under a 0 (NaN too) has
no influence on any result here, and advantages and returns are 0 there.

    token_level_scores [N, R] --apply_kl_penalty--> token_level_rewards [N, R]
    AdvantageInputs --estimate_advantages--> advantages, returns [N, R]
    LossInputs --policy_loss--> scalar;  vpreds, returns --compute_value_loss--> scalar

You add estimators and losses with `register_adv_est` and `register_policy_loss`. The code is in `verl.algos`;
this module has all of it under the names that users import.
"""

# ruff: noqa: F401, F403

from verl.algos.advantages import *
from verl.algos.aggregation import *
from verl.algos.clipped_losses import *
from verl.algos.group_estimators import *
from verl.algos.importance_losses import *
from verl.algos.kl_and_entropy import *
from verl.algos.policy_losses import *
from verl.algos.rollout_correction import *
from verl.algos.token_estimators import *
