"""Our verifiers beside Open-Instruct's own (commit e6c3044), whose scores of generated rows are recorded.

`open_instruct_cases.py` makes the rows and records; a difference has an entry here, with its reason.
"""

import gzip
import json
from pathlib import Path

import pytest
from open_instruct_cases import HIGHEST_TEN, cases

from verl.code_server.client import Results
from verl.config.environments import CodeVerifierConfig, JudgeConfig, VerifiersConfig
from verl.verifiers import Sample, Verdict
from verl.verifiers.ifeval import ifeval_score
from verl.verifiers.llm_judge import Judge, RubricVerifier, score_of
from verl.verifiers.registry import VERIFIERS, make_verifier
from verl.verifiers.verifier import VerifierSettings

RECORDED = Path(__file__).with_name("open_instruct_cases.json.gz")


class Replies(Judge):
    """A judge that has answered already."""

    def __init__(self, scores):
        super().__init__(JudgeConfig(), None)
        self.scores = scores

    def ask(self, prompts):
        return [Verdict(score / 2) for score in self.scores]


class Server:
    def __init__(self, reply):
        self.reply = reply

    def test(self, *_):
        return Results(*self.reply)

    def close(self):
        pass


THEIRS = set(VERIFIERS) - {"reasoning_gym"}


def pairs():
    """(name, response, label, their score, our score) of each case."""
    rows = cases()
    theirs = json.loads(gzip.decompress(RECORDED.read_bytes()))
    assert len(rows) == len(theirs) >= 1000 and {name for name, *_ in rows} == THEIRS
    ours: list[float | None] = [None] * len(rows)
    together: dict[str, list[int]] = {}
    for i, (name, text, label, tokens, settings) in enumerate(rows):
        if name.startswith("general-"):
            highest = 10 if name in HIGHEST_TEN else 1
            score = score_of(text, highest)
            ours[i] = None if score is None else score / highest
        elif name == "rubric":
            verifier = RubricVerifier()
            verifier.judge = Replies(json.loads(text))
            ours[i] = verifier.verify(Sample("x", label)).score
        elif name.startswith("code"):
            config = VerifiersConfig(code=CodeVerifierConfig(**settings))
            verifier = make_verifier(name, VerifierSettings(config))
            verifier.client = Server(json.loads(text))
            ours[i] = verifier.verify(Sample("x", "[]")).score
        elif name.endswith("max_length"):
            verifier = make_verifier(name, VerifierSettings(VerifiersConfig(**settings)))
            ours[i] = max(0.0, verifier.verify(Sample(text, label, num_tokens=tokens)).score)
        else:
            together.setdefault(name, []).append(i)
    for name, places in together.items():
        verifier = make_verifier(name, VerifierSettings(VerifiersConfig(cpu_seconds=20.0)))
        samples = [Sample(rows[i][1], rows[i][2]) for i in places]
        for sample in samples:
            verifier.check_label(sample.label)
        for i, verdict in zip(places, verifier.verify_many(samples), strict=True):
            ours[i] = verdict.score
        verifier.close()
    return [(*row[:3], their, our) for row, their, our in zip(rows, theirs, ours, strict=True)]


@pytest.mark.slow
def test_every_name_scores_as_open_instruct_does_rows_that_are_right_and_wrong():
    scored = pairs()
    differing = [pair for pair in scored if pair[3] != pytest.approx(pair[4])]
    # a length far off is worth 0; theirs falls below, against its comment
    assert differing == [pair for pair in scored if pair[3] < 0 and pair[0] != "rubric"]
    assert {name for name, *_ in differing} == {"max_length", "up_to_max_length"}
    assert all(our == 0.0 for *_, our in differing)
    for name in sorted(THEIRS):
        scores = {our for other, _, _, _, our in scored if other == name}
        assert name == "passthrough" or len(scores) > 1, name


def test_a_label_may_be_json_text_where_theirs_has_to_be_a_list_and_have_commas_as_the_answer_may():
    for name, text, label in (("string_f1", "Oslo", '["Rome", "Oslo"]'), ("gsm8k", "It is 1,234", "1,234")):
        verifier = make_verifier(name, VerifierSettings(VerifiersConfig()))
        assert verifier.verify(Sample(text, label)).score == 1.0


def test_signs_are_counted_and_keywords_are_no_patterns_where_the_original_counts_a_random_letter_or_fails():
    counted = {"letter": "#", "let_frequency": 2, "let_relation": "at least"}
    for name, arguments, right, wrong in (
        ("keywords:letter_frequency", counted, "# and #", "# and letters"),
        ("keywords:word_once", {"keyword": "C++"}, "I like C++.", "I like C."),
    ):
        label = {"instruction_id": [name], "kwargs": [arguments]}
        assert [ifeval_score(text, label) for text in (right, wrong)] == [1.0, 0.0]
