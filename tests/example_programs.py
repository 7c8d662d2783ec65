"""Runs the example programs in processes that are forked from one with their imports."""

import gc
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import torch

import ranks
from processes import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


class Examples:
    """Programs of the folder examples/, each rank a process of its own with one thread."""

    def __init__(self) -> None:
        ranks.start_server()
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._server = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._server.start()
        theirs.close()

    def start(
        self, arguments: list[str], world_size: int | None = None, script: str = "train_lm.py"
    ) -> list[int]:
        """Process ids of a program's ranks; ``finish`` must follow.

        Args:
            arguments: the program's command line.
            world_size: number of ranks, with the variables that torchrun sets; None sets none.
            script: the program's file name.
        """
        environments: list[dict[str, str]] = [{}]
        if world_size is not None:
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            common |= {"WORLD_SIZE": str(world_size), "TORCHELASTIC_RUN_ID": "test"}
            environments = [
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)
            ]
        self._pipe.send((str(EXAMPLES / script), arguments, environments))
        pids: list[int] = self._pipe.recv()
        return pids

    def finish(self) -> tuple[int, str, str]:
        """Exit code, output and errors of what was started; those of all ranks together."""
        code, output, errors = self._pipe.recv()
        return code, output, errors

    def run(
        self, arguments: list[str], world_size: int | None = None, script: str = "train_lm.py"
    ) -> tuple[int, str, str]:
        """``start`` and ``finish``."""
        self.start(arguments, world_size, script)
        return self.finish()

    def close(self) -> None:
        """Ends the process that forks."""
        self._pipe.close()
        self._server.join(60)
        assert self._server.exitcode == 0


def _serve(pipe: Connection) -> None:
    """Forks the ranks of each program it is sent; answers with their ids, then with their ends."""
    sys.path.insert(0, str(EXAMPLES))
    import train_lm  # noqa: F401 - once, for all

    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "80"
    gc.freeze()  # what has been imported stays; programs that look through it would copy its pages
    while True:
        try:
            script, arguments, environments = pipe.recv()
        except EOFError:
            return
        started = [_fork(script, arguments, environment) for environment in environments]
        pipe.send([pid for pid, _ in started])
        code, texts = 0, ["", ""]
        for pid, outputs in started:
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or code
            for place, output in enumerate(outputs):
                os.lseek(output, 0, os.SEEK_SET)
                with os.fdopen(output) as file:
                    texts[place] += file.read()
        pipe.send((code, *texts))


def _fork(
    script: str, arguments: list[str], environment: dict[str, str]
) -> tuple[int, tuple[int, int]]:
    outputs = os.memfd_create("stdout"), os.memfd_create("stderr")
    pid = os.fork()
    if pid:
        return pid, outputs
    os.environ |= environment
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, output in enumerate(outputs, start=1):
        os.dup2(output, stream)
    sys.argv = [script, *arguments]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)  # taking torch apart would take longer than the rest
