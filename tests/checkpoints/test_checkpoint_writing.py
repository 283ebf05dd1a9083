"""Checkpoints in the background: a name only when whole, errors that stop the run, a kill at any moment."""

import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from verl.checkpoints import run_state
from verl.checkpoints.run_state import CheckpointStore, CheckpointWriting, RunState, RunStopped
from verl.single_controller.base import ClassWithInitArgs, Worker, WorkerDiedError, register
from verl.single_controller.local import LocalWorkerGroup
from verl.workers.engine.snapshot import BackgroundWriter, Snapshot


class SlowWorker(Worker):
    """Writes one file, when it may; fails if it is told to."""

    def __init__(self):
        super().__init__()
        self.writer = BackgroundWriter()
        self.may_write = threading.Event()
        self.error = None

    @register()
    def save_checkpoint(self, path, background):
        def write():
            if background:
                self.may_write.wait()
            if self.error:
                raise self.error
            Path(path).mkdir()
            (Path(path) / "weights").write_text("all")

        self.writer.write([Snapshot(write=write)], Path(path).parent, background)

    @register()
    def checkpoint_is_written(self, wait):
        return self.writer.is_done(wait)

    @register()
    def control(self, error=None):
        self.error = error
        self.may_write.set()

    def close(self):
        self.may_write.set()
        self.writer.close()


@pytest.fixture
def group():
    made = LocalWorkerGroup(ClassWithInitArgs(SlowWorker))
    yield made
    made.shutdown()


def save(writing, group, step):
    writing.save(step, {"actor": group}, lambda folder: RunState(step=step).save(folder))


def test_rule_10_a_checkpoint_gets_its_name_when_its_files_are_there_and_no_earlier(tmp_path, group):
    store = CheckpointStore(tmp_path, None)
    writing = CheckpointWriting(store, background=True)
    save(writing, group, 4)
    writing.commit_if_written()
    assert store.steps() == [] and store.find_resume("auto", None) is None
    assert (tmp_path / "global_step_4.incomplete" / "run_state.json").is_file()
    group.control()
    writing.finish()
    assert store.steps() == [4] and (store.folder(4) / "actor" / "weights").read_text() == "all"
    writing.finish()  # nothing left to do


@pytest.mark.parametrize("ends", ["by itself", "stopped"])
def test_a_checkpoint_that_is_being_written_when_the_run_ends_gets_its_name(tmp_path, group, ends):
    store = CheckpointStore(tmp_path, None)
    writing = CheckpointWriting(store, background=True)
    expected = pytest.raises(RunStopped, match="^asked to stop$") if ends == "stopped" else nullcontext()
    with expected, writing.finishing():
        save(writing, group, 3)
        threading.Timer(0.1, group.control).start()
        if ends == "stopped":
            raise RunStopped("asked to stop")
    assert store.steps() == [3]


@pytest.mark.parametrize("error", [WorkerDiedError("rank 1 died"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_checkpoint_that_is_being_written_when_the_run_fails_gets_its_name(tmp_path, group, error):
    store = CheckpointStore(tmp_path, None)
    writing = CheckpointWriting(store, background=True)
    with pytest.raises(type(error)), writing.finishing():
        save(writing, group, 3)
        threading.Timer(0.1, group.control).start()
        raise error
    assert store.steps() == [3]
    writing.finish()  # nothing left to do


@pytest.mark.parametrize("ends", [True, False])
def test_rule_10_an_interrupt_while_the_run_waits_for_a_checkpoint_names_none_that_is_not_whole(
    tmp_path, group, monkeypatch, ends
):
    monkeypatch.setattr(run_state, "_SECONDS_AFTER_A_FAILURE", 30 if ends else 0.5)
    store = CheckpointStore(tmp_path, None)
    writing = CheckpointWriting(store, background=True)
    with pytest.raises(KeyboardInterrupt), writing.finishing():
        save(writing, group, 3)
        future = group._worker.writer._written
        with monkeypatch.context() as patch:
            patch.setattr(future, "result", interrupt)
            if ends:
                threading.Timer(0.3, group.control).start()
            writing.finish()
    assert store.steps() == ([3] if ends else [])
    assert not ends or (store.folder(3) / "actor" / "weights").read_text() == "all"
    group.control()


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("notices", ["the next step", "the next save", "the end"])
def test_a_checkpoint_that_could_not_be_written_stops_the_run_with_the_reason(tmp_path, group, notices):
    store = CheckpointStore(tmp_path, None)
    writing = CheckpointWriting(store, background=True)
    save(writing, group, 1)
    group.control()
    writing.finish()
    group.control(OSError(28, "No space left on device"))
    save(writing, group, 2)
    group._worker.writer._thread.shutdown(wait=True)
    with pytest.raises(RunStopped, match="of step 2 could not be written: OSError: .*No space left.* step 1"):
        if notices == "the next step":
            writing.commit_if_written()
        elif notices == "the next save":
            save(writing, group, 3)
        else:
            writing.finish()
    assert store.steps() == [1] and store.find_resume("auto", None) == store.folder(1)
    writing.finish()  # said once


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_checkpoint_writing import CheckpointStore, CheckpointWriting, ClassWithInitArgs, LocalWorkerGroup
from test_checkpoint_writing import SlowWorker, save
store = CheckpointStore({run!r}, None)
group = LocalWorkerGroup(ClassWithInitArgs(SlowWorker))
writing = CheckpointWriting(store, background=True)
save(writing, group, 1)
group.control()
writing.finish()
group._worker.may_write.clear()
save(writing, group, 2)
print("writing", flush=True)
group._worker.may_write.wait()
"""


@pytest.mark.slow
def test_rule_10_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path):
    script = KILLED.format(folder=str(Path(__file__).parent), run=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "writing\n"
        finally:
            process.kill()
    store = CheckpointStore(tmp_path, None)
    assert (tmp_path / "global_step_2.incomplete").is_dir() and store.steps() == [1]
    assert RunState.load(store.find_resume("auto", None)).step == 1
    store.remove_incomplete()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
