"""Models behind an API of others, whose server fails, stalls, and goes away."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from verl.evaluation import program
from verl.evaluation.api_engine import number_of_tokens
from verl.evaluation.program import main
from verl.records.tags import tags_of
from verl.utils import patient

ROOT = Path(__file__).parents[2]
ANSWERS = {"What is 1?": "one", "What is 2?": "two", "What is 3?": "three", "What is 4?": "four"}


class Api:
    """Answers questions of ANSWERS, all but the last one right. faults: what happens to the first requests of
    each question: a status, or "stall". seconds: that each answer takes. says: the text of an answer, by the
    first message.
    """

    def __init__(self, faults=(), seconds=0.0, says=None):
        self.bodies = []
        self.asked = Counter()
        self.stop = threading.Event()
        api = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = body["messages"][0]["content"]
                question = next((each for each in ANSWERS if each in content), content)
                with lock:
                    api.bodies.append((body, self.headers["Authorization"], self.path))
                    api.asked[question] += 1
                    number = api.asked[question]
                fault = faults[number - 1] if number <= len(faults) else 200
                if fault == "stall":
                    api.stop.wait(20)
                    self.close_connection = True
                    return
                api.stop.wait(seconds)
                said = ANSWERS.get(question, "") if question != "What is 4?" else "no idea"
                text = says(content) if says else f"I think <answer>{said}"
                message = {"role": "assistant", "content": text}
                reply = {"choices": [{"message": message, "finish_reason": "stop"}]}
                reply["usage"] = {"prompt_tokens": 1000, "completion_tokens": 10}
                text = json.dumps(reply if fault == 200 else {"error": "busy"}).encode()
                self.send_response(fault)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def questions(tmp_path):
    rows = [
        {
            "data_source": "numbers",
            "prompt": [{"role": "user", "content": f"{question} Answer between answer tags."}],
            "reward_model": {"style": "rule", "ground_truth": {"target": [answer]}},
            "extra_info": {"question": question},
        }
        for question, answer in ANSWERS.items()
    ]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "numbers.jsonl"


def flags(api, questions, *more):
    out = questions.parent / "evals"
    flags = [
        "--base_url",
        api.url,
        "--model",
        "some/model",
        "--benchmarks",
        str(questions),
        "--out",
        str(out),
    ]
    return [*flags, *more, "do_search=false"]


def results(questions):
    folder = questions.parent / "evals" / "some--model" / "numbers"
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "summary.json").read_text())


def test_errors_and_stalls_lose_nothing_and_the_cost_is_that_of_the_answers(questions, monkeypatch):
    monkeypatch.setattr(patient, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("THE_KEY", "secret")
    with Api(faults=(429, "stall", 500)) as api:
        more = ["--rollouts", "2", "--timeout", "1", "--prices", "1,100", "--api_key_var", "THE_KEY"]
        assert main(flags(api, questions, *more)) == 0
        body, key, path = api.bodies[0]
    assert key == "Bearer secret" and path == "/v1/chat/completions" and body["model"] == "some/model"
    assert body["stop"] == ["</answer>"] and body["temperature"] == 1.0
    lines, summary = results(questions)
    assert all(tags_of(line) == [] for line in lines)  # they are records of rollouts, too
    places = sorted((line["example_id"], line["rollout_idx"]) for line in lines)
    assert places == [(example, i) for example in range(4) for i in range(2)]
    assert {line["completion"] for line in lines if line["reward"] == 1.0} == {
        f"I think <answer>{ANSWERS[f'What is {i}?']}</answer>" for i in (1, 2, 3)
    }
    assert summary["avg@2"][0] == summary["pass@2"][0] == 0.75 and summary["num_unverified"] == 0
    assert summary["cost"] == pytest.approx(8 * (1000 * 1 + 10 * 100) / 1e6)
    assert (summary["prompt_tokens"], summary["completion_tokens"]) == (8000, 80)


def test_a_request_that_is_refused_costs_its_rollout_alone_and_resume_pays_nothing_twice(questions):
    settings = [
        "retriever.topk=2",
        "max_turns=3",
        "data.max_obs_length=99",
    ]  # three, as an interval has figures
    with Api(faults=(400,)) as api:
        more = ["--rollouts", "2", "--concurrency", "1", "--prices", "1,100", *settings]
        assert main(flags(api, questions, *more)) == 0
        lines, summary = results(questions)
        assert sum(line["reward"] is None for line in lines) == summary["num_unverified"] == 4
        assert {line["refused"] is None for line in lines if line["reward"] is not None} == {True}
        paid = len(api.bodies) - 4
        assert summary["cost"] == pytest.approx(paid * 0.002)
        assert main(flags(api, questions, *more, "--resume")) == 0
        lines, summary = results(questions)
        assert len(lines) == 8 and summary["num_unverified"] == 0
        assert summary["cost"] == pytest.approx((len(api.bodies) - 4) * 0.002)


def test_a_server_that_refuses_ends_the_evaluation_and_says_what_it_said(questions, capsys):
    with Api(faults=(401,) * 9) as api:
        assert main(flags(api, questions)) == 3
    assert "status 401" in (error := capsys.readouterr().err) and "--resume" in error


def test_a_full_disk_is_one_line_and_the_results_can_be_gone_on_with(questions, monkeypatch, capsys):
    def evaluate(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "results.jsonl")

    monkeypatch.setattr("verl.evaluation.program.evaluate", evaluate)
    with Api() as api:
        assert main(flags(api, questions)) == 3
    error = capsys.readouterr().err
    assert "results.jsonl can't be written: No space left on device" in error and "--resume" in error


@pytest.mark.parametrize(
    ("stated", "number"), [(7, 7), (-5, 0), (None, 0), (float("nan"), 0), ("9", 0), (True, 0)]
)
def test_only_numbers_of_tokens_are_paid_for(stated, number):
    assert number_of_tokens(stated) == number


def test_results_are_gone_on_with_only_if_asked_for_and_with_the_same_settings(questions, capsys):
    with Api() as api:
        assert main(flags(api, questions, "-n", "2")) == 0
        assert main(flags(api, questions, "-n", "2")) == 2
        assert "Give --resume" in capsys.readouterr().err
        assert main(flags(api, questions, "-n", "3", "--resume")) == 2
        assert "n=2, now 3" in capsys.readouterr().err
        before = len(api.bodies)
        assert main(flags(api, questions, "-n", "2", "--resume")) == 0
        assert len(api.bodies) == before


@pytest.mark.slow
def test_after_a_kill_no_rollout_is_repeated(questions):
    with Api(seconds=0.3) as api:
        command = [sys.executable, "-m", "verl.evaluation", *flags(api, questions, "--rollouts", "10")]
        command += ["--concurrency", "2"]
        folder = questions.parent / "evals" / "some--model" / "numbers"
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            deadline = time.monotonic() + 120
            while (
                not (folder / "results.jsonl").exists()
                or len((folder / "results.jsonl").read_text().splitlines()) < 7
            ):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        with (folder / "results.jsonl").open("a") as file:
            file.write('{"example_id": 3, "half')  # as if it was killed while it wrote
        before = (folder / "results.jsonl").read_text().splitlines()[:-1]
        asked = len(api.bodies)
        assert (
            subprocess.run(
                [*command, "--resume"], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}
            ).returncode
            == 0
        )
        assert len(api.bodies) == asked + 40 - len(before)
    after = (folder / "results.jsonl").read_text().splitlines()
    assert after[: len(before)] == before and len(after) == 40
    lines, summary = results(questions)
    assert len({(line["example_id"], line["rollout_idx"]) for line in lines}) == 40
    assert summary["pass@10"][0] == 0.75


def test_mistakes_are_refused_before_anything_is_asked(questions, tmp_path, capsys):
    with Api() as api:
        given = flags(api, questions)
        for more, said in (
            (["--rollouts", "0"], "--rollouts: found 0"),
            (["--steps", "3"], "--steps and --watch"),
            (["--prices", "1"], "--prices"),
            (["--temperature", "-1"], "--temperature"),
        ):
            with pytest.raises(SystemExit) as ended:
                main([*given[:-1], *more, given[-1]])
            assert ended.value.code == 2 and said in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main([*given[:5], str(tmp_path / "none.parquet"), *given[6:]])
        assert "none.parquet" in capsys.readouterr().err
        assert main([*given, "max_turn=3"]) == 2
        assert "max_turns" in capsys.readouterr().err
        assert not api.bodies


@pytest.mark.parametrize(
    ("card", "topk"),
    [
        ({"id": "some/model", "run_settings": {"retriever.topk": 2, "max_turns": 1}}, 2),
        ({"id": "other", "run_settings": {"retriever.topk": 2}}, 3),
        (
            {
                "id": "some/model",
                "run_settings": {"retriever.topk": "2 trainer.x=1", "retriever.url": "http://x"},
            },
            3,
        ),
        ({"id": "some/model"}, 3),
    ],
)
def test_a_model_behind_our_server_is_asked_with_its_runs_settings(monkeypatch, capsys, card, topk):
    answer = httpx.Response(200, json={"data": [card]})
    monkeypatch.setattr(program.httpx, "get", lambda *_, **__: answer)
    options = Namespace(base_url="http://x/v1", model="some/model", api_key_var="K", settings=["max_turns=3"])
    config = program.settings_of(None, options)
    assert (config.retriever.topk, config.max_turns) == (topk, 3)
    told = capsys.readouterr().err
    assert f"asks with max_turns=3 do_search=True retriever.topk={topk} " in told
    assert ("as http://x/v1 says" in told) == (topk == 2)
