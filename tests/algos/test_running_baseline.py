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
    baseline = algos.RunningBaseline(decay)
    wanted = {}
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


def test_it_goes_on_from_its_state_as_if_nothing_had_happened():
    baseline = algos.RunningBaseline(0.9)
    ones = torch.ones(2, 3)
    baseline.update(ones, ones, ["nq", "hotpotqa"])
    resumed = algos.RunningBaseline(0.9)
    resumed.load_state_dict(json.loads(json.dumps(baseline.state_dict())))
    for each in (baseline, resumed):
        each.update(0.1 * ones, ones, ["nq", "triviaqa"])
    assert resumed.values == baseline.values and len(baseline.values) == 3
