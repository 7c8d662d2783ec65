"""A dropped wrapper, its module and its buckets are freed, whatever was done with it before.

One process on the fake group: what is freed does not depend on what ranks send.
"""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from hierarchical_average import HierarchicalAverage
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from ddp_lite import BucketedDDP, FlatDDP, NaiveDDP, OverlapDDP

ALL = (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)


@pytest.fixture(autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(wrapped: nn.Module) -> torch.Tensor:
    return wrapped(torch.ones(2, 4)).sum()


def torch_ddp(module: nn.Module) -> DistributedDataParallel:
    """torch's wrapper with a hook in place of the fake group, which gives it no result."""

    def hook(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(bucket.buffer())
        return done

    wrapped = DistributedDataParallel(module)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def one_step(wrapped: nn.Module) -> None:
    loss_of(wrapped).backward()


def accumulated(wrapped: nn.Module) -> None:
    with wrapped.no_sync():
        loss_of(wrapped).backward()


def inside_no_sync(wrapped: nn.Module) -> None:
    """The block is never left, as in a notebook whose cell was interrupted."""
    wrapped.no_sync().__enter__()
    loss_of(wrapped).backward()


def failed_backward(wrapped: nn.Module) -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError("injected")

    hidden = wrapped.module[0](torch.ones(2, 4))
    hidden.register_hook(fail)
    with pytest.raises(ArithmeticError):
        wrapped.module[2](wrapped.module[1](hidden)).sum().backward()


USES: dict[str, Callable[[nn.Module], None]] = {
    "construction": lambda wrapped: None,
    "forward without backward": lambda wrapped: (loss_of(wrapped), None)[1],
    "backward": one_step,
    "two backwards": lambda wrapped: (one_step(wrapped), one_step(wrapped))[1],
    "no_sync": accumulated,
    "inside no_sync": inside_no_sync,
    "failed backward": failed_backward,
    "detach": lambda wrapped: (one_step(wrapped), wrapped.detach(), None)[2],
}

BUILDS: dict[str, Callable[[nn.Module], nn.Module]] = {w.__name__: w for w in ALL} | {
    "small buckets": lambda m: BucketedDDP(m, 0.00005),
    "copy": lambda m: BucketedDDP(m, 0.00005, copy=True),
    "wire_dtype": lambda m: BucketedDDP(m, 0.00005, wire_dtype=torch.bfloat16),
    "HierarchicalAverage": lambda m: BucketedDDP(
        m, comm_hook=HierarchicalAverage(dist.device_mesh.init_device_mesh("cpu", (1, 2)))
    ),
}


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Cycles stay, so that only what is free of them is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@pytest.mark.usefixtures("without_collector")
def test_a_dropped_wrapper_is_freed_without_the_collector(build) -> None:
    for use in USES.values():
        wrapped = build(mlp())
        use(wrapped)
        parameter = wrapped.module[2].weight
        references = {
            "wrapper": weakref.ref(wrapped),
            "module": weakref.ref(wrapped.module),
            "parameter": weakref.ref(wrapped.module[0].weight),
            "bucket": weakref.ref(wrapped._engine.buckets[0]),
        }
        del wrapped
        alive = [name for name, reference in references.items() if reference() is not None]
        assert not alive, (use, alive)
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize("auto_finish", [True, False])
@pytest.mark.parametrize("wrapper", ALL)
@pytest.mark.usefixtures("without_collector")
def test_outputs_of_a_dropped_wrapper_are_synchronised(wrapper, auto_finish) -> None:
    """The gradients of an output are synchronised although nobody else holds the wrapper."""
    model = mlp()
    wrapped = wrapper(model, auto_finish=auto_finish)
    output = loss_of(wrapped)
    hooks = model[0].weight._post_accumulate_grad_hooks
    del wrapped
    assert bool(hooks) is auto_finish  # else nobody could finish the step
    with CommDebugMode() as mode:
        output.backward()
    assert (mode.get_total_counts() > 0) is auto_finish
    del output
    assert not hooks
    assert model[0].weight.grad is not None


@pytest.mark.parametrize("wrapper", [*ALL, torch_ddp])
def test_the_collector_frees_wrappers_in_cycles(wrapper) -> None:
    """A module that refers to its wrapper; and torch's wrapper, which is always in a cycle."""
    wrapped = wrapper(mlp())
    one_step(wrapped)
    wrapped.module.wrapped_by = [wrapped]
    alive = weakref.ref(wrapped)
    parameter = weakref.ref(wrapped.module[0].weight)
    del wrapped
    gc.collect()
    assert alive() is None
    assert parameter() is None


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", [*ALL, torch_ddp])
def test_wrappers_of_compiled_modules_are_freed(wrapper) -> None:
    wrapped = wrapper(torch.compile(mlp(), backend="aot_eager"))
    one_step(wrapped)
    alive = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert alive() is None


class ReturnsParameter(nn.Module):
    """Returns a parameter beside its output, as contrastive models do with their temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x), self.scale


@pytest.mark.parametrize("wrapper", ALL)
def test_a_parameter_that_is_returned_keeps_nothing(wrapper: Callable[..., nn.Module]) -> None:
    module = ReturnsParameter()
    wrapped = wrapper(module)
    for _ in range(2):
        output, scale = wrapped(torch.ones(2, 4))
        (output.sum() * scale).backward()
    assert not module.scale._backward_hooks
    engine = weakref.ref(wrapped._engine)
    wrapped.detach()
    del wrapped, output, scale
    assert engine() is None
    with CommDebugMode() as sent:
        output, scale = module(torch.ones(2, 4))
        (output.sum() * scale).backward()
    assert sent.get_total_counts() == 0
