"""Steps recorded as CUDA graphs: what is refused anywhere, and replays on a GPU."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from basics_model import CapturedStep, CosineSchedule, TransformerLM
from basics_model.captured_step import CaptureError, check_counters, check_inputs
from basics_model.sizes import ModelConfig

CONFIG = ModelConfig(
    vocab_size=64, context_length=16, d_model=32, num_layers=2, num_heads=2, d_ff=64
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_error_says_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"torch sees none\. Call the step itself"):
        CapturedStep(lambda: None)


def test_inputs_must_be_like_the_recorded_ones() -> None:
    recorded = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)]
    check_inputs(recorded, [torch.ones(2, 3), torch.ones(4, dtype=torch.int64)])
    for wrong in (recorded[:1], [torch.zeros(3, 2), recorded[1]], [recorded[0], torch.zeros(4)]):
        with pytest.raises(ValueError, match="takes inputs of the recorded shapes and dtypes"):
            check_inputs(recorded, wrong)


def stepped(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(4))
    optimizer = cls([weight], lr=0.1)  # type: ignore[call-arg]
    weight.grad = torch.ones(4)
    optimizer.step()
    return optimizer


def test_counters_on_the_host_are_refused() -> None:
    check_counters(stepped(torch.optim.SGD))
    optimizer = stepped(torch.optim.AdamW)
    (state,) = optimizer.state.values()
    for counter in (state["step"], 1):
        state["step"] = counter
        with pytest.raises(
            CaptureError, match=r"'step' of AdamW must be on the GPU.*capturable=True"
        ):
            check_counters(optimizer)
    state["step"] = torch.ones((), device="meta")
    check_counters(optimizer)


def test_a_recording_refuses_them_before_the_optimizer_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "another")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    optimizer = stepped(torch.optim.Adagrad)
    (state,) = optimizer.state.values()
    with pytest.raises(CaptureError, match="'step' of Adagrad must be on the GPU"):
        CapturedStep(optimizer.step)
    assert state["step"] == 1
    monkeypatch.undo()
    optimizer.step()  # outside a recording nothing is refused
    assert state["step"] == 2


def test_a_schedule_fills_a_learning_rate_that_is_a_tensor() -> None:
    rate = torch.tensor(1.0)
    plain, filled = (
        torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=1.0, foreach=False) for _ in range(2)
    )
    filled.param_groups[0]["lr"] = rate
    schedules = [CosineSchedule(each, warmup_steps=2, total_steps=9) for each in (plain, filled)]
    for _ in range(8):
        assert float(rate) == pytest.approx(plain.param_groups[0]["lr"], rel=1e-6)
        for schedule in schedules:
            schedule.step()
    assert filled.param_groups[0]["lr"] is rate


def train(captured: bool, steps: int = 8) -> tuple[list[float], list[Tensor]]:
    torch.manual_seed(0)
    model = TransformerLM(CONFIG, device="cuda")
    rate = torch.tensor(1e-2, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    schedule = CosineSchedule(optimizer, warmup_steps=2, total_steps=steps)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(tokens, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    recorded: CapturedStep[Tensor] | None = None
    losses = []
    for number in range(steps):
        generator = torch.Generator("cuda").manual_seed(number)
        text = torch.randint(0, 64, (4, 17), generator=generator, device="cuda")
        inputs = text[:, :-1], text[:, 1:].contiguous()
        if captured and number == 3:
            recorded = CapturedStep(step, *inputs)
        loss = step(*inputs) if recorded is None else recorded(*inputs)
        losses.append(float(loss))
        schedule.step()
    return losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.gpu
def test_replays_train_as_the_step_does() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        losses, weights = train(captured=False)
        again, replayed = train(captured=True)
    torch.cuda.synchronize()  # the stream of the comparison does not wait for that of training
    assert again == pytest.approx(losses, rel=1e-5)
    for one, other in zip(weights, replayed, strict=True):
        # Gradients of the embedding are summed with atomic additions, in any order.
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_the_default_stream_is_refused() -> None:
    with pytest.raises(CaptureError, match="which must not be the default stream"):
        CapturedStep(lambda: None)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_named() -> None:
    program = (
        "import torch; from basics_model import CapturedStep\n"
        "torch.cuda.set_stream(torch.cuda.Stream())\n"
        "value = torch.ones(1, device='cuda')\n"
        "CapturedStep(lambda: value.item())"
    )
    done = subprocess.run(  # a recording that failed leaves traces in its process
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "CaptureError: a step must launch the same kernels at every call" in done.stderr
