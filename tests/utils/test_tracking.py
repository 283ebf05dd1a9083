"""Backends that metrics go to."""

import sys
import threading
import time
from importlib import import_module
from pathlib import Path

import pytest
from outside_servers import KINDS, Forbidding, server_that_is_away, serving

from verl.config.loading import load_config
from verl.preflight.run_checks import find_unreachable_wandb
from verl.preflight.target import Target
from verl.utils.tracking import Backend, Tracking, wandb_key, wandb_problem


def track(tmp_path, *loggers: str, first_step: int = 0) -> Tracking:
    return Tracking("project", "run", loggers, {"trainer": {"seed": 0}}, tmp_path, first_step)


def test_tensorboard_gets_the_metrics_and_drops_later_steps_on_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracking = track(tmp_path, "console", "tensorboard")
    for step in range(5):
        tracking.log({"train/em": step / 10}, step)
    tracking.finish()
    tracking.finish()
    resumed = track(tmp_path, "tensorboard", first_step=3)
    resumed.log({"train/em": 0.9}, 3)
    resumed.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    values = {event.step: round(event.value, 3) for event in events.Scalars("train/em")}
    assert values == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.9}


def test_verls_call_prints_verls_line(capsys):
    tracking = Tracking(project_name="p", experiment_name="e", default_backend="console", config=None)
    tracking.log(data={"actor/lr": 1e-6, "em": 0.5}, step=3)
    tracking.finish()
    assert capsys.readouterr().out == "step:3 - actor/lr:1e-06 - em:0.5\n"


def test_metrics_go_to_the_backends_that_are_named_and_wandb_gets_the_status(capsys):
    """verl 0.9.1: Tracking.log(data, step, backend=None), Tracking.finish(exit_code=0)."""
    tracking = Tracking("p", "e", "console")
    logged = []
    statuses = []
    tracking.backends["other"] = Backend(lambda metrics, step: logged.append(step), statuses.append)
    tracking.log({"em": 0.5}, step=1, backend=["other"])
    tracking.log({"em": 0.5}, step=2, backend="console")
    assert logged == [1] and capsys.readouterr().out == "step:2 - em:0.5\n"
    with pytest.raises(ValueError, match="backend: found wandb; expected any of console, other"):
        tracking.log({"em": 0.5}, step=3, backend="wandb")
    tracking.finish(exit_code=3)
    assert statuses == [3]


def test_unknown_and_missing_loggers_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Found nodepad in trainer.logger"):
        track(tmp_path, "nodepad")
    for name, extra in {"mlflow": "mlflow", "wandb": "train", "tensorboard": "train"}.items():
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=f"needs the package {name}, .* it is in the extra {extra}: "):
            track(tmp_path, name)


def test_a_wandb_key_is_found_where_wandb_looks(tmp_path, monkeypatch):
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    assert wandb_key() is None
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    (tmp_path / "netrc").chmod(0o600)
    assert wandb_key() == "0123"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_key() is None
    monkeypatch.setenv("WANDB_API_KEY", "4567")
    assert wandb_key() == "4567"


@pytest.fixture
def wandb_at(tmp_path, monkeypatch):
    """wandb_at(url, key): this process reports to a server at the address."""

    def report_to(url: str | None, key: str | None) -> None:
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name, value in {"WANDB_MODE": None, "WANDB_BASE_URL": url, "WANDB_API_KEY": key}.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return report_to


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["offline", None])
def test_wandb_without_a_key_keeps_the_run_on_disk(tmp_path, monkeypatch, capsys, mode, wandb_at):
    wandb_at(None, None)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    tracking = track(tmp_path, "wandb")
    tracking.log({"train/em": 0.5}, 1)
    tracking.finish()
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert ("no API key" in capsys.readouterr().out) == (mode is None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_wandb_that_is_away_is_foreseen_and_the_run_goes_on_offline(kind, tmp_path, capsys, wandb_at):
    with server_that_is_away(kind) as url:
        wandb_at(url, "local-" + "0" * 40)
        begun = time.monotonic()
        (finding,) = find_unreachable_wandb(Target(load_config(["trainer.logger=[wandb]"])))
        problem = wandb_problem()  # the server is asked once
        assert time.monotonic() - begun < 5
        tracking = track(tmp_path, "wandb")
        tracking.log({"train/em": 0.5}, 1)
        tracking.finish()
    assert finding.level == "warning" and f"has wandb, and {url} " in finding.what
    (line,) = capsys.readouterr().out.splitlines()
    folder = line.removeprefix(f"wandb: {problem}: the run is kept on disk; to upload it later: wandb sync ")
    assert list(Path(folder).glob("*.wandb"))


@pytest.mark.slow
def test_a_wandb_that_falls_silent_keeps_a_run_no_longer_than_it_is_told_to(
    tmp_path, monkeypatch, capsys, wandb_at
):
    """At the start of the run it answers the first request alone; the run is then kept offline."""

    class Once(Forbidding):
        def do_POST(self) -> None:
            if b"Viewer" in self.rfile.read(int(self.headers["Content-Length"])) and not asked:
                asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")
            else:
                over.wait(60)

    asked: list[str] = []
    over = threading.Event()
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "0.5")
    import_module("wandb").teardown()  # it keeps the variables of its first run
    with serving(Once) as url:
        wandb_at(url, "local-" + "0" * 40)
        tracking = track(tmp_path, "wandb")
        tracking.log({"train/em": 0.5}, 1)
        tracking.finish()
        over.set()
    assert asked == ["/graphql"]
    assert "Timed out initializing run" in capsys.readouterr().out
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_tensorboard_dir_says_where_the_event_files_are(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    tracking = track(tmp_path, "tensorboard")
    tracking.log({"loss": 1.0}, step=1)
    tracking.finish()
    assert list((tmp_path / "events").glob("*tfevents*")) and not (tmp_path / "tensorboard").exists()
