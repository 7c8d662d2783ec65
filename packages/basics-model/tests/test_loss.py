"""Cross-entropy against PyTorch's, and where a naive one fails."""

import pytest
import torch
import torch.nn.functional as F

from basics_model import cross_entropy


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
        (torch.zeros(2, 3), torch.zeros(2), "targets must be int64, got torch.float32"),
    ],
)
def test_mismatches_are_refused(logits: torch.Tensor, targets: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, targets)
