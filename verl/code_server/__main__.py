"""Start the code server with `python -m verl.code_server` (its HTTP API is described in app.py)."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading

import uvicorn

from verl.code_server.app import Settings, create_app
from verl.code_server.walls import TIERS, Limits
from verl.utils.addresses import open_note
from verl.utils.logs import start_logging
from verl.utils.serving import SERVER_OPTIONS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl.code_server", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=1234)
    parser.add_argument("--fd", type=int, help="serve on this listening socket instead")
    parser.add_argument("--until_stdin_closes", action="store_true", help="end with whoever holds its stdin")
    parser.add_argument("--workers", type=int, default=Settings().workers, help="programs at once")
    parser.add_argument("--sandbox", default="auto", choices=["auto", *TIERS])
    parser.add_argument("--memory_mb", type=int, default=Limits.memory_mb, help="of one program")
    parser.add_argument("--max_output_mb", type=float, default=Limits.output_mb, help="of a program's stdout")
    parser.add_argument("--allow_packages", default="", help="that programs may import: numpy,...")
    args = parser.parse_args(arguments)
    if args.workers < 1 or args.memory_mb < 64 or not 0 < args.max_output_mb <= 64:
        parser.error("expected --workers >= 1, --memory_mb >= 64, 0 < --max_output_mb <= 64")
    settings = Settings(
        sandbox=args.sandbox,
        workers=args.workers,
        limits=Limits(memory_mb=args.memory_mb, output_mb=args.max_output_mb),
        allow_packages=tuple(name for name in args.allow_packages.split(",") if name),
    )
    note = open_note(args.host, "can run programs in its sandboxes")
    if note is not None and args.fd is None:
        print(note, file=sys.stderr, flush=True)
    app = create_app(settings, args.host if args.fd is None else None)
    config = uvicorn.Config(app, args.host, args.port, **SERVER_OPTIONS)
    server = uvicorn.Server(config)

    def end_with_stdin() -> None:
        while os.read(0, 4096):
            pass
        server.should_exit = True

    if args.until_stdin_closes:
        threading.Thread(target=end_with_stdin, daemon=True).start()
    server.run(sockets=None if args.fd is None else [socket.socket(fileno=args.fd)])
    if not server.started:
        sys.exit(3)


if __name__ == "__main__":
    start_logging("code_server")
    main()
