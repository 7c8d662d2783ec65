import torch

from bench_harness.traces.allocations import (
    NO_PHASE,
    MemoryEvent,
    allocated_after,
    follow,
    from_cuda_history,
    from_profile,
    largest,
    peaks,
    timeline,
)
from bench_harness.traces.kineto import recording
from bench_harness.traces.trace import phase

CPU = torch.device("cpu")


def events(*changes):
    """(bytes, address, phase) in order, one per millisecond."""
    return [
        MemoryEvent(1_000_000 * i, nbytes, address, where, "line" if nbytes > 0 else "")
        for i, (nbytes, address, where) in enumerate(changes)
    ]


RECORDING = events(
    (100, 1, "forward"),
    (50, 2, "forward"),
    (-50, 2, "forward"),
    (-7, 99, "forward"),  # allocated before the recording began
    (30, 2, "backward"),  # the address is used again
    (-100, 1, "backward"),
)


def test_blocks_live_from_allocation_to_release():
    blocks = follow(RECORDING)
    assert [(b.event.nbytes, b.first, b.last) for b in blocks] == [
        (100, 0, 5),
        (50, 1, 2),
        (30, 4, None),
    ]
    assert allocated_after(RECORDING, blocks) == [100, 150, 100, 100, 130, 30]


def test_every_phase_has_its_own_peak_and_end():
    assert peaks(RECORDING, ["forward", "backward", "optimizer"]) == {
        "forward": (150, 100),
        "backward": (130, 30),
    }


def test_timeline_is_stacked_by_the_allocating_phase():
    line = timeline(RECORDING, ["forward", "backward"])
    assert line["bytes"] == {
        "forward": [100, 150, 100, 100, 100, 0],
        "backward": [0, 0, 0, 0, 30, 30],
    }
    assert line["phase_starts_ms"] == {"forward": 0.0, "backward": 4.0}


def test_a_long_timeline_is_thinned_but_keeps_its_peak():
    long = events(
        *[(1, i, "forward") for i in range(5000)], *[(-1, i, "forward") for i in range(5000)]
    )
    line = timeline(long, ["forward"])
    assert len(line["time_ms"]) <= 400
    assert max(line["bytes"]["forward"]) == 5000


def test_largest_allocations_are_grouped():
    assert largest(RECORDING, 2) == [
        {"block_bytes": 100, "phase": "forward", "source": "line", "blocks": 1, "stack": []},
        {"block_bytes": 50, "phase": "forward", "source": "line", "blocks": 1, "stack": []},
    ]


def test_a_group_of_allocations_shows_the_stack_of_most_of_them():
    often, rarely = ("a.py:1 f", "b.py:2 g"), ("a.py:1 f", "c.py:3 h")
    made = [
        MemoryEvent(i, 8, i, "forward", "a.py:1 f", stack)
        for i, stack in enumerate([rarely, often, often])
    ]
    (group,) = largest(made, 5)
    assert (group["blocks"], group["stack"]) == (3, list(often))


def test_cuda_history_is_cut_at_the_boundaries_and_names_the_line():
    torch_frame = {"filename": "/site/torch/nn/functional.py", "line": 9, "name": "linear"}
    own_frame = {"filename": "/code/model.py", "line": 42, "name": "forward"}
    history = [
        {"action": "alloc", "size": 1, "addr": 5, "frames": []},
        {"action": "segment_alloc", "size": 99, "addr": 5, "frames": []},
        {"action": "alloc", "size": 2, "addr": 6, "frames": [torch_frame, own_frame]},
        {"action": "free_requested", "size": 2, "addr": 6, "frames": []},
        {"action": "free_completed", "size": 2, "addr": 6, "frames": []},
        {"action": "alloc", "size": 4, "addr": 7, "frames": [torch_frame]},
        {"action": "alloc", "size": 8, "addr": 8, "frames": [{**own_frame, "filename": "x.cpp"}]},
        {"action": "free_requested", "size": 8, "addr": 8, "frames": []},
    ]
    boundaries = [("forward", 1), (NO_PHASE, 5), ("backward", 5), (NO_PHASE, 7)]
    found = from_cuda_history(history, boundaries)
    assert [(e.nbytes, e.phase, e.source) for e in found] == [
        (2, "forward", "model.py:42 forward"),
        (-2, "forward", ""),
        (4, "backward", "functional.py:9 linear"),
        (8, "backward", "backward (started by the autograd engine)"),
    ]


def test_a_stack_leaves_out_torch_and_what_called_the_recorded_pass():
    frames = [
        {"filename": "/site/torch/nn/functional.py", "line": 9, "name": "linear"},
        {"filename": "/code/basics/model.py", "line": 42, "name": "forward"},
        {"filename": "/site/torch/nn/modules/module.py", "line": 7, "name": "_call_impl"},
        {"filename": "/code/bench/memory.py", "line": 3, "name": "one_pass"},
        {"filename": "/code/bench/memory.py", "line": 1, "name": "record"},
    ]
    history = [{"action": "alloc", "size": 2, "addr": 6, "frames": frames}]
    (event,) = from_cuda_history(history, [("forward", 0)], outermost="one_pass")
    assert event.stack == ("basics/model.py:42 forward", "bench/memory.py:3 one_pass")


def test_the_profilers_events_find_what_a_product_allocates(tmp_path):
    left, right = torch.randn(64, 128), torch.randn(128, 256)
    path = tmp_path / "memory.json"
    with recording(path, CPU, memory=True):
        torch.zeros(1000)  # outside every phase
        with phase("forward", CPU):
            out = left @ right
    found = from_profile(path)
    assert out.shape == (64, 256)
    (block,) = follow(found)
    assert (block.event.nbytes, block.event.phase, block.last) == (64 * 256 * 4, "forward", None)
    assert "aten::mm" in block.event.source
    assert block.event.stack == ("aten::mm", "aten::matmul")
