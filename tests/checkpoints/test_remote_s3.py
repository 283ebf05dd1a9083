"""Checkpoints in S3: s3fs speaks with moto's server, which answers as S3 does, fails, stalls, or is away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server

from verl.checkpoints import remote_store
from verl.checkpoints.remote_store import MANIFEST, RemoteFailed, RemoteStore, Uploads
from verl.checkpoints.run_state import CheckpointStore

pytestmark = pytest.mark.slow
# bytes: S3 takes it in one request, and streams it
BUCKET = "bucket"
STEP = 3
SIZE = 6_000_000


class Bucket:
    """A bucket of moto's server on a port of its own. before(number): called ahead of each request's answer;
    what it returns, if anything, is the status that the client gets instead.
    """

    def __init__(self) -> None:
        self._s3 = DomainDispatcherApplication(create_backend_app)
        self.number = 0
        self.before = lambda number: None
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.port}"

    def _answer(self, environ, start_response):
        with self._lock:
            self.number += 1
            number = self.number
        status = self.before(number)
        if status is not None:
            start_response(f"{status} as it was told", [("Content-Length", "0")])
            return [b""]
        return self._s3(environ, start_response)

    def reset(self, before: Callable[[int], int | None] = lambda number: None) -> None:
        self.number = 0
        self.before = before

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def bucket(monkeypatch) -> Iterator[Bucket]:
    bucket = Bucket()
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setattr(remote_store, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(remote_store, "LONGEST_PAUSE", 0.2)
    httpx.post(f"{bucket.url}/moto-api/reset")  # moto keeps one state for all servers of a process
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    bucket.reset()
    S3FileSystem.clear_instance_cache()  # of another test's server
    yield bucket
    bucket.close()


@pytest.fixture
def run(tmp_path) -> CheckpointStore:
    """A run's folder with one whole checkpoint."""
    store = CheckpointStore(tmp_path / "run", None)
    folder = store.begin(STEP)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(os.urandom(SIZE))
    (folder / "run_state.json").write_text(json.dumps({"step": STEP}))
    store.commit(STEP)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3}\n')
    return store


def place() -> RemoteStore:
    return RemoteStore(f"s3://{BUCKET}/runs", "run")


def comes_back_whole(run: CheckpointStore, folder: Path) -> None:
    place().fetch(STEP, folder)
    for path in run.folder(STEP).rglob("*"):
        copy = folder / path.relative_to(run.run_dir)
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()


UPLOAD = """
import pathlib, sys
from verl.checkpoints.remote_store import RemoteStore
run = pathlib.Path(sys.argv[2])
RemoteStore(sys.argv[1], "run").upload(int(sys.argv[3]), run / f"global_step_{sys.argv[3]}", run)
"""


def test_a_process_that_is_killed_at_any_request_leaves_a_whole_checkpoint_or_none(bucket, run, tmp_path):
    store = place()
    command = [sys.executable, "-c", UPLOAD, f"s3://{BUCKET}/runs", str(run.run_dir), str(STEP)]
    store.upload(STEP, run.folder(STEP), run.run_dir)
    num_requests = bucket.number
    assert num_requests >= 8
    seen = set()
    for number in range(1, num_requests + 1):
        store.delete(STEP)
        started: list[subprocess.Popen[bytes]] = []

        def kill(count: int, at: int = number, started=started) -> None:
            if count == at:
                started[0].kill()

        bucket.reset(kill)
        started.append(subprocess.Popen(command))
        started[0].wait()
        bucket.reset()
        steps = place().steps()
        seen.add(tuple(steps))
        if steps:
            comes_back_whole(run, tmp_path / f"back-{number}")
        place().upload(STEP, run.folder(STEP), run.run_dir)  # the same command goes on
        assert place().steps() == [STEP]
    comes_back_whole(run, tmp_path / "back")
    assert () in seen  # killed in time


def test_an_upload_gets_through_refusals_and_stalls_without_holding_up_the_run(bucket, run, tmp_path):
    def trouble(number: int) -> int | None:
        if number % 3 == 1:
            return 503
        if number % 7 == 0:
            time.sleep(0.3)
        return None

    bucket.reset(trouble)
    uploads = Uploads(place(), run.run_dir, None, 60)
    start = time.monotonic()
    uploads.add(STEP)
    assert time.monotonic() - start < 0.1
    uploads.close(in_haste=False)
    bucket.reset()
    assert place().steps() == [STEP] and STEP in uploads.whole
    comes_back_whole(run, tmp_path / "back")


def test_a_bucket_that_is_away_costs_the_upload_alone_and_the_next_start_ends_it(bucket, run, capsys):
    uploads = Uploads(place(), run.run_dir, None, 1.0)
    bucket.reset(lambda number: 500)
    uploads.add(STEP)
    uploads.close(in_haste=False)
    assert "could not be uploaded within 1 s" in capsys.readouterr().out and run.steps() == [STEP]
    with pytest.raises(RemoteFailed):
        place().steps()
    bucket.reset()
    assert place().steps() == []
    again = Uploads(place(), run.run_dir, None, 60)
    again.add(STEP)
    again.close(in_haste=False)
    assert place().steps() == [STEP]


def test_a_bucket_that_is_not_there_and_a_damaged_file_are_said(bucket, run, tmp_path):
    with pytest.raises(RemoteFailed, match="there is no such place|NoSuchBucket|does not exist"):
        RemoteStore("s3://no-such-bucket/runs", "run").check(run.run_dir)
    store = place()
    store.check(run.run_dir)
    store.upload(STEP, run.folder(STEP), run.run_dir)
    key = f"runs/run/global_step_{STEP}/actor/weights"
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=bytes(SIZE))
    with pytest.raises(RemoteFailed, match=f"actor/weights is damaged: it is not what {MANIFEST} says"):
        place().fetch(STEP, tmp_path / "back")
    assert not (tmp_path / "back" / f"global_step_{STEP}").exists()
