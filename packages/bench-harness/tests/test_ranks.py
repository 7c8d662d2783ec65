import importlib
import multiprocessing
import tempfile
import time
from pathlib import Path

import pytest
import torch

from bench_harness.nodes import Nodes
from bench_harness.process import start_server, temporary_prefix
from bench_harness.ranks import RankError, launch, launch_each
from processes import all_end, free_port


@pytest.fixture(scope="module")
def functions():
    with pytest.MonkeyPatch.context() as patched:
        # Ranks inherit the launcher's path, so they find the module by its name.
        patched.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("rank_functions")


@pytest.fixture(scope="module", autouse=True)
def launcher(functions, tmp_path_factory):
    """A launcher of ranks that sleep, and the folder where they leave their process ids.

    Started before all tests: its fork server imports torch anew, which goes on beside them. The
    server that it and the tests' own ranks come from imports torch once for all of them.
    """
    start_server()
    folder = tmp_path_factory.mktemp("sleeping")
    context = multiprocessing.get_context("forkserver")
    process = context.Process(
        target=launch, args=(functions.sleep_and_say, 2, str(folder)), kwargs={"timeout_s": 300}
    )
    process.start()
    yield process, folder
    process.kill()
    process.join()


def test_results_come_back_in_rank_order(functions):
    results = launch(functions.report, 2, "hello", timeout_s=120)
    assert [r["rank"] for r in results] == [0, 1]
    assert all(r["world_size"] == 2 and r["device"] == "cpu" for r in results)
    assert all(r["text"] == "hello" and r["total"] == [1.0] * 3 for r in results)
    listening = {address for r in results for address in r["ports"]}
    assert not {"0.0.0.0", "::"} & listening


def test_error_names_the_rank_that_failed_first_with_its_traceback(
    functions, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*fail_on_last.*no such luck"):
        launch(functions.fail_on_last, 2, timeout_s=120)
    assert not list(tmp_path.iterdir())  # torch's launcher would leave a file for each that raised


def test_a_rank_that_exits_has_failed(functions):
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*exit_on_last.*SystemExit: 0"):
        launch(functions.exit_on_last, 2, timeout_s=120)


def test_a_hang_ends_at_the_deadline_and_says_where(functions):
    for timeout_s in (5, 20, 80):  # on a busy machine ranks have not met by the first
        with pytest.raises(RankError) as caught:
            launch(functions.hang_on_last, 2, timeout_s=timeout_s)
        if "hang_on_last" in str(caught.value):
            break
    assert f"rank 1 was still running after {timeout_s} s" in str(caught.value)
    assert "hang_on_last" in str(caught.value)


def test_a_killed_rank_is_named(functions):
    with pytest.raises(RankError, match=r"rank 1 .*(SIGKILL|left no report)"):
        launch(functions.die_on_last, 2, timeout_s=120)


def test_a_killed_rank_has_its_last_words(functions):
    with pytest.raises(RankError, match=r"(?s)rank 1 was ended by SIGKILL.*what it said last"):
        launch(functions.say_and_die_on_last, 2, timeout_s=120)


def test_ranks_end_together(functions):
    start = time.monotonic()
    message = r"(?s)rank 1 failed \(rank 0 left no report, and was killed\).*no such luck"
    with pytest.raises(RankError, match=message):
        launch(functions.fail_on_last_while_others_sleep, 2, timeout_s=500)
    assert time.monotonic() - start < 300


def test_each_rank_has_its_own_end(functions):
    failed, healthy = reversed(launch_each(functions.fail_on_last, 2, timeout_s=120))
    assert not failed.ok
    assert "no such luck" in failed.error
    assert not failed.died
    assert not failed.killed
    assert "Connection closed" in healthy.error or "reset" in healthy.error


def test_running_out_of_memory_keeps_its_type(functions):
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        launch(functions.run_out_of_memory, 1, timeout_s=120)


def test_ranks_end_when_their_launcher_is_killed(launcher):
    process, folder = launcher
    deadline = time.monotonic() + 200
    pids = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        written = [file.read_text() for file in folder.glob("pid-*")]
        pids = [int(text) for text in written if text]  # a file is empty before it is written
    assert len(pids) == 2
    process.kill()
    process.join()
    assert all_end(pids)
    left = Path(tempfile.gettempdir()).glob(f"{temporary_prefix(process.pid)}*")
    assert not list(left)


def test_a_machine_that_does_not_come_is_said(functions):
    endpoint = f"localhost:{free_port()}"
    nodes = Nodes(nnodes=2, rdzv_endpoint=endpoint, run_id="lonely")
    with pytest.raises(RankError, match=rf"2 machines must meet at {endpoint} within 2 s"):
        launch(functions.report, 2, "hello", timeout_s=2, nodes=nodes)


def test_bad_arguments_are_refused_before_anything_starts(functions):
    with pytest.raises(ValueError, match=r"gloo or nccl, but got 'mpi'"):
        launch(functions.report, 2, "x", backend="mpi")
    with pytest.raises(ValueError, match=r"positive multiple of 1 nodes, but got 0"):
        launch(functions.report, 0, "x")
    with pytest.raises(ValueError, match="share run_id"):
        Nodes(nnodes=2)
    with pytest.raises(ValueError, match=r"multiple of 2 nodes, but got 3"):
        launch(
            functions.report,
            3,
            "x",
            nodes=Nodes(nnodes=2, run_id="a", rdzv_endpoint="localhost:29400"),
        )
