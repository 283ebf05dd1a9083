"""A page of runs that refreshes by itself: their figures, curves and failures, at 127.0.0.1."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from verl.monitor.runs import TABLE, Run, share_of_tags
from verl.utils.json_files import last_steps, to_json
from verl.utils.serving import SERVER_OPTIONS, Door, DoorRules

HOST = "127.0.0.1"
PAGE_HEADERS = {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
MOST_POINTS = 500  # maximum number of points of a curve


def page_data(folders: Sequence[Path], open_run: Callable[[Path], Run] = Run) -> dict[str, Any]:
    """Return what the page shows.

    Returns:
        `runs`, a list with the name, state, step, figures of the table and tags of the newest rollouts of
        each run; and `panels`, name -> [{run, metric, points of (step, value)}].
    """
    runs = [open_run(folder) for folder in folders]
    entries = []
    for run in runs:
        _, counts = run.failures(0.0, 0, max_scanned=200)
        figures = {name: run.last(name) for name in TABLE}
        entry = {"name": run.folder.name, "state": run.state, "step": run.step, "age": run.age}
        entries.append(entry | {"figures": figures, "tags": share_of_tags(counts)})
    panels: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for picture in run.pictures().values():
            for name, metrics in picture.items():
                for metric in metrics:
                    if points := last_steps(run.rows, metric):
                        stride = -(-len(points) // MOST_POINTS)
                        line = {"run": run.folder.name, "metric": metric, "points": points[::stride]}
                        panels.setdefault(name, []).append(line)
    return {"runs": entries, "panels": panels}


class PageServer:
    """The server of the page, which listens from its creation on."""

    def __init__(self, app: Starlette, listener: socket.socket) -> None:
        options = SERVER_OPTIONS | {"log_level": "error", "lifespan": "off"}
        self._listener = listener
        self._server = uvicorn.Server(uvicorn.Config(app, **options))
        self.server_port: int = listener.getsockname()[1]

    def serve_forever(self) -> None:
        """Serve until Ctrl-C, or until `shutdown` is called."""
        self._server.run([self._listener])

    def shutdown(self) -> None:
        self._server.should_exit = True

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def page_server(folders: Sequence[Path], port: int, open_run: Callable[[Path], Run] = Run) -> PageServer:
    """Create the server, which listens already.

    Raises:
        ValueError: If a folder is not that of a run, or the port is taken or no port.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--serve: found port {port}; expected one from 1 to 65535, or 0 for any free one")
    for folder in folders:
        open_run(folder)
    page = Path(__file__).with_name("page.html").read_bytes()

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html", headers=PAGE_HEADERS)

    def data(request: Request) -> Response:  # in a thread, as it reads files
        return Response(to_json(page_data(folders, open_run)).encode(), media_type="application/json")

    app = Starlette()
    app.add_route("/", show)
    app.add_route("/data", data)
    app.add_middleware(Door, rules=DoorRules(host=HOST))
    try:
        return PageServer(app, socket.create_server((HOST, port), backlog=128))
    except OSError as error:
        raise ValueError(f"--serve: found port {port} taken ({error}); expected a free one") from None


def serve(folders: Sequence[Path], port: int, open_run: Callable[[Path], Run]) -> None:
    """Serve the page until Ctrl-C."""
    with page_server(folders, port, open_run) as server:
        print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it, not the runs)", flush=True)
        server.serve_forever()
