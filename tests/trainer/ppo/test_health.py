"""Each sign of collapse is told on a made-up collapse of it, at most once in a while; a real run that learns
gets no line."""

import json
import re
from pathlib import Path

import pytest

from verl.trainer.ppo.health import QUIET_STEPS, HealthMonitor

HEALTHY = {
    "actor/entropy": 0.8,
    "actor/ref_kl": 0.01,
    "actor/ppo_kl": 0.001,
    "actor/pg_clipfrac": 0.02,
    "actor/ratio/max": 3.0,
    "actor/ratio/min": 0.3,
    "critic/score/mean": 0.3,
    "groups/effective_share": 0.6,
    "rollout_corr/k3_kl": 0.0005,
    "response/repeated_ngrams": 0.03,
    "response_length/mean": 120.0,
    "response_length/clip_ratio": 0.02,
}

# what a collapse looks like -> words that its line must have
COLLAPSES = [
    ({"actor/entropy": 0.005, "critic/score/mean": 0.7}, "entropy is 0.005 nats"),
    ({"actor/entropy": 0.05}, "entropy fell from 0.8 to 0.05 .* score did not rise"),
    ({"actor/entropy": 4.0}, "entropy rose from 0.8 to 4 "),
    (
        {"actor/ref_kl": 2.0},
        r"to the reference a token of the policy is worth 2\.8 nats, one of its own 0\.8",
    ),
    ({"actor/ppo_kl": 0.3}, "moves by 0.3 nats"),
    ({"actor/pg_clipfrac": 0.45}, "clip takes the gradient of 45%"),
    ({"actor/ratio/max": 5000.0}, "factor of 5e\\+03"),
    ({"actor/ratio/min": 0.0001}, "factor of 0.0001"),
    ({"groups/effective_share": 0.05}, r"only 5% of the groups .*mean score 0\.3"),
    ({"rollout_corr/k3_kl": 0.3}, "rollout engine and trainer differ by a KL of 0.3"),
    ({"response/repeated_ngrams": 0.8}, "80% of what the policy writes"),
    ({"response_length/mean": 12.0}, "responses shrank from 120 to 12"),
    ({"response_length/clip_ratio": 0.9}, "90% of the trajectories"),
]


def recorded(name):
    """The metrics of each step of a real run."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def told(monitor, series, start=1):
    """[(step, line), ...] of a series of metrics."""
    return [
        (step, line) for step, metrics in enumerate(series, start) for line in monitor.check(step, metrics)
    ]


@pytest.mark.parametrize(("change", "words"), COLLAPSES, ids=[next(iter(change)) for change, _ in COLLAPSES])
def test_a_collapse_is_told_in_one_line_and_not_again_for_a_while(change, words):
    series = [HEALTHY] * 10 + [HEALTHY | change] * (QUIET_STEPS + 10)
    lines = told(HealthMonitor(), series)
    assert len(lines) == 2
    assert 10 < lines[0][0] <= 15 and lines[1][0] - lines[0][0] == QUIET_STEPS
    for _, line in lines:
        assert re.search(words, line) and "\n" not in line
        assert re.search(r"\b([Tt]ry|[Cc]heck) ", line)


@pytest.mark.parametrize("change", [change for change, _ in COLLAPSES if "rollout_corr/k3_kl" not in change])
def test_a_single_bad_step_is_not_told(change):
    series = ([HEALTHY] * 6 + [HEALTHY | change]) * 5
    assert told(HealthMonitor(), series) == []


@pytest.mark.parametrize("name", ["learning_run.jsonl", "learning_start.jsonl"])
def test_a_run_that_learns_gets_no_line(name):
    """Real runs of the shipped model on its world: 130 steps of one mini-batch; 12 steps of two mini-batches
    with a KL in the loss, and the figures of collapse.
    """
    series = recorded(name)
    assert series[-1]["critic/score/mean"] > series[0]["critic/score/mean"] + 0.2
    assert told(HealthMonitor(), series) == []


def test_a_run_that_collapses_is_told_of_before_its_score_is_gone():
    """A real run of the same model whose learning rate is eight times too large, with four mini-batches."""
    series = recorded("collapsing_run.jsonl")
    assert set(series[0]) == set(HEALTHY)
    gone = next(step for step, metrics in enumerate(series, 1) if metrics["critic/score/mean"] == 0)
    lines = told(HealthMonitor(), series)
    before = [line for step, line in lines if step < gone]
    assert any("single tokens drive the update" in line for line in before)
    assert any("its updates are too large" in line for line in before)
    after = " ".join(line for step, line in lines if step >= gone)
    assert "it runs in circles" in after and "the others teach nothing" in after
