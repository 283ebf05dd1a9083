"""What estimators are given besides rewards: turns and their rewards, components, running means."""

import math

import pytest
import torch
from quick_config import config_with
from selection_batches import batch_of, record, turn

from verl.trainer.ppo.core_algos import RunningBaseline, compute_advantage, estimator_inputs
from verl.trainer.ppo.passes import Passes
from verl.trainer.ppo.run_state import RunStopped
from verl.trainer.ppo.scoring import advantage_inputs, turn_ids, turn_rewards

SEARCHES = record(turns=[turn(0, 2, ["Lima"]), turn(3, 4, ["In OSLO."]), turn(4, 6, ["Oslo"]), turn(7, 8)])


def two_rows():
    masks = [[1, 1, 0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0, 0, 0]]
    return batch_of("aa", [8, 3], [SEARCHES, record(turns=[turn(0, 3)])], masks=masks)


def test_each_sampled_token_knows_its_turn_also_where_two_turns_border():
    expected = [[0, 0, -1, 1, 2, 2, -1, 3], [0, 0, 0, -1, -1, -1, -1, -1]]
    assert turn_ids(two_rows()).tolist() == expected


def test_the_first_search_that_finds_a_golden_answer_is_rewarded_and_no_other():
    rewards = turn_rewards(two_rows())
    assert rewards[0].tolist()[:3] == [0.0, 1.0, 0.0] and math.isnan(rewards[0, 3])
    assert rewards[1].isnan().all()


def test_a_reward_function_can_give_the_turns_their_rewards():
    batch = two_rows()
    batch.non_tensor_batch["reward_extra"][1] = {"turn_rewards": [0.5]}
    assert turn_rewards(batch)[1, 0] == 0.5
    batch.non_tensor_batch["reward_extra"][1] = {"turn_rewards": [0.5, None]}
    with pytest.raises(RunStopped, match="2 turn_rewards for a trajectory of 1 turns"):
        turn_rewards(batch)


def config_of(estimator: str, *more: str):
    return config_with(f"algorithm.adv_estimator={estimator}", "algorithm.kl_ctrl.kl_coef=0", *more)


ESTIMATORS = ["gae", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
ESTIMATORS += ["remax", "opo", "gpg", "gdpo", "maxrl", "rae", "optimal_token_baseline"]
ESTIMATORS += ["tir_optimal_token_baseline"]


@pytest.mark.parametrize("turn_credit", [0.0, 0.5])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_gets_all_that_it_asks_for(estimator, turn_credit):
    keys = ["algorithm.gdpo_reward_keys=[score,format]"] if estimator == "gdpo" else []
    config = config_of(estimator, f"algorithm.turn_credit={turn_credit}", *keys)
    passes = Passes.of(config)
    batch = two_rows()
    batch.non_tensor_batch["reward_extra"][:] = [{"score": 1.0, "format": 0.0}, {"score": 0.0, "format": 1}]
    rewards = torch.zeros(2, 8)
    rewards[0, 7] = 1.0
    batch.tensors["token_level_rewards"] = rewards
    for name in ("values", "old_log_probs", "sum_pi_squared"):  # what passes would have written
        batch.tensors[name] = torch.full((2, 8), -0.1 if name == "old_log_probs" else 0.1)
    batch.tensors["reward_baselines"] = torch.tensor([0.5, 0.5])
    baseline = RunningBaseline()
    inputs = advantage_inputs(batch, config.algorithm, passes, baseline)
    wanted = estimator_inputs(estimator, turn_credit) - {"rollout_is_weights"}
    assert all(getattr(inputs, name) is not None for name in wanted - {"reward_weights"})
    advantages, _ = compute_advantage(estimator, inputs)
    mask = batch.tensors["response_mask"].bool()
    assert advantages[mask].isfinite().all() and not advantages[~mask].any()


def test_components_have_their_weights_and_rows_without_a_token_count_nowhere():
    config = config_of(
        "gdpo", "algorithm.gdpo_reward_keys=[score,format]", "algorithm.gdpo_reward_weights=[1,0.5]"
    )
    extra = [{"score": 1.0, "format": 0.5}, {"score": 0.0, "format": math.nan}, {"score": 0.0}]
    batch = batch_of("aba", [1, 1, 0], extra=extra)
    batch.tensors["token_level_rewards"] = torch.zeros(3, 1)
    inputs = advantage_inputs(batch, config.algorithm, Passes.of(config), RunningBaseline())
    assert inputs.reward_weights == {"score": 1.0, "format": 0.5}
    score, format_score = (inputs.reward_components[name].tolist() for name in ("score", "format"))
    assert score == [1.0, 0.0, 0.0] and format_score[0] == 0.5 and all(map(math.isnan, format_score[1:]))
    advantages, _ = compute_advantage("gdpo", inputs)
    assert advantages[:2].isnan().all()  # what a reward function gets wrong is not hidden
    batch.non_tensor_batch["reward_extra"][1]["format"] = 0.1
    inputs = advantage_inputs(batch, config.algorithm, Passes.of(config), RunningBaseline())
    advantages, _ = compute_advantage("gdpo", inputs)
    assert advantages[0] > 0 > advantages[1] and advantages[2] == 0
