"""Runs on wandb: what the real package writes as tables, and reads from a server that answers as wandb's."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from verl.monitor import __main__ as monitor
from verl.monitor import wandb_runs
from verl.monitor.__main__ import main
from verl.records.tags import table_row
from verl.utils.tracking import Tracking


def record(question, answer, score, texts, reason):
    turn = {"action": "answer", "text": "".join(texts), "obs_start": None}
    trajectory = {"turns": [turn], "finish_reason": reason, "prompt_text": question, "env_class": "search"}
    about = {"step": 2, "split": "val", "data_source": "nq", "question": question, "gold": ["ann"]}
    return about | {"answer": answer, "score": score, "tokens": texts, "trajectory": trajectory}


ROWS = [
    table_row(record("who?", "ann", 1.0, [" <answer> ann", " </answer>"], "answer")),
    table_row(record("where?", None, 0.0, [" <answer> rome"], "eos")),
]
TABLE = {"columns": list(ROWS[0]), "data": [list(row.values()) for row in ROWS]}
PATH = "media/table/val/rollouts_2.table.json"
FIRST = [
    {"_step": step, "_timestamp": 1.7e9 + step, "critic/score/mean": 0.1 * step} for step in (1, 2, 3, 9)
]
SECOND = [{"_step": step, "_timestamp": 1.8e9 + step, "critic/score/mean": 0.2 * step} for step in (3, 4)]
SECOND[0]["val/rollouts"] = {"_type": "table-file", "path": PATH, "ncols": 10, "nrows": 2}
HISTORY = {"one": FIRST, "two": SECOND}  # a run that was killed at step 9 and went on from 2, and the rest


class Wandb:
    """Answers the queries of wandb 0.31's public API for two runs of one group."""

    def __init__(self) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.reply({"data": outer.data(json.loads(body))} if self.path == "/graphql" else {})

            def do_GET(self):
                self.reply(TABLE)

            def reply(self, answer):
                text = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self.state = "finished"  # of the second
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def data(self, body):
        query = body["query"]
        asked = body.get("variables", {})
        viewer = {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}
        if "viewer" in query:
            return {"viewer": viewer}
        if asked.get("project") != "project":
            return {"project": None}
        if "query Runs(" in query:
            group = json.loads(asked["filters"] or "{}").get("group", "both")
            edges = [{"node": self.node(name), "cursor": name} for name in ("two", "one") if group == "both"]
            runs = {"edges": edges, "pageInfo": {"endCursor": "", "hasNextPage": False}}
            return {"project": {"internalId": "1", "runCount": len(edges), "readOnly": False, "runs": runs}}
        name = asked.get("name") or asked.get("runName") or asked.get("run")
        if name not in HISTORY:
            return {"project": {"run": None}}
        if "files(" in query:
            url = f"{self.url}/files/{PATH}"
            file = {"id": "1", "name": PATH, "url": url, "directUrl": url, "sizeBytes": "9", "md5": "x"}
            file |= {"mimetype": "application/json", "updatedAt": None}
            files = {"edges": [{"node": file, "cursor": ""}]}
            files["pageInfo"] = {"endCursor": "", "hasNextPage": False}
            return {"project": {"internalId": "1", "run": {"fileCount": 1, "files": files}}}
        node = self.node(name)
        if "minStep" in asked:
            steps = range(asked["minStep"], asked["maxStep"])
            node["history"] = [json.dumps(row) for row in HISTORY[name] if row["_step"] in steps]
        return {"project": {"run": node}}

    def node(self, name):
        node = {"id": name, "name": name, "displayName": "both", "group": "both", "projectId": 1}
        node |= {
            "state": "finished" if name == "two" else "crashed",
            "user": {"name": "me", "username": "me"},
        }
        node |= {"createdAt": f"2026-01-0{1 + (name == 'two')}T00:00:00Z", "heartbeatAt": None}
        node |= {"config": "{}", "summaryMetrics": "{}", "systemMetrics": "{}", "tags": [], "readOnly": False}
        node |= {"parquetHistory": {"parquetUrls": [], "liveData": []}, "historyLineCount": 3}
        return node | {"historyKeys": {"lastStep": HISTORY[name][-1]["_step"], "keys": {}}}


@pytest.fixture
def wandb_server(monkeypatch, tmp_path):
    server = Wandb()
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", "local-" + "0" * 40)
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.mark.slow
def test_the_runs_of_one_name_are_one_with_its_failures(wandb_server, tmp_path, capsys):
    assert main(["--project", "project", "--list"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "both" in each]
    assert "finished" in line and "4" in line and "0.8" in line
    assert main(["--project", "project", "--entity", "team", "both"]) == 0
    said = capsys.readouterr().out
    assert "search: 2 rollouts kept; no_answer 50.0%, format 50.0%" in said
    assert "step 2: where? [no_answer, format]" in said and (tmp_path / "both/monitor/reward.png").is_file()
    (sample,) = map(json.loads, (tmp_path / "both/monitor/samples.jsonl").read_text().splitlines())
    assert sample["text"] == "where? <answer> rome"
    assert main(["--project", "project", "two", "--metrics-only"]) == 0  # by its id


@pytest.mark.slow
def test_watching_ends_with_the_run(wandb_server, monkeypatch, capsys):
    monkeypatch.setattr(monitor, "REFRESH_SECONDS", 0.2)
    monkeypatch.setattr(wandb_runs, "LOOK_SECONDS", 0.0)
    wandb_server.state = "running"
    over = threading.Timer(1.0, lambda: setattr(wandb_server, "state", "finished"))
    over.start()
    assert main(["--project", "project", "both", "--watch"]) == 0
    over.join()


@pytest.mark.slow
def test_what_wandb_does_not_have_is_said(wandb_server, capsys):
    assert main(["--project", "project", "three"]) == 2
    assert "wandb does not give run three of team/project" in capsys.readouterr().err
    assert main(["--project", "other", "both"]) == 2
    assert "team/other" in capsys.readouterr().err


@pytest.mark.slow
def test_a_validation_is_a_table_of_rollouts(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracking = Tracking("project", "run", ["wandb"], {}, tmp_path)
    tracking.log_table("val/rollouts", ROWS, 2)
    tracking.log({"train/em": 0.5}, 2)
    tracking.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.table.json")
    assert json.loads(written.read_text()) == TABLE


@pytest.mark.parametrize(("path", "name"), [("../../x", "../../x"), ("/abs/x", "/abs/x"), (PATH, "../x")])
def test_no_name_on_wandb_leaves_the_folder_of_the_download(path, name):
    file = SimpleNamespace(name=name, download=lambda root: pytest.fail("it is downloaded"))
    run = wandb_runs.WandbRun.__new__(wandb_runs.WandbRun)
    run.folder = "both"
    run._history = [(SimpleNamespace(file=lambda path: file), {"step": 3, "val/rollouts": {"path": path}})]
    with pytest.raises(ValueError, match="wandb does not give the table of step 3 .* expected a file of the"):
        next(run.records())
