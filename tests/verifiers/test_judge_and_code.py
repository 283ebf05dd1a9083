"""A judge or a code server that fails, stalls or talks nonsense makes no false zero."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl.code_server.client import Results
from verl.config.environments import CodeVerifierConfig, JudgeConfig, VerifiersConfig
from verl.verifiers import Sample
from verl.verifiers.llm_judge import API_KEY_VARIABLE, CACHE_FILE, final_answer, score_of
from verl.verifiers.registry import Assigned, Verifiers, assigned_verifiers, make_verifier
from verl.verifiers.verifier import VerifierLimit, VerifierSettings


class Busy(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True


class StandIn:
    """A judge that says what `answer(prompt, number of requests so far)` returns: text, a status, or None
    to stall."""

    def __init__(self, answer):
        self.asked = []
        self.usage = {"prompt_tokens": 1000, "completion_tokens": 100}
        stand_in = self
        self.stop = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][0]["content"]
                stand_in.asked.append((prompt, self.headers["Authorization"], self.path))
                said = answer(prompt, len(stand_in.asked))
                if said is None:
                    stand_in.stop.wait(30)
                    self.close_connection = True
                    return
                message = {"choices": [{"message": {"content": said}}], "usage": stand_in.usage}
                text = json.dumps(message if isinstance(said, str) else {"error": "no"}).encode()
                self.send_response(200 if isinstance(said, str) else said)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = Busy(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self):
        self.stop.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def stand_in():
    made = []

    def start(answer):
        made.append(StandIn(answer))
        return made[-1]

    yield start
    for each in made:
        each.close()


def settings(server, folder=None, **judge):
    config = JudgeConfig(base_url=server.url, **{"model": "one", "timeout": 5.0, **judge})
    return VerifierSettings(VerifiersConfig(judge=config), folder)


def sample(i=0, label="Oslo"):
    return Sample(f"<think>hm</think><answer>It is {i}</answer>", label, "Which city?", 5)


def test_a_judge_is_asked_about_the_answer_and_its_score_is_scaled(stand_in, monkeypatch):
    monkeypatch.setenv(API_KEY_VARIABLE, "secret")
    server = stand_in(lambda prompt, n: '{"REASONING": "fine", "SCORE": "7"}')
    (verdict,) = make_verifier("general-quality_ref", settings(server, prices=[1.0, 10.0])).verify_many(
        [sample()]
    )
    assert (verdict.score, verdict.cost) == (0.7, pytest.approx(0.002))
    ((prompt, key, path),) = server.asked
    assert key == "Bearer secret" and path == "/v1/chat/completions"
    for text in ("Which city?", "It is 0", "Oslo"):
        assert f"\n{text}\n</text-" in prompt
    assert "hm" not in prompt.split("ANSWER")[1]


def test_each_type_has_a_prompt_and_a_range_of_its_own_and_one_judge_serves_them(stand_in):
    server = stand_in(lambda prompt, n: '```json\n{"REASONING": "a \\"b\\"\n", "SCORE": "1"}\n```')
    shared = settings(server)
    judges = set()
    for kind in ("quality", "quality_rubric", "safety", "factuality", "creative_writing", "refusal"):
        verifier = make_verifier(f"general-{kind}", shared)
        (verdict,) = verifier.verify_many([sample()])
        judges.add(verifier.judge)
        assert verdict.score == (0.1 if kind == "quality" else 1.0)
        assert ("Oslo" in server.asked[-1][0]) == (kind not in ("quality", "safety"))
    assert len(judges) == 1 and len({prompt for prompt, *_ in server.asked}) == 6


def test_scores_are_read_from_many_forms_and_never_guessed():
    assert score_of('<think>{"SCORE": 1}</think>{"SCORE": 8.5}', 10) == 8.5
    assert score_of('{"REASONING": "..", "SCORE": true}', 1) == 1.0
    assert score_of("Final Decision: No", 1) == 0.0
    for nonsense in (
        '<think>{"SCORE": 5}, or rather',
        "",
        "Very good!",
        '{"SCORE": "great"}',
        '{"SCORE": 11}',
        '{"SCORE": -1}',
    ):
        assert score_of(nonsense, 10) is None
    assert final_answer("<answer>a</answer> <answer> b </answer>") == "b"
    assert final_answer("<think>x</think> c") == "c"


@pytest.mark.slow
def test_failures_are_tried_again_and_then_could_not_verify(stand_in):
    replies = {"0": [500, 429, '{"SCORE": 10}'], "1": ["good", "fine", "well"], "2": [401], "3": [None]}

    def answer(prompt, n):
        return replies[prompt.split("It is ")[1][0]].pop(0)

    server = stand_in(answer)
    started = time.perf_counter()
    verdicts = make_verifier("general-quality", settings(server)).verify_many([sample(i) for i in range(4)])
    assert [each.score for each in verdicts] == [1.0, None, None, None]
    assert time.perf_counter() - started < 8
    for verdict, why in zip(
        verdicts[1:], ("no score in 'well'", "status 401", "within 5 seconds"), strict=True
    ):
        assert why in verdict.detail


def test_a_server_that_is_away_could_not_verify_and_no_server_at_all_is_refused_before_the_run():
    config = JudgeConfig(base_url="http://127.0.0.1:9/v1", model="one", timeout=1.0)
    verifier = make_verifier("general-safety", VerifierSettings(VerifiersConfig(judge=config)))
    assert [each.score for each in verifier.verify_many([sample(i) for i in range(3)])] == [None] * 3
    row = {"dataset": "general-quality", "ground_truth": "x"}
    with pytest.raises(ValueError, match="row 0: .* without a judge; set verifiers.judge.base_url"):
        Verifiers(VerifierSettings(VerifiersConfig())).check_rows([row])


def test_the_deadline_starts_when_it_is_a_verdicts_turn(stand_in):
    def slowly(prompt, n):
        time.sleep(0.3)
        return '{"SCORE": 1}'

    verifier = make_verifier("general-safety", settings(stand_in(slowly), timeout=1.0, concurrency=2))
    verdicts = verifier.verify_many([sample(i) for i in range(10)])  # 1.5 seconds in all
    assert [each.score for each in verdicts] == [1.0] * 10


def test_a_verdict_is_paid_once_also_by_a_run_that_goes_on(stand_in, tmp_path):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    verifier = make_verifier("general-quality", settings(server, tmp_path, prices=[1.0, 10.0]))
    verdicts = verifier.verify_many([sample(0), sample(0), sample(1)])
    assert len(server.asked) == 2 and [each.cost for each in verdicts] == [0.002, 0.0, 0.002]
    with (tmp_path / CACHE_FILE).open("a") as file:
        file.write('{"key": "half a li')
    again = make_verifier("general-quality", settings(server, tmp_path))
    verdicts = again.verify_many([sample(1), sample(0)])
    assert [(each.score, each.cost) for each in verdicts] == [(0.5, 0.0)] * 2
    assert len(server.asked) == 2
    for count, other in enumerate(({"model": "two"}, {"temperature": 0.0}) * 2):  # asked anew, and kept
        make_verifier("general-quality", settings(server, tmp_path, **other)).verify_many([sample(0)])
        assert len(server.asked) == min(3 + count, 4)


def test_a_run_that_begins_anew_counts_nothing_of_the_old_runs_folder(stand_in, tmp_path):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    run = tmp_path / "run"
    make_verifier("general-quality", settings(server, run, prices=[1.0, 10.0])).verify_many([sample()])
    limited = settings(server, run, prices=[1.0, 10.0], cost_limit=0.002)
    verifier = make_verifier("general-quality", limited)
    run.rename(tmp_path / "old")  # as resume_mode=none does, after the verifiers were made
    assert verifier.verify_many([sample()])[0].cost == 0.002 and len(server.asked) == 2


@pytest.mark.slow
def test_what_was_paid_counts_where_the_deadline_ends_a_verdict(stand_in):
    server = stand_in(lambda prompt, n: "good" if n == 1 else None)
    verifier = make_verifier("general-safety", settings(server, timeout=1.0, prices=[1.0, 10.0]))
    (verdict,) = verifier.verify_many([sample()])
    assert (verdict.score, verdict.cost) == (None, 0.002) and "no score in 'good'" in verdict.detail


def test_the_run_stops_at_the_cost_limit_and_goes_on_from_there(stand_in, tmp_path):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    limited = settings(server, tmp_path, prices=[1.0, 10.0], cost_limit=0.005, concurrency=1)
    with pytest.raises(VerifierLimit, match=r"cost 0.01 US dollars .verifiers.judge.cost_limit=0.005"):
        make_verifier("general-quality", limited).verify_many([sample(i) for i in range(9)])
    assert len(server.asked) == 3  # of 0.002 dollars each
    more = settings(server, tmp_path, prices=[1.0, 10.0], cost_limit=1.0, concurrency=1)
    assert make_verifier("general-quality", more).verify_many([sample(2)])[0].cost == 0
    with pytest.raises(ValueError, match="cost_limit needs them"):
        make_verifier("general-quality", settings(server, cost_limit=1.0))


def test_many_verdicts_at_once_stay_within_the_cost_limit(stand_in):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    server.usage = {"prompt_tokens": 1000, "completion_tokens": 0}
    limited = settings(server, prices=[1000.0, 0.0], cost_limit=5.0, concurrency=64)
    with pytest.raises(VerifierLimit, match="cost 5.00 US dollars"):
        make_verifier("general-quality", limited).verify_many([sample(i) for i in range(64)])
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        [],
        "many",
        {"prompt_tokens": -1000, "completion_tokens": 100},
        {"prompt_tokens": float("nan"), "completion_tokens": 100},
        {"prompt_tokens": float("inf"), "completion_tokens": 100},
        {"prompt_tokens": "1000", "completion_tokens": 100},
        {"prompt_tokens": True, "completion_tokens": 100},
    ],
)
def test_what_is_no_cost_neither_counts_as_nothing_nor_is_given_back(stand_in, usage):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    server.usage = usage
    limited = settings(server, prices=[1000.0, 1000.0], cost_limit=1.0, max_tokens=100)
    verifier = make_verifier("general-quality", limited)
    with pytest.raises(VerifierLimit):
        for number in range(20):
            (verdict,) = verifier.verify_many([sample(number)])
            assert verdict.score is None and "expected numbers of tokens" in verdict.detail
    assert verifier.judge.spent >= 1.0 and len(server.asked) < 20
    without_limit = make_verifier("general-quality", settings(server, prices=[1000.0, 1000.0]))
    (verdict,) = without_limit.verify_many([sample()])
    assert (verdict.score, verdict.cost) == (0.5, 0.0)


def test_damaged_lines_of_kept_verdicts_are_skipped_with_a_note(stand_in, tmp_path, capsys):
    server = stand_in(lambda prompt, n: '{"SCORE": 5}')
    make_verifier("general-quality", settings(server, tmp_path)).verify_many([sample()])
    path = tmp_path / CACHE_FILE
    entry = json.loads(path.read_text())
    damages = ({"score": 99}, {"score": "x"}, {"score": float("nan")}, {"cost": -5}, {"cost": float("nan")})
    lines = [json.dumps(entry | damage | {"key": f"k{n}"}) for n, damage in enumerate(damages)]
    path.write_bytes(b"\n".join([*map(str.encode, lines), b"[]", b"5", b"{}", b"\xff\xfe", b'{"key": "ha']))
    verifier = make_verifier("general-quality", settings(server, tmp_path, prices=[1.0, 1.0], cost_limit=1.0))
    assert verifier.verify_many([sample()])[0].score == 0.5 and len(server.asked) == 2
    assert verifier.judge.spent == pytest.approx(0.0011)
    note = capsys.readouterr().out
    assert f"{CACHE_FILE}: 10 lines hold no verdict and are skipped: line 1 " in note


def test_a_rubric_is_the_weighted_mean_of_its_criteria(stand_in):
    def answer(prompt, n):
        return {"polite": '{"SCORE": 2}', "long": '{"SCORE": 1}', "lies": '{"SCORE": 2}', "odd": "what?"}[
            next(word for word in ("polite", "long", "lies", "odd") if word in prompt)
        ]

    def label(*criteria):
        rubrics = [{"description": f"The answer: {text}", "weight": weight} for text, weight in criteria]
        return json.dumps({"query": "Why?", "rubrics": rubrics})

    server = stand_in(answer)
    verifier = make_verifier("rubric", settings(server))
    labels = [label(("polite", 3), ("long", 1)), label(("lies", -2)), label(("polite", 1), ("odd", 1))]
    verdicts = verifier.verify_many([sample(0, text) for text in labels])
    assert [each.score for each in verdicts] == [pytest.approx(3.5 / 4), -1.0, None]
    assert all("Why?" in prompt for prompt, *_ in server.asked)
    with pytest.raises(ValueError, match="expected .*rubrics"):
        verifier.check_label('{"query": "Why?", "rubrics": []}')


@pytest.mark.slow
def test_a_stalling_judge_costs_its_rows_alone_among_256(stand_in):
    def answer(prompt, n):
        return None if "It is 7" in prompt else '{"SCORE": 1}'  # 7, 70..79

    both = [Assigned("general-safety", None), Assigned("gsm8k", "1", 0.5)]
    requests = [(sample(i), both) for i in range(100)] + [(sample(i), both[1:]) for i in range(156)]
    verifiers = Verifiers(settings(stand_in(answer), timeout=3.0))
    started = time.perf_counter()
    results = verifiers.verify(requests)
    assert time.perf_counter() - started < 20
    lost = [i for i, result in enumerate(results) if result.score is None]
    assert lost == [7, *range(70, 80)]
    assert results[0].score == 1.0 and results[1].score == 1.5 and results[101].score == 0.5


class Client:
    """Says what a code server would."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.asked = []

    def test(self, *arguments):
        self.asked.append(arguments)
        return Results(*self.replies.pop(0))


def code(name="code", *replies, **config):
    client = Client(*replies)
    verifier = make_verifier(name, VerifierSettings(VerifiersConfig(code=CodeVerifierConfig(**config))))
    verifier.client = client
    return verifier, client


TESTS = json.dumps(["assert f(1) == 2", "assert f(2) == 3"])


def test_the_last_block_is_tested_and_the_share_of_passed_tests_is_the_score():
    verifier, client = code("code", ([1, 0], [0.1, -1.0]), max_execution_time=2.0)
    text = "```python\nold\n``` or rather ```python\ndef f(x): return x + 1\n```"
    assert verifier.verify(Sample(text, TESTS)).score == 0.5
    assert client.asked == [("def f(x): return x + 1", json.loads(TESTS), False, 2.0)]
    verifier, client = code("code_stdio", ([1], [0.1]))
    verifier.verify(Sample("print(1)", [{"input": "", "output": "1"}]))
    assert client.asked == [("print(1)", [{"input": "", "output": "1"}], True, 1.0)]


def test_a_failed_test_earns_no_bonus_where_time_counts_and_a_slow_one_nothing():
    for reply, settings_, score in [
        (([1, 0], [0.5, -1.0]), {"apply_perf_penalty": True}, 0.25),
        (([1], [1.4]), {"apply_perf_penalty": True}, 0.0),
        (([], []), {}, 0.0),
    ]:
        verifier, _ = code("code", reply, **settings_)
        assert verifier.verify(Sample("x", TESTS)).score == score


def test_tests_that_the_prompt_shows_are_left_out_where_others_are_left():
    verifier, client = code("code", ([1], [0.1]), ([1, 1], [0.1, 0.1]), drop_shown_tests=True)
    verifier.verify(Sample("x", TESTS, "Such that assert f(1) == 2 holds."))
    verifier.verify(Sample("x", TESTS, "assert f(1) == 2\nassert f(2) == 3"))
    assert [len(tests) for _, tests, *_ in client.asked] == [1, 2]


def test_one_test_alone_is_a_list_of_one_and_labels_that_are_no_tests_are_refused():
    for name, tests in (("code", ["assert f(1)"]), ("code_stdio", [{"input": "1", "output": "2"}])):
        (assigned,) = assigned_verifiers({"verifier": name, "ground_truth": tests})
        verifier, client = code(name, ([1], [0.1]))
        verifier.check_label(assigned.label)
        assert verifier.verify(Sample("x", assigned.label)).score == 1.0 and client.asked[0][1] == tests
    refused = [("code", '[{"input": "1"}]'), ("code_stdio", '["assert f(1)"]'), ("code", "[]")]
    damaged = ({"input": "1"}, {"output": "1"}, {"input": "1", "output": 1}, {"input": [1], "output": "1"})
    refused += [("code_stdio", json.dumps([{"input": "1", "output": "2"}, test])) for test in damaged]
    for name, label in refused:
        with pytest.raises(ValueError, match="expected a list of tests"):
            code(name)[0].check_label(label)


@pytest.mark.slow
def test_programs_are_tested_by_a_server_of_their_own_and_a_dead_one_makes_no_zero():
    verifier = make_verifier("code", VerifierSettings(VerifiersConfig()))
    right = "```\ndef f(x): return x + 1\n```"
    wrong = "```\ndef f(x): return 2\n```"
    verdicts = verifier.verify_many([Sample(text, TESTS) for text in (right, wrong)])
    verifier.close()
    assert [each.score for each in verdicts] == [1.0, 0.5]
    away, _ = code("code")
    away.client = type(verifier.client)("http://127.0.0.1:9", queue_seconds=0.5)
    assert away.verify(Sample(right, TESTS)).score is None
