"""Runs are listed, reported, drawn and served from their folders, while they run too."""

import fcntl
import json
import threading
import urllib.error
import urllib.request

import pytest

from verl.monitor.__main__ import main
from verl.monitor.page import page_server
from verl.monitor.runs import Run


def turn(text, action="search", **details):
    return {
        "action": action,
        "text": text,
        "start": 0,
        "end": 1,
        "obs_start": None,
        "obs_end": None,
        **details,
    }


def write_run(folder, steps=5, rewards=(1.0, 0.0, 0.0), finished=True):
    (folder / "trajectories").mkdir(parents=True)
    rows = [
        {
            "step": step,
            "critic/score/mean": 0.1 * step,
            "train/em": 0.1 * step,
            "actor/pg_loss": -0.5 * step,
            "actor/entropy_loss": 1.0 / step,
            "actor/grad_norm": 0.3,
            "actor/lr": 1e-3,
            "timing_s/step": 2.0,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "ha')
    for step in (1, steps):
        records = []
        for i, reward in enumerate(rewards):
            turns = [turn("<search> a </search>", query="a", documents=[{"contents": "x", "score": 1.0}])] * (
                i + 1
            )
            trajectory = {
                "turns": turns,
                "finish_reason": "answer" if i < 2 else "max_turns",
                "num_searches": 1,
            }
            trajectory |= {"prompt_text": "Question: who?", "policy_text": "<search> a </search>"}
            about = {
                "step": step,
                "split": "train",
                "uid": f"{i}",
                "data_source": "nq",
                "question": f"who {i}?",
            }
            scores = {"gold": ["b"], "answer": "c", "em": 0, "f1": 0.0, "score": reward, "extra_info": {}}
            tokens = {"trajectory": trajectory, "tokens": ["<search> a </search>"], "token_mask": [1]}
            records.append(about | scores | tokens)
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "trajectories" / f"step_{step}.jsonl").write_text(text)
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def test_runs_are_listed_with_their_states(tmp_path, capsys):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", finished=False)
    running = write_run(tmp_path / "group" / "three", finished=False)
    with (running / "run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["--list", "--root", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    lines = {line.split()[-2]: line for line in shown if line.startswith("│")}
    assert "finished" in lines["one"] and "stopped" in lines["two"] and "running" in lines["group/three"]
    assert main(["--list", "--root", str(tmp_path), "--num-runs", "1"]) == 0
    assert capsys.readouterr().out.count("│") == 7  # one row


def test_the_list_breaks_no_name(tmp_path, capsys, monkeypatch):
    name = "squad-quickstart-Qwen2.5-3B-Instruct-grpo-seed0-adv_estimator-rloo-lr-1e-6-n_agent-16"
    write_run(tmp_path / "group" / name)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--list", "--root", str(tmp_path)]) == 0
    assert f"group/{name} " in capsys.readouterr().out


def test_a_run_in_an_environment_is_shown_by_its_reward(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    for line in lines:
        line |= {
            "train/em": 0.0,
            "val/sampled/em": 0.0,
            "env/text2sql/reward": 0.25,
            "env/text2sql/turns": 2.0,
        }
    lines[-1]["val/test_score/text2sql"] = 0.625
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(run), "--metrics-only"]) == 0
    told = capsys.readouterr().out
    assert "validation reward" in told and "0.625" in told and "EM" not in told
    shown = Run(run).pictures()["reward"]
    assert shown["Environments"] == ("env/text2sql/reward", "val/test_score/text2sql")
    assert "Exact match" not in shown


def test_a_report_has_figures_tags_failed_rollouts_and_pictures(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    assert main([str(run)]) == 0
    told = capsys.readouterr().out
    assert "0.5" in told and "nq: 6 rollouts kept" in told and "repeated_action 66.7%" in told
    assert "no_answer 33.3%" in told and "4 rollouts below a reward of 0.3" in told
    for name in ("loss.png", "reward.png", "optimizer.png"):
        assert (run / "monitor" / name).read_bytes()[:4] == b"\x89PNG"
    lines = (run / "monitor" / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert [(x["step"], x["question"]) for x in samples[:2]] == [(5, "who 2?"), (5, "who 1?")]
    assert samples[0]["tags"] == ["no_answer", "repeated_action"]
    assert "who 2?" in (run / "monitor" / "samples.html").read_text()


def test_flags_leave_out_what_is_not_asked_for(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    place = tmp_path / "place"
    assert main([str(run), "--metrics-only", "--save-dir", str(place)]) == 0
    assert "rollouts" not in capsys.readouterr().out and not (place / "samples.jsonl").exists()
    flags = ["--samples-only", "--save-dir", str(place), "--reward-threshold", "2", "--max-samples", "3"]
    assert main([str(run), *flags]) == 0
    assert "entropy" not in capsys.readouterr().out
    assert len((place / "samples.jsonl").read_text().splitlines()) == 3


def test_what_others_wrote_is_no_command_to_the_terminal(tmp_path, capsys):
    run = write_run(tmp_path / "one")
    for path in (run / "trajectories").glob("*.jsonl"):
        path.write_text(
            path.read_text().replace('"who ', '"\\u001b]52;c;eA==\\u0007 who ').replace('"c"', '"\\u009b2J"')
        )
    assert main([str(run)]) == 0
    told = capsys.readouterr().out
    assert "\\x1b]52;c;eA==\\x07 who 2?" in told and "\\x9b2J" in told
    assert not {"\x1b", "\x07", "\x9b"} & set(told)


def test_watching_ends_with_the_runs(tmp_path, capsys):
    assert main([str(write_run(tmp_path / "one")), str(write_run(tmp_path / "two")), "--watch"]) == 0
    assert "one" in capsys.readouterr().out


def test_a_page_of_several_runs_has_their_newest_figures(tmp_path):
    folders = [write_run(tmp_path / "one"), write_run(tmp_path / "two", steps=2000)]
    with page_server(folders, 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            assert b"<!doctype html>" in urllib.request.urlopen(f"{url}/").read()
            of_a_page = urllib.request.Request(f"{url}/data", headers={"Host": "evil.example"})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(of_a_page)
            data = json.load(urllib.request.urlopen(f"{url}/data"))
            assert [run["step"] for run in data["runs"]] == [5, 2000]
            assert data["runs"][0]["tags"] == [["nq", 6, [["no_answer", 2 / 6], ["repeated_action", 4 / 6]]]]
            curves = {line["run"]: line["points"] for line in data["panels"]["Reward"]}
            assert len(curves["one"]) == 5 and len(curves["two"]) == 500
            with (folders[0] / "metrics.jsonl").open("a") as file:
                file.write('\n{"step": 6, "critic/score/mean": 0.9}\n')
            data = json.load(urllib.request.urlopen(f"{url}/data"))
            assert data["runs"][0]["step"] == 6 and data["runs"][0]["figures"]["reward"] == 0.9
        finally:
            server.shutdown()
            thread.join()


def test_mistakes_are_said(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "expected the folder of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([])
    assert "--list" in capsys.readouterr().err


@pytest.mark.parametrize("port", [-1, 65536, 70000])
def test_a_number_that_is_no_port_is_said(tmp_path, port):
    with pytest.raises(ValueError, match=f"--serve: found port {port}; expected one from 1 to 65535"):
        page_server([write_run(tmp_path / "one")], port)


@pytest.mark.parametrize("count", ["0", "-3"])
def test_a_list_of_no_runs_is_refused(tmp_path, count, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--list", "--root", str(tmp_path), "--num-runs", count])
    assert ended.value.code == 2
    assert f"--num-runs: found {count}, expected 1 or more" in capsys.readouterr().err
