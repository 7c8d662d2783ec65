"""The assignment's questions: each is answered in the asked form; what is calculated is right."""

import itertools
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tools import browser
from tools.course import deliverables, document, student_checks, students
from tools.course.questions import PAGES, RESULTS, Part, parts
from tools.pages.rows import read

from basics_model.sizes import model_config
from bench_harness import cli
from bench_harness.activations import peaks, saved_for_backward

PARTS = parts()
GIB, MIB = 2**30, 2**20


def answer(part: Part, page: str) -> tuple[str, str]:
    """The line below a part's heading, and Markdown of its answer without the marks of a quote."""
    match = re.search(rf"^## {re.escape(part.heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert match is not None, f"{part.file} has no heading {part.heading!r}"
    asked, _, rest = match[1].strip().partition("\n\n")
    quote = re.search(r"^> \*\*Answer\.\*\* (.*(?:\n>.*)*)", rest, re.MULTILINE)
    assert quote is not None, f"{part.file} has no answer below {part.heading!r}"
    return asked, re.sub(r"^> ?", "", quote[1], flags=re.MULTILINE)


def paragraphs(text: str) -> list[str]:
    """Those of an answer that are no tables, lists or code."""
    return [p for p in text.split("\n\n") if p and not p.lstrip().startswith(("|", "- ", "```"))]


def sentences(text: str) -> int:
    """Answers have no abbreviations with full stops."""
    prose = " ".join(p for p in text.split("\n\n") if not p.lstrip().startswith(("|", "```")))
    return len([each for each in re.split(r"(?<=[.?!])[)*]*\s+(?=\S)", prose.strip()) if each])


def name_of(part: Part) -> str:
    return f"{part.problem}-{part.label}-{part.editions[-1]}"


@pytest.mark.parametrize("part", PARTS, ids=name_of)
def test_answer_has_the_asked_form(part: Part) -> None:
    page = part.file.read_text(encoding="utf-8")
    asked_for, text = answer(part, page)
    assert asked_for == part.asked_for
    if part.sentences:
        least, most = part.sentences
        assert least <= sentences(text) <= most, text
    if part.paragraphs:
        least, most = part.paragraphs
        assert least <= len(paragraphs(text)) <= most, text
    if "table" in part.form:
        assert "|" in text
    if "picture" in part.form or "plot" in part.form:
        assert re.search(r"!\[.*\]\(.*\.png\)", page) or "(../memory_profiling.md#" in text


@pytest.mark.parametrize("part", PARTS, ids=name_of)
def test_rows_are_published_and_named_on_the_page(part: Part) -> None:
    page = part.file.read_text(encoding="utf-8")
    for name in part.rows:
        assert (RESULTS / name).is_file()
        assert f"/{name})" in page or part.form == "code"
    assert part.rows or part.problem.endswith(("calcs", "_reduce")) or part.editions == (2026,)


def test_the_table_is_the_generated_one() -> None:
    assert deliverables.PAGE.read_text(encoding="utf-8") == deliverables.table()


def test_every_answer_of_a_page_is_asked() -> None:
    """No page has an answer that the list of questions does not have."""
    for page in [*PAGES.glob("*.md"), *PAGES.glob("2026/*.md")]:
        name = page.relative_to(PAGES).with_suffix("").as_posix()
        asked = [part for part in PARTS if part.page == name]
        assert page.read_text(encoding="utf-8").count("> **Answer.**") == len(asked), page


@pytest.mark.nightly
def test_commands_list_their_cases(capsys: pytest.CaptureFixture[str]) -> None:
    """Those that make rows again, and those of cells that no row has yet."""
    missing = [part.missing.partition(" (")[0] for part in PARTS]
    given = "; ".join([*(part.command for part in PARTS), *missing]).split("; ")
    for command in dict.fromkeys(given):
        words = [word for word in shlex.split(command) if not word.startswith("PYTORCH_")]
        if words[:1] != ["bench-harness"]:
            assert words[:1] in ([], ["uv"], ["torchrun"]) or "tools.course" in words, command
            continue
        assert cli.main([*words[1:], "--dry-run", "--json"]) == 0, command
        assert json.loads(capsys.readouterr().out)["cases"], command


def test_sentences_are_counted() -> None:
    quote = "> **Answer.** It takes 1.5 ms (95 %). Is it? Yes.\n>\n> | a |\n"
    text = f"## (a) Ask\n\nAsked for: x.\n\n{quote}\n## (b) Next\n\n> **Answer.** Other.\n"
    part = Part(problem="p", ask="Ask", editions=(2025,), page="p", command="", label="a")
    asked_for, found = answer(part, text)
    assert (sentences(found), asked_for) == (3, "Asked for: x.")
    with pytest.raises(AssertionError, match="has no answer"):
        answer(part, "## (a) Ask\n\nAsked for: x.\n")


def test_one_kind_of_gpu_for_each_answer() -> None:
    """The first sentences of an answer name no two kinds of GPU, except to say that they differ."""
    for part in PARTS:
        _, text = answer(part, part.file.read_text(encoding="utf-8"))
        kinds = set(re.findall(r"\b(?:H100|H200|B200)", text))
        if len(kinds) > 1:
            assert "not a ranking" in text, text


# --- numbers that are calculated ----------------------------------------------------------------


def text_of(page: str) -> str:
    return (PAGES / f"{page}.md").read_text(encoding="utf-8")


def test_memory_that_the_allocator_cannot_split_off() -> None:
    """181.9 MiB of remainders in xl's parameters, as measured after initialisation."""

    def remainder(nbytes: float) -> float:  # of the allocator's segments, if it is below 1 MiB
        segment = 2 * MIB * math.ceil(nbytes / (2 * MIB)) if nbytes >= 10 * MIB else 20 * MIB
        in_one = segment // nbytes
        return (segment - in_one * nbytes) / in_one

    layers, width, d_ff, vocabulary = 48, 1600, 6400, 10_000
    shapes = [
        *itertools.repeat(width * width, 4 * layers),
        *itertools.repeat(width * d_ff, 3 * layers),
        *itertools.repeat(vocabulary * width, 2),
    ]
    rounding = sum(remainder(4 * numel) for numel in shapes)
    first = read(RESULTS / "sharding-memory.jsonl")[0]["memory"][0]
    measured = first["allocated_bytes"] - first["parameter_bytes"]
    assert rounding == pytest.approx(measured, rel=0.002)
    assert f"{rounding / MIB:.0f} MiB" in text_of("optimizer_state_sharding_accounting")


def test_bucket_model() -> None:
    """A simulated channel is behind by n·o + s/(n·w), and no other bucket count is better."""

    def simulated(n: int, s: float, w: float, o: float) -> float:
        part = s / (n * w)
        ends = 0.0
        for bucket in range(1, n + 1):
            ends = max(ends, bucket * part) + part + o
        return ends - n * part

    s, w, o = 7.99e9, 3.141e11, 95.94e-6
    for n in (1, 7, 100):
        assert simulated(n, s, w, o) == pytest.approx(s / (n * w) + n * o)
    best = min(range(1, 100), key=lambda n: simulated(n, s, w, o))
    assert best == round(math.sqrt(s / (w * o)))
    assert "= 16.3, b* = 468 MiB" in text_of("ddp_bucketed_benchmarking")


def test_residual_stream_and_scores() -> None:
    assert 4 * 512 * 2560 * 4 == 20_971_520 == 20 * MIB
    assert 4 * 2048 * 2560 * 4 == 83_886_080 == 80 * MIB
    assert 128 * MIB == 4 * 32 * 512 * 512 * 4
    assert 2048 * MIB == 4 * 32 * 2048 * 2048 * 4
    assert 100 * MIB == 2560 * 10_240 * 4
    for number in ("20,971,520", "128 MiB", "100 MiB"):
        assert number in text_of("memory_profiling")


def test_predictions_of_2026() -> None:
    config = model_config("2026/xl", context_length=2048)
    page = text_of("2026/memory_profiling")

    def peak(
        precision: str, attention: str = "naive", *, training: bool, second_step: bool = False
    ) -> float:
        found = peaks(
            config,
            4,
            2048,
            precision=precision,
            attention=attention,
            training=training,
            second_step=second_step,
        )
        return max(found.values()) / GIB

    forward = peak("fp32", training=False)
    first, later = (peak("fp32", training=True, second_step=again) for again in (False, True))
    written_out = f"{forward:.1f} GiB for forward, {first:.0f} GiB for a first step"
    assert f"{written_out} and {later:.0f} GiB for a later one" in page
    assert f"is {peak('bf16', training=True, second_step=True):.0f} instead of {later:.0f}" in page
    fused = peak("fp32", "sdpa", training=True, second_step=True)
    assert page.count(f" | {fused:.1f} |") == 1

    def block(attention: str) -> float:
        two, one = (
            sum(
                saved_for_backward(
                    model_config("2026/xl", context_length=2048, num_layers=layers),
                    4,
                    2048,
                    precision="fp32",
                    attention=attention,
                ).values()
            )
            for layers in (2, 1)
        )
        return (two - one) / MIB

    assert f"keeps {block('naive'):,.0f} MiB" in page
    assert f"keeps {block('sdpa'):,.0f} MiB" in page
    for kept in (2048, 640, 320, 160):
        share = 100 * kept / block("naive")
        assert f"| {kept:,} | {share:.{1 if share < 10 else 0}f} % |" in page
    assert 4 * (4 * 2560**2 + 3 * 2560 * 10_240) / MIB == 400
    recomputed = text_of("2026/gradient_checkpointing")
    best = math.sqrt(32 * 80 / block("sdpa"))
    assert f"k = √(N · 80 / {block('sdpa'):,.0f}) = {best:.2f}" in recomputed
    more = (16 * 80 + 2 * block("sdpa")) - (32 * 80 + block("sdpa"))
    assert f"need {more / 1024:.1f} GiB more" in recomputed
    one_more = (block("sdpa") - 400) / 1024
    assert f"takes {block('sdpa'):,.0f} − 400 MiB, {one_more:.2f} GiB" in recomputed


@pytest.mark.nightly  # torch.utils.checkpoint imports torch's compiler, which takes seconds
def test_nested_checkpoints() -> None:
    """The page's code: N·(1 + log₂ N) forward passes of a block at most, and the same gradients."""
    code = re.search(r"> ```python\n(.*?)> ```", text_of("2026/gradient_checkpointing"), re.DOTALL)
    assert code is not None
    names: dict[str, Callable[..., torch.Tensor]] = {}
    exec(re.sub(r"^> ?", "", code[1], flags=re.MULTILINE), names)
    for count in (1, 2, 4, 16):
        passes = 0

        def block(x: torch.Tensor) -> torch.Tensor:
            nonlocal passes
            passes += 1
            return torch.sin(x) + x

        x = torch.ones(3, requires_grad=True)
        names["nested"]([block] * count, x).sum().backward()
        limit = count * (1 + math.log2(count))
        assert limit / 2 <= passes <= limit
        plain = torch.ones(3, requires_grad=True)
        y = plain
        for _ in range(count):
            y = torch.sin(y) + y
        y.sum().backward()
        torch.testing.assert_close(x.grad, plain.grad)


def test_backward_of_the_tensor_parallel_layer() -> None:
    """The page's equations on two slices equal autograd on the whole layer."""
    torch.manual_seed(0)
    x, dy = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    w1, w2, w3 = (torch.randn(s, dtype=torch.float64) for s in ((4, 6), (4, 6), (6, 4)))
    whole = [t.clone().requires_grad_() for t in (x, w1, w2, w3)]
    f = torch.nn.functional.silu
    ((f(whole[0] @ whole[1]) * (whole[0] @ whole[2])) @ whole[3]).backward(dy)
    dx = torch.zeros_like(x)
    for i in (slice(0, 3), slice(3, 6)):
        x1, x2 = x @ w1[:, i], x @ w2[:, i]
        z, dz = f(x1) * x2, dy @ w3[i].T
        slope = torch.sigmoid(x1) * (1 + x1 * (1 - torch.sigmoid(x1)))
        dx2, dx1 = dz * f(x1), dz * slope * x2
        for found, expected in (
            (z.T @ dy, whole[3].grad[i]),  # type: ignore[index]
            (x.T @ dx2, whole[2].grad[:, i]),  # type: ignore[index]
            (x.T @ dx1, whole[1].grad[:, i]),  # type: ignore[index]
        ):
            torch.testing.assert_close(found, expected)
        dx += dx1 @ w1[:, i].T + dx2 @ w2[:, i].T
    torch.testing.assert_close(dx, whole[0].grad)


def test_rings_by_simulation() -> None:
    """Bytes that a device sends: whole tensors in N - 1 rounds, and 1/N of them twice."""
    for n in (2, 4, 8):
        held = [{i} for i in range(n)]  # whose tensors a device has added
        for step in range(1, n):
            moving = [(i - step + 1) % n for i in range(n)]  # the tensor that device i sends
            for i in range(n):
                held[(i + 1) % n].add(moving[i])
        assert all(each == set(range(n)) for each in held)
        assert (n - 1) / (2 * (n - 1) / n) == n / 2


def test_accumulated_roundings() -> None:
    """The three partial sums of roundings on the page about accumulation."""
    total, errors = torch.tensor(0.0, dtype=torch.float16), {4.0: 0.0, 8.0: 0.0, 16.0: 0.0}
    for _ in range(1000):
        exact = float(total) + 0.01
        after = total + torch.tensor(0.01, dtype=torch.float16)
        limit = next(limit for limit in errors if float(total) < limit)
        errors[limit] += float(after) - exact
        total = after
    page = text_of("mixed_precision_accumulation")
    below, between, above = errors.values()
    assert f"−{-below:.3f} below 4, to +{between:.3f} between" in page
    assert f"−{-above:.3f} above 8" in page


def test_calculated_rows_are_those_of_the_command() -> None:
    """Published calculations equal the calculator's of today."""
    from bench_harness.mesh_accounting import mesh_rows

    for name in ("accounting", "accounting-rings"):
        case = json.loads((RESULTS / f"{name}.jsonl").read_text(encoding="utf-8"))
        published = {row["variant"]: row["value"] for row in case["rows"] if row["kind"] == "mesh"}
        today = {
            row["variant"]: row["value"]
            for row in mesh_rows(case["config"].get("mesh", {}), 80.0, 95.0)
        }
        assert published == pytest.approx(today, rel=1e-5)


# --- documents and checks of adapters -----------------------------------------------------------


@pytest.mark.parametrize("edition", [2025, 2026])
def test_document_has_every_answer(edition: int) -> None:
    text = document.text(edition)
    chosen = [part for part in PARTS if edition in part.editions]
    for part in chosen:
        assert f"## {part.heading}" in text
    assert text.count("> **Answer.**") == len(chosen)
    for path in re.findall(r"\((/[^)]+\.png)\)", text):
        assert Path(path).is_file()


@pytest.mark.nightly
def test_document_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("markdown", reason="needs the dependency group docs")
    if browser.find() is not None:
        html, pdf = document.write(2026, tmp_path)
        assert "data:image/png;base64," in html.read_text(encoding="utf-8")
        assert pdf.read_bytes().startswith(b"%PDF")
    monkeypatch.setattr(browser, "NAMES", ("no-such-browser",))
    with pytest.raises(browser.BrowserError, match="no-such-browser must be on the PATH"):
        document.write(2025, tmp_path)
    assert len(document.write(2025, tmp_path, pdf=False)) == 1


BROKEN = """
import torch, torch.distributed as dist
from torch import nn

class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module, self.handles = module, []
        BROADCAST
        for p in module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self.reduce)
    def reduce(self, p):
        self.handles.append(dist.all_reduce(p.grad, async_op=True))
    def forward(self, *args):
        return self.module(*args)
    def finish(self):
        WAIT
        DIVIDE
        self.handles.clear()

class Base2(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        ctx.save_for_backward(q, k, v, s.logsumexp(-1) / 0.6931471805599453)
        return s.softmax(-1) @ v

class Local:
    def __init__(self, params, cls, **kwargs):
        self.all = list(params)
        self.own = cls(self.all[dist.get_rank()::dist.get_world_size()], **kwargs)
        self.param_groups = self.own.param_groups
    def zero_grad(self):
        for p in self.all:
            p.grad = None
    def step(self):
        self.own.step()

def get_ddp(module):
    return Wrapped(module)
def ddp_on_after_backward(model, optimizer):
    model.finish()
def get_flashattention_autograd_function_pytorch():
    return Base2
def get_sharded_optimizer(params, cls, **kwargs):
    return Local(params, cls, **kwargs)
"""
BROADCAST = "[dist.broadcast(p.data, 0) for p in module.parameters()]"
WAIT = "[handle.wait() for handle in self.handles]"
DIVIDE = (
    "[p.grad.div_(dist.get_world_size()) for p in self.module.parameters() if p.grad is not None]"
)


@pytest.mark.parametrize(
    ("left_out", "check", "sentence"),
    [
        ("", "data parallelism, single parameters", None),
        (
            "BROADCAST",
            "data parallelism, single parameters",
            "Ranks begin with different values of",
        ),
        (
            "DIVIDE",
            "data parallelism, single parameters",
            "is the sum over the ranks, 2 times the mean",
        ),
        ("WAIT", "harder: data parallelism, single parameters, a late rank", "is not awaited"),
        ("", "sharded optimizer", "Ranks have different values of"),
        ("", "attention in pytorch, forward and backward", "is in base 2"),
        ("", "attention in pytorch, causal", "ignores is_causal"),
        ("", "fully sharded", "skipped"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    left_out: str, check: str, sentence: str | None, tmp_path: Path
) -> None:
    code = BROKEN
    for name, text in (("BROADCAST", BROADCAST), ("WAIT", WAIT), ("DIVIDE", DIVIDE)):
        code = code.replace(name, "pass" if name == left_out else text)
    path = tmp_path / "adapters.py"
    path.write_text(code)
    (chosen,) = (one for one in students.every() if one.name == check)
    verdict, told = students.run(chosen, path)
    if sentence is None:
        assert (verdict, told) == ("ok", "")
    else:
        assert sentence in f"{verdict} {told}"


def test_own_adapters_pass_the_checks_of_attention() -> None:
    adapters = student_checks.load(Path(__file__).with_name("adapters.py"))
    for one in students.every():
        if not one.ranks and "pytorch" in one.name:
            assert one.call(adapters) is None
