# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Lines of PTX for what the Hopper kernels need beyond Gluon's interface, and shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from flashattn_triton.triton_versions import rounds_in_pairs, tma_copies, views_are_public

# A tile from global to shared memory, and back.
tma_load, tma_store = tma_copies()
ROUNDS_IN_PAIRS = gl.constexpr(rounds_in_pairs())
VIEWS_ARE_PUBLIC = gl.constexpr(views_are_public())
# Of 16 hardware barriers, Triton takes one for each of at most four partitions, and one more.
FIRST_NAMED_BARRIER = gl.constexpr(5)


@gluon.jit
def allocate_tiles(DTYPE: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory of N tiles, which the TMA and products read."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [N, ROWS, COLUMNS], LAYOUT)


@gluon.jit
def as_tiles(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The same shared memory as tiles of (ROWS, COLUMNS), for other contents."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], buffer.dtype)
    N: gl.constexpr = buffer.shape[0] * buffer.shape[1] // (ROWS * COLUMNS)
    if VIEWS_ARE_PUBLIC:
        tiles = buffer.reinterpret(buffer.dtype, [N, ROWS, COLUMNS], LAYOUT)
    else:
        tiles = buffer._reinterpret(buffer.dtype, [N, ROWS, COLUMNS], LAYOUT)
    return tiles


@gluon.jit
def new_barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers in shared memory; COUNT arrivals complete a phase of one."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], LAYOUT)
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def slot_and_phase(n, SLOTS: gl.constexpr):
    """Of one slot or two, that of tile n, and the phase of its barrier; n is at least -1.

    Without divisions, which take instructions and registers.
    """
    return n & (SLOTS - 1), (n >> (SLOTS - 1)) & 1


@gluon.jit
def _in_order(PTX: gl.constexpr, x):
    """PTX for its effect alone, over which no access to memory moves. ``x`` is its ``$1``.

    Whatever waits or lets others go on here says that it changes memory (``~{memory}``). Otherwise
    LLVM moves loads behind the arrival at a barrier that lets others overwrite what is loaded.
    """
    gl.inline_asm_elementwise(PTX, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def reduce_add(pointers, x, condition):
    """Adds fp32 ``x`` to global memory in any order, 16 bytes at a time, if ``condition`` holds.

    ``pointers``: of each group of four elements that a thread holds, the first one's is used; they
    are neighbours, and aligned to 16 bytes.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred holds;
        setp.ne.s32 holds, $12, 0;
        @holds red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f,r,r,r,r",
        [pointers.to(gl.int64), x, condition.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def store_or_add(pointers, x, adds, stores):
    """:func:`reduce_add` if ``adds``, a store there if ``stores``."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred adds, stores;
        setp.ne.s32 adds, $12, 0;
        setp.ne.s32 stores, $16, 0;
        @adds red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        @stores st.relaxed.gpu.global.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        }""",
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f,r,r,r,r,r,r,r,r",
        [pointers.to(gl.int64), x, adds.to(gl.int32), stores.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.constexpr_function
def _wait_and_arrive(barrier, threads):
    return f"""{{
        .reg .pred other, again;
        .reg .b32 warp, now;
        mov.u32 warp, %tid.x;
        and.b32 warp, warp, 96;
        setp.ne.s32 other, warp, 64;
        @other bra done;
        setp.le.s32 again, $2, 0;
        @again bra reached;
        look:
        ld.acquire.gpu.global.b32 now, [$1];
        setp.lt.s32 again, now, $2;
        @again bra look;
        reached:
        bar.warp.sync 0xffffffff;
        bar.arrive {barrier}, {threads};
        bar.arrive {barrier + 1}, {threads};
        done:
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def wait_for_predecessors(order_counter, before, INDEX: gl.constexpr, THREADS: gl.constexpr):
    """A kernel's third warp waits until the ``order_counter`` has reached ``before``.

    It then arrives at hardware barriers ``INDEX`` and ``INDEX + 1``. What predecessors had added to
    memory before they incremented the counter is visible to who waits there.
    """
    PTX: gl.constexpr = _wait_and_arrive(FIRST_NAMED_BARRIER + INDEX, THREADS)
    gl.inline_asm_elementwise(
        PTX,
        "=r,l,r,~{memory}",
        [order_counter.to(gl.int64), gl.to_tensor(before)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def wait_until_reached(counter, n):
    """Until a counter in memory is at least ``n``."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred again;
        .reg .b32 now;
        look:
        ld.relaxed.gpu.global.b32 now, [$1];
        setp.lt.s32 again, now, $2;
        @again bra look;
        bar.warp.sync 0xffffffff;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,~{memory}",
        [counter.to(gl.int64), gl.to_tensor(n)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def signal_successors(order_counter):
    """The first thread of a kernel's second warp adds 1 to the ``order_counter``.

    What others had added to memory when they arrived at a barrier at which the warp has waited
    since is visible then to successors.
    """
    gl.inline_asm_elementwise(
        """{
        .reg .pred own;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.s32 own, thread, 32;
        @own red.release.gpu.global.add.s32 [$1], 1;
        mov.b32 $0, 0;
        }""",
        "=r,l,~{memory}",
        [order_counter.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


# ---- kernels one after another -------------------------------------------------------------------
#
# CUDA's programmatic dependent launch: a kernel with the option ``launch_pdl`` may begin when all
# programs of the one before have said so or have ended, and waits for results itself, if it needs
# any.


@gluon.jit
def wait_for_prerequisites():
    """Waits until the kernel before has ended, and all that it has written is visible."""
    _in_order("griddepcontrol.wait; mov.b32 $0, 0;", gl.to_tensor(0))


@gluon.jit
def launch_dependents():
    """Lets the next kernel begin, as far as this program is concerned."""
    _in_order("griddepcontrol.launch_dependents; mov.b32 $0, 0;", gl.to_tensor(0))


@gluon.jit
def exp2(x):
    """2^x by the special function unit alone; results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def wait_until_written():
    """Waits until what this warp group has stored by the TMA is in memory, not only read."""
    _in_order("{ cp.async.bulk.wait_group 0; mov.b32 $0, 0; }", gl.to_tensor(0))


@gluon.jit
def reciprocal(x):
    """1 / x by the special function unit alone, to one unit in the last place; 0 of infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _selection(seen, other):
    """PTX of $1 where the instructions ``seen`` set the predicate ``seen``, else of ``other``.

    ``other``: 0 or an infinity.
    """
    bits = "00000000" if other == 0 else "7F800000" if other > 0 else "FF800000"
    return f"{{ .reg .pred seen; {seen} selp.f32 $0, $1, 0f{bits}, seen; }}"


@gluon.jit
def keep_where(COMPARISON: gl.constexpr, x, a, b, OTHER: gl.constexpr):
    """fp32 ``x`` where the COMPARISON ("lt" or "ge") of int32 ``a`` and ``b`` holds, else OTHER.

    In PTX, because LLVM packs the results of many comparisons into the bits of one number and tests
    these one by one: at head_dim 64, 1.4 times as many instructions in a backward step on the
    diagonal.
    """
    PTX: gl.constexpr = _selection(f"setp.{COMPARISON}.s32 seen, $2, $3;", OTHER)
    return gl.inline_asm_elementwise(
        PTX, "=f,f,r,r", [x, a, b], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def keep_between(x, a, first, n, OTHER: gl.constexpr):
    """fp32 ``x`` where int32 ``a`` is one of the ``n`` numbers from ``first`` on, else OTHER."""
    PTX: gl.constexpr = _selection(
        ".reg .b32 past; sub.s32 past, $2, $3; setp.lt.u32 seen, past, $4;", OTHER
    )
    return gl.inline_asm_elementwise(
        PTX, "=f,f,r,r,r", [x, a, first, n], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _rounding_instruction(is_bfloat16):
    return f"cvt.rn.{'bf16x2' if is_bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def to_operand(x, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """fp32 ``x`` rounded to a half type, as an operand of products in registers.

    Where the compiler does not keep rounded numbers in pairs, one instruction rounds two of them
    into one register. They are bf16 to the compiler until they are in place, whatever their bits
    mean: it takes pairs of fp16 apart.
    """
    if ROUNDS_IN_PAIRS:
        operand = gl.convert_layout(x.to(dtype), LAYOUT)
    else:
        PTX: gl.constexpr = _rounding_instruction(dtype == gl.bfloat16)
        pairs = gl.inline_asm_elementwise(
            PTX, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
        operand = gl.convert_layout(pairs, LAYOUT).to(dtype, bitcast=True)
    return operand


@gluon.constexpr_function
def _barrier_instruction(operation, barrier, threads, then=""):
    return f"{{ {operation} {barrier}, {threads};{then} mov.b32 $0, 0; }}"


@gluon.jit
def named_barrier_sync(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at hardware barrier ``INDEX`` (0 to 10) and waits until ``THREADS`` have arrived."""
    PTX: gl.constexpr = _barrier_instruction("bar.sync", FIRST_NAMED_BARRIER + INDEX, THREADS)
    _in_order(PTX, gl.to_tensor(0))


@gluon.jit
def named_barrier_arrive(INDEX: gl.constexpr, THREADS: gl.constexpr):
    """Arrives at hardware barrier ``INDEX`` (0 to 10) without waiting."""
    PTX: gl.constexpr = _barrier_instruction("bar.arrive", FIRST_NAMED_BARRIER + INDEX, THREADS)
    _in_order(PTX, gl.to_tensor(0))


@gluon.jit
def named_barrier_sync_at(index, THREADS: gl.constexpr):
    """:func:`named_barrier_sync`, of a barrier that is known only at run time."""
    PTX: gl.constexpr = _barrier_instruction("bar.sync", "$1", THREADS)
    _in_order(PTX, gl.to_tensor(FIRST_NAMED_BARRIER + index))


@gluon.jit
def named_barrier_arrive_at(index, THREADS: gl.constexpr):
    """:func:`named_barrier_arrive`, of a barrier that is known only at run time."""
    PTX: gl.constexpr = _barrier_instruction("bar.arrive", "$1", THREADS)
    _in_order(PTX, gl.to_tensor(FIRST_NAMED_BARRIER + index))


@gluon.jit
def named_barrier_arrive_soon_at(index, THREADS: gl.constexpr):
    """:func:`named_barrier_arrive_at`, which ptxas does not put off. No product is in flight.

    Otherwise it may come after all exponentials of a step. ptxas schedules waits for products
    early, and never before an arrival that is written before them. So a wait for nothing follows.
    """
    WAIT: gl.constexpr = " wgmma.wait_group.sync.aligned 0;"
    PTX: gl.constexpr = _barrier_instruction("bar.arrive", "$1", THREADS, WAIT)
    _in_order(PTX, gl.to_tensor(FIRST_NAMED_BARRIER + index))


@gluon.constexpr_function
def _arrival_at_one(first, threads):
    return f"""{{
        .reg .pred second;
        setp.ne.s32 second, $1, 0;
        @second bar.arrive {first + 1}, {threads};
        @!second bar.arrive {first}, {threads};
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def named_barrier_arrive_at_one(INDEX: gl.constexpr, which, THREADS: gl.constexpr):
    """:func:`named_barrier_arrive` at ``INDEX``, or at the next one if ``which`` is 1 instead of 0.

    No register holds the barrier's number. If one did, ptxas could take a register from which
    additions to memory are still read, and the arrival would wait for these: 1 to 3 % of a backward
    pass with 96 or 128 columns.
    """
    PTX: gl.constexpr = _arrival_at_one(FIRST_NAMED_BARRIER + INDEX, THREADS)
    _in_order(PTX, gl.to_tensor(which))
