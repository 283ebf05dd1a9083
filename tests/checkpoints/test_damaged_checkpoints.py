"""Rule 15: a checkpoint is whole or not offered, here and at a remote place."""

import json
import threading
import time

import pytest

from verl.checkpoints.remote_store import MANIFEST, CheckpointDamaged, RemoteDamaged, RemoteStore, Uploads
from verl.checkpoints.run_state import CheckpointStore, RunState
from verl.utils.file_sums import SUMS_FILE, damage_in, stays_inside, write_sums

WEIGHTS = "actor/dcp/__0_0.distcp"


def write(store: CheckpointStore, step: int) -> None:
    folder = store.begin(step)
    (folder / "actor" / "dcp").mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 40)
    RunState(step=step).save(folder)
    store.commit(step)


def flip(path, position=100, bit=3):
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "run", None)
    for step in (2, 4):
        write(store, step)
    return store


@pytest.fixture
def remote(tmp_path) -> RemoteStore:
    (tmp_path / "far").mkdir()
    return RemoteStore(f"file://{tmp_path}/far", "run")


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip, f"{WEIGHTS} is damaged"),
        (cut, f"{WEIGHTS} has 10,239 bytes; expected 10,240"),
        (lambda path: path.unlink(), f"{WEIGHTS} is missing"),
    ],
)
def test_rule_15_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_taken(
    store, capsys, damage, expected
):
    damage(store.folder(4) / WEIGHTS)
    assert store.find_whole("auto", None) == store.folder(2)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and expected in printed and "global_step_4" in printed
    assert store.steps() == [2] and (store.run_dir / "global_step_4.damaged-1").is_dir()
    assert (store.run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_at_step_0(store):
    for step in (2, 4):
        flip(store.folder(step) / WEIGHTS)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"no whole checkpoint.* 2 damaged ones.*global_step_4.*distcp"):
            store.find_whole("auto", None)
    assert store.steps() == [2, 4]


def test_a_checkpoint_that_is_given_by_its_path_is_refused_if_it_is_damaged(store):
    cut(store.folder(2) / "run_state.json")
    with pytest.raises(ValueError, match=r"global_step_2 is damaged: run_state\.json has"):
        store.find_whole("from_path", str(store.folder(2)))


def test_a_checkpoint_of_an_older_version_is_taken_with_a_line(store, capsys):
    (store.folder(4) / SUMS_FILE).unlink()
    assert store.find_whole("latest", None) == store.folder(4)
    assert "has no SUMS.json (an older version wrote it" in capsys.readouterr().out


def test_a_damaged_checkpoint_comes_back_from_the_remote_place(store, remote, capsys):
    store.remote = remote
    remote.upload(4, store.folder(4), store.run_dir)
    flip(store.folder(4) / WEIGHTS)
    assert store.find_whole("auto", None) == store.folder(4)
    assert damage_in(store.folder(4)) is None and (store.run_dir / "global_step_4.damaged-1").is_dir()
    assert "global_step_4: actor/dcp/__0_0.distcp is damaged" in capsys.readouterr().out


def test_a_damaged_remote_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, store, remote, capsys):
    for step in (2, 4):
        remote.upload(step, store.folder(step), store.run_dir)
    flip(tmp_path / "far" / "run" / "global_step_4" / WEIGHTS)
    elsewhere = CheckpointStore(tmp_path / "elsewhere" / "run", None, remote)
    assert elsewhere.find_whole("auto", None) == elsewhere.folder(2)
    assert "global_step_4/actor/dcp/__0_0.distcp is damaged" in capsys.readouterr().out
    (tmp_path / "far" / "run" / "global_step_2" / MANIFEST).unlink()
    (tmp_path / "far" / "run" / "global_step_4" / MANIFEST).unlink()
    assert CheckpointStore(tmp_path / "other" / "run", None, remote).find_whole("auto", None) is None
    assert "note: step 4 at" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_not_uploaded_as_a_whole_one(store, remote, capsys):
    flip(store.folder(4) / WEIGHTS)
    with pytest.raises(CheckpointDamaged, match="distcp is damaged"):
        remote.upload(4, store.folder(4), store.run_dir)
    uploads = Uploads(remote, store.run_dir, None, 60)
    uploads.add(4)
    uploads.close(in_haste=False)
    assert remote.steps() == []
    assert "warning: checkpoint 4 is not uploaded" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../../x", "/abs/x", "actor/../../x", "..", "", "a\\..\\x"])
def test_no_name_in_a_store_leaves_its_folder(tmp_path, store, remote, name):
    remote.upload(4, store.folder(4), store.run_dir)
    manifest = tmp_path / "far" / "run" / "global_step_4" / MANIFEST
    content = json.loads(manifest.read_text())
    content["files"][name] = content["files"][WEIGHTS]
    manifest.write_text(json.dumps(content))
    before = {path for path in tmp_path.rglob("*") if "back" not in path.parts}
    with pytest.raises(RemoteDamaged, match="which is not a file below"):
        remote.fetch(4, tmp_path / "back")
    assert {path for path in tmp_path.rglob("*") if "back" not in path.parts} == before
    assert not stays_inside(name) and stays_inside("actor/huggingface/a..b")


def test_no_record_leaves_the_runs_folder_or_takes_the_place_of_another_file(
    tmp_path, store, remote, capsys, monkeypatch
):
    (store.run_dir / "metrics.jsonl").write_text('{"step": 4}\n')
    remote.upload(4, store.folder(4), store.run_dir)
    listed = ["metrics.jsonl", "../../x", "/abs/x", "run.lock", "global_step_9/run_state.json"]
    monkeypatch.setattr(remote, "_below", lambda folder: iter(listed))
    back = tmp_path / "back"
    back.mkdir()
    remote.fetch(4, back)
    assert sorted(path.name for path in back.iterdir()) == ["global_step_4", "metrics.jsonl"]
    assert capsys.readouterr().out.count("which is no record of a run; it is left") == 4


def test_a_damaged_record_is_named(tmp_path, store, remote, capsys):
    (store.run_dir / "metrics.jsonl").write_text('{"step": 4, "train/em": 0.25}\n')
    remote.upload(4, store.folder(4), store.run_dir)
    flip(tmp_path / "far" / "run" / "records" / "metrics.jsonl", position=5)
    (tmp_path / "back").mkdir()
    remote.fetch(4, tmp_path / "back")
    assert "records/metrics.jsonl is not what its sums say; it is taken" in capsys.readouterr().out


def test_files_of_several_blocks_have_a_sum_for_each_block(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.utils.file_sums.BLOCK", 1000)
    (tmp_path / "large").write_bytes(bytes(2500))
    (tmp_path / "empty").write_bytes(b"")
    write_sums(tmp_path)
    assert len(json.loads((tmp_path / SUMS_FILE).read_text())["files"]["large"]["crc32"]) == 3
    assert damage_in(tmp_path) is None
    flip(tmp_path / "large", position=2300)
    assert damage_in(tmp_path) == "large is damaged: its sum from byte 2,000 on is not that of SUMS.json"
    assert damage_in(tmp_path, below="empty") is None


def test_training_goes_on_while_the_sums_of_a_checkpoint_are_made(tmp_path, monkeypatch):
    from verl.checkpoints.run_state import CheckpointWriting

    store = CheckpointStore(tmp_path, None)
    may_end = threading.Event()
    real = store.seal
    monkeypatch.setattr(store, "seal", lambda step: (may_end.wait(), real(step)))
    writing = CheckpointWriting(store, background=True)
    writing.save(1, {}, lambda folder: RunState(step=1).save(folder))
    writing.commit_if_written()
    assert store.steps() == []
    may_end.set()
    deadline = time.monotonic() + 30
    while not store.steps() and time.monotonic() < deadline:
        writing.commit_if_written()
        time.sleep(0.01)
    assert store.steps() == [1] and (store.folder(1) / SUMS_FILE).is_file()
