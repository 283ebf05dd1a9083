"""From scores to what the update learns from: what a step adds to its batch, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_config import config_with
from selection_batches import batch_of, record, turn

from verl.algos.advantages import RunningBaseline
from verl.algos.kl_and_entropy import FixedKLController
from verl.planning.passes import Passes
from verl.protocol import DataProto
from verl.trainer.ppo.scoring import add_advantages, score

NO_KL = "algorithm.kl_ctrl.kl_coef=0"
CORRECTION = "algorithm.rollout_correction"


def scored(uids: str, scores: list[float], turns: list[dict[str, Any]] | None = None) -> DataProto:
    """Return a batch of rows with two sampled tokens, the score on the second one."""
    records = [record(turns=turns) for _ in uids]
    batch = batch_of(uids, [2] * len(uids), records)
    token_level_scores = torch.zeros(len(uids), 2)
    token_level_scores[:, 1] = torch.tensor(scores)
    batch.tensors["token_level_scores"] = token_level_scores
    return batch


def learnt(batch: DataProto, *settings: str, baseline: RunningBaseline | None = None) -> list[list[float]]:
    """Return the advantages that a step with these settings adds."""
    config = config_with(*settings)
    controller = FixedKLController(config.algorithm.kl_ctrl.kl_coef)
    add_advantages(batch, config.algorithm, Passes(config), controller, baseline or RunningBaseline())
    advantages: list[list[float]] = batch.tensors["advantages"].tolist()
    return advantages


def test_the_reward_of_a_row_that_is_not_trained_is_in_its_groups_baseline():
    """Row 0 is stale, row 1 is rejected: their rewards count, their tokens do not."""
    batch = scored("aaa", [1.0, 1.0, 0.0])
    batch.tensors["stale_mask"] = torch.tensor([[True, True], [False, False], [False, False]])
    batch.tensors["rollout_log_probs"] = torch.full((3, 2), -1.0)
    batch.tensors["old_log_probs"] = torch.tensor([[-1.0, -1.0], [-9.0, -9.0], [-1.0, -1.0]])
    rejection = [f"{CORRECTION}.rollout_rs=sequence", f"{CORRECTION}.rollout_rs_threshold=2"]
    plain = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false"]
    advantages = learnt(batch, *plain, *rejection, NO_KL)
    assert advantages[2] == pytest.approx([-2 / 3] * 2)
    assert batch.tensors["response_mask"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert batch.tensors["sampled_mask"].tolist() == [[1, 1]] * 3


def test_running_means_are_those_before_the_step_and_take_its_scores_in_after_it():
    """One for each data source, whatever the prompt."""
    baseline = RunningBaseline()
    batch = scored("ab", [1.0, 0.0])
    assert learnt(batch, "algorithm.adv_estimator=rae", NO_KL, baseline=baseline) == [[1.0, 1.0], [0.0, 0.0]]
    mean = (1 - 0.95**2) * 0.5
    assert baseline.values == pytest.approx({"nq": mean})
    again = learnt(scored("ab", [1.0, 0.0]), "algorithm.adv_estimator=rae", NO_KL, baseline=baseline)
    assert again[0] == pytest.approx([1 - mean] * 2) and again[1] == pytest.approx([-mean] * 2)


def test_a_kl_in_the_reward_is_taken_off_before_rows_are_compared():
    batch = scored("aa", [1.0, 1.0])
    batch.tensors["old_log_probs"] = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]])
    batch.tensors["ref_log_prob"] = torch.tensor([[-1.0, -1.0], [-3.0, -1.0]])
    settings = ["algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false"]
    settings += ["algorithm.kl_ctrl.kl_coef=0.1", "actor_rollout_ref.actor.use_kl_loss=false"]
    advantages = learnt(batch, *settings)
    assert advantages[0] == pytest.approx([0.1, 0.1]) and advantages[1] == pytest.approx([-0.1, -0.1])
    assert batch.tensors["token_level_scores"].tolist() == [[0, 1], [0, 1]]


def test_discount_and_lambda_reach_the_estimator():
    """Before whitening the first token's advantage is gamma * lam of the last one's, with values of 0."""
    for gamma, lam in ((0.5, 1.0), (1.0, 0.5)):
        batch = scored("a", [1.0])
        batch.tensors["values"] = torch.zeros(1, 2)
        learnt(
            batch, "algorithm.adv_estimator=gae", f"algorithm.gamma={gamma}", f"algorithm.lam={lam}", NO_KL
        )
        assert batch.tensors["returns"].tolist() == [pytest.approx([gamma * lam, 1.0])]


def test_with_turns_as_rows_each_token_is_told_its_turn():
    batch = scored("aa", [1.0, 0.0], [turn(0, 1), turn(1, 2)])
    learnt(batch, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.step_wise=true", NO_KL)
    assert batch.tensors["turn_ids"].tolist() == [[0, 1], [0, 1]]


def test_the_outcome_is_the_score_after_costs():
    """It is what groups are filtered by; a penalty may make it negative."""
    entries = record("length", [turn(0, 2)])
    batch = batch_of("a", [2], [entries | {"num_searches": 1}])

    def reward_fn(data: DataProto, return_dict: bool) -> dict[str, Any]:
        return {"reward_tensor": torch.tensor([[0.0, 0.2]]), "score": [0.2], "em": [0.0], "f1": [0.0]}

    overlong = "reward_model.overlong_buffer"
    settings = [f"{overlong}.enable=true", f"{overlong}.len=4", f"{overlong}.penalty_factor=1"]
    settings += ["reward_model.search_cost=0.5", "data.max_prompt_length=40", "data.max_response_length=20"]
    score(batch, reward_fn, config_with(*settings))  # type: ignore[arg-type]
    assert batch.tensors["outcome"].tolist() == pytest.approx([0.2 * 0.5 - 1.0])


@pytest.mark.parametrize("missing", ["rollout_log_probs", "old_log_probs"])
def test_a_correction_without_its_log_probs_is_an_error_and_not_left_out(missing):
    for remedy in (["rollout_is=token"], ["rollout_rs=token", "rollout_rs_threshold=2"]):
        batch = scored("aa", [1.0, 0.0])
        for name in {"rollout_log_probs", "old_log_probs"} - {missing}:
            batch.tensors[name] = torch.full((2, 2), -1.0)
        settings = [f"{CORRECTION}.{key}" for key in remedy]
        with pytest.raises(ValueError, match=f"algorithm.rollout_correction needs {missing}"):
            learnt(batch, "algorithm.adv_estimator=grpo", NO_KL, *settings)
