"""A real training step whose judge stalls for some rows goes on, and counts them."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pandas as pd
import pytest
from small_runs import BASE_MODEL, arguments, metrics

from verl.trainer import main_ppo


class Judge(ThreadingHTTPServer):
    """Stalls for every question about a lake; every other answer is worth 0.7."""

    request_queue_size = 256
    daemon_threads = True
    ended = threading.Event()

    class RequestHandlerClass(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "lake" in body["messages"][0]["content"].split("ANSWER")[0]:
                Judge.ended.wait(30)
                return
            said = {"choices": [{"message": {"content": '{"REASONING": "so so", "SCORE": 7}'}}]}
            text = json.dumps(said | {"usage": {"prompt_tokens": 1000, "completion_tokens": 0}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_):
            pass

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)


@pytest.fixture
def judge():
    server = Judge()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    Judge.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def rows(*subjects: str) -> list[dict]:
    verifiers = [
        {"name": "general-quality", "label": "", "weight": 1.0},
        {"name": "up_to_max_length", "label": "4", "weight": 0.5},
        {"name": "math", "label": "1", "weight": 1.0},
    ]
    return [
        {
            "data_source": "mixed",
            "prompt": [{"role": "user", "content": f"Who named the {subject}?"}],
            "reward_model": {"ground_truth": {"verifiers": verifiers}},
            "extra_info": {"index": i},
        }
        for i, subject in enumerate(subjects)
    ]


@pytest.mark.slow
def test_a_training_step_with_a_judge_that_stalls_goes_on_without_those_rows(judge, tmp_path, capsys):
    pd.DataFrame(rows("lake", "river", "town", "hill")).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame(rows("river", "lake", "hill")).to_parquet(tmp_path / "test.parquet")
    settings = {
        "do_search": "false",
        "max_turns": 0,
        "verifiers.judge.base_url": judge,
        "verifiers.judge.model": "stand-in",
        "verifiers.judge.timeout": 1,
        "verifiers.judge.prices": "[1,1]",
        "verifiers.length_range": 40,
        "trainer.total_training_steps": 1,
    }
    line = [
        *arguments(tmp_path, "http://127.0.0.1:9/retrieve", tmp_path / "run"),
        *(f"{k}={v}" for k, v in settings.items()),
    ]
    assert BASE_MODEL.is_dir() and main_ppo.run(line) == 0, capsys.readouterr().err
    before = metrics(tmp_path / "run")[0]
    step = next(row for row in metrics(tmp_path / "run") if "train/score" in row)
    assert step["reward/unverified/general-quality"] == step["env/left_out"] == 4
    assert step["objective/general-quality_reward"] == pytest.approx(0.7)
    assert step["reward/cost"] > 0 and step["train/score"] >= 0.7
    assert before["val/greedy/unverified"] == 1
    assert before["val/test_score/mixed"] >= 0.7  # of those that were verified
