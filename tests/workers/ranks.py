"""Runs a function in several processes that talk over gloo, for tests on CPU."""

import multiprocessing
import tempfile
from multiprocessing import forkserver
from pathlib import Path

import torch
import torch.distributed as dist

PRELOADED = [
    "verl.workers.megatron.megatron_engine",  # where Megatron is installed
    "verl.workers.actor.dp_actor",
    "verl.workers.critic.dp_critic",
    "verl.config.loading",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
]


def start_server():
    """Lets the server that `run_ranks` forks from begin to import; meanwhile the caller may go on."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()


def _rank_main(rank, function, world_size, meeting_file, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=world_size)
    try:
        function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


def run_ranks(function, world_size, *args):
    """Runs function(rank, world_size, *args) in as many processes and waits for them. They are forked from a
    server that has imported what takes seconds, and meet over a file: a port that was free a moment ago may
    belong to another program by the time they listen on it.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank_main,
            (function, world_size, Path(folder) / "meeting", args),
            nprocs=world_size,
            start_method="forkserver",
        )
