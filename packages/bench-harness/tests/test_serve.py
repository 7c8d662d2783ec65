"""The server of traces: the files of a run, to this machine and to Perfetto's page alone."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench_harness.serve import PAGE, TraceServer, traces
from bench_harness.store import Store, StoreError

Bench = Callable[..., subprocess.CompletedProcess[str]]
KEY = "abc"
TRACE = f"/artifacts/{KEY}/trace.trimmed.json.gz"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run with a trace, a snapshot, and a link that leads out of it."""
    store = Store(tmp_path / "run")
    row = {"experiment": "toy", "case_key": KEY, "label": "toy 1", "status": "ok", "config": {}}
    row |= {"environment": "e", "commit": None, "started": "t0", "seconds": 1.0}
    with store.open_for_writing() as writer:
        writer.append([{**row, "error": None, "detail": None}])
    folder = store.folder / "artifacts" / KEY
    folder.mkdir(parents=True)
    (folder / "trace.trimmed.json.gz").write_bytes(b"trace")
    (folder / "snapshot.pickle").write_bytes(b"data")
    (tmp_path / "secret.json").write_text("secret")
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    return store


@pytest.fixture
def server(run: Store) -> Iterator[TraceServer]:
    files = {path: file for path, (_, file) in traces(run).items()}
    with TraceServer(files, port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: TraceServer, path: str, host: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    if answer.status < 400:
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
    return answer.status, answer.read()


def test_a_trace_is_served_to_perfetto_s_page(run: Store, server: TraceServer) -> None:
    assert list(traces(run)) == [TRACE], "no links, and nothing that is no trace"
    assert ask(server, TRACE) == (200, b"trace")
    address = f"http://127.0.0.1:{server.server_port}{TRACE}"
    assert server.link(TRACE) == f"https://ui.perfetto.dev/#!/?url={address}"
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/results.jsonl", f"/artifacts/{KEY}/snapshot.pickle"),
        *(f"/artifacts/{KEY}/link.json", f"/artifacts/{KEY}/../../../secret.json"),
        *("/..%2f..%2fsecret.json", "/etc/passwd", "//etc/passwd"),
    ],
)
def test_nothing_else_is_served(server: TraceServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_a_name_that_leads_here_and_a_file_that_became_a_link_get_nothing(
    run: Store, server: TraceServer
) -> None:
    assert ask(server, TRACE, host="evil.example")[0] == 404
    file = run.folder / TRACE[1:]
    file.unlink()
    file.symlink_to(run.folder.parent / "secret.json")
    assert ask(server, TRACE)[0] == 404


def test_a_taken_port_and_a_run_without_traces_are_named(run: Store, bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ValueError, match=r"port \d+ must be free, .* Stop what uses it"):
            TraceServer({}, taken.getsockname()[1])
    (run.folder / TRACE[1:]).unlink()
    with pytest.raises(StoreError, match="RUN must hold a trace, but got"):
        traces(run)
    done = bench("serve", str(run.folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert "Measure with profile, or train-step --profiled." in done.stderr


@pytest.mark.timeout(60)
def test_the_command_prints_links_and_ends_with_ctrl_c(
    run: Store, command_line: tuple[list[str], dict[str, str]]
) -> None:
    command, environment = command_line
    # Ignored signals are inherited by children, and a shell's background job ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(
            [*command, "serve", str(run.folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "PYTHONUNBUFFERED": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        if "port 9001 must be free" in lines[0]:
            pytest.skip("something else uses port 9001")
        lines += [process.stdout.readline() for _ in range(2)]
        assert lines[0] == "toy 1\n"
        assert re.fullmatch(rf"  {PAGE}/#!/\?url=http://127.0.0.1:9001{TRACE}\n", lines[1])
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stdout.read() == ""
