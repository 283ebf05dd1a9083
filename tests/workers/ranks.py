"""Runs a function in several processes that talk over gloo, for tests on CPU."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist


def _rank_main(rank, function, world_size, meeting_file, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=world_size)
    try:
        function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def run_ranks(function, world_size, *args, start_method="spawn"):
    """Runs function(rank, world_size, *args) in as many processes and waits for them. They meet over a file:
    a port that was free a moment ago may belong to another program by the time they listen on it.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank_main,
            (function, world_size, Path(folder) / "meeting", args),
            nprocs=world_size,
            start_method=start_method,
        )
