"""Serves the traces of a run folder over the loopback, so that Perfetto's page can open them.

Perfetto's page draws a trace in the reader's browser and sends it nowhere. It reads local traces
from port 9001 of 127.0.0.1 alone, from a server that names the page as an origin (CORS).
"""

from __future__ import annotations

from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote

from bench_harness.store import ARTIFACTS, Store, StoreError, read_file

PAGE = "https://ui.perfetto.dev"
HOST, PORT = "127.0.0.1", 9001


def traces(run: Store) -> dict[str, tuple[str, Path]]:
    """The label of its case and the file of each trace, by its path on the server.

    Raises:
        StoreError: the folder is no run, cannot be read, or holds no trace.
    """
    run.check_is_run()
    labels = {row["case_key"]: row["label"] for row in run.load().rows}
    found = {
        f"/{ARTIFACTS}/{key}/{file.name}": (label, file)
        for key, label in labels.items()
        for file in sorted(run.subfolder(ARTIFACTS, key).glob("*"))
        if file.name.endswith((".json", ".json.gz")) and not file.is_symlink()
    }
    if not found:
        raise StoreError(
            f"RUN must hold a trace, but got {run.folder}, which has none. Measure with profile, "
            "or train-step --profiled."
        )
    return found


class TraceServer(ThreadingHTTPServer):
    """Serves some files, and nothing else, to this machine.

    Args:
        files: by path.
        port: 0 chooses a free one, which Perfetto's page does not ask.

    Raises:
        ValueError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, files: Mapping[str, Path], port: int = PORT) -> None:
        self.files = files
        try:
            super().__init__((HOST, port), _Request)
        except OSError as error:
            raise ValueError(
                f"port {port} must be free, because Perfetto reads no other, but got: "
                f"{error.strerror}. Stop what uses it."
            ) from None

    def link(self, path: str) -> str:
        """The address at which a browser shows a trace in Perfetto."""
        return f"{PAGE}/#!/?url=http://{HOST}:{self.server_port}{quote(path)}"


class _Request(BaseHTTPRequestHandler):
    server: TraceServer

    def do_GET(self) -> None:
        """Answers with a file. A page of another host that a name leads here gets nothing."""
        path = self.server.files.get(unquote(self.path))
        named = self.headers.get("Host") == f"{HOST}:{self.server.server_port}"
        try:
            content = read_file(path) if path is not None and named else None
        except (OSError, StoreError):
            content = None
        if content is None:
            self.send_error(404)
            return
        self._begin(200, len(content))
        self.wfile.write(content)

    def do_OPTIONS(self) -> None:
        """Lets Perfetto's page ask an address of this machine."""
        self._begin(204, 0)

    def _begin(self, status: int, length: int) -> None:
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", PAGE)
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Prints nothing: the terminal shows the links."""
