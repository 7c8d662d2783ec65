import importlib
import multiprocessing
import tempfile
import time
from pathlib import Path

import pytest
import torch

from bench_harness.process import PROCESS_NAME, start_server, temporary_prefix
from bench_harness.ranks import RankError, launch, launch_each
from processes import all_end


@pytest.fixture(scope="module")
def functions():
    with pytest.MonkeyPatch.context() as patched:
        # Ranks inherit the launcher's path, so they find the module by its name.
        patched.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("rank_functions")


def process(target, *args, name=None, **kwargs):
    """A process of the server that the tests' own ranks come from, which has torch imported."""
    start_server()
    context = multiprocessing.get_context("forkserver")
    started = context.Process(name=name, target=target, args=args, kwargs=kwargs)
    started.start()
    return started


@pytest.fixture(scope="module", autouse=True)
def launchers(functions, tmp_path_factory):
    """By start method, a launcher of ranks that sleep, and where they leave their process ids.

    Started before all tests: the fork server of one imports torch anew, which goes on beside them.
    """
    started = {}
    for method, name in (("forkserver", None), ("fork", PROCESS_NAME)):
        folder = tmp_path_factory.mktemp(method)
        arguments = (functions.sleep_and_say, 2, str(folder))
        started[method] = (process(launch, *arguments, name=name, timeout_s=300), folder)
    yield started
    for launcher, _ in started.values():
        launcher.kill()
        launcher.join()


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
    with pytest.raises(
        RankError, match=r"(?s)rank 1 failed.*: ValueError: no such luck\n.*fail_on_"
    ):
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


def test_ranks_that_end_apart_are_reported_one_by_one(functions):
    for timeout_s in (5, 20, 80):  # on a busy machine ranks have not met by the first
        outcomes = launch_each(functions.end_apart, 5, timeout_s=timeout_s)
        if outcomes[0].ok and outcomes[4].output:
            break
    returned, raised, killed, stopped, late = outcomes
    assert (returned.value, returned.exitcode, returned.error) == (0, 0, None)
    assert "ValueError: no such luck" in raised.error
    assert raised.output == "words of 1"
    assert killed.error == "died without a report (exit code -9)"
    assert stopped.error == "stopped by SIGSTOP; killed"
    assert late.error == f"still running after {timeout_s} s; killed"
    assert "in end_apart" in late.stacks
    assert [each.ok for each in outcomes] == [True, False, False, False, False]
    assert [each.died for each in outcomes] == [False, False, True, False, False]
    assert [each.killed for each in outcomes] == [False, False, False, True, True]
    assert raised.seconds < timeout_s <= late.seconds


def test_a_crash_says_where(functions):
    words = r"rank 0 was ended by SIGABRT(.|\n)*rank_functions.py\", line \d+ in crash"
    with pytest.raises(RankError, match=words):
        launch(functions.crash, 1, timeout_s=120)


def test_a_rank_that_dies_is_noticed_although_its_child_lives(functions):
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 was ended by SIGKILL"):
        launch(functions.die_beside_a_child, 1, timeout_s=120)
    assert time.monotonic() - start < 60


def test_running_out_of_memory_keeps_its_type(functions):
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        launch(functions.run_out_of_memory, 1, timeout_s=120)


@pytest.mark.parametrize("start_method", ["forkserver", "fork"])
def test_ranks_end_when_their_launcher_is_killed(launchers, start_method):
    launcher, folder = launchers[start_method]
    deadline = time.monotonic() + 200
    pids = []
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        written = [file.read_text() for file in folder.glob("pid-*")]
        pids = [int(text) for text in written if text]  # a file is empty before it is written
    assert len(pids) == 2
    launcher.kill()
    launcher.join()
    assert all_end(pids)
    left = Path(tempfile.gettempdir()).glob(f"{temporary_prefix(launcher.pid)}*")
    assert not list(left)


def test_bad_arguments_are_refused_before_anything_starts(functions):
    with pytest.raises(ValueError, match=r"gloo or nccl, but got 'mpi'"):
        launch(functions.report, 2, "x", backend="mpi")
    with pytest.raises(ValueError, match=r"world_size must be at least 1, but got 0"):
        launch(functions.report, 0, "x")
