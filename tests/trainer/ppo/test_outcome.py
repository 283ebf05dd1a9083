"""The end of a run says what was not learnt, and is quiet about what was."""

import json

import pytest
from test_health import QUICKSTART, kind, learning_runs

from verl.checkpoints.run_state import RunState
from verl.records.console import outcome_lines
from verl.trainer.ppo.health import HealthMonitor
from verl.trainer.ppo.kinds import MAX_KINDS, kind_figures, kind_metrics, kind_of, kind_words
from verl.trainer.ppo.outcome import run_outcome
from verl.trainer.ppo.validation import ValidationReport, run_summary


def figures(em, searches=1.5, count=200, score=None, judged_by="em"):
    score = em if score is None else score
    return {"em": em, "score": score, "searches": searches, "count": count, "judged_by": judged_by}


def validation(**kinds):
    return {"kinds": {name.replace("__", "."): values for name, values in kinds.items()}}


def health_after(series):
    monitor = HealthMonitor()
    for step, metrics in enumerate(series, 1):
        monitor.check(step, metrics)
    return json.loads(json.dumps(monitor.state_dict(), allow_nan=False))


def question(hops, em, searches, source="microworld", env_class=None):
    return {
        "em": em,
        "f1": em,
        "score": em,
        "searches": searches,
        "hops": hops,
        "data_source": source,
        "env_class": env_class,
        "judged_by": "em",
    }


def test_the_quickstart_that_lost_its_second_search_says_so_in_its_last_lines_and_its_summary():
    """Its reward looked fine: 0.48 at the end. The validations had 200 questions of each kind."""

    def report(one_hop, two_hops, searches):
        rows = [question(1, float(i < one_hop * 200), 1) for i in range(200)]
        rows += [question(2, float(i < two_hops * 200), searches) for i in range(200)]
        return ValidationReport(rows={"greedy": rows, "sampled": rows})

    state = RunState(step=len(QUICKSTART), health=health_after(QUICKSTART))
    state.validation = {"before": report(0.05, 0.015, 1).summary(), "after": report(0.96, 0.005, 1).summary()}
    summary = run_summary(state, 1.0, seed=7)
    assert summary["not_learnt"] == [
        {"kind": "2 hops", "em": 0.005, "searches": 1.0, "reason": "one search for every question"}
    ]
    assert summary["score_rose"] is True  # over all questions it did
    lines = outcome_lines(summary)
    assert lines[0] == "not learnt: 2 hops 0.005 (one search for every question)"
    ends = (
        "the run ends in a collapse that it has not left: since step 19 fewer trajectories end with an answer"
    )
    assert any(line.startswith(ends) for line in lines)
    assert [collapse["onset"] for collapse in summary["open_collapses"]] == [19, 19, 20]


@pytest.mark.parametrize("name", learning_runs())
def test_real_runs_that_learn_end_without_a_word_also_without_a_validation(name):
    series = learning_runs()[name]
    outcome = run_outcome({}, {}, health_after(series), len(series))
    assert outcome == {"not_learnt": [], "score_rose": True, "open_collapses": []}
    assert outcome_lines(outcome) == []


def test_a_run_without_a_validation_ends_with_its_training_figures():
    series = [kind("nq", 0.02) | kind("popqa", 0.02)] * 10 + [kind("nq", 0.8) | kind("popqa", 0.01)] * 20
    outcome = run_outcome({}, {}, health_after(series), len(series))
    (line,) = outcome["not_learnt"]
    assert line["kind"] == "popqa" and line["em"] == pytest.approx(0.01, abs=1e-3)
    assert line["reason"] == "0.020 before training, 1.5 searches a question"


@pytest.mark.parametrize(
    ("before", "after", "reasons"),
    [
        # learnt less than the best, but clearly more than before
        (validation(a=figures(0.05), b=figures(0.05)), validation(a=figures(0.9), b=figures(0.3)), {}),
        # known before training, and worse for it
        (
            validation(a=figures(0.1), b=figures(0.6)),
            validation(a=figures(0.9), b=figures(0.3)),
            {"b": "lost: 0.600 before training"},
        ),
        # a little worse, though by more than chance
        (
            validation(a=figures(0.1), b=figures(0.9, count=10**5)),
            validation(a=figures(0.9), b=figures(0.85, count=10**5)),
            {},
        ),
        # so few questions that chance decides
        (validation(a=figures(0.1)), validation(a=figures(0.9), b=figures(0.0, count=8)), {}),
        # nobody knows what it was worth before
        ({}, validation(a=figures(0.9), b=figures(0.4)), {}),
        ({}, validation(a=figures(0.9), b=figures(0.0)), {"b": "1.5 searches a question"}),
        # a format reward is no answer
        (
            validation(a=figures(0.0, score=0.1), b=figures(0.0, score=0.1)),
            validation(a=figures(0.9, score=1.0), b=figures(0.0, score=0.3)),
            {"b": "0.000 before training, 1.5 searches a question"},
        ),
        # a verifier's and an environment's score count, whatever matches exactly
        (
            validation(a=figures(0.0), b=figures(0.0, score=0.1, judged_by="score")),
            validation(a=figures(0.9), b=figures(0.0, score=0.8, judged_by="score")),
            {},
        ),
    ],
)
def test_what_counts_as_not_learnt(before, after, reasons):
    outcome = run_outcome(before, after, {}, steps=10)
    assert {line["kind"]: line["reason"] for line in outcome["not_learnt"]} == reasons


def test_a_run_whose_answers_did_not_get_better_says_so():
    before = validation(nq=figures(0.10), popqa=figures(0.12))
    outcome = run_outcome(before, validation(nq=figures(0.11), popqa=figures(0.11)), {}, steps=10)
    assert outcome["score_rose"] is False and outcome["not_learnt"] == []
    assert outcome_lines(outcome) == [
        "nothing was learnt: beyond chance, the answers are no better than before training"
    ]
    better = run_outcome(before, validation(nq=figures(0.3), popqa=figures(0.3)), {}, steps=10)
    assert better["score_rose"] is True and outcome_lines(better) == []


def test_another_mixture_of_kinds_is_no_progress():
    before = validation(easy=figures(0.9, count=50), hard=figures(0.1, count=500))
    after = validation(easy=figures(0.9, count=500), hard=figures(0.1, count=50))
    assert run_outcome(before, after, {}, steps=10)["score_rose"] is False


def test_a_run_that_only_measures_has_nothing_that_it_should_have_learnt():
    outcome = run_outcome(validation(nq=figures(0.0)), {}, {}, steps=0)
    assert outcome_lines(outcome) == [] and outcome["score_rose"] is None


def test_a_kind_that_was_learnt_and_lost_is_not_learnt():
    series = [kind("nq", 0.1) | kind("popqa", 0.1)] * 5 + [kind("nq", 0.8) | kind("popqa", 0.8)] * 20
    series += [kind("nq", 0.8) | kind("popqa", 0.3)] * 10
    before = validation(nq=figures(0.1), popqa=figures(0.1))
    after = validation(nq=figures(0.8), popqa=figures(0.35))
    outcome = run_outcome(before, after, health_after(series), len(series))
    assert [(line["kind"], line["reason"]) for line in outcome["not_learnt"]] == [
        ("popqa", "lost since step 26")
    ]


def test_kinds_have_names_of_their_environment_source_and_hops():
    assert kind_of(None, "nq", None) == kind_of("search", "nq", float("nan")) == "nq"
    assert kind_of("search", "microworld", 2) == "microworld.hops_2"
    assert kind_of("my.maze:Maze", "my/mazes", None) == "my.maze.Maze.my.mazes"
    assert kind_of("maze.Maze", "maze.Maze", None) == "maze.Maze"
    assert kind_of(None, None, None) == "unnamed"
    microworld = ["microworld.hops_1", "microworld.hops_2"]
    assert [kind_words(name, microworld) for name in microworld] == ["1 hop", "2 hops"]
    assert kind_words("microworld.hops_2", [*microworld, "nq"]) == "2 hops of microworld"
    assert kind_words("nq", ["nq"]) == "nq"


def test_the_most_frequent_kinds_are_measured_and_no_more():
    kinds = [f"source_{i}" for i in range(40) for _ in range(i + 1)]
    uids = [i // 2 for i in range(len(kinds))]
    ones = [1] * len(kinds)
    metrics = kind_metrics(kinds, uids, ones, ones, ones)
    measured = {name.split("/")[1] for name in metrics}
    assert measured == {f"source_{i}" for i in range(40 - MAX_KINDS, 40)}
    assert metrics["kinds/source_39/count"] == 40 and metrics["kinds/source_39/questions"] == 20
    rows = [question(None, 1.0, 1, source) for source in kinds]
    assert set(kind_figures(rows)) == measured
