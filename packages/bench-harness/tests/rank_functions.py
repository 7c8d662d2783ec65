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
    if rank == world_size - 1:
        raise ValueError("no such luck")
    time.sleep(600)


def say_and_die_on_last(rank, world_size, device):
    if rank == world_size - 1:
        os.write(2, b"what it said last")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def run_out_of_memory(rank, world_size, device):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def sleep_and_say(rank, world_size, device, folder):
    (Path(folder) / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(600)
