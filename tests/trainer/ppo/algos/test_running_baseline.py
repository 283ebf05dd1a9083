"""RAE: a running mean of scores per key, that survives a restart."""

import json

import pytest
import torch
from advantage_cases import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_batches import ragged_batches

from verl.trainer.ppo import core_algos as algos

KEYS = ["nq", "hotpotqa/asker", "hotpotqa/solver"]


def steps_of(batch):
    keys = [KEYS[i % 3] for i in range(batch.num_rows)]
    return batch.rewards, batch.response_mask, keys


@settings(deadline=None, derandomize=True, max_examples=15)
@given(batches=st.lists(ragged_batches(), min_size=1, max_size=3), decay=st.sampled_from([0.0, 0.5, 0.95]))
def test_the_running_mean_takes_in_each_score_as_the_mean_of_its_step(batches, decay):
    baseline, wanted = algos.RunningBaseline(decay), {}
    for batch in batches:
        rewards, mask, keys = steps_of(batch)
        before = dict(baseline.values)
        advantages, _ = algos.compute_rae_outcome_advantage(rewards, mask, baseline, keys)
        assert baseline.values == before, "reading must not change it"
        for i, key in enumerate(keys):
            against_the_mean_before = (batch.scores[i] - wanted.get(key, 0.0)) * mask[i]
            assert_close(advantages[i], against_the_mean_before)
        baseline.update(rewards, mask, keys)
        for key in set(keys):
            scores = [
                float(score)
                for score, row, other in zip(batch.scores, mask, keys, strict=True)
                if other == key and row.any()
            ]
            for _ in scores:
                wanted[key] = decay * wanted.get(key, 0.0) + (1 - decay) * sum(scores) / len(scores)
    assert baseline.values == pytest.approx(wanted, abs=1e-6)


def test_one_score_moves_it_by_one_minus_decay():
    baseline = algos.RunningBaseline(0.95)
    one, ones = torch.ones(1, 1), torch.ones(2, 1)
    baseline.update(one, one, ["nq"])
    assert baseline.values == pytest.approx({"nq": 0.05})
    baseline.update(ones, ones, ["nq", "nq"])
    assert baseline.values == pytest.approx({"nq": 0.05 * 0.95**2 + 1 - 0.95**2})
    advantages, _ = algos.compute_rae_outcome_advantage(one, one, baseline, ["never seen"])
    assert advantages.item() == 1.0


@settings(deadline=None, derandomize=True, max_examples=10)
@given(batch=ragged_batches(), random=st.randoms(use_true_random=False))
def test_the_order_of_rows_and_rows_without_a_token_do_not_matter(batch, random):
    rewards, mask, keys = steps_of(batch)
    straight, shuffled = algos.RunningBaseline(), algos.RunningBaseline()
    straight.update(rewards, mask, keys)
    order = random.sample(range(batch.num_rows), batch.num_rows)
    shuffled.update(batch.with_garbage(rewards)[order], mask[order], [keys[i] for i in order])
    assert shuffled.values == pytest.approx(straight.values, abs=1e-12)
    assert set(straight.values) == {key for key, row in zip(keys, mask, strict=True) if row.any()}


def test_it_goes_on_from_its_state_as_if_nothing_had_happened():
    baseline = algos.RunningBaseline(0.9)
    ones = torch.ones(2, 3)
    baseline.update(ones, ones, ["nq", "hotpotqa"])
    resumed = algos.RunningBaseline(0.9)
    resumed.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    for each in (baseline, resumed):
        each.update(0.1 * ones, ones, ["nq", "triviaqa"])
    assert resumed.values == baseline.values and len(baseline.values) == 3


def test_mistakes_are_said():
    with pytest.raises(ValueError, match=r"decay .* in \[0, 1\), found 1"):
        algos.RunningBaseline(1.0)
    with pytest.raises(ValueError, match="each of the 2 rows, found 1"):
        algos.compute_rae_outcome_advantage(
            torch.ones(2, 1), torch.ones(2, 1), algos.RunningBaseline(), ["nq"]
        )
