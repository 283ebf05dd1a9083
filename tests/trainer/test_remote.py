"""Checkpoints at a remote place, whole or not there, whatever fails on the way."""

import json
import shutil
import subprocess
import time
from collections import namedtuple

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from small_runs import arguments, metrics

from verl.checkpoints import remote_store
from verl.checkpoints.remote_store import RemoteFailed, RemoteStore, Uploads
from verl.checkpoints.run_state import CheckpointStore
from verl.trainer.main_ppo import run


class Breaking(LocalFileSystem):
    """A local file system whose calls fail from the n-th on, as often as it is told."""

    protocol = "breaking"
    calls = 0
    fails_at = None
    failures = 0

    @classmethod
    def _strip_protocol(cls, path):
        return LocalFileSystem._strip_protocol(str(path).removeprefix("breaking://"))

    def _count(self):
        kind = type(self)
        kind.calls += 1
        if kind.fails_at is not None and kind.calls >= kind.fails_at and kind.failures > 0:
            kind.failures -= 1
            raise PermissionError("503 slow down")


for name in ("put_file", "pipe_file", "size", "ls", "get_file", "cat_file", "rm_file", "mv", "rm"):

    def guarded(self, *arguments, _name=name, **flags):
        self._count()
        return getattr(super(Breaking, self), _name)(*arguments, **flags)

    setattr(Breaking, name, guarded)
fsspec.register_implementation("breaking", Breaking, clobber=True)


@pytest.fixture
def breaking(tmp_path):
    Breaking.calls = 0
    Breaking.fails_at = None
    Breaking.failures = 0
    (tmp_path / "far").mkdir()
    return RemoteStore(f"breaking://{tmp_path}/far", "run")


def write(store, step, size=1000):
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes([step]) * size)
    (folder / "run_state.json").write_text(json.dumps({"step": step}))
    store.commit(step)


def test_a_failure_at_any_call_leaves_it_whole_or_not_there_and_the_next_try_ends_it(tmp_path, breaking):
    store = CheckpointStore(tmp_path / "run", None)
    write(store, 3)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3}\n')
    breaking.upload(3, store.folder(3), store.run_dir)
    num_calls = Breaking.calls
    for fails_at in range(1, num_calls + 1):
        shutil.rmtree(tmp_path / "far")
        (tmp_path / "far").mkdir()
        other = RemoteStore(f"breaking://{tmp_path}/far", "run")
        Breaking.calls = 0
        Breaking.fails_at = fails_at
        Breaking.failures = 1
        with pytest.raises(RemoteFailed, match="503 slow down"):
            other.upload(3, store.folder(3), store.run_dir)
        assert other.steps() == [] or fails_at > num_calls
        other.upload(3, store.folder(3), store.run_dir)
        assert other.steps() == [3]
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        other.fetch(3, tmp_path / "back")
        for path in store.folder(3).rglob("*"):
            copy = tmp_path / "back" / path.relative_to(store.run_dir)
            assert path.is_dir() or copy.read_bytes() == path.read_bytes()
        assert (tmp_path / "back" / "metrics.jsonl").read_text() == '{"step": 3}\n'


def test_what_is_damaged_or_missing_is_not_taken(tmp_path, breaking):
    store = CheckpointStore(tmp_path / "run", None)
    write(store, 1)
    breaking.upload(1, store.folder(1), store.run_dir)
    weights = tmp_path / "far" / "run" / "global_step_1" / "actor" / "weights"
    weights.write_bytes(bytes([2]) * 1000)
    with pytest.raises(RemoteFailed, match="damaged"):
        breaking.fetch(1, tmp_path / "back")
    weights.unlink()
    with pytest.raises(RemoteFailed, match="lacks"):
        breaking.fetch(1, tmp_path / "back")
    assert CheckpointStore(tmp_path / "back", None).steps() == []


def test_only_what_is_whole_elsewhere_is_deleted_here_and_old_ones_there(tmp_path, breaking, monkeypatch):
    monkeypatch.setattr(remote_store, "FIRST_PAUSE", 0.01)
    store = CheckpointStore(tmp_path / "run", 1, breaking)
    Breaking.fails_at = 10**9
    Breaking.failures = 0
    store.start_uploads(keep=2, deadline=0.05)
    # the place is away
    Breaking.fails_at = 0
    Breaking.failures = 10**9
    for step in (1, 2, 3):
        write(store, step)
    store.ended_well = True
    store.end_uploads()
    assert store.steps() == [1, 2, 3]
    Breaking.fails_at = None  # and is back
    again = CheckpointStore(tmp_path / "run", 1, breaking)
    again.start_uploads(keep=2, deadline=60)
    again.ended_well = True
    again.end_uploads()
    assert breaking.steps() == [2, 3]
    last = CheckpointStore(tmp_path / "run", 1, breaking)
    last.start_uploads(keep=2, deadline=60)
    write(last, 4)
    assert last.steps() == [1, 4]  # 1 is not elsewhere, 2 and 3 are
    last.ended_well = True
    last.end_uploads()
    assert breaking.steps() == [3, 4]


def test_before_a_checkpoint_there_is_room_or_it_is_not_begun(tmp_path, breaking, monkeypatch):
    usage = namedtuple("usage", "total used free")
    disk = 5000  # bytes, for checkpoints alone

    def free(path):
        held = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*") if file.is_file())
        return usage(disk, held, disk - held)

    monkeypatch.setattr(shutil, "disk_usage", free)
    alone = CheckpointStore(tmp_path / "run", None)
    for step in (1, 2, 3):
        write(alone, step)
    with pytest.raises(OSError, match="1.1 times"):
        for step in (4, 5):
            write(alone, step)
    kept = alone.steps()
    assert not list((tmp_path / "run").glob("*.incomplete"))
    both = CheckpointStore(tmp_path / "run", None, breaking)
    both.start_uploads(keep=None, deadline=60)
    both.ended_well = True
    both.end_uploads()
    assert breaking.steps() == kept
    both.uploads = Uploads(breaking, both.run_dir, None, 60)
    write(both, 6)  # takes the room of those that are elsewhere
    assert both.steps() == [*kept[1:], 6]
    both.ended_well = True
    both.end_uploads()


def test_a_listing_that_fails_is_no_empty_place(breaking, tmp_path):
    store = CheckpointStore(tmp_path / "run", None, breaking)
    Breaking.fails_at = 0
    Breaking.failures = 10**9
    for ask in (breaking.steps, lambda: store.find_resume("auto", None)):
        with pytest.raises(RemoteFailed, match="503 slow down"):
            ask()


def test_one_place_is_one_runs(tmp_path, breaking):
    (tmp_path / "run").mkdir()
    breaking.check(tmp_path / "run")
    breaking.check(tmp_path / "run")
    breaking.check(tmp_path / "fresh")  # a machine that has nothing goes on with it
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("")
    with pytest.raises(RemoteFailed, match="another run"):
        breaking.check(tmp_path / "other")
    shutil.rmtree(tmp_path / "far")  # a mount that is away
    with pytest.raises(RemoteFailed, match="no such place"):
        breaking.check(tmp_path / "run")


def test_a_prune_that_fails_there_sends_nothing_again_and_local_ones_go_all_the_same(
    tmp_path, breaking, monkeypatch, capsys
):
    sent = []
    real = breaking.upload
    monkeypatch.setattr(breaking, "upload", lambda step, *rest: (sent.append(step), real(step, *rest)))
    monkeypatch.setattr(breaking, "delete", lambda step: (_ for _ in ()).throw(RemoteFailed("no right")))
    store = CheckpointStore(tmp_path / "run", 3, breaking)
    store.start_uploads(keep=1, deadline=60)
    for step in range(1, 9):
        write(store, step)
        while store.uploads and step not in store.uploads.whole:
            time.sleep(0.005)
    store.ended_well = True
    store.end_uploads()
    assert sent == list(range(1, 9)) and store.steps() == [6, 7, 8]
    assert "could not be deleted there: no right" in capsys.readouterr().out
    again = CheckpointStore(tmp_path / "run", 3, breaking)
    again.start_uploads(keep=1, deadline=60)
    again.end_uploads()
    assert sent == list(range(1, 9))


def test_a_new_run_renames_the_old_one_there(tmp_path, breaking):
    store = CheckpointStore(tmp_path / "run", None, breaking)
    write(store, 1)
    breaking.upload(1, store.folder(1), store.run_dir)
    store.set_aside()
    assert breaking.steps() == [] and (tmp_path / "far" / "run.old-1" / "global_step_1").is_dir()
    write(store, 2)
    breaking.upload(2, store.folder(2), store.run_dir)
    write(store, 4)
    breaking.upload(4, store.folder(4), store.run_dir)
    store.set_aside_after(2)
    assert breaking.steps() == [2] and (tmp_path / "far" / "run" / "global_step_4.old-1").is_dir()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 200 MB, which has room for nine checkpoints of the shipped model."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can't be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow
def test_on_a_full_disk_a_run_stops_before_it_writes_and_with_a_place_elsewhere_it_goes_on(
    world, url, tmp_path, small_disk, capsys
):
    line = arguments(world, url, small_disk / "run", trainer__total_training_steps=12)
    line += ["trainer.val_before_train=false", "data.val_data_num=4", "trainer.doctor_skip=[checkpoints]"]
    line.append("trainer.max_ckpt_to_keep=null")
    assert run(line) == 3
    assert "1.1 times" in capsys.readouterr().err
    store = CheckpointStore(small_disk / "run", None)
    held = store.steps()
    assert held == list(range(1, len(held) + 1)) and 5 <= len(held) < 12
    assert not list((small_disk / "run").glob("*.incomplete"))
    (tmp_path / "far").mkdir()
    assert run([*line, f"trainer.remote_dir=file://{tmp_path}/far"]) == 0
    assert [row["step"] for row in metrics(small_disk / "run") if row["step"]] == list(range(1, 13))
    assert RemoteStore(f"file://{tmp_path}/far", "run").steps()[-1] == 12 == store.steps()[-1]
    assert len(store.steps()) < 12


@pytest.mark.slow
def test_a_run_goes_on_on_a_machine_that_has_nothing(world, url, tmp_path, capsys):
    def line(*settings, steps=3):
        return [
            *arguments(world, url, tmp_path / "run", trainer__total_training_steps=steps),
            f"trainer.remote_dir=file://{tmp_path}/far",
            *settings,
        ]

    (tmp_path / "far").mkdir()
    assert run([*line(steps=2)]) == 0
    before = metrics(tmp_path / "run")
    assert (tmp_path / "far" / "run" / "global_step_2" / remote_store.MANIFEST).is_file()
    (tmp_path / "run").rename(tmp_path / "lost")
    assert run(line()) == 0
    assert "downloading" in capsys.readouterr().out or (tmp_path / "run" / "global_step_2").is_dir()
    after = metrics(tmp_path / "run")
    assert [row["step"] for row in after] == [0, 1, 2, 3] and after[:3] == before
    (tmp_path / "whole").mkdir()
    (tmp_path / "lost").rename(tmp_path / "whole" / "run")  # on the first machine, which is there after all
    assert run(arguments(world, url, tmp_path / "whole" / "run", trainer__total_training_steps=3)) == 0
    undisturbed = metrics(tmp_path / "whole" / "run")
    same = [name for name in after[3] if not name.startswith(("timing", "perf", "retrieval", "rollout/"))]
    assert [after[3][name] for name in same] == [undisturbed[3][name] for name in same]

    shutil.rmtree(tmp_path / "run")
    (tmp_path / "far" / "run" / "global_step_3" / "run_state.json").write_text("{}")
    capsys.readouterr()
    assert run(line(steps=4)) == 0  # it goes on from step 2
    assert "global_step_3/run_state.json is damaged" in capsys.readouterr().out
    assert [row["step"] for row in metrics(tmp_path / "run")] == [0, 1, 2, 3, 4]


def test_a_place_that_is_not_there_ends_the_start(world, url, tmp_path, capsys):
    line = arguments(world, url, tmp_path / "run")
    assert run([*line, "trainer.remote_dir=nosuchscheme://bucket"]) == 2
    assert "trainer.remote_dir=nosuchscheme://bucket" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run([*line, f"trainer.remote_dir=file://{tmp_path}/file"]) == 2
    assert "trainer.remote_dir" in capsys.readouterr().err
