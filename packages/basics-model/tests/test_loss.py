"""Cross-entropy against PyTorch's, and where a naive one fails; in chunks, against the whole."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from basics_model import ModelConfig, TransformerLM, cross_entropy
from basics_model.loss import linear_cross_entropy


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equals_torch_with_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.randn(*shape, 11, dtype=dtype, requires_grad=True)
    twin = logits.detach().clone().requires_grad_()
    targets = torch.randint(11, shape)
    loss = cross_entropy(logits, targets)
    expected = F.cross_entropy(twin.reshape(-1, 11), targets.reshape(-1))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(logits.grad, twin.grad)


def test_huge_logits_stay_finite() -> None:
    logits = torch.tensor([[1e30, 0.0, -1e30]], requires_grad=True)
    assert cross_entropy(logits, torch.tensor([0])) == 0
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.backward()
    assert loss == 1e30
    assert torch.isfinite(logits.grad).all()


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.randn(64, 1000).to(torch.bfloat16)
    targets = torch.randint(1000, (64,))
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), F.cross_entropy(logits.double(), targets))


def test_uniform_logits_cost_log_vocabulary() -> None:
    loss = cross_entropy(torch.zeros(4, 256), torch.arange(4))
    assert float(loss) == pytest.approx(5.5452, abs=1e-4)


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.long), r"got logits \(2, 3\) and targets"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "at least one value"),
        (torch.zeros(2, 3), torch.zeros(2), "targets must be int64, but got torch.float32"),
    ],
)
def test_mismatches_are_refused(logits: torch.Tensor, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, targets)


@pytest.mark.parametrize("target", [-100, -1, 37])
def test_targets_outside_of_the_vocabulary_are_refused(target: int) -> None:
    hidden, weight, targets = head((5,))
    targets[3] = target
    with pytest.raises(ValueError, match=f"vocab_size - 1, but got: index {target} is out of boun"):
        cross_entropy(hidden @ weight.T, targets)
    with pytest.raises(ValueError, match=f"vocab_size - 1, but got: index {target} is out of boun"):
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=2)


def head(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states (*shape, 16), a weight (37, 16) and targets, the first two with gradients."""
    hidden = torch.randn(*shape, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(37, 16, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(37, shape)


@pytest.mark.parametrize("shape", [(), (1,), (13,), (3, 7)], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 1000])
def test_chunks_equal_the_whole_with_gradients(shape: tuple[int, ...], chunk_tokens: int) -> None:
    hidden, weight, targets = head(shape, torch.float64)
    twins = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    expected = cross_entropy(twins[0] @ twins[1].T, targets)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close((hidden.grad, weight.grad), (twins[0].grad, twins[1].grad))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    hidden, weight, targets = head((13,))
    named = {"hidden": hidden, "weight": weight}
    named[frozen].requires_grad_(False)
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=5).backward()
    assert named.pop(frozen).grad is None
    [other] = named.values()
    assert other.grad is not None


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    hidden, weight, targets = head((13,))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, cross_entropy((hidden @ weight.T).detach(), targets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_errs_no_more_than_the_whole_does(dtype: torch.dtype) -> None:
    """Twice the error of the whole computation in the same precision, against fp64."""
    hidden, weight, targets = head((64,))

    def run(name: str, grown: torch.dtype) -> list[Tensor]:
        h, w = (x.detach().to(grown).requires_grad_() for x in (hidden, weight))
        with torch.autocast("cpu", dtype, enabled=grown == torch.float32):
            if name == "chunks":
                loss = linear_cross_entropy(h, w, targets, chunk_tokens=24)
            else:
                loss = cross_entropy(F.linear(h, w), targets)
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return [loss.detach(), h.grad, w.grad]

    exact, whole, chunks = (
        run("whole", torch.float64), run("whole", torch.float32), run("chunks", torch.float32)
    )  # fmt: skip
    for right, other, ours in zip(exact, whole, chunks, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - right).abs().max() <= 2 * (other - right).abs().max() + 1e-7


def test_small_fp16_gradients_survive_until_a_scaler_multiplies_them() -> None:
    """Each is 1 / N of a probability of about 1 / 4096, below the smallest fp16 number."""
    n_tokens = 512
    hidden = torch.zeros(n_tokens, 4, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(4096, 4, dtype=torch.float16, requires_grad=True)
    with torch.no_grad():
        weight[:, 0] = torch.linspace(-1e-2, 1e-2, 4096)
    targets = torch.zeros(n_tokens, dtype=torch.long)
    (linear_cross_entropy(hidden, weight, targets) * 2.0**16).backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    (cross_entropy(wide[0] @ wide[1].T, targets) * 2.0**16).backward()
    torch.testing.assert_close(hidden.grad.double(), wide[0].grad, rtol=1e-2, atol=1e-3)


def test_the_logits_are_never_whole() -> None:
    """No tensor of the forward and backward pass is larger than a chunk's logits."""
    sizes: list[int] = []

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            results = out if isinstance(out, tuple) else (out,)
            sizes.extend(x.numel() for x in results if isinstance(x, Tensor))
            return out

    hidden, weight, targets = head((400,))
    with Largest():
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=50).backward()
    assert max(sizes) == 400 * 16 < 400 * 37
    assert 50 * 37 in sizes


def test_compiles_without_a_graph_break() -> None:
    hidden, weight, targets = head((20,))
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, weight, targets, chunk_tokens=8)
    loss.backward()
    twins = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    expected = linear_cross_entropy(*twins, targets)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close((hidden.grad, weight.grad), (twins[0].grad, twins[1].grad))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(37, 15)}, r"weight must be .* got weight \(37, 15\) and hidden"),
        ({"targets": torch.zeros(12, dtype=torch.long)}, r"hidden \(13, 16\) and targets \(12,\)"),
        ({"targets": torch.zeros(13)}, "targets must be int64"),
        ({"chunk_tokens": 0}, "chunk_tokens must be an integer of at least 1, but got 0"),
        ({"chunk_tokens": 2.5}, "chunk_tokens must be an integer of at least 1, but got 2.5"),
        (
            {"hidden": torch.zeros(13, 16, dtype=torch.long)},
            "hidden and weight must be floating point, but got torch.int64 and torch.float",
        ),
    ],
)
def test_misfits_are_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, targets = head((13,))
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{"hidden": hidden, "weight": weight, "targets": targets} | change)


def test_the_models_loss_is_that_of_its_logits(config: ModelConfig) -> None:
    model = TransformerLM(config)
    twin = copy.deepcopy(model)
    token_ids, targets = torch.randint(config.vocab_size, (2, 3, 9))
    loss, expected = model(token_ids, targets), cross_entropy(twin(token_ids), targets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_chunks_equal_the_whole(dtype: torch.dtype) -> None:
    """The loss and gradients of 5,000 tokens over a vocabulary of 10,000, in three chunks."""
    hidden = torch.randn(5000, 256, device="cuda", requires_grad=True)
    weight = torch.randn(10_000, 256, device="cuda").div_(16).requires_grad_()
    targets = torch.randint(10_000, (5000,), device="cuda")
    twins = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = linear_cross_entropy(hidden, weight, targets)
    expected = cross_entropy(twins[0] @ twins[1].T, targets)
    loss.backward()
    expected.backward()
    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(loss.double(), expected, rtol=rtol / 10, atol=0)
    for ours, right in zip((hidden, weight), twins, strict=True):
        assert (ours.grad.double() - right.grad).norm() <= rtol * right.grad.norm()
