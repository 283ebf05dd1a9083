"""The functions of core_algos take verl's keywords, and the keywords mean what they mean in verl 0.9.1."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import verl_calls

from verl.protocol import DataProto
from verl.trainer.ppo import core_algos as algos
from verl.trainer.ppo import ray_trainer

NUMBERS = json.loads((Path(__file__).parent / "verl_numbers.json").read_text())


@pytest.fixture(scope="module")
def ours():
    return verl_calls.compute(verl_calls.ACTOR)


def test_the_calls_are_those_whose_numbers_were_written_down(ours):
    assert ours.keys() == NUMBERS.keys()


@pytest.mark.parametrize("call", NUMBERS)
def test_a_call_with_verls_keywords_returns_verls_numbers(call, ours):
    assert ours[call] == pytest.approx(NUMBERS[call], rel=1e-6, abs=1e-6)


ONES = torch.ones(2, 3)


def test_several_ranks_need_the_counts_of_all_ranks():
    for mode, name in (("token-mean", "batch_num_tokens"), ("seq-mean-token-sum", "global_batch_size")):
        with pytest.raises(ValueError, match=f"dp_size=2 and no {name}"):
            algos.agg_loss(ONES, ONES, mode, dp_size=2)
    assert algos.agg_loss(ONES, ONES, "token-sum", dp_size=2) == 12


def test_a_denominator_goes_by_keyword_and_not_beside_verls_keywords():
    denominator = algos.LossDenominator.of(ONES)
    with pytest.raises(ValueError, match="dp_size: found LossDenominator.*as denominator="):
        algos.agg_loss(ONES, ONES, "token-mean", denominator)
    with pytest.raises(ValueError, match="Found a denominator with dp_size"):
        algos.agg_loss(ONES, ONES, "token-mean", batch_num_tokens=6, denominator=denominator)
    with pytest.raises(ValueError, match="Found a denominator with dp_size"):
        algos.compute_value_loss(ONES, ONES, ONES, ONES, 0.5, dp_size=2, denominator=denominator)
    with pytest.raises(ValueError, match="batch_num_tokens: found -1"):
        algos.agg_loss(ONES, ONES, "token-mean", batch_num_tokens=-1)


def test_an_unknown_name_in_the_actors_global_batch_info_is_an_error():
    config = verl_calls.Block(verl_calls.ACTOR, global_batch_info={"num_tokens": 3})
    with pytest.raises(ValueError, match=r"global_batch_info: found \['num_tokens'\]"):
        algos.compute_policy_loss_gpg(ONES, ONES, ONES, ONES, config=config)


def test_clip_cov_chooses_out_of_its_own_rows_when_nobody_has_chosen():
    config = verl_calls.Block(verl_calls.ACTOR, global_batch_info={})
    batch = (verl_calls.OLD, verl_calls.NEW, verl_calls.ADVANTAGES, verl_calls.MASK)
    old, new, advantages, mask = batch
    chosen = algos.loss_traits("clip_cov").select(new, old, advantages, mask, config, 0)
    assert chosen.any()
    loss, _ = algos.compute_policy_loss_clip_cov(*batch, config=config)
    wanted, _ = algos.compute_policy_loss_clip_cov(*batch, config=config, selection=chosen)
    assert loss == wanted  # with a share of 1 all candidates are chosen


ESTIMATORS = ("grpo_passk", "rloo", "rloo_vectorized", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
ESTIMATORS += ("remax", "opo", "gpg", "gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_takes_what_a_trainer_passes_to_all_and_refuses_a_name_that_nobody_knows(name):
    rewards = torch.zeros(2, 3)
    arguments = {
        "token_level_rewards": rewards,
        "response_mask": ONES,
        "index": np.array(["a", "a"], dtype=object),
        "config": SimpleNamespace(gamma=1.0, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=["em"]),
        "reward_baselines": torch.zeros(2),
        "non_tensor_batch": {"em": np.array([1.0, 0.0])},
        "batch": {},
        "old_log_probs": -ONES,
        "sum_pi_squared": ONES,
    }
    advantages, returns = algos.get_adv_estimator_fn(name)(**arguments)
    assert advantages.shape == returns.shape == (2, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'baseline'"):
        algos.get_adv_estimator_fn(name)(**arguments, baseline=1.0)


def test_gdpo_reads_its_rewards_where_verls_trainer_has_them():
    uids = np.array(list("aaaa"), dtype=object)
    columns = {"em": np.array([1.0, 0.0, 0.0, 0.0]), "format": np.array([1.0, 1.0, 0.0, 0.0])}
    mask = torch.ones(4, 2)
    rewards = torch.zeros(4, 2)
    config = {"gdpo_reward_keys": ["em", "format"], "gdpo_reward_weights": [1.0, 0.5]}
    call = {"config": config, "non_tensor_batch": columns, "batch": {}}
    advantages, _ = algos.compute_gdpo_outcome_advantage(rewards, mask, uids, **call)
    components = {name: torch.tensor(column) for name, column in columns.items()}
    weights = {"em": 1.0, "format": 0.5}
    wanted, _ = algos.compute_gdpo_outcome_advantage(
        rewards, mask, uids, reward_components=components, reward_weights=weights
    )
    assert torch.equal(advantages, wanted) and advantages[0, 0] > advantages[1, 0] > advantages[2, 0]
    one = torch.zeros(4, 2)
    one[:, 1] = components["em"]
    alone, _ = algos.compute_gdpo_outcome_advantage(one, mask, uids)
    wanted, _ = algos.compute_gdpo_outcome_advantage(
        rewards, mask, uids, reward_components={"em": components["em"]}
    )
    assert torch.equal(alone, wanted)
    for wrong, found in (
        ({"gdpo_reward_keys": ["exact"]}, r"gdpo_reward_keys=\['exact'\] and the columns \['em', 'format'\]"),
        ({"gdpo_reward_keys": ["em"], "gdpo_reward_weights": [1.0, 2.0]}, "2 gdpo_reward_weights for 1"),
        ({"gdpo_reward_weights": [1.0]}, "expected one with gdpo_reward_keys"),
    ):
        with pytest.raises(ValueError, match=found):
            algos.compute_gdpo_outcome_advantage(rewards, mask, uids, **(call | {"config": wrong}))
    batch = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, {"uid": uids, **columns}
    )
    data = ray_trainer.compute_advantage(batch, "gdpo", config=config)
    assert torch.equal(data.batch["advantages"], advantages)


def test_reinforce_plus_plus_needs_a_gamma_from_somewhere():
    with pytest.raises(ValueError, match="config=None; expected one with gamma"):
        algos.compute_reinforce_plus_plus_outcome_advantage(ONES, ONES)


def scored_rows() -> DataProto:
    scores = torch.zeros(4, 2)
    scores[:, 1] = torch.tensor([0.0, 1.0, 2.0, 0.5])
    columns = {"token_level_scores": scores, "number": torch.arange(4), "response_mask": torch.ones(4, 2)}
    names = np.array(list("abcd"), dtype=object)
    return DataProto.from_dict(columns, {"uid": names}, {"turns": [0, 1, 2, 3], "step": 7})


@pytest.mark.parametrize(
    ("method", "weight_pow", "chances"),
    [
        ("pow", 1.0, [0.0, 2 / 7, 4 / 7, 1 / 7]),
        ("pow", 2.0, [0.0, 4 / 21, 16 / 21, 1 / 21]),
        ("max_min", 2.0, [0.5, 0.0, 0.5, 0.0]),
        ("max_random", 2.0, [1 / 7, 1 / 7, 4 / 7, 1 / 7]),
    ],
)
def test_pf_ppo_draws_rows_by_their_scores_and_whole(method, weight_pow, chances):
    torch.manual_seed(0)
    counts = torch.zeros(4)
    for _ in range(300):
        drawn = algos.compute_pf_ppo_reweight_data(
            data=scored_rows(), reweight_method=method, weight_pow=weight_pow
        )
        numbers = drawn.batch["number"].tolist()
        counts += torch.bincount(drawn.batch["number"], minlength=4)
    assert len(drawn) == 4 and drawn.meta_info == {"turns": numbers, "step": 7}
    assert drawn.non_tensor_batch["uid"].tolist() == ["abcd"[number] for number in numbers]
    assert (counts / 1200).tolist() == pytest.approx(chances, abs=0.05)


def test_compute_advantage_draws_rows_where_the_configuration_has_pf_ppo():
    data = scored_rows()
    data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    data.batch["values"] = torch.zeros(4, 2)
    config = {"use_pf_ppo": True, "pf_ppo": {"reweight_method": "max_min", "weight_pow": 2.0}}
    drawn = ray_trainer.compute_advantage(data, "gae", config=config)
    assert set(drawn.batch["number"].tolist()) <= {0, 2} and "advantages" in drawn.batch
    with pytest.raises(ValueError, match="reweight_method: found 'min', expected pow"):
        algos.compute_pf_ppo_reweight_data(scored_rows(), "min")


def test_apply_kl_penalty_of_ray_trainer_returns_the_batch_and_verls_metrics():
    data = scored_rows()
    data.batch["old_log_probs"] = torch.full((4, 2), -0.5)
    data.batch["ref_log_prob"] = torch.full((4, 2), -1.0)
    controller = algos.FixedKLController(0.2)
    same, metrics = ray_trainer.apply_kl_penalty(data, kl_ctrl=controller, kl_penalty="kl")
    assert same is data
    assert metrics == pytest.approx({"actor/reward_kl_penalty": 0.5, "actor/reward_kl_penalty_coeff": 0.2})
    assert data.batch["token_level_rewards"][2].tolist() == pytest.approx([-0.1, 1.9])


def test_a_kl_controller_of_an_unknown_type_or_without_a_horizon_is_an_error():
    with pytest.raises(ValueError, match="kl_ctrl.type: found 'adaptiv', expected fixed or adaptive"):
        algos.get_kl_controller(SimpleNamespace(type="adaptiv", kl_coef=0.1))
    with pytest.raises(ValueError, match="kl_ctrl.horizon: found 0"):
        algos.get_kl_controller(SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=0))
    assert algos.AdaptiveKLController(init_kl_coef=0.1, target_kl=0.2, horizon=10).target == 0.2


def test_dro_needs_a_beta():
    config = verl_calls.Block(verl_calls.ACTOR, policy_loss=verl_calls.Block(dro_beta=None))
    with pytest.raises(ValueError, match="policy_loss.dro_beta: found None"):
        algos.compute_policy_loss_dro(-ONES, -ONES, ONES, ONES, config=config)


def test_the_registries_read_like_dicts():
    assert algos.ADV_ESTIMATOR_REGISTRY["grpo"] is algos.compute_grpo_outcome_advantage
    assert "vanilla" in algos.POLICY_LOSS_REGISTRY and "ppo" not in algos.POLICY_LOSS_REGISTRY
    assert set(algos.AdvantageEstimator) <= set(algos.ADV_ESTIMATOR_REGISTRY)
