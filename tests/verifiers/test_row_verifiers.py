"""Rows name their verifiers; a row without a verdict leaves the batch and is counted."""

import time

import pytest

from verl.config.environments import VerifiersConfig
from verl.verifiers import CouldNotVerify, Sample, Verdict, Verifier
from verl.verifiers.registry import (
    VERIFIERS,
    Assigned,
    Verifiers,
    assigned_verifiers,
    try_row,
    verifier_metrics,
)
from verl.verifiers.verifier import VerifierSettings

SETTINGS = VerifierSettings(VerifiersConfig())
VERIFY = Verifiers(SETTINGS)
OWN = f"{__name__}:"


class Shouts(Verifier):
    name = "shouts"

    def verify(self, sample: Sample) -> Verdict:
        return Verdict(3.0 if sample.text.isupper() else -3.0, "looked at the letters", cost=0.25)


class Away(Verifier):
    def verify(self, sample: Sample) -> Verdict:
        if sample.text == "b":
            raise CouldNotVerify("the server is away")
        return Verdict(0.5)


class Slow(Verifier):
    def verify_many(self, samples):
        time.sleep(0.3)
        return [Verdict(0.0, timed_out=True)] * len(samples)


class Slower(Slow):
    pass


class Broken(Verifier):
    def verify_many(self, samples):
        raise CouldNotVerify("no machine")


class NoNumber(Verifier):
    def verify(self, sample: Sample) -> Verdict:
        return Verdict(float("nan"))


class NoVerdict(Verifier):
    def verify(self, sample: Sample) -> Verdict:
        return 1.0  # type: ignore[return-value]


class Mistaken(Verifier):
    def verify(self, sample: Sample) -> Verdict:
        return Verdict(float(sample.label))


class Nothing(Verifier):
    """Defines neither `verify` nor `verify_many`."""


def test_a_row_names_its_verifiers_in_three_forms():
    listed = [{"name": "Math", "label": "72", "weight": None}, {"name": OWN + "Shouts", "label": None}]
    assert assigned_verifiers({"ground_truth": {"verifiers": listed, "target": None}}) == [
        Assigned("math", "72"),
        Assigned(OWN + "Shouts", None),
    ]
    assert assigned_verifiers({"ground_truth": "72", "verifier": "gsm8k"}) == [Assigned("gsm8k", "72")]
    theirs = {"dataset": ["gsm8k", "max_length"], "ground_truth": ["72", "500"]}
    assert assigned_verifiers({}, theirs) == [Assigned("gsm8k", "72"), Assigned("max_length", "500")]
    assert assigned_verifiers({}, {"dataset": "math", "ground_truth": ["72"]}) == [Assigned("math", "72")]
    assert assigned_verifiers({"ground_truth": {"target": ["Oslo"]}}, {"dataset": "nq"}) == []


def test_an_unknown_name_is_refused_with_the_nearest_one_before_the_run():
    row = {"reward_model": {"verifier": "strict_mat", "ground_truth": "1"}}
    with pytest.raises(ValueError, match=r"row 0: Found verifier 'strict_mat'.*mean 'strict_math'"):
        VERIFY.check_rows([row])
    with pytest.raises(ValueError, match="2 verifiers .* 1 labels"):
        assigned_verifiers({"verifier": ["math", "code"], "ground_truth": ["1"]})
    with pytest.raises(ValueError, match="found no class 'Nobody'"):
        VERIFY.check_rows([{"reward_model": {"verifier": OWN + "Nobody", "ground_truth": "1"}}])
    with pytest.raises(ValueError, match="neither verify nor verify_many"):
        VERIFY.check_rows([{"reward_model": {"verifier": OWN + "Nothing", "ground_truth": "1"}}])
    for entries in ("math", [{"name": "math", "weigth": 2}]):
        with pytest.raises(ValueError, match=r"; expected \[\{"):
            assigned_verifiers({"ground_truth": {"verifiers": entries}})
    with pytest.raises(ValueError, match="expected a number of tokens"):
        VERIFY.check_rows([{"dataset": "max_length", "ground_truth": "long"}])
    assert VERIFY.check_rows([{"dataset": "max_length", "ground_truth": "9"}, {"data_source": "nq"}]) == 1


def test_an_empty_label_is_refused_and_one_that_names_its_verifier_is_never_left_to_the_reward_function():
    for name, label in (("math", None), ("gsm8k", None), ("strict_math", " "), ("string_f1", "[]")):
        with pytest.raises(ValueError, match=f"row 0: Found label .* of {name}; expected an answer"):
            VERIFY.check_rows([{"reward_model": {"verifier": name, "ground_truth": label}}])
    assert assigned_verifiers({"verifier": "passthrough"}) == [Assigned("passthrough", None)]
    with pytest.raises(ValueError, match="row 0: Found verifier .'label': '7'.; expected .*name"):
        VERIFY.check_rows([{"reward_model": {"ground_truth": {"verifiers": [{"label": "7"}]}}}])


def test_numbers_as_labels_keep_their_form():
    for name, text, label in (("re_search", "<finish>1.50</finish>", "1.50"), ("gsm8k", "is 72", 72.0)):
        (result,) = Verifiers(SETTINGS).verify([(Sample(text, None), [Assigned(name, label)])])
        assert result.score == 1.0


def test_all_of_open_instructs_names_are_there():
    judges = "quality quality_rubric quality_ref safety factuality creative_writing refusal "
    judges += "web_instruct_general_verifier"
    names = "gsm8k math strict_math ifeval ifeval_old flan string_matcher string_f1 puzzle re_search "
    names += "re_search_f1 max_length up_to_max_length code code_stdio rubric passthrough"
    expected = {*names.split(), *(f"general-{kind}" for kind in judges.split())}
    assert set(VERIFIERS) == expected | {"reasoning_gym"}  # the last is ours


def test_a_rows_score_is_the_weighted_sum_within_each_verifiers_range():
    assigned = [Assigned(OWN + "Shouts", None, 0.5), Assigned("gsm8k", "7", 2.0), Assigned("gsm8k", "8", 9.0)]
    loud, quiet = Verifiers(SETTINGS).verify([(Sample(text, None), assigned) for text in ("A 7", "a")])
    assert (loud.score, quiet.score) == (0.5 * 1.0 + 2.0, 0.0)
    assert [each["score"] for each in loud.verdicts] == [1.0, 1.0, 0.0]
    metrics = verifier_metrics([loud.verdicts, quiet.verdicts, None])
    assert metrics["objective/gsm8k_reward"] == 1.0
    assert metrics["objective/gsm8k_correct_rate"] == 0.5
    assert metrics["reward/cost"] == 0.5


def test_a_row_without_a_verdict_has_no_score_and_the_others_keep_theirs():
    both = [Assigned(OWN + "Away", None), Assigned(OWN + "Broken", None, 0.0)]
    requests = [(Sample(text, None), both) for text in "abc"]
    results = Verifiers(SETTINGS).verify(requests)
    assert [result.score for result in results] == [0.5, None, 0.5]  # what has no weight only reports
    assert results[1].verdicts[0]["detail"] == "the server is away"
    metrics = verifier_metrics([result.verdicts for result in results])
    assert metrics[f"reward/unverified/{OWN}Away"] == 1
    assert metrics[f"reward/unverified/{OWN}Broken"] == 3
    assert metrics[f"objective/{OWN}Away_reward"] == 0.5  # of those that were verified


def test_verifiers_of_different_names_work_at_the_same_time():
    assigned = [Assigned(OWN + name, None) for name in ("Slow", "Slower")]
    started = time.perf_counter()
    results = Verifiers(SETTINGS).verify([(Sample("", None), assigned)] * 3)
    assert time.perf_counter() - started < 0.55
    metrics = verifier_metrics([result.verdicts for result in results])
    assert [result.score for result in results] == [0.0] * 3
    assert metrics[f"reward/timeout/{OWN}Slow"] == 3


def test_a_score_that_is_no_number_is_an_error_and_no_score():
    with pytest.raises(ValueError, match="returned 1.0; expected a Verdict"):
        Verifiers(SETTINGS).verify([(Sample("", None), [Assigned(OWN + "NoVerdict", None)])])
    with pytest.raises(ValueError, match="NoNumber' returned the score nan"):
        Verifiers(SETTINGS).verify([(Sample("", None), [Assigned(OWN + "NoNumber", None)])])
    with pytest.raises(ValueError, match=r"Mistaken' failed: ValueError: could not .*py:\d+, in verify\)"):
        Verifiers(SETTINGS).verify([(Sample("", None), [Assigned(OWN + "Mistaken", "a")])])


def test_a_row_is_tried_by_hand():
    row = {"reward_model": {"verifier": ["gsm8k", OWN + "Shouts"], "ground_truth": ["72", "x"]}}
    assert try_row(row, "IT IS 72").score == 2.0
    assert [each["score"] for each in try_row(row, "it is 72").verdicts] == [1.0, 0.0]
    with pytest.raises(ValueError, match="expected a row that names verifiers"):
        try_row({"reward_model": {"ground_truth": {"target": ["a"]}}}, "a")
    with pytest.raises(ValueError, match="row 0: Found max_turns='two' in a row"):
        VERIFY.check_rows([row | {"max_turns": "two"}])
    assert VERIFY.check_rows([row | {"max_turns": "2"}]) == 1
    with pytest.raises(ValueError, match="row 0: .*expected a number of tokens"):
        try_row({"dataset": "max_length", "ground_truth": "long"}, "a")
    half: list = [{"name": "math", "label": "1", "weight": "half"}]
    large = [{"name": "math", "label": "1", "weight": 1e39}]  # no score of float32
    with pytest.raises(ValueError, match="Found weight 1e[+]39 of verifier 'math'; expected a number"):
        assigned_verifiers({"ground_truth": {"verifiers": large}}, {})
    with pytest.raises(ValueError, match="Found weight 'half' of verifier 'math'; expected a number"):
        try_row({"reward_model": {"ground_truth": {"verifiers": half}}}, "a")
