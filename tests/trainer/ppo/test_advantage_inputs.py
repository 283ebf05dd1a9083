"""What estimators are given besides rewards: turns and their rewards, components, running means."""

import math

import numpy as np
import pytest
import torch
from quick_config import config_with
from selection_batches import batch_of, record, turn

from verl.checkpoints.run_state import RunStopped
from verl.planning.passes import Passes
from verl.protocol import DataProto, object_array
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.core_algos import RunningBaseline, estimate_advantages, estimator_inputs
from verl.trainer.ppo.scoring import advantage_inputs, turn_ids, turn_rewards, values_named

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
    for wrong in (math.nan, math.inf, 1e39, "much"):
        batch.non_tensor_batch["reward_extra"][1] = {"turn_rewards": [wrong]}
        with pytest.raises(RunStopped, match="among turn_rewards; expected a finite number"):
            turn_rewards(batch)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "much"])
def test_a_named_reward_that_is_no_finite_number_is_named_with_its_response(wrong):
    tensors = {"num_sampled": torch.tensor([1, 1, 0])}
    extra = [{"format": 0.5}, {"format": wrong, "answer": "Ada"}, {}]
    batch = DataProto.from_dict(tensors, {"reward_extra": object_array(extra)})
    with pytest.raises(RunStopped, match="format=.* for the answer 'Ada'; expected a finite"):
        values_named(batch, "format", "algorithm.gdpo_reward_keys")


# The advantages that verl's compute_advantage adds to the batch below, under its response mask
# (verl/trainer/ppo/ray_trainer.py of the wheels 0.8.0 and 0.9.1, which agree).
VERLS_ADVANTAGES = {
    "gae": [[1.24035, 1.57434], [-1.16722, -0.51314, -0.2812], [-0.00027, 0.17341, 0.41463], [-1.44091]],
    "grpo": [[0.70711] * 2, [-0.70711] * 3, [0.70711] * 3, [-0.70711]],
    "rloo": [[1.0] * 2, [-1.0] * 3, [1.5] * 3, [-1.5]],
    "remax": [[0.5] * 2, [-0.5] * 3, [0.5] * 3, [-1.0]],
    "reinforce_plus_plus": [[1.16861] * 2, [-0.44947] * 3, [0.35957] * 3, [-2.06755]],
    "reinforce_plus_plus_baseline": [[0.59751] * 2, [-0.93894] * 3, [0.98162] * 3, [-1.32305]],
    "opo": [[0.6] * 2, [-0.4] * 3, [0.375] * 3, [-1.125]],
}


@pytest.mark.parametrize("estimator", VERLS_ADVANTAGES)
def test_verls_call_adds_verls_advantages(estimator):
    columns = {
        "token_level_rewards": torch.tensor([[0, 1, 0], [0, 0, 0], [0, 0, 0.5], [-1, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "responses": torch.arange(12).reshape(4, 3),
        "values": torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.1, 0.0], [0.2, 0.2, 0.2], [-0.5, 0.0, 0.0]]),
        "reward_baselines": torch.tensor([0.5, 0.5, 0.0, 0.0]),
    }
    batch = DataProto.from_dict(columns, {"uid": np.array(list("aabb"), dtype=object)})
    gamma, lam = (0.9, 0.8) if estimator == "gae" else (1.0, 1.0)
    data = ray_trainer.compute_advantage(batch, estimator, gamma, lam, num_repeat=2, config=None)
    for row, expected in zip(data.batch["advantages"].tolist(), VERLS_ADVANTAGES[estimator], strict=True):
        assert row == pytest.approx(expected + [0.0] * (3 - len(expected)), abs=1e-5)
    if estimator == "gae":
        assert data.batch["returns"][2].tolist() == pytest.approx([0.32112, 0.396, 0.5], abs=1e-5)


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
    passes = Passes(config)
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
    advantages, _ = estimate_advantages(estimator, inputs)
    mask = batch.tensors["response_mask"].bool()
    assert advantages[mask].isfinite().all() and not advantages[~mask].any()


def test_components_have_their_weights_and_rows_without_a_token_count_nowhere():
    config = config_of(
        "gdpo", "algorithm.gdpo_reward_keys=[score,format]", "algorithm.gdpo_reward_weights=[1,0.5]"
    )
    extra = [{"score": 1.0, "format": 0.5}, {"score": 0.0, "format": 0.25}, {"score": 0.0}]
    batch = batch_of("aba", [1, 1, 0], extra=extra)
    batch.tensors["token_level_rewards"] = torch.zeros(3, 1)
    inputs = advantage_inputs(batch, config.algorithm, Passes(config), RunningBaseline())
    assert inputs.reward_weights == {"score": 1.0, "format": 0.5}
    score, format_score = (inputs.reward_components[name].tolist() for name in ("score", "format"))
    assert score == [1.0, 0.0, 0.0] and format_score[:2] == [0.5, 0.25] and math.isnan(format_score[2])
    advantages, _ = estimate_advantages("gdpo", inputs)
    assert advantages[0] > 0 > advantages[1] and advantages[2] == 0
    inputs.reward_components["format"][1] = math.nan
    advantages, _ = estimate_advantages("gdpo", inputs)
    assert advantages[:2].isnan().all()  # what is no number is not hidden
