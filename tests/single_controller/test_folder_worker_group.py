"""The folder backend: the results of the others, and what a killed, silent or new process does to a group."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from sample_workers import ScaleWorker, SumWorker, sample_batch

from verl.single_controller import ClassWithInitArgs, build_worker_groups, folder
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.folder import FolderResourcePool, FolderSession, Pulse, RankReply, put, take

SERVE = """
import sys
from pathlib import Path
from verl.single_controller.folder import serve
sys.exit(serve(Path(sys.argv[1]), sys.argv[2], "127.0.0.1", int(sys.argv[4]), float(sys.argv[3])))
"""
ROLES = {"scale": ClassWithInitArgs(ScaleWorker, factor=3), "sum": ClassWithInitArgs(SumWorker)}


def start(root, name, patience=60, parent=0):
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    command = [sys.executable, "-c", SERVE, str(root), name, str(patience), str(parent)]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE)


@contextmanager
def processes(root, count):
    """Those of a pool `w`, by rank; all are ended."""
    running = [start(root, f"w-{rank}") for rank in range(count)]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def groups_of(session, count=2, roles=ROLES):
    pool = FolderResourcePool([count], "w", session.renew())
    pool.timeout_seconds = 60
    return build_worker_groups("folder", pool, roles)


@pytest.mark.slow
def test_rows_errors_and_sessions_of_two_ranks(tmp_path):
    root = tmp_path / "processes"
    with processes(root, 2) as running:
        with FolderSession(root) as session:
            groups = groups_of(session)
            for num_rows in (1, 4, 5):
                batch = sample_batch(num_rows)
                rows = groups["scale"].scale(batch, offset=1)
                assert rows.batch["y"].tolist() == [3 * i + 1 for i in range(num_rows)]
            later = groups["scale"].scale_later(sample_batch(4))  # an argument that is not there yet
            assert groups["sum"].add_up(later).batch["total"].tolist() == [3, 3, 15, 15]
            assert groups["scale"].sum_of_ranks() == [3.0, 3.0]
            with pytest.raises(KeyError, match="no taste") as raised:
                groups["scale"].fail([None, "no taste"])
            assert "rank 1 of worker group 'w' failed in scale_fail" in str(raised.value.__cause__)
            with pytest.raises(AttributeError, match="Can't pickle"):
                groups["scale"].give_a_function()
            with pytest.raises(RuntimeError, match="SystemExit: 0"):
                groups["scale"].leave()
            assert list(root.glob("session-*/*/*")) == []  # what was read is gone
            assert oct(root.stat().st_mode)[-2:] == "00"
            with pytest.raises(ValueError, match="Found another process that holds"):
                FolderSession(root)

            again = groups_of(session)  # the same processes, begun anew
            assert again["scale"].pid() == [process.pid for process in running]
            assert again["scale"].set_factor_on_rank_zero(5) == 0
            assert len(list(root.glob("session-*"))) == 1
        assert [process.wait(30) for process in running] == [0, 0]  # the run is over


@pytest.mark.slow
def test_who_is_killed_is_named_and_another_takes_the_place(tmp_path):
    root = tmp_path / "processes"
    with processes(root, 2) as running, FolderSession(root) as session:
        groups = groups_of(session)
        waiting = groups["scale"].scale_later(sample_batch(2))
        assert waiting.get().batch["x"].tolist() == waiting.get().batch["x"].tolist() == [0, 3]
        running[1].kill()
        running[1].wait()
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match=rf"w-1 died during .*pid {running[1].pid}\): its process"):
            groups["scale"].sum_of_ranks()  # rank 0 waits for the other one in it
        assert time.monotonic() - began < 5
        running[1] = start(root, "w-1")
        while json.loads((root / "w-1.json").read_text())["pid"] != running[1].pid:
            time.sleep(0.05)
        with pytest.raises(WorkerDiedError, match="begun anew"):
            groups["scale"].describe("hello")
        assert groups_of(session)["scale"].sum_of_ranks() == [3.0, 3.0]


@pytest.mark.slow
def test_who_falls_silent_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "SILENT_SECONDS", 3.0)
    root = tmp_path / "processes"
    with processes(root, 1) as running, FolderSession(root) as session:
        group = groups_of(session, 1)["scale"]
        running[0].send_signal(signal.SIGSTOP)
        with pytest.raises(
            WorkerDiedError, match="w-0 died during scale_describe .*: nothing was heard of it"
        ):
            group.describe("hello")


@pytest.mark.slow
def test_a_driver_that_is_gone_and_a_place_that_is_taken(tmp_path):
    root = tmp_path / "processes"
    with processes(root, 1) as running:
        while not (root / "w-0.json").exists():
            time.sleep(0.05)
        second = start(root, "w-0")
        _, told = second.communicate(timeout=60)
        assert b"Found another process that holds" in told and second.returncode == 1
        assert running[0].poll() is None
    orphan = start(root, "w-1", parent=1)
    assert orphan.wait(60) == 3
    orphan.communicate()
    lonely = start(root, "w-0", patience=1)
    _, told = lonely.communicate(timeout=60)
    assert lonely.returncode == 3 and b"nothing was heard of a driver" in told


def test_processes_that_do_not_come_are_named(tmp_path):
    with FolderSession(tmp_path) as session:
        pool = FolderResourcePool([2], "train_worker", session.renew())
        pool.timeout_seconds = 0.2
        with pytest.raises(
            ValueError, match=r"Found no process train_worker-0, train_worker-1 .*--rank RANK"
        ):
            build_worker_groups("folder", pool, ROLES)


def test_messages_are_whole_or_refused(tmp_path):
    path = tmp_path / "call-0"
    with pytest.raises(FileNotFoundError):
        take(path)
    put(path, pickle.dumps({"a": [1, None]}))
    assert take(path) == {"a": [1, None]} and list(tmp_path.iterdir()) == []
    put(path, pickle.dumps("text"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(WorkerDiedError, match="the reply of rank 2 is lost: .*damaged"):
        RankReply(2, path).look()


def test_what_lies_there_from_before_is_no_beat(tmp_path):
    path = tmp_path / "driver.json"
    path.write_text('{"session": "old", "beat": 7}')
    pulse = Pulse(path)
    assert pulse.look()["session"] == "old" and not pulse.has_moved
    path.write_text('{"session": "old", "beat": 8}')
    assert pulse.look()["beat"] == 8 and pulse.has_moved and pulse.silent < 1
