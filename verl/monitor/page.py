"""A page of runs that refreshes by itself: their figures, curves and failures, at 127.0.0.1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verl.monitor.runs import PICTURES, TABLE, Run, share_of_tags
from verl.utils.json_files import last_steps, to_json

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
    for picture in PICTURES.values():
        for name, metrics in picture.items():
            for run in runs:
                for metric in metrics:
                    if points := last_steps(run.rows, metric):
                        stride = -(-len(points) // MOST_POINTS)
                        line = {"run": run.folder.name, "metric": metric, "points": points[::stride]}
                        panels.setdefault(name, []).append(line)
    return {"runs": entries, "panels": panels}


def page_server(
    folders: Sequence[Path], port: int, open_run: Callable[[Path], Run] = Run
) -> ThreadingHTTPServer:
    """Create the server, which listens already.

    Raises:
        ValueError: If a folder is not that of a run, or the port is taken or no port.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--serve: found port {port}; expected one from 1 to 65535, or 0 for any free one")
    for folder in folders:
        open_run(folder)
    page = Path(__file__).with_name("page.html").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/data":
                kind = "application/json"
                content = to_json(page_data(folders, open_run)).encode()
            elif self.path == "/":
                kind = "text/html; charset=utf-8"
                content = page
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ValueError(f"--serve: found port {port} taken ({error}); expected a free one") from None


def serve(folders: Sequence[Path], port: int, open_run: Callable[[Path], Run]) -> None:
    """Serve the page until Ctrl-C."""
    with page_server(folders, port, open_run) as server:
        print(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C ends it, not the runs)", flush=True)
        server.serve_forever()
