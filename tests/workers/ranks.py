"""Runs a function in several processes that talk over gloo, for tests on CPU."""

import faulthandler
import multiprocessing
import tempfile
import warnings
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
    faulthandler.enable()  # a crash in native code leaves the Python stack of each thread on stderr
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

    A rank that dies of SIGSEGV is a crash in native code, of which one is known and not explained
    (docs/troubleshooting.md, "A process dies of SIGSEGV"). All ranks then run once more, as a training run
    goes on from its checkpoint, and a warning of the test session says so. A second one is an error.
    """
    try:
        _run_once(function, world_size, args)
    except torch.multiprocessing.ProcessExitedException as error:
        if error.signal_name != "SIGSEGV":
            raise
        warnings.warn(
            f"{function.__qualname__}: a rank died of SIGSEGV and all ran again ({error})", stacklevel=2
        )
        _run_once(function, world_size, args)


def _run_once(function, world_size, args):
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _rank_main,
            (function, world_size, Path(folder) / "meeting", args),
            nprocs=world_size,
            start_method="forkserver",
        )
