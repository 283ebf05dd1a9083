"""The retrieval server: `python -m search_r1.search.server --corpus_path corpus.jsonl` answers `/retrieve`.

    POST /retrieve {"queries": [str], "topk": int?, "return_scores": bool?}
        -> {"result": [[{"document": {"contents": ..., ...}, "score": float}, ...], ...]}   one list per query
           (without return_scores: lists of plain documents)

The JSON and the flags are Search-R1's. serving/app.py lists the other routes.

The backend is loaded in the background. Until it is there, `/health` says "loading" and `/retrieve` answers
503. SIGTERM and Ctrl-C stop the server: open requests are answered, for at most SHUTDOWN_SECONDS, and the
exit status is 0. With `--workers N` the parent loads the backend once, which finds what can't be loaded. Then
it starts N processes on the port.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_r1.search.launch import (
    API_KEY_VARIABLE,
    build_server_parser,
    check_server_arguments,
    open_retriever,
)
from search_r1.search.long_work import end_with_parent
from search_r1.search.search_backend import SearchBackend
from search_r1.search.serving.metrics import FOLDER_VARIABLE
from search_r1.search.serving.service import RetrievalService
from verl.utils.addresses import open_note, open_socket
from verl.utils.logs import level_or, start_logging
from verl.utils.text import printable

if TYPE_CHECKING:  # it is slow to import, and mistakes in the flags are reported before
    import uvicorn

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SHUTDOWN_SECONDS = 5  # the time of open requests after a stop, as a client may never finish its own
BACKLOG = 2048
SECONDS_TO_END = 3  # the time of a worker process beyond that
SECONDS_TO_RESTART = 0.5
COULD_NOT_LOAD = 3  # exit status of a worker process that would fail again
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
UVICORN: dict[str, Any] = {
    "lifespan": "off",
    "log_level": level_or("error"),
    "proxy_headers": False,
    "backlog": BACKLOG,
    "timeout_keep_alive": 120,
    "timeout_graceful_shutdown": SHUTDOWN_SECONDS,
}


def create_service(arguments: argparse.Namespace) -> RetrievalService:
    """Return the service that the flags ask for, not loaded yet.

    Raises ValueError for a wrong flag.
    """
    settings = check_server_arguments(arguments)

    def load() -> SearchBackend:
        retriever = open_retriever(arguments, lambda line: setattr(service, "progress", line))
        if arguments.workers > 1 and uses_gpu():
            retriever.close()
            raise ValueError(
                f"--workers: found {arguments.workers} with a backend on a GPU; each process would load the "
                "index into the same GPU's memory again. One keeps a GPU busy: leave --workers out"
            )
        return retriever

    name = arguments.retriever_name.lower()
    service = RetrievalService(
        load,
        arguments.corpus_path,
        name,
        arguments.topk,
        settings,
        api_key=api_key_of(arguments),
        host=arguments.host,
    )
    return service


def api_key_of(arguments: argparse.Namespace) -> str | None:
    """Return the key that clients must send, or None if there is none."""
    key = arguments.api_key or os.environ.get(API_KEY_VARIABLE, "")
    return key.strip() or None


def uses_gpu() -> bool:
    """Return whether a backend of this process has begun to use CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def create_server(service: RetrievalService) -> uvicorn.Server:
    """Return the uvicorn server of a service, for `serve` and the tests to run."""
    import uvicorn

    from search_r1.search.serving.app import create_app
    from verl.utils.serving import SERVER_OPTIONS

    return uvicorn.Server(uvicorn.Config(create_app(service), **SERVER_OPTIONS | UVICORN))


def serve(service: RetrievalService, listener: socket.socket, stopped: threading.Event) -> int:
    """Load the service and serve until a signal comes. If `stopped` is set, a signal has come already.

    Returns:
        The exit status: 2 if a file or a flag is wrong, 1 if the backend can't be loaded for another reason,
        else 0.
    """
    server = create_server(service)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn has handlers of its own, and raises the signal again when it is done. These handlers catch it.
    for number in SIGNALS:
        signal.signal(number, stop)
    if stopped.is_set():
        return 0
    service.start_loading(lambda: print_ready(service.health()) if service.error is None else stop())
    server.run(sockets=[listener])
    return print_error(service.error) if service.error is not None else 0


def serve_with_workers(arguments: argparse.Namespace, listener: socket.socket) -> int:
    """Serve with several processes until a signal comes. A process that dies is started again.

    Returns:
        The exit status, as of `serve`. It is also 1 if a process finds a file wrong that was right at first.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(0))  # only the load has begun, and nothing else stops that
    service = create_service(arguments)
    service.start_loading().join()
    if service.error is not None:
        return print_error(service.error)
    health = service.health()
    stopped = threading.Event()
    spawn = multiprocessing.get_context("spawn")
    service.close()

    def begin() -> SpawnProcess:
        process = spawn.Process(target=serve_as_worker, args=(arguments, listener))
        process.start()
        return process

    with tempfile.TemporaryDirectory(prefix="search_r1_metrics_") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        for number in SIGNALS:
            signal.signal(number, lambda *_: stopped.set())
        workers = list[SpawnProcess]()
        is_announced = False
        status = 0
        try:
            workers += [begin() for _ in range(arguments.workers)]
            while not stopped.is_set() and status == 0:
                wait([worker.sentinel for worker in workers], timeout=0.1)
                if not is_announced and len(list(Path(folder).glob("ready_*"))) >= len(workers):
                    is_announced = True
                    print_ready(health, f", {len(workers)} processes")
                for index, worker in enumerate(workers):
                    if worker.exitcode == COULD_NOT_LOAD:
                        status = 1
                    elif worker.exitcode is not None and not stopped.is_set():
                        event = f"process {worker.pid} died with exit status {worker.exitcode}"
                        print(f"{event}; another is started", file=sys.stderr, flush=True)
                        stopped.wait(SECONDS_TO_RESTART)  # the next may die as soon as it has begun
                        workers[index] = begin()
        finally:  # also where another process can't be started
            for worker in workers:
                worker.terminate()
            deadline = time.monotonic() + SHUTDOWN_SECONDS + SECONDS_TO_END
            for worker in workers:
                worker.join(max(0.0, deadline - time.monotonic()))
                worker.kill()
                worker.join()
    return status


def serve_as_worker(arguments: argparse.Namespace, listener: socket.socket) -> None:
    """Serve as one process of several. It is loaded before it takes its first connection."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # nothing else stops a load
    start_logging("retrieval-worker")
    logging.basicConfig(format=LOG_FORMAT)
    end_with_parent()
    try:
        service = create_service(arguments)
        service.start_loading().join()
        if service.error is not None:
            raise service.error
    except Exception as error:  # the parent could load it: a file has gone since
        print_error(error)
        sys.exit(COULD_NOT_LOAD)
    server = create_server(service)
    for number in SIGNALS:
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    Path(os.environ[FOLDER_VARIABLE], f"ready_{os.getpid()}").touch()
    server.run(sockets=[listener])
    sys.stderr.flush()
    os._exit(0)  # a backend that is still at work would keep the process


def main(argv: list[str] | None = None, **defaults: str) -> int:
    """Serve until interrupted.

    Args:
        argv: The flags. None means those of the command line.
        **defaults: Other defaults of flags, for the servers that Search-R1 has under other names.

    Returns:
        The exit status: 2 for a mistake in the flags or the files. Otherwise it is that of `serve`.
    """
    parser = build_server_parser()
    parser.set_defaults(**defaults)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format=LOG_FORMAT)
    try:
        check_server_arguments(arguments)
        listener = open_socket(arguments.host, arguments.port)
    except ValueError as error:
        return print_error(error)
    stopped = threading.Event()  # a signal may come long before there is a server to be stopped
    for number in SIGNALS:
        signal.signal(number, lambda *_: stopped.set())
    if arguments.workers == 1:
        listener.listen(BACKLOG)  # before the line is printed, so that whoever reads it can connect
    note = open_note(arguments.host, "can search")
    if note is not None and not api_key_of(arguments):
        ask_for_key = f"with {API_KEY_VARIABLE} in the environment it asks for a key"
        print(f"{note}; {ask_for_key}", file=sys.stderr, flush=True)
    print(f"retrieval server on http://{arguments.host}:{listener.getsockname()[1]}/retrieve", flush=True)
    if arguments.workers > 1:
        return serve_with_workers(arguments, listener)
    service = create_service(arguments)
    status = serve(service, listener, stopped)
    if not service.close():  # the backend is still at work: nothing else stops a thread inside of it
        sys.stderr.flush()
        os._exit(status)
    return status


def print_error(error: BaseException) -> int:
    """Print what can't be served, and return the exit status."""
    print(f"error: {printable(error)}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ValueError) else 1


def print_ready(health: dict[str, Any], processes: str = "") -> None:
    """Print the line that tells people that searches are answered."""
    num_documents = health["num_documents"]
    documents = "" if num_documents is None else f", {num_documents} documents"
    print(f"ready: {health['backend']}{documents}{processes}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    start_logging("retrieval")
    sys.exit(main())
