"""Checkpoints on disk: whole or not there at all, kept to a limit, found again."""

import pytest

from verl.checkpoints.run_state import CheckpointStore, RunState


def write(store: CheckpointStore, step: int) -> None:
    folder = store.begin(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(bytes([step]))
    RunState(step=step).save(folder)
    store.commit(step)


def test_rule_10_a_checkpoint_bears_its_name_only_when_it_is_whole(tmp_path):
    store = CheckpointStore(tmp_path, None)
    write(store, 2)
    (store.begin(4) / "half").write_text("")
    assert store.steps() == [2]
    assert (tmp_path / "global_step_4.incomplete").exists()
    assert store.find_resume("auto", None) == tmp_path / "global_step_2"
    store.remove_incomplete()
    assert not (tmp_path / "global_step_4.incomplete").exists()


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, 2)
    for step in (5, 10, 15, 100):
        write(store, step)
    assert store.steps() == [15, 100]
    assert sorted(path.name for path in tmp_path.glob("global*")) == ["global_step_100", "global_step_15"]


def verls_latest(run_dir):
    """As `find_latest_ckpt_path` of verl/utils/checkpoint/checkpoint_manager.py (verl 0.9.1) finds it."""
    tracker = run_dir / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    folder = run_dir / f"global_step_{int(tracker.read_bytes().decode())}"
    return folder if folder.exists() else None


def test_verls_tracker_names_the_newest_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, 1)
    for step in (5, 10):
        write(store, step)
        assert verls_latest(tmp_path) == store.folder(step)
    store.set_aside_after(8)
    assert verls_latest(tmp_path) is None
    write(store, 9)
    assert verls_latest(tmp_path) == store.folder(9)


def test_the_state_comes_back_as_it_was(tmp_path):
    state = RunState(
        step=7, sampler={"epoch": 1, "offset": 3}, kl_controller={"value": 0.25}, generated_tokens=11
    )
    state.seconds_by_phase["gen"] = 1.5
    state.validation["before"] = {"greedy": {"em": 0.1}}
    state.save(tmp_path)
    assert RunState.load(tmp_path) == state


def test_resume_modes(tmp_path):
    store = CheckpointStore(tmp_path / "run", None)
    assert store.find_resume("auto", None) is None
    assert store.find_resume("none", None) is None
    with pytest.raises(ValueError, match="resume_mode=latest.*holds no global_step_N"):
        store.find_resume("latest", None)
    with pytest.raises(ValueError, match="resume_from_path"):
        store.find_resume("from_path", str(tmp_path))
    write(store, 1)
    write(store, 12)
    assert store.find_resume("latest", None) == store.folder(12)
    assert store.find_resume("from_path", str(store.folder(1))) == store.folder(1)
    assert store.find_resume("none", None) is None


def test_a_new_start_leaves_the_earlier_run_beside_it(tmp_path):
    store = CheckpointStore(tmp_path / "run", None)
    assert store.set_aside() is None
    for number in (1, 2):
        write(store, 4)
        assert store.set_aside() == tmp_path / f"run.old-{number}"
        assert store.steps() == []
    assert CheckpointStore(tmp_path / "run.old-1", None).steps() == [4]


def test_a_run_that_goes_on_from_an_earlier_step_keeps_what_it_writes(tmp_path):
    """Later checkpoints that were left behind don't crowd out its own, and aren't taken for the newest."""
    store = CheckpointStore(tmp_path, 2)
    for step in (8, 10):
        write(store, step)
    assert store.set_aside_after(8) == [tmp_path / "global_step_10.old-1"]
    write(store, 9)
    assert store.steps() == [8, 9]
    assert store.find_resume("auto", None) == store.folder(9)
    assert RunState.load(tmp_path / "global_step_10.old-1").step == 10


def test_two_runs_do_not_share_a_folder(tmp_path):
    store = CheckpointStore(tmp_path / "run", None)
    store.lock()
    second = CheckpointStore(tmp_path / "run", None)
    with pytest.raises(ValueError, match="in use by another run"):
        second.lock()
    second.unlock()  # it holds nothing, and takes nothing away
    assert (tmp_path / "run" / "run.lock").exists()
    CheckpointStore(tmp_path / "other", None).lock()
    store.unlock()
    CheckpointStore(tmp_path / "run", None).lock()


def test_a_run_that_wrote_nothing_leaves_no_folder(tmp_path):
    store = CheckpointStore(tmp_path / "run", None)
    store.lock()
    store.unlock()
    assert not (tmp_path / "run").exists()
    store.lock()
    (tmp_path / "run" / "metrics.jsonl").touch()
    store.unlock()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.jsonl", "run.lock"]
