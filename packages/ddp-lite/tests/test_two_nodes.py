"""Two "nodes" on one machine: network namespaces joined by a slow cable, started by torchrun."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

RATE_MBIT = 200
PORT = 29617


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)


@pytest.fixture
def nodes() -> Iterator[list[tuple[str, str, str]]]:
    """Two (namespace, interface, address), their link limited to RATE_MBIT."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs Linux with the ip and tc commands")
    tag = os.getpid() % 100_000
    pair = [(f"ddp{tag}{s}", f"v{tag}{s}", f"10.77.0.{i + 1}") for i, s in enumerate("ab")]
    try:
        for namespace, _, _ in pair:
            made = command("ip", "netns", "add", namespace)
            if made.returncode:
                pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
        steps = [["ip", "link", "add", pair[0][1], "type", "veth", "peer", "name", pair[1][1]]]
        for namespace, interface, address in pair:
            inside = ["ip", "-n", namespace]
            limit = ["tbf", "rate", f"{RATE_MBIT}mbit", "burst", "64kb", "latency", "500ms"]
            steps += [
                ["ip", "link", "set", interface, "netns", namespace],
                [*inside, "addr", "add", f"{address}/24", "dev", interface],
                [*inside, "link", "set", interface, "up"],
                [*inside, "link", "set", "lo", "up"],
                ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit],
            ]
        for step in steps:
            done = command(*step)
            if done.returncode:
                pytest.skip(f"cannot build the network here: {' '.join(step)}: {done.stderr}")
        yield pair
    finally:
        for namespace, _, _ in pair:
            command("ip", "netns", "delete", namespace)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_nodes_under_torchrun(nodes: list[tuple[str, str, str]]) -> None:
    processes = []
    with contextlib.ExitStack() as running:
        for place, (namespace, interface, address) in enumerate(nodes):
            words = ["ip", "netns", "exec", namespace, sys.executable, "-W", "ignore"]
            words += ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[0][2]}:{PORT}"]
            words += [f"--rdzv-conf=is_host={'true' if place == 0 else 'false'}"]
            words += [f"--local-addr={address}", str(Path(__file__).with_name("node_program.py"))]
            environment = os.environ | {
                "GLOO_SOCKET_IFNAME": interface,
                "TP_SOCKET_IFNAME": interface,
                "OMP_NUM_THREADS": "1",
            }
            process = subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            processes.append(running.enter_context(process))
            running.callback(process.kill)
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    line = next(part for part in "".join(outputs).splitlines() if part.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["world_size"] == 4
    seconds = result["seconds"]
    assert seconds["float32"] >= 1.6 * seconds["bfloat16"], seconds
