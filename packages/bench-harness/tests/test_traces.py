"""Reading traces: made-up ones with known answers, and real ones of this machine."""

import gzip
import json
import sqlite3
from contextlib import closing

import pytest
import torch
from tools.pages import timelines as pages

import basics_model
from basics_model.attention import softmax_attention
from bench_harness.display.timelines import timelines
from bench_harness.traces import kineto, nsight
from bench_harness.traces.timeline import WORK, timeline
from bench_harness.traces.trace import (
    Event,
    Trace,
    is_communication,
    kernel_totals,
    kind,
    phase,
    short_name,
    time_inside,
)

CPU = torch.device("cpu")
MAIN, AUTOGRAD = 11, 12


def span(name, category, start, end, thread=MAIN, **args):
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start,
        "dur": round(end - start, 3),
        "pid": 1,
        "tid": thread,
        "args": args,
    }


@pytest.fixture
def gpu_trace(tmp_path):
    """A step on a GPU: backward's kernels are launched by another thread than the range's."""
    events = [
        span("phase:forward", "user_annotation", 0, 100),
        span("phase:backward", "user_annotation", 100, 300),
        span("attention.softmax", "user_annotation", 10, 20),
        span("phase:forward", "gpu_user_annotation", 0, 100, thread=7),
        span("cudaLaunchKernel", "cuda_runtime", 5, 6, correlation=1),
        span("cudaLaunchKernel", "cuda_runtime", 12, 13, correlation=2),
        span("cudaLaunchKernel", "cuda_runtime", 110, 111, thread=AUTOGRAD, correlation=3),
        span("ncclAllReduce", "cuda_runtime", 120, 121, thread=AUTOGRAD, correlation=4),
        span("sm90_xmma_gemm_bf16", "kernel", 30, 60.5, thread=7, correlation=1),
        span("softmax_warp_forward", "kernel", 61, 71, thread=7, correlation=2),
        span("nvjet_tst_128x256", "kernel", 115, 215, thread=7, correlation=3),
        span("ncclDevKernel_AllReduce_Sum_f32", "kernel", 200, 260, thread=20, correlation=4),
        span("Memcpy DtoD", "gpu_memcpy", 262, 263, thread=7),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_gpu_kernels_belong_to_the_phase_they_run_in(gpu_trace):
    trace = kineto.load(gpu_trace)
    assert trace.on_device
    backward = kernel_totals(trace, trace.phases("backward"))
    assert [(total["kernel"], total["work"]) for total in backward] == [
        ("nvjet_tst_128x256", "matmul"),
        ("ncclDevKernel_AllReduce_Sum_f32", "communication"),
    ]
    assert backward[0]["total_ms"] == 0.1
    forward = kernel_totals(trace, trace.phases("forward"))
    assert [(total["kernel"], total["total_ms"]) for total in forward] == [
        ("sm90_xmma_gemm_bf16", 0.0305),
        ("softmax_warp_forward", 0.01),
    ]
    assert forward[0]["share"] == pytest.approx(3050 / 40.5)


def test_gpu_overlap_is_of_kernels(gpu_trace):
    trace = kineto.load(gpu_trace)
    found = trace.overlap(trace.phases("backward")[0])
    assert found.communication_ns == 60_000
    assert (found.hidden_ns, found.exposed_ns) == (15_000, 45_000)
    assert found.idle_ns == 200_000 - 145_000
    assert len(trace.copies) == 1


def test_kernels_belong_to_the_range_that_launched_them(gpu_trace):
    trace = kineto.load(gpu_trace)
    assert time_inside(trace, "attention.softmax") == {"other": 10_000}
    assert time_inside(trace, "attention.softmax", trace.phases("backward")) == {}


def test_an_exchange_by_copies_is_communication(tmp_path):
    """Copies, sums and signals of the range's own thread, and nothing that others launch then."""
    events = [
        span("phase:step", "user_annotation", 0, 100),
        span("ddp_lite::exchange", "user_annotation", 10, 20, thread=AUTOGRAD),
        span("cudaLaunchKernel", "cuda_runtime", 5, 6, thread=AUTOGRAD, correlation=1),
        span("cudaMemcpyAsync", "cuda_runtime", 12, 13, thread=AUTOGRAD, correlation=2),
        span("cudaLaunchKernel", "cuda_runtime", 14, 15, thread=AUTOGRAD, correlation=3),
        span("cudaLaunchKernel", "cuda_runtime", 16, 17, thread=MAIN, correlation=4),
        span("cudaMemcpyAsync", "cuda_runtime", 20, 21, thread=AUTOGRAD, correlation=5),
        span("nvjet_tst", "kernel", 20, 50, thread=7, correlation=1),
        span("Memcpy DtoD", "gpu_memcpy", 30, 60, thread=8, correlation=2),
        span("symmetric_memory::barrier_kernel", "kernel", 60, 70, thread=8, correlation=3),
        span("elementwise_kernel", "kernel", 50, 55, thread=7, correlation=4),
        span("Memcpy DtoD", "gpu_memcpy", 80, 85, thread=7, correlation=5),
        span("kernel_of_a_graph", "kernel", 90, 91, thread=7),
        span("c10d::symmetric_memory::barrier_kernel", "kernel", 91, 92, thread=8, correlation=6),
        span("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 92, 93, thread=8, correlation=6),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = kineto.load(path)
    assert [event.correlation for event in trace.communication] == [3, 6, 2, 6]
    assert [event.correlation for event in trace.compute] == [1, 4, None]
    assert [event.correlation for event in trace.copies] == [5]
    window = trace.phases("step")[0]
    assert trace.overlap(window).exposed_ns == 17_000


def test_a_recording_holds_no_path_of_this_machine(tmp_path, monkeypatch):
    """Traces are passed on; a case records in a folder of its own, whose path names the user."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    with kineto.recording(path, torch.device("cpu")):
        torch.ones(2) + 1
    text = path.read_text()
    assert "aten::add" in text
    assert str(tmp_path) not in text


def test_a_trimmed_trace_keeps_the_window_and_can_be_read(gpu_trace, tmp_path):
    target = tmp_path / "small.json.gz"
    kineto.trimmed(gpu_trace, target, kineto.load(gpu_trace).phases("forward"))
    small = kineto.load(target)
    assert {event.name for event in small.operators} == {
        "sm90_xmma_gemm_bf16",
        "softmax_warp_forward",
    }
    assert any(
        e["ph"] == "M" for e in json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    )


def test_times_far_from_zero_stay_exact(tmp_path):
    path = tmp_path / "late.json"
    path.write_text(
        '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, '
        '"ts": 1760000000000000.123, "dur": 1.001, "args": {}}]}'
    )
    (kernel,) = kineto.load(path).operators
    assert kernel.interval == (1_760_000_000_000_000_123, 1_760_000_000_000_001_124)


def test_a_file_without_events_is_refused(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="must hold traceEvents"):
        kineto.load(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllReduce", "communication"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int)", "communication"),
        ("sm90_xmma_gemm_f32", "matmul"),
        ("void cutlass::Kernel2<cutlass_80>", "matmul"),
        ("ampere_sgemm_128x64_tn", "matmul"),
        ("void pytorch_flash::flash_fwd_kernel", "fused attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "fused attention"),
        ("aten::mm", "matmul"),
        ("aten::matmul", "other"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_kinds_of_kernels(name, expected):
    assert kind(name) == expected
    assert is_communication(name) == (expected == "communication")


@pytest.fixture(scope="module")
def cpu_trace(tmp_path_factory):
    return recorded_step(tmp_path_factory.mktemp("trace") / "step.json")


def recorded_step(path):
    """Records a real training step of naive attention on this machine's CPU."""
    config = basics_model.ModelConfig(
        vocab_size=64, context_length=64, d_model=512, d_ff=2048, num_layers=2, num_heads=2
    )
    model = basics_model.TransformerLM(config, attention=softmax_attention)
    tokens = torch.randint(64, (4, 64))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other work has the cores
    try:
        model(tokens).sum().backward()
        model.zero_grad()
        with kineto.recording(path, CPU):
            with phase("forward", CPU):
                loss = model(tokens).sum()
            with phase("backward", CPU):
                loss.backward()
    finally:
        torch.set_num_threads(threads)
    return path


def test_a_recording_does_not_say_where_it_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    with kineto.recording(path, CPU):
        torch.ones(2).sum()
    assert str(tmp_path) not in path.read_text()


def test_matmuls_dominate_backward(cpu_trace, tmp_path):
    """An operator that has to wait for a busy core takes long; hence several tries."""
    for number in range(10):
        path = cpu_trace if number == 0 else recorded_step(tmp_path / f"{number}.json")
        trace = kineto.load(path)
        assert not trace.on_device
        totals = kernel_totals(trace, trace.phases("backward"))
        matmul = sum(total["share"] for total in totals if total["work"] == "matmul")
        if totals[0]["work"] == "matmul" and matmul > 50:
            break
    assert totals[0]["work"] == "matmul"
    assert matmul > 50
    # Two products in backward for each of forward's.
    count = {
        name: sum(
            t["count"] for t in kernel_totals(trace, trace.phases(name)) if t["work"] == "matmul"
        )
        for name in ("forward", "backward")
    }
    assert count["backward"] == 2 * count["forward"]


def test_operators_own_times_add_up_to_the_outermost_spans(cpu_trace):
    trace = kineto.load(cpu_trace)
    outermost = sum(event.end_ns - event.start_ns for event in trace.compute)
    assert sum(event.self_ns for event in trace.operators) == pytest.approx(outermost, rel=1e-3)


def test_softmax_and_products_are_found_inside_their_ranges(cpu_trace):
    trace = kineto.load(cpu_trace)
    scores = time_inside(trace, "attention.scores")
    softmax = time_inside(trace, "attention.softmax")
    assert scores["matmul"] > 0
    assert set(softmax) == {"other"}


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("aten::mm", "aten::mm"),
        ("nvjet_hsh_128x64_tn", "nvjet_hsh_128x64_tn"),
        (
            "sm80_xmma_gemm_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_execute_kernel__5x_cublas",
            "sm80_xmma_gemm_tn_n_tilesize64x64x8_stage3",
        ),
        ("void cutlass::Kernel2<cutlass_80_sgemm_nt>(T1::Params)", "cutlass_80_sgemm_nt"),
        (
            "void (anonymous namespace)::softmax_warp_forward<float, 8, false>(float*, int)",
            "softmax_warp_forward",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::<unnamed>::silu_kernel("
            "at::TensorIteratorBase &)::[lambda(float)], std::array<char *, 2>>(int, T2, T3)",
            "vectorized_elementwise_kernel: silu_kernel",
        ),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<"
            "at::native::BinaryFunctor<float, float, float, at::native::binary_internal::MulFunctor"
            "<float> > >(at::TensorIteratorBase&)::{lambda(int)#1}>(int, T3)",
            "elementwise_kernel: MulFunctor",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::"
            "func_wrapper_t<float, at::native::MaxNanFunctor<float> >, unsigned int> >(T3)",
            "reduce_kernel: MaxNanFunctor",
        ),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::"
            "(anonymous namespace)::FusedOptimizerTensorListMetadata<4>, at::native::"
            "(anonymous namespace)::FusedAdamMathFunctor<float, 4> >(T1, T2)",
            "multi_tensor_apply_kernel: FusedAdamMathFunctor",
        ),
    ],
)
def test_kernels_have_names_that_fit_a_table(kernel, short):
    assert short_name(kernel) == short


def spans_of(lane):
    """Start, end and name's position of each span of a lane."""
    found, at, spans = [], 0, lane["spans"]
    for gap, duration, name in zip(spans[::3], spans[1::3], spans[2::3], strict=True):
        found.append((at + gap, at + gap + duration, name))
        at += gap + duration
    return found


def test_a_timeline_keeps_every_kernel_by_name_and_stream(gpu_trace):
    trace = kineto.load(gpu_trace)
    line = timeline(trace, (0, 300_000))
    named = {
        lane["name"]: [(start, end, line["names"][name]) for start, end, name in spans_of(lane)]
        for lane in line["lanes"]
    }
    assert named == {
        "stream 7": [
            (30_000, 60_500, "sm90_xmma_gemm_bf16"),
            (61_000, 71_000, "softmax_warp_forward"),
            (115_000, 215_000, "nvjet_tst_128x256"),
            (262_000, 263_000, "Memcpy DtoD"),
        ],
        "stream 20": [(200_000, 260_000, "ncclDevKernel_AllReduce_Sum_f32")],
    }
    work = dict(zip(line["names"], line["work"], strict=True))
    assert WORK[work["nvjet_tst_128x256"]] == "matmul"
    assert WORK[work["ncclDevKernel_AllReduce_Sum_f32"]] == "communication"
    assert WORK[work["Memcpy DtoD"]] == "copy"
    assert line["phases"] == [["forward", 0, 100_000], ["backward", 100_000, 300_000]]
    assert line["exposed_ns"] == 45_000
    assert timelines(json.loads(json.dumps({"a": whole(line)})))["a"]["drawn"] == 0


def test_streams_of_a_replayed_graph_share_lanes_by_their_work():
    """A block of a graph has a stream of its own, and 30 lanes of one block each show nothing."""
    blocks = [Event("gemm", 10 * n, 10 * n + 12, (0, 700 + n), 12) for n in range(30)]
    sent = [Event("ncclDevKernel_AllReduce", 10 * n, 10 * n + 5, (0, 800 + n), 5) for n in range(9)]
    trace = Trace(on_device=True, compute=blocks, communication=sent)
    lanes = timeline(trace, (0, 400))["lanes"]
    assert [lane["name"] for lane in lanes] == ["compute", "compute", "transfer"]
    assert [len(spans_of(lane)) for lane in lanes] == [15, 15, 9]
    few = timeline(Trace(on_device=True, compute=blocks[:3]), (0, 400))["lanes"]
    assert [lane["name"] for lane in few] == ["stream 700", "stream 701", "stream 702"]


def whole(line):
    """A rank's timeline as the only one of a row."""
    return {"drawn": 0, "ranks": [{**line, "offset_ns": 0}]}


def test_a_phase_that_torch_and_nvtx_both_record_is_one(gpu_trace):
    trace = kineto.load(gpu_trace)
    trace.ranges.append(Event("phase:forward", 1_000, 99_000, (1, MAIN), 98_000))
    assert timeline(trace, (0, 300_000))["phases"] == [
        ["forward", 0, 100_000],
        ["backward", 100_000, 300_000],
    ]


def test_phases_of_a_step_without_marks_are_those_of_the_launches(tmp_path):
    """Backward's kernels by autograd's nodes, the optimizer's by torch's own range."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    events = [
        span("phase:step", "user_annotation", 0, 200),
        span(node, "cpu_op", 20, 30, thread=AUTOGRAD),
        span("Optimizer.step#AdamW.step", "user_annotation", 50, 60),
    ]
    for number, (launch, start, thread) in enumerate(
        [(5, 10, MAIN), (21, 60, AUTOGRAD), (28, 80, AUTOGRAD), (40, 95, MAIN), (51, 120, MAIN)], 1
    ):
        launched = {"thread": thread, "correlation": number}
        events.append(span("cudaLaunchKernel", "cuda_runtime", launch, launch + 1, **launched))
        events.append(span("k", "kernel", start, start + 10, thread=7, correlation=number))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert timeline(kineto.load(path), (0, 200_000))["phases"] == [
        ["forward", 10_000, 20_000],
        ["backward", 60_000, 90_000],
        ["optimizer", 120_000, 130_000],
    ], "what follows the backward before the optimizer belongs to none of them"


def test_marks_say_what_any_thread_launched_meanwhile(tmp_path):
    """As in an export of Nsight Systems, which records neither autograd nor torch's ranges."""
    events = [
        span("phase:step", "user_annotation", 0, 200),
        span("mark:forward", "user_annotation", 1, 20),
        span("mark:backward", "user_annotation", 20, 45),
        span("mark:optimizer", "user_annotation", 50, 60),
    ]
    for number, (launch, start, thread) in enumerate(
        [(5, 10, MAIN), (21, 60, AUTOGRAD), (44, 95, AUTOGRAD), (47, 110, MAIN), (51, 120, MAIN)], 1
    ):
        launched = {"thread": thread, "correlation": number}
        events.append(span("cudaLaunchKernel", "cuda_runtime", launch, launch + 1, **launched))
        events.append(span("k", "kernel", start, start + 10, thread=7, correlation=number))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert timeline(kineto.load(path), (0, 200_000))["phases"] == [
        ["forward", 10_000, 20_000],
        ["backward", 60_000, 105_000],
        ["optimizer", 120_000, 130_000],
    ]


def test_a_file_shows_every_variant_on_one_axis(gpu_trace):
    trace = kineto.load(gpu_trace)
    line = timeline(trace, trace.phases("backward")[0])
    shorter = {**line, "window_ns": 150_000}
    drawn = timelines({"naive": whole(line), "overlap": whole(shorter)})
    (plot,) = pages.draw(drawn).axes
    assert [text.get_text().strip() for text in plot.texts] == [
        *("naive", "0.045 ms exposed"),
        *("overlap", "0.045 ms exposed"),
    ]
    window, exposed, bars = pages.bars_of(drawn["naive"])
    assert (window, exposed) == (0.2, 0.045)
    assert bars == {
        "computation": [(0.015, 0.1)],
        "late": [],
        "communication": [(0.1, 0.06)],
    }


def test_a_window_that_two_recorders_name_counts_once():
    def window(start, end):
        return Event("phase:forward", start, end, (1, 1), end - start)

    trace = Trace(on_device=True, ranges=[window(1, 9), window(0, 10), window(20, 30)])
    assert trace.phases("forward") == [(0, 10), (20, 30)]


def test_a_picture_has_the_marks_of_phases(gpu_trace):
    trace = kineto.load(gpu_trace)
    line = timeline(trace, trace.phases("backward")[0])
    phases = [["forward", 0, 20_000], ["backward", 20_000, 90_000]]
    drawn = timelines({"naive": whole({**line, "phases": phases})})
    assert pages.phases_of(drawn["naive"]) == [("forward", 0.0, 0.02), ("backward", 0.02, 0.09)]
    (plot,) = pages.draw(drawn).axes
    texts = [text.get_text().strip() for text in plot.texts]
    assert texts == ["naive", "forward", "backward", "0.045 ms exposed"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": []},
        {"names": [3]},
        {"work": [7]},
        {"window_ns": -1},
        {"window_ns": float("nan")},
        {"lanes": [{"name": "s", "spans": [1, 2]}]},
        {"lanes": [{"name": "s", "spans": [1, "2", 0]}]},
        {"phases": [["forward", 1, None]]},
    ],
)
def test_a_stranger_s_timeline_is_refused(wrong):
    right = {
        "window_ns": 9,
        "exposed_ns": 0,
        "names": ["k"],
        "work": [0],
        "lanes": [{"name": "s", "spans": [1, 2, 0]}],
        "phases": [],
        "late": [],
    }
    timelines({"a": whole(right)})
    with pytest.raises(ValueError, match="timeline must hold the ranks of a step, but got"):
        timelines({"a": whole({**right, **wrong})})
    with pytest.raises(ValueError, match="timeline must hold"):
        timelines({"a": 3})


def test_spans_that_overlap_on_a_stream_have_lanes_of_their_own():
    kernels = [Event("k", start, start + 10, (0, 7), 10) for start in (0, 5, 10, 12)]
    line = timeline(Trace(on_device=True, compute=kernels), (0, 30))
    starts = [[start for start, _, _ in spans_of(lane)] for lane in line["lanes"]]
    assert starts == [[0, 10], [5], [12]]


@pytest.fixture
def export(tmp_path):
    """What Nsight Systems exports of the same step, as far as it is read."""
    path = tmp_path / "report.sqlite"
    tid = (1 << 24) | MAIN
    autograd = (1 << 24) | AUTOGRAD
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
                streamId INT, correlationId INT, demangledName INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
                correlationId INT, nameId INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INT, end INT, deviceId INT,
                streamId INT, correlationId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT,
                textId INT, globalTid INT);
            """
        )
        names = ["sm90_xmma_gemm", "softmax", "nvjet", "ncclDevKernel_AllReduce", "cudaLaunch"]
        names += ["attention.softmax, op_id = 7"]  # as torch writes it under emit_nvtx
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, ?, ?, ?)",
            [
                (30_000, 60_500, 7, 1, 0),
                (61_000, 71_000, 7, 2, 1),
                (115_000, 215_000, 7, 3, 2),
                (200_000, 260_000, 20, 4, 3),
            ],
        )
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 4)",
            [
                (5_000, 6_000, tid, 1),
                (12_000, 13_000, tid, 2),
                (110_000, 111_000, autograd, 3),
                (120_000, 121_000, autograd, 4),
            ],
        )
        database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (262000, 263000, 0, 7, 9)")
        database.executemany(
            "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?)",
            [
                (0, 100_000, 59, "phase:forward", None, tid),
                (100_000, 300_000, 59, "phase:backward", None, tid),
                (10_000, 20_000, 59, None, 5, tid),
                (0, 300_000, 60, "a start/end range", None, tid),
                (5, None, 59, "never closed", None, tid),
            ],
        )
    return path


def test_an_export_reads_like_the_profilers_trace(export, gpu_trace):
    found, expected = nsight.load(export), kineto.load(gpu_trace)
    for name in ("forward", "backward"):
        assert found.phases(name) == expected.phases(name)
        window = found.phases(name)[0]
        assert found.overlap(window) == expected.overlap(window)
    assert time_inside(found, "attention.softmax") == {"other": 10_000}
    assert len(found.copies) == 1


def test_tables_that_had_nothing_to_hold_are_simply_absent(export):
    with closing(sqlite3.connect(export)) as database, database:
        for table in ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_RUNTIME"):
            database.execute(f"DROP TABLE {table}")
    trace = nsight.load(export)
    assert len(trace.operators) == 4
    assert trace.ranges == []
    assert trace.copies == []


@pytest.mark.parametrize("statement", ["DELETE FROM", "DROP TABLE"])
def test_a_report_without_kernels_does_not_count(export, statement):
    with closing(sqlite3.connect(export)) as database, database:
        database.execute(f"{statement} CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(nsight.NsightError, match="must hold kernels, but got none"):
        nsight.load(export)


def test_a_missing_nsys_is_said_plainly(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(nsight.NsightError, match="must be on the PATH"):
        nsight.nsys()


def fake_nsys(folder, version):
    tool = folder / "nsys"
    tool.write_text(f'#!/bin/sh\necho "NVIDIA Nsight Systems version {version}"\n')
    tool.chmod(0o755)


def test_an_old_nsys_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    fake_nsys(tmp_path, "2021.5.2")
    with pytest.raises(nsight.NsightError, match=r"at least 2022\.1"):
        nsight.nsys()
    fake_nsys(tmp_path, "2024.4.1")
    assert nsight.nsys() == str(tmp_path / "nsys")
