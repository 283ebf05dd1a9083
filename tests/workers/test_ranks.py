"""A crash in native code is seen and bounded; every other death of a rank is an error."""

import os
import signal

import pytest
import torch
from ranks import run_ranks

pytestmark = pytest.mark.slow


def die_once(rank, world_size, folder, signal_number):
    marker = folder / f"died{rank}"
    if rank == 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal_number)
    (folder / f"ended{rank}").touch()


def test_ranks_run_again_after_a_segmentation_fault_and_a_warning_says_so(tmp_path):
    with pytest.warns(UserWarning, match="die_once: a rank died of SIGSEGV"):
        run_ranks(die_once, 2, tmp_path, signal.SIGSEGV)
    assert all((tmp_path / f"ended{rank}").exists() for rank in range(2))


def test_ranks_that_die_of_another_signal_do_not_run_again(tmp_path):
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(die_once, 2, tmp_path, signal.SIGKILL)
    assert not (tmp_path / "ended1").exists()
