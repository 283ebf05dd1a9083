"""A disk that takes no more is one line and status 3; what was written before stays whole."""

import errno
from types import SimpleNamespace

import pytest

from verl.checkpoints.run_state import CheckpointStore, CheckpointWriting, DiskFailed, RunState, RunStopped
from verl.trainer.ppo.resuming import ResumableRun
from verl.trainer.restarts import run_program
from verl.utils.json_files import MetricsFile, append_whole, read_lines


def test_a_line_that_is_written_in_part_is_taken_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append(1, {"a": 1.0})
    full = "/dev/full"
    with pytest.raises(OSError, match="No space left") as caught:
        append_whole(type(path)(full), "x" * 100)
    assert caught.value.filename == full
    assert read_lines(path) == [{"step": 1, "a": 1.0}]


class Run(ResumableRun):
    """The part of a run that ends it, around steps that the test gives."""

    def __init__(self, folder, fails_at):
        self.checkpoints = CheckpointStore(folder, None)
        self.checkpoint_writing = CheckpointWriting(self.checkpoints, background=False)
        self.config = SimpleNamespace(trainer=SimpleNamespace(resume_mode="auto", val_only=False))
        self.state = RunState()
        self.fails_at = fails_at

    def _save_checkpoint(self):
        self.checkpoint_writing.save(self.state.step, {}, self.state.save)

    def fit(self):
        with self._finishing_run():
            for step in (1, 2, 3):
                self.state.step = step
                if step == self.fails_at:
                    raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")


def test_a_disk_that_is_full_keeps_the_steps_and_is_one_line(tmp_path, capsys):
    run = Run(tmp_path, fails_at=2)
    assert run_program(lambda closing, stop: run) == 3
    assert run.checkpoints.steps() == [2]
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "after step 2 metrics.jsonl: No space left on device. Make room and run the same command" in error
    assert "goes on from step 2" in error


def test_a_disk_that_has_no_room_for_a_checkpoint_either_says_where_the_run_goes_on(
    tmp_path, capsys, monkeypatch
):
    run = Run(tmp_path, fails_at=3)

    def begin(step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run.checkpoints, "begin", begin)
    with pytest.raises(RunStopped, match="the disk takes no more.* its beginning"):
        run.fit()
    assert "the checkpoint of step 3 could not be written" in capsys.readouterr().out


def test_other_errors_stay_what_they_are(tmp_path):
    writing = CheckpointWriting(CheckpointStore(tmp_path, None), background=False)
    with pytest.raises(ConnectionError), writing.finishing():
        raise ConnectionResetError(errno.ECONNRESET, "reset")
    with pytest.raises(DiskFailed), writing.finishing():
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "x")
