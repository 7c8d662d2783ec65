"""Calls that repeat: found again by their kind, and never taken for another kind."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashattn_triton import (
    dispatch,
    explain,
    flash_attention,
    flash_attention_varlen,
    op,
    triton_versions,
)
from flashattn_triton.configs import TABLE

# With a GPU the kernels are compiled, and take no CPU tensors: see test_hopper_launch.py.
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is not active")
IMPLEMENTATIONS = ["tiled", pytest.param("triton", marks=interpreted)]


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    op._cache.clear()
    yield
    op._cache.clear()


def inputs(*shape: int, **keywords: Any) -> list[Tensor]:
    return [torch.randn(shape or (1, 2, 20, 16), **keywords) for _ in range(3)]


def calls() -> int:
    """How many kinds of calls are remembered, without the launchers of their backward passes."""
    return sum(isinstance(x, op.CachedCall) for x in op._cache.values())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_repeated_call_is_found_and_computes_the_same(implementation: str) -> None:
    leaves = inputs(requires_grad=True)
    grad_out = torch.randn(1, 2, 20, 16)
    results = []
    for _ in range(2):
        out, lse = flash_attention(
            *leaves, causal=True, return_lse=True, implementation=implementation
        )
        gradients = torch.autograd.grad((out, lse), leaves, (grad_out, torch.ones_like(lse)))
        results.append((out, lse, *gradients))
        assert calls() == 1
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    expected = flash_attention(*leaves, causal=True, implementation="reference")
    torch.testing.assert_close(results[1][0], expected, rtol=1e-4, atol=1e-5)


def test_a_found_call_reads_its_own_inputs() -> None:
    first, second = inputs(), inputs()
    flash_attention(*first)
    found = flash_attention(*second)
    assert calls() == 1
    op._cache.clear()
    assert torch.equal(found, flash_attention(*second))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "bottom-right"},
        {"scale": 0.3},
        {"window": (3, None)},
        {"softcap": 2.0},
        {"deterministic": True},
        {"implementation": "tiled"},
    ],
    ids=str,
)
def test_options_tell_kinds_apart(options: dict[str, Any]) -> None:
    q, k, v = inputs()
    plain = flash_attention(q, k, v)
    other = flash_attention(q, k, v, **options)
    assert calls() == 2
    op._cache.clear()
    assert torch.equal(other, flash_attention(q, k, v, **options))
    if not options.keys() & {"deterministic", "implementation"}:
        assert not torch.equal(plain, other)


@pytest.fixture
def torch_setting() -> Iterator[Callable[..., None]]:
    """``torch.use_deterministic_algorithms``, which is as before when the test ends."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before, warn_only=warn_only)


def deterministic_problems() -> list[bool]:
    return [x.problem.deterministic for x in op._cache.values() if isinstance(x, op.CachedCall)]


@pytest.mark.parametrize("warn_only", [False, True])
def test_torchs_setting_is_the_default_of_deterministic(
    torch_setting: Callable[..., None], warn_only: bool
) -> None:
    q, k, v = inputs()
    starts = torch.tensor([0, q.shape[2]], dtype=torch.int32)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    for call in (
        lambda **given: flash_attention(q, k, v, **given),
        lambda **given: flash_attention_varlen(*packed, starts, starts, **given),
    ):
        op._cache.clear()
        torch_setting(False)
        call()
        torch_setting(True, warn_only=warn_only)
        call()
        assert deterministic_problems() == [False, True]
        call(deterministic=False)
        call(deterministic=True)
        torch_setting(False)
        call()
        assert deterministic_problems() == [False, True]  # no other kinds of calls
        torch_setting(True)


def test_explain_names_torchs_setting(torch_setting: Callable[..., None]) -> None:
    sentence = "as torch.use_deterministic_algorithms asks for"
    tensors = inputs()
    torch_setting(False)
    assert sentence not in explain(*tensors)
    torch_setting(True)
    assert sentence in explain(*tensors)
    assert sentence not in explain(*tensors, deterministic=True)
    assert sentence not in explain(*tensors, deterministic=False)


def test_compiled_code_is_guarded_by_torchs_setting(torch_setting: Callable[..., None]) -> None:
    seen: list[bool] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        seen.extend(
            next(x for x in node.args if isinstance(x, bool))
            for node in graph.graph.nodes
            if "flashattn_triton" in str(node.target)
        )
        return graph

    compiled = torch.compile(flash_attention, backend=backend, fullgraph=True)
    tensors = inputs()
    for setting in (False, True, False):
        torch_setting(setting)
        compiled(*tensors)
    assert seen == [False, True]


def test_layouts_and_strides_tell_kinds_apart() -> None:
    q, k, v = inputs(1, 20, 20, 16)
    heads_first = flash_attention(q, k, v)
    rows_first = flash_attention(q, k, v, layout="bshd")
    views = [x.transpose(1, 2) for x in (q, k, v)]
    transposed = flash_attention(*views)
    assert calls() == 3
    assert torch.equal(rows_first, transposed.transpose(1, 2))
    assert not torch.equal(rows_first, heads_first)
    for _ in range(2):
        assert torch.equal(rows_first, flash_attention(q, k, v, layout="bshd"))


def test_equal_values_of_another_type_are_still_refused() -> None:
    q, k, v = inputs()
    flash_attention(q, k, v, causal=True, window=(1, None))
    with pytest.raises(ValueError, match="causal"):
        flash_attention(q, k, v, causal=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="window left"):
        flash_attention(q, k, v, causal=True, window=(True, None))


def test_arguments_that_cannot_be_hashed() -> None:
    q, k, v = inputs()
    listed = flash_attention(q, k, v, window=[3, None])  # type: ignore[arg-type]
    assert torch.equal(listed, flash_attention(q, k, v, window=(3, None)))
    with pytest.raises(ValueError, match="causal"):
        flash_attention(q, k, v, causal=[True])  # type: ignore[arg-type]


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    leaves = inputs(requires_grad=True)
    assert flash_attention(*leaves).requires_grad
    with torch.no_grad():
        assert not flash_attention(*leaves).requires_grad
    assert not flash_attention(*(x.detach() for x in leaves)).requires_grad
    assert calls() == 1


class Seen(TorchDispatchMode):
    """Records the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_operators() -> None:
    leaves = inputs(requires_grad=True)
    flash_attention(*leaves)
    with Seen() as seen:
        flash_attention(*leaves).sum().backward()
    assert "flashattn_triton.forward.default" in seen.names
    assert "flashattn_triton.backward.default" in seen.names


def test_subclasses_are_left_to_the_operators() -> None:
    seen: list[str] = []

    class Named(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    q, k, v = (x.as_subclass(Named) for x in inputs())
    assert isinstance(flash_attention(q, k, v), Tensor)
    assert "flashattn_triton.forward.default" in seen


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashattn_triton.op._LIMIT", 4)
    for length in range(1, 12):
        flash_attention(*inputs(1, 1, length, 16))
        assert len(op._cache) <= 4
    leaves = inputs(requires_grad=True)
    out = flash_attention(*leaves)
    for gap in range(1, 12):  # of one call, whose gradients have other strides each time
        grad_out = torch.randn(1, 2, 20, 16 + gap)[..., :16]
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        assert len(op._cache) <= 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("given", ["sinks", "bias"])
def test_calls_with_tensors_of_their_own_are_planned_once(
    implementation: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    for name in ("choose", "gradients_launcher"):
        function = getattr(op, name)
        monkeypatch.setattr(
            op, name, lambda *a, f=function, **k: planned.append(f.__name__) or f(*a, **k)
        )
    added = torch.randn(2 if given == "sinks" else (1, 2, 20, 20), requires_grad=True)
    options: dict[str, Any] = {"causal": True, given: added, "implementation": implementation}
    expected = None
    for _ in range(3):
        torch.manual_seed(5)
        leaves = inputs(requires_grad=True)
        out = flash_attention(*leaves, **options)
        actual = (out, *torch.autograd.grad(out, (*leaves, added), torch.ones(out.shape)))
        expected = actual if expected is None else expected
        assert all(map(torch.equal, actual, expected))
        assert planned == ["choose", "gradients_launcher"]
    wider = inputs(1, 2, 20, 24, requires_grad=True)
    flash_attention(*wider, **options).sum().backward()
    assert planned == ["choose", "gradients_launcher"] * 2


def test_threads_share_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of many kinds from several threads, which empty the cache while others read it."""
    monkeypatch.setattr("flashattn_triton.op._LIMIT", 3)
    kinds = [inputs(1, 1, length, 16, requires_grad=True) for length in (3, 5, 9, 17)]

    def results(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = flash_attention(*leaves, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))

    expected = [results(leaves) for leaves in kinds]
    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(results, kinds * 25))
    for found, wanted in zip(actual, expected * 25, strict=True):
        for a, e in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_any_strides(implementation: str) -> None:
    leaves = inputs(requires_grad=True)
    gradients_out = [
        torch.randn(1, 2, 20, 16),
        torch.randn(1, 2, 16, 20).transpose(2, 3),
        torch.randn(1, 20, 2, 16).transpose(1, 2),
        torch.randn(1, 2, 20, 17)[..., 1:],
        torch.ones(()).expand(1, 2, 20, 16),
    ]
    for grad_out in gradients_out * 2:
        out = flash_attention(*leaves, causal=True, implementation=implementation)
        expected = flash_attention(*leaves, causal=True, implementation="reference")
        actual = torch.autograd.grad(out, leaves, grad_out)
        for a, e in zip(actual, torch.autograd.grad(expected, leaves, grad_out), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    assert calls() == 1


@interpreted
def test_saved_tensors_may_come_back_elsewhere() -> None:
    leaves = inputs(requires_grad=True)

    def moved(x: Tensor) -> Tensor:
        return torch.cat([x.flatten(), x.new_zeros(1)])[:-1].view(x.shape).clone()

    with torch.autograd.graph.saved_tensors_hooks(moved, lambda x: x.mT.contiguous().mT):
        out = flash_attention(*leaves, causal=True, implementation="triton")
    expected = flash_attention(*leaves, causal=True, implementation="reference")
    grad_out = torch.randn_like(out)
    actual = torch.autograd.grad(out, leaves, grad_out)
    for a, e in zip(actual, torch.autograd.grad(expected, leaves, grad_out), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tensors_that_outlived_their_transform_are_left_to_the_operators(
    implementation: str,
) -> None:
    """Such a wrapper has no memory, and stands for a tensor that has some."""
    survivors: list[Tensor] = []

    def doubled(x: Tensor) -> Tensor:
        survivors.append(x * 2)
        return survivors[-1].sum()

    query, key, value = inputs()
    torch.func.grad(doubled)(query)
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    actual = flash_attention(survivors[0], key, value, **options)
    assert torch.equal(actual, flash_attention(query * 2, key, value, **options))


def test_gradients_do_not_depend_on_whether_the_logsumexp_is_returned() -> None:
    leaves = inputs(requires_grad=True)
    out, lse = flash_attention(*leaves, causal=True, return_lse=True)
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad((out, lse), leaves, (grad_out, torch.zeros_like(lse)))
    alone = flash_attention(*leaves, causal=True)
    assert torch.equal(alone, out)
    for a, e in zip(torch.autograd.grad(alone, leaves, grad_out), expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-6)


VIEWS_AND_COPIES = {
    "__getitem__", "as_strided", "clone", "contiguous", "copy_", "detach", "expand", "new_empty",
    "new_empty_strided", "squeeze", "transpose", "unsqueeze", "view",
}  # fmt: skip


def tensor_calls(work: Callable[[], object]) -> list[str]:
    """Methods of tensors that make a view or take memory, as ``work`` calls them."""
    names: list[str] = []

    def profile(frame: object, event: str, argument: Any) -> None:
        if event == "c_call" and argument.__name__ in VIEWS_AND_COPIES:
            names.append(argument.__name__)

    work()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return names


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs the Hopper tier's launchers on CPU tensors; the names of kernels, launching nothing."""
    refusal = triton_versions.refusal()
    if refusal is not None:
        pytest.skip(refusal)
    from flashattn_triton.hopper import backward, forward
    from flashattn_triton.launch import Launch

    launched: list[str] = []

    def launcher(self: Launch, first: Mapping[str, int]) -> Callable[[Mapping[str, int]], None]:
        present = {name for name, x in self.parameters.items() if x is not None}

        def start(addresses: Mapping[str, int]) -> None:
            assert present <= addresses.keys()
            launched.append(self.kernel.__name__)

        return start

    plan = dispatch.Plan(
        tier="hopper", tiling=TABLE[220, 64, 2], reason="a test", hopper_backward=True
    )
    monkeypatch.setattr(op, "choose", lambda *inputs, **options: plan)
    monkeypatch.setattr(Launch, "_launcher", launcher)
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 132)
    for module in (forward, backward):
        monkeypatch.setattr(module, "current_device", lambda: None)
    return launched


BACKWARD_KERNELS = ["preprocess_kernel", "hopper_backward_kernel", "postprocess_kernel"]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("expanded", "methods"), [(False, ["contiguous"]), (True, ["contiguous", "clone"])]
)
def test_calls_of_the_hopper_tier_make_no_views(
    expanded: bool, methods: list[str], layout: Any, hopper: list[str]
) -> None:
    """Of the Hopper tier: each of a tensor's methods takes as long as ten lines of Python."""
    shape = (1, 2, 128, 64) if layout == "bhsd" else (1, 128, 2, 64)
    leaves = inputs(*shape, dtype=torch.bfloat16, requires_grad=True)
    grad_out = torch.ones(shape, dtype=torch.bfloat16)
    if expanded:
        grad_out = grad_out[0, 0, 0, 0].expand(shape)
        if layout == "bshd":  # of a gradient that all heads share, one is copied
            methods = ["contiguous", "as_strided", "clone"]
    assert tensor_calls(lambda: flash_attention(*leaves, causal=True, layout=layout)) == []
    out = flash_attention(*leaves, causal=True, layout=layout)
    assert hopper == ["hopper_forward_kernel"] * 3
    hopper.clear()

    def work() -> None:
        torch.autograd.grad(out, leaves, grad_out, retain_graph=True)

    assert tensor_calls(work) == methods
    for gradient, x in zip(torch.autograd.grad(out, leaves, grad_out), leaves, strict=True):
        assert (gradient.shape, gradient.stride()) == (x.shape, x.stride())
    assert hopper == BACKWARD_KERNELS * 3


def test_packed_calls_of_the_hopper_tier_make_no_views(hopper: list[str]) -> None:
    leaves = [torch.randn(128, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    starts = starts_of(0, 50, 128)
    made: list[tuple[Tensor, ...]] = []

    def work() -> None:
        out, lse = flash_attention_varlen(*leaves, starts, starts, 78, 78, return_lse=True)
        grads = (torch.ones((), dtype=out.dtype).expand(out.shape), torch.ones_like(lse))
        made.append((out, lse, *torch.autograd.grad((out, lse), leaves, grads)))

    # Of the gradient, whose copy has one head. The tables of tiles are allocated once a pass.
    expected = ["new_empty", "expand", "contiguous", "as_strided", "clone", "new_empty"]
    assert tensor_calls(work) == expected
    for out, lse, *gradients in made:
        assert out.shape == (128, 2, 64)
        assert lse.shape == (2, 128)
        for x, gradient in zip(leaves, gradients, strict=True):
            assert gradient.shape == x.shape
            assert gradient.stride() == x.stride()
    assert hopper == ["packed_tiles_kernel", "hopper_forward_kernel", "packed_tiles_kernel",
                      *BACKWARD_KERNELS] * 2  # fmt: skip


def packed_inputs(heads: int = 2, **keywords: Any) -> list[Tensor]:
    return [torch.randn(20, heads, 16, **keywords) for _ in range(3)]


def starts_of(*starts: int) -> Tensor:
    return torch.tensor(starts, dtype=torch.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_packed_calls_are_found_and_read_their_own_starts(implementation: str) -> None:
    leaves = packed_inputs(requires_grad=True)
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    for starts in (starts_of(0, 5, 20), starts_of(0, 13, 20)):
        out, lse = flash_attention_varlen(
            *leaves, starts, starts, 15, 15, return_lse=True, **options
        )
        assert calls() == 1
        wanted, wanted_lse = flash_attention_varlen(
            *leaves, starts, starts, 15, 15, return_lse=True, causal=True,
            implementation="reference",
        )  # fmt: skip
        grads = (torch.randn_like(out), torch.randn_like(lse))
        actual = (out, lse, *torch.autograd.grad((out, lse), leaves, grads))
        expected = (
            wanted,
            wanted_lse,
            *torch.autograd.grad((wanted, wanted_lse), leaves, grads),
        )
        for a, e in zip(actual, expected, strict=True):
            assert a.shape == e.shape
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


def test_starts_of_packed_calls_tell_kinds_apart_and_are_checked_each_time() -> None:
    q, k, v = packed_inputs()
    starts, same = starts_of(0, 5, 20), starts_of(0, 5, 20)
    for given in ((starts, starts), (starts, same), (starts_of(0, 20), starts_of(0, 20))):
        flash_attention_varlen(q, k, v, *given, 20, 20)
    flash_attention_varlen(q, k, v, starts, starts, 15, 20)
    assert calls() == 4
    for strided in (starts.repeat_interleave(2)[::2], starts.long().repeat_interleave(2)[::2]):
        expected = flash_attention_varlen(q, k, v, starts, starts, 15, 20)
        for given in ((strided, strided), (strided, starts), (starts, strided)):
            assert torch.equal(flash_attention_varlen(q, k, v, *given, 15, 20), expected)
    wrong = starts_of(0, 21, 20)
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0"):
        flash_attention_varlen(q, k, v, wrong, wrong, 20, 20)
    with pytest.raises(ValueError, match="cu_seqlens_q must be a contiguous int32"):
        flash_attention_varlen(q, k, v, starts.short(), starts.short(), 20, 20)


def test_outputs_of_packed_calls_may_be_changed_in_place() -> None:
    """As those of dense ones: a Function's output that is a view would refuse."""
    leaves, starts = packed_inputs(requires_grad=True), starts_of(0, 5, 20)
    out = flash_attention_varlen(*leaves, starts, starts, 15, 15, causal=True)
    expected = out.detach() * 2
    with torch.no_grad():
        out.mul_(2)
    assert torch.equal(out, expected)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_packed_calls_are_seen_by_modes() -> None:
    leaves, starts = packed_inputs(requires_grad=True), starts_of(0, 5, 20)
    out = flash_attention_varlen(*leaves, starts, starts, 15, 15)
    expected = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with Seen() as seen:
        actual = torch.autograd.grad(out.sum(), leaves)
    assert "flashattn_triton.backward.default" in seen.names
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
