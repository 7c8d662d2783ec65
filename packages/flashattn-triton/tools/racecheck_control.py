"""A kernel without a race, which racecheck reports if it does not follow mbarriers.

    compute-sanitizer --tool racecheck python tools/racecheck_control.py

Four warps, each of them, write 128 numbers into shared memory and meet; one of their threads
arrives at an mbarrier, where four other warps wait before they read. So do producers of the Hopper
tier tell consumers which tile is next. Needs a Hopper GPU.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn_triton.hopper.support import new_barriers

EACH_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))


@gluon.jit
def _write(numbers, full):
    numbers.store(gl.arange(0, 128, EACH_WARP))  # read after an mbarrier
    mbarrier.arrive(full.index(0), count=1)


@gluon.jit
def _read(numbers, full, out_ptr):
    mbarrier.wait(full.index(0), 0)
    gl.store(out_ptr + gl.arange(0, 128, EACH_WARP), numbers.load(EACH_WARP))


@gluon.jit
def control(out_ptr):
    """Stores 0 to 127 at ``out_ptr``, (128,) int32."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    numbers = gl.allocate_shared_memory(gl.int32, [128], LAYOUT)
    full = new_barriers(1, 1)
    # fmt: off
    gl.warp_specialize([(_write, (numbers, full)), (_read, (numbers, full, out_ptr))], [4], [64])
    # fmt: on


if __name__ == "__main__":
    out = torch.zeros(128, dtype=torch.int32, device="cuda")
    control[(1,)](out, num_warps=4)
    right = out.equal(torch.arange(128, dtype=torch.int32, device="cuda"))
    print("control ran" if right else "control is wrong")
