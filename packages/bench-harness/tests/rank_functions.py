"""What the ranks run in test_ranks.py; imported by name in their processes."""

import os
import signal
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist


def report(rank, world_size, device, text):
    total = torch.full((3,), float(rank))
    dist.all_reduce(total)
    return {"rank": rank, "world_size": world_size, "device": str(device), "text": text} | {
        "total": total.tolist(),
        "ports": open_ports(),
    }


def open_ports():
    """The addresses that this rank and its launcher listen on."""
    processes = psutil.Process(), psutil.Process().parent()
    return [
        each.laddr.ip
        for process in processes
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    ]


def fail_on_last(rank, world_size, device):
    if rank == world_size - 1:
        raise ValueError("no such luck")
    dist.barrier()


def exit_on_last(rank, world_size, device):
    if rank == world_size - 1:
        raise SystemExit(0)
    dist.barrier()


def hang_on_last(rank, world_size, device):
    if rank == world_size - 1:
        time.sleep(600)


def die_on_last(rank, world_size, device):
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fail_on_last_while_others_sleep(rank, world_size, device):
    dist.barrier()  # a rank that has not met the others yet reports that it lost them
    if rank == world_size - 1:
        time.sleep(1)
        raise ValueError("no such luck")
    time.sleep(600)


def say_and_die_on_last(rank, world_size, device):
    if rank == world_size - 1:
        os.write(2, b"what it said last")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def end_apart(rank, world_size, device):
    """Ranks 0 to 4 return, raise, are killed, are stopped, and go on for ever."""
    os.write(1, f"words of {rank}".encode())
    if rank == 1:
        raise ValueError("no such luck")
    if rank in (2, 3):
        os.kill(os.getpid(), {2: signal.SIGKILL, 3: signal.SIGSTOP}[rank])
    if rank == 4:
        time.sleep(600)
    return 10 * rank


def crash(rank, world_size, device):
    os.abort()


def die_beside_a_child(rank, world_size, device):
    if not os.fork():
        time.sleep(100)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def run_out_of_memory(rank, world_size, device):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def sleep_and_say(rank, world_size, device, folder):
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
