"""Each sign of collapse is told on a made-up collapse of it, at most once in a while; a real run that learns
gets no line."""

import json
import re
from pathlib import Path

import numpy as np
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
    return [(step, finding.line) for step, finding in found(monitor, series, start)]


def found(monitor, series, start=1):
    """[(step, finding), ...] of a series of metrics."""
    return [
        (step, finding)
        for step, metrics in enumerate(series, start)
        for finding in monitor.check(step, metrics)
    ]


def learning_runs():
    """Name -> the metrics of each step of real runs of the microworld that learn; 128 rows a step."""
    text = (Path(__file__).parent / "learning_kinds.jsonl").read_text(encoding="utf-8")
    runs = {}
    for line in text.splitlines():
        columns = json.loads(line)
        name = columns.pop("run")
        for kind in ("1", "2"):
            columns[f"kinds/microworld.hops_{kind}/score"] = columns[f"kinds/microworld.hops_{kind}/em"]
        steps = zip(*columns.values(), strict=True)
        runs[name] = [dict(zip(columns, values, strict=True)) for values in steps]
    return runs


def kind(name, em, searches=1.5, questions=20, answers=4):
    """The figures of a kind of question in a step."""
    figures = {"em": em, "score": em, "searches": searches, "questions": questions}
    figures["count"] = questions * answers
    return {f"kinds/{name}/{figure}": float(value) for figure, value in figures.items()}


def collapses(monitor, series):
    return [(step, finding) for step, finding in found(monitor, series) if finding.is_collapse]


def noise(seed, num_steps, rates, questions, answers, likeness=0.5, answered=0.9):
    """Steps of a policy that does not change: each kind's questions are solved at a rate of their own, drawn
    around the kind's. likeness: the correlation of two answers to one question.
    """
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        metrics = {"actor/entropy": abs(rng.normal(0.5, 0.2))}
        for i, rate in enumerate(rates):
            spread = (1 - likeness) / likeness
            rate_of = rng.beta(rate * spread, (1 - rate) * spread, questions)
            em = rng.binomial(answers, rate_of).sum() / (questions * answers)
            searches = 1 + rng.binomial(1, 0.6, questions * answers).mean()
            metrics |= kind(f"source_{i}", em, searches, questions, answers)
        num_rows = len(rates) * questions * answers
        yield metrics | {"train/answered": rng.binomial(num_rows, answered) / num_rows}


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


# What was noted of the quickstart of seed 7 at a learning rate of 8e-4, whose answers and second searches go
# in steps 17 to 22; what lies between the noted values is interpolated.
QUICKSTART = [
    {"train/answered": answered, "actor/entropy": entropy}
    | kind("microworld.hops_1", one_hop, 1.6, questions=12)
    | kind("microworld.hops_2", two_hops, searches)
    for answered, entropy, one_hop, two_hops, searches in [
        *[(0.91, 3.0, 0.05, 0.01, 1.5)] * 4,
        *[(0.94, 2.8, 0.3, 0.02, 1.6)] * 4,
        *[(0.95, 2.4, 0.6, 0.05, 1.8)] * 4,
        *[(0.95, 2.2, 0.8, 0.08, 1.9)] * 4,
        (0.95, 2.2, 0.9, 0.08, 1.9),
        (0.93, 2.6, 0.95, 0.07, 1.8),
        (0.84, 3.4, 0.96, 0.05, 1.6),
        (0.79, 4.2, 0.96, 0.03, 1.4),
        (0.71, 4.9, 0.96, 0.02, 1.25),
        (0.66, 5.4, 0.96, 0.01, 1.15),
        *[(0.66, 5.4, 0.96, 0.005, 1.1)] * 12,
    ]
]


def test_a_run_that_falls_apart_is_told_of_within_ten_steps_of_the_onset():
    monitor = HealthMonitor()
    findings = {finding.name: (step, finding) for step, finding in found(monitor, QUICKSTART)}
    assert set(findings) == {"no_answers", "falls_apart", "searches_fall:microworld.hops_2"}
    for step, finding in findings.values():
        assert finding.is_collapse and 17 <= finding.onset <= 20 and step <= finding.onset + 10
        assert f"since step {finding.onset}" in finding.line
        assert f"checkpoint from before step {finding.onset}" in finding.line
    assert "66% now" in findings["no_answers"][1].line
    assert "the policy searches less for 2 hops" in findings["searches_fall:microworld.hops_2"][1].line
    assert {finding.name for finding in monitor.open_collapses} == set(findings)


@pytest.mark.parametrize(("coefficient", "is_told"), [(0.003, True), (0.0, False), (None, False)])
def test_where_the_entropy_rises_with_a_bonus_the_line_says_to_leave_the_bonus_out(coefficient, is_told):
    of_bonus = {} if coefficient is None else {"actor/entropy_coeff": coefficient}
    series = [metrics | of_bonus for metrics in QUICKSTART]
    lines = {finding.name: finding.line for _, finding in found(HealthMonitor(), series)}
    assert ("try actor.entropy_coeff=0, not 0.003" in lines["falls_apart"]) is is_told
    assert not any("entropy_coeff" in line for name, line in lines.items() if name != "falls_apart")


@pytest.mark.parametrize(
    ("answered", "limit"),
    [([1.0, 1.0, 0.91, 0.84, 0.63] + [0.6] * 10, 13), ([0.95] * 20 + [0.0] * 10, 25)],
    ids=["Gemma 3 270M", "at once"],
)
def test_a_policy_that_stops_answering_is_told_of_once(answered, limit):
    series = [{"train/answered": share} for share in answered]
    ((step, finding),) = collapses(HealthMonitor(), series)
    assert finding.name == "no_answers" and step <= limit and step <= finding.onset + 10


@pytest.mark.parametrize(
    ("answered", "entropy"),
    [
        ([0.98, 0.95, 0.52] + [0.97] * 10, [2.5] * 13),
        ([0.95] * 10 + [0.95, 0.88, 0.82, 0.78, 0.88] + [0.96] * 10, [2.2] * 11 + [3, 3.4, 3.6] + [1.5] * 11),
    ],
)
def test_a_dip_that_a_run_recovers_from_by_itself_is_not_told(answered, entropy):
    series = [
        {"train/answered": share, "actor/entropy": nats}
        for share, nats in zip(answered, entropy, strict=True)
    ]
    assert told(HealthMonitor(), series) == []


def test_three_steps_of_nothing_are_no_collapse_yet():
    high = {"train/answered": 0.95, "actor/entropy": 1.0} | kind("nq", 0.8, 2.0)
    gone = {"train/answered": 0.0, "actor/entropy": 9.0} | kind("nq", 0.0, 0.0)
    assert collapses(HealthMonitor(), [high] * 10 + [gone] * 3 + [high] * 10) == []
    four = collapses(HealthMonitor(), [high] * 10 + [gone] * 4)
    assert {(step, finding.onset) for step, finding in four} == {(14, 11)}


@pytest.mark.parametrize(
    "name", [name for name in learning_runs() if name != "loses_two_hops_and_finds_them_again"]
)
def test_real_runs_that_learn_both_kinds_get_no_line(name):
    assert told(HealthMonitor(), learning_runs()[name]) == []


def test_a_real_run_that_loses_a_kind_for_eight_steps_hears_of_that_alone_and_ends_well():
    """The answers for 2 hops fall from 34 % to 1 % and their searches from 2 to 1, in steps 23 to 31."""
    monitor = HealthMonitor()
    ((step, finding),) = found(monitor, learning_runs()["loses_two_hops_and_finds_them_again"])
    assert finding.name == "searches_fall:microworld.hops_2"
    assert finding.onset == 23 and step <= 31
    assert monitor.open_collapses == []


def test_a_kind_that_is_lost_is_told_of_by_name_and_the_others_are_not():
    before = kind("nq", 0.5) | kind("popqa.hops_2", 0.3)
    after = kind("nq", 0.55) | kind("popqa.hops_2", 0.02)
    ((step, finding),) = collapses(HealthMonitor(), [before] * 20 + [after] * 12)
    assert (finding.name, finding.onset, finding.is_collapse) == ("kind_lost:popqa.hops_2", 21, True)
    assert step <= 30
    assert finding.line.startswith("2 hops of popqa were solved and no longer are, since step 21: 2.0%")


def test_many_small_kinds_that_are_lost_together_are_told_of_in_one_line():
    before = [kind(f"source_{i}", 0.4, questions=1, answers=4) for i in range(16)]
    after = [kind(f"source_{i}", 0.1, questions=1, answers=4) for i in range(16)]
    series = [{name: x for figures in kinds for name, x in figures.items()} for kinds in (before, after)]
    findings = collapses(HealthMonitor(), [series[0]] * 50 + [series[1]] * 10)
    assert [finding.name for _, finding in findings] == ["all_lost"]
    assert findings[0][1].onset == 51


@pytest.mark.parametrize(
    ("rates", "questions", "answers"),
    [((0.1, 0.5), 8, 4), ((0.1, 0.9), 4, 8), ((0.3, 0.5, 0.9), 2, 16), ((0.5,), 1, 8), ((0.1, 0.5), 1, 4)],
)
def test_chance_in_small_groups_is_no_collapse(rates, questions, answers):
    for seed in range(2):
        assert collapses(HealthMonitor(), noise(seed, 200, rates, questions, answers)) == []


def test_a_change_of_the_curriculum_is_no_collapse():
    """A source that is solved ends, a harder one appears late, and its questions change the mean over all."""
    easy = list(noise(1, 60, (0.9, 0.8), 10, 4))
    hard = [
        {name.replace("source_", "hard_"): value for name, value in metrics.items()}
        for metrics in noise(2, 60, (0.05, 0.1), 10, 4)
    ]
    both = [first | second for first, second in zip(easy[30:], hard, strict=False)]
    assert collapses(HealthMonitor(), [*easy[:30], *both, *hard[30:]]) == []


def test_fewer_searches_for_questions_that_stay_solved_are_no_collapse():
    series = [kind("microworld.hops_1", 0.7, 2.2)] * 20 + [kind("microworld.hops_1", 0.8, 1.0)] * 30
    assert told(HealthMonitor(), series) == []


@pytest.mark.parametrize("sampler", ["filter/retired", "pools/measured"])
def test_where_solved_questions_are_asked_less_often_their_share_says_nothing(sampler):
    series = [kind("nq", 0.8)] * 20 + [kind("nq", 0.1)] * 20
    assert len(collapses(HealthMonitor(), series)) == 1
    assert collapses(HealthMonitor(), [metrics | {sampler: 5.0} for metrics in series]) == []


def test_a_collapse_that_goes_on_is_told_again_only_after_a_while_and_ends_when_it_is_left():
    monitor = HealthMonitor()
    high = {"train/answered": 0.95}
    low = {"train/answered": 0.5}
    steps = [step for step, _ in found(monitor, [high] * 10 + [low] * (QUIET_STEPS + 10))]
    assert len(steps) == 2 and steps[1] - steps[0] == QUIET_STEPS
    assert [finding.onset for finding in monitor.open_collapses] == [11]
    assert found(monitor, [high] * 10, start=QUIET_STEPS + 21) == []
    assert monitor.open_collapses == []


@pytest.mark.parametrize("at", [3, 18, 22, 26])
def test_a_resumed_run_finds_what_the_undisturbed_one_finds(at):
    whole = HealthMonitor()
    findings = found(whole, QUICKSTART)
    first = HealthMonitor()
    some = found(first, QUICKSTART[:at])
    second = HealthMonitor()
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert some + found(second, QUICKSTART[at:], at + 1) == findings
    assert second.state_dict() == whole.state_dict()


def test_the_state_of_a_version_without_levels_is_read():
    monitor = HealthMonitor()
    old = {"early": {"actor/entropy": [1.0] * 5}, "in_a_row": {"length": 2}, "last_told": {"mismatch": 4}}
    monitor.load_state_dict(old)
    fresh = HealthMonitor()
    fresh.load_state_dict(fresh.state_dict() | old)
    assert monitor.state_dict() == fresh.state_dict()
    ((_, finding),) = collapses(monitor, [{"train/answered": 0.95}] * 5 + [{"train/answered": 0.4}] * 6)
    assert finding.onset == 6


def test_a_sign_has_the_step_at_which_it_began():
    ((step, finding),) = found(HealthMonitor(), [HEALTHY] * 8 + [HEALTHY | {"actor/ppo_kl": 0.3}] * 4)
    assert (step, finding.name, finding.onset, finding.is_collapse) == (11, "step_too_large", 9, False)
