"""Math and instructions are checked in processes: text that takes too long costs only its own row."""

import json
import os
import resource
import signal
import time

import psutil
import pytest

from verl.config.environments import VerifiersConfig
from verl.verifiers import CouldNotVerify, Sample
from verl.verifiers.math import candidates, same_text
from verl.verifiers.registry import Verifiers, make_verifier
from verl.verifiers.verifier import VerifierSettings
from verl.verifiers.workers import CheckedVerifier, KillableWorkers

SETTINGS = VerifierSettings(VerifiersConfig(cpu_seconds=1.5))
TOWER = r"$9^{9^{9^9}}$"


@pytest.fixture(scope="module")
def math():
    verifier = make_verifier("math", SETTINGS)
    yield verifier
    verifier.close()


def calls(function, first):
    """A verifier whose samples are arguments of a function."""
    verifier = CheckedVerifier()
    verifier.workers = KillableWorkers(function, 5.0, [first])
    verifier._call = lambda sample: [sample]
    return verifier


def scores(verifier, *pairs):
    return [each.score for each in verifier.verify_many([Sample(text, label) for text, label in pairs])]


@pytest.mark.slow
def test_256_rows_at_once_with_poisoned_ones_among_them_have_no_false_zero(math):
    rows = [Sample(rf"so \boxed{{\frac{{{i}}}{{2}}}}", str(i / 2)) for i in range(256)]
    poisoned = {7: TOWER, 100: r"\boxed{9^{9^{9^{9}}}}", 200: r"$\binom{10^9}{10^8}$ and $(10^{99})!$"}
    for place, text in poisoned.items():
        rows[place] = Sample(text, "1")
    verdicts = math.verify_many(rows)
    assert [i for i, verdict in enumerate(verdicts) if verdict.score != 1.0] == sorted(poisoned)
    assert verdicts[7].timed_out and verdicts[7].detail == "more than 1.5 seconds"
    assert all(verdicts[place].score == 0.0 for place in poisoned)


@pytest.mark.slow
def test_symbols_are_compared_by_value(math):
    right = [(r"\boxed{2\sqrt2}", r"\sqrt{8}"), (r"\boxed{(x-1)(x+1)}", "x^2-1"), (r"$\{2,1\}$", r"\{1,2\}")]
    wrong = [(r"\boxed{2\sqrt3}", r"\sqrt{8}"), ("the 7 dwarfs were 8 in the end 9", "9"), (r"\boxed{}", "")]
    assert scores(math, *right, *wrong[:2]) == [1.0] * 3 + [0.0] * 2


def test_the_place_of_the_answer_is_part_of_the_name():
    minerva = r"\boxed{1} Final Answer: The final answer is $2$. I hope it is correct."
    assert candidates(minerva, is_strict=False) == ["1", "2"]
    assert candidates(minerva, is_strict=True) == ["2"]
    assert candidates("$1$ then $x = 3$", is_strict=False) == ["3"]
    assert candidates(r"\boxed{1} and \boxed{\frac{1}{2}}", is_strict=False) == [r"\frac{1}{2}"]
    assert candidates("just 5", is_strict=False) == ["just5", "just 5"]
    assert same_text(r"\dfrac12", "1/2") and same_text("x=0.5", r"\frac{1}{2}") and not same_text("1", "2")


def test_a_killed_process_is_replaced_its_row_asked_again_and_all_end_with_their_verifier():
    verifier = calls("builtins:float", 1.0)
    workers = verifier.workers
    assert [each.score for each in verifier.verify_many([1.0, 2.0])] == [1.0, 2.0]
    killed = {process.pid for process in workers._idle}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert [each.score for each in verifier.verify_many([3.0, 4.0, 5.0])] == [3.0, 4.0, 5.0]
    # One that was killed may stay there: a fast thread needs only the other.
    running = [psutil.Process(process.pid) for process in workers._idle if process.pid not in killed]
    assert running
    workers.close()
    deadline = time.monotonic() + 5
    for process in running:
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_process_that_always_ends_or_never_starts_could_not_verify(monkeypatch):
    with pytest.raises(CouldNotVerify, match="can't start .status 3"):
        calls("os:_exit", 3).verify_many([3])
    verifier = calls("signal:raise_signal", int(signal.SIGCHLD))  # which does nothing
    (verdict,) = verifier.verify_many([int(signal.SIGKILL)])
    assert verdict.score is None and "killed twice" in verdict.detail
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(CouldNotVerify, match="can't start"):
        KillableWorkers("builtins:float", 5.0, [1.0]).call_in_any(1.0)


def test_a_process_answers_where_a_thousand_files_are_open_and_may_wait_longer_than_it_may_compute():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    workers = KillableWorkers("time:sleep", 0.2, [0])
    try:
        assert workers.call_in_any(0.6) is None
    finally:
        workers.close()
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ifeval_label(**instructions) -> str:
    names = [name.replace("__", ":") for name in instructions]
    return json.dumps([{"instruction_id": names, "kwargs": list(instructions.values())}])


@pytest.mark.slow
def test_ifeval_gives_the_share_of_instructions_that_were_followed_after_the_thinking():
    verifier = make_verifier("ifeval", SETTINGS)
    label = ifeval_label(
        punctuation__no_comma=None,
        keywords__word_once={"keyword": "lake", "frequency": None},
        length_constraints__number_sentences={"num_sentences": 2, "relation": "at least"},
        language__response_language={"language": "en"},
    )
    texts = ["<think>a, b</think>Dr. Who swims in the lake. Nobody else does.", "<think>lake</think>", "a, b"]
    assert scores(verifier, *((text, label) for text in texts))[:2] == [1.0, 0.0]
    again = [scores(verifier, (texts[0], label)) for _ in range(3)]
    verifier.close()
    assert again == [[1.0]] * 3


def test_a_label_that_names_no_check_is_refused_before_the_run():
    row = {"dataset": "ifeval", "ground_truth": ifeval_label(punctuation__no_coma=None)}
    with pytest.raises(ValueError, match="row 0: Found instruction .punctuation:no_coma."):
        Verifiers(SETTINGS).check_rows([row])
    label = ifeval_label(length_constraints__number_words={"relation": "at least"})
    with pytest.raises(ValueError, match="no num_words in the arguments of length_constraints:number_words"):
        make_verifier("ifeval", SETTINGS).check_label(label)
    label = ifeval_label(letters__letter_counting={"N": 9, "relation": "more than"})
    with pytest.raises(ValueError, match="relation='more than' of letters:letter_counting; expected .*least"):
        make_verifier("ifeval", SETTINGS).check_label(label)
    with pytest.raises(ValueError, match="Found instruction .nothing.*validate_title"):
        make_verifier("ifeval_old", SETTINGS).check_label('{"func_name": "nothing"}')
    row = {"dataset": "ifeval_old", "ground_truth": '{"func_name": "validate_title"}'}
    assert Verifiers(SETTINGS).check_rows([row]) == 1
