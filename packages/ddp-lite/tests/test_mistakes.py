"""What users get wrong: said on every rank, at the first step at the latest. One test a mistake."""

import gc
import itertools
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from ddp_lite import (
    BucketedDDP,
    FlatDDP,
    ModelMismatchError,
    NaiveDDP,
    OverlapDDP,
    PeerFailureError,
    StepMismatchError,
)
from ddp_lite.migration import TORCH_ARGUMENTS
from ranks import run_case, run_ranks, set_collective_timeout

ALL = {wrapper.__name__: wrapper for wrapper in (NaiveDDP, FlatDDP, OverlapDDP, BucketedDDP)}
EACH_FINISH = list(itertools.product(ALL, (True, False)))
PAIRS = list(itertools.product(ALL, ALL))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.full((2, 4), rank + 1.0)).square().sum()


def usual_loop(rank: int, world_size: int, name: str, auto: bool) -> None:
    """backward, clip, step: without any call of ours."""
    model, reference = mlp(), mlp()
    wrapped = ALL[name](model, auto_finish=auto)
    ours = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        ours.zero_grad()
        plain.zero_grad()
        loss_of(wrapped, rank).backward()
        if not auto:
            wrapped.finish_gradient_synchronization()
        for r in range(world_size):
            (loss_of(reference, r) / world_size).backward()
        norm = clip_grad_norm_(wrapped.parameters(), 0.5)
        torch.testing.assert_close(norm, clip_grad_norm_(reference.parameters(), 0.5))
        ours.step()
        plain.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("name", "auto"), EACH_FINISH)
def test_the_usual_loop_with_clipping_is_right(name: str, auto: bool) -> None:
    run_case(usual_loop, 2, EACH_FINISH, name, auto)


def gradients_asked_for(rank: int, world_size: int) -> None:
    """One warning a wrapper; none for gradients of inputs, or with ``create_graph``."""
    for name, wrapper in ALL.items():
        wrapped = wrapper(mlp())
        x = torch.full((2, 4), rank + 1.0, requires_grad=True)
        torch.autograd.grad(wrapped(x).sum(), x)
        loss = loss_of(wrapped, rank)
        torch.autograd.grad(loss, list(wrapped.parameters()), create_graph=True)
        with pytest.warns(UserWarning, match=f"{name} averages gradients of backward"):
            torch.autograd.grad(loss, list(wrapped.parameters()), retain_graph=True)
        torch.autograd.grad(loss, list(wrapped.parameters()), retain_graph=True)
        loss.backward()


def test_gradients_without_backward_are_warned_of_once() -> None:
    run_ranks(gradients_asked_for, 2)


def wrapped_again(rank: int, world_size: int, first: str, second: str) -> None:
    model = mlp()
    wrapped = ALL[first](model)
    words = rf"0\.weight is synchronised by a {first}\. Call detach\(\)"
    with pytest.raises(TypeError, match=words):
        ALL[second](model)
    heads = nn.ModuleDict({"trunk": model[0], "head": nn.Linear(8, 2)})
    with pytest.raises(TypeError, match=r"trunk\.weight is synchronised"):
        ALL[second](heads)
    loss_of(wrapped, rank).backward()
    del wrapped  # takes its hooks along
    model.zero_grad()
    again = ALL[second](model)
    loss_of(again, rank).backward()
    mine = torch.cat([p.grad.flatten() for p in model.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    assert torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_wrapping_again_is_refused_and_after_dropping_right(first: str, second: str) -> None:
    run_case(wrapped_again, 2, PAIRS, first, second)


def freed(rank: int, world_size: int, name: str) -> None:
    gc.disable()
    model = mlp()
    wrapped = ALL[name](model)
    for _ in range(2):
        loss_of(wrapped, rank).backward()
        wrapped.finish_gradient_synchronization()
    alive = weakref.ref(wrapped)
    del wrapped
    assert alive() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_a_dropped_wrapper_is_freed_at_once(name: str) -> None:
    run_case(freed, 2, ALL, name)


def freed_with_buckets(rank: int, world_size: int) -> None:
    gc.disable()
    buckets = BucketedDDP(mlp(), copy=True)
    loss_of(buckets, rank).backward()
    model, parameter = weakref.ref(buckets.module), weakref.ref(buckets.module[0].weight)
    del buckets
    assert model() is None
    assert parameter() is None


def test_flat_buckets_keep_no_module_alive() -> None:
    run_ranks(freed_with_buckets, 2)


SETTINGS: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "class": lambda m, odd: (OverlapDDP if odd else BucketedDDP)(m),
    "missing_gradients": lambda m, odd: FlatDDP(
        m, missing_gradients="zeros" if odd else "skip-if-all"
    ),
    "auto_finish": lambda m, odd: NaiveDDP(m, auto_finish=odd),
    "bucket_size_mb": lambda m, odd: BucketedDDP(m, 1 if odd else 2),
    "last_bucket_size_mb": lambda m, odd: BucketedDDP(m, last_bucket_size_mb=1 + odd),
    "copy": lambda m, odd: BucketedDDP(m, copy=odd),
    "wire_dtype": lambda m, odd: BucketedDDP(
        m, wire_dtype=torch.float16 if odd else torch.bfloat16
    ),
    "comm_hook": lambda m, odd: BucketedDDP(m, comm_hook=average if odd else other_average),
    "rebucket": lambda m, odd: BucketedDDP(m, rebucket=odd),
}


def average(flat: torch.Tensor, bucket: object) -> dist.Work:
    return dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)


def other_average(flat: torch.Tensor, bucket: object) -> dist.Work:
    return average(flat, bucket)


def other_settings(rank: int, world_size: int, name: str) -> None:
    with pytest.raises(ModelMismatchError, match=rf"{name} .*rank 1: {name} "):
        SETTINGS[name](mlp(), rank == 1)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_differ_are_named_on_every_rank(name: str) -> None:
    run_case(other_settings, 2, SETTINGS, name)


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def replace_number(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[2].bias.detach().clone())  # one element, equal value


def add(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(3)))


def add_module(model: nn.Module) -> None:
    model[1].extra = nn.Linear(2, 2)


def remove(model: nn.Module) -> None:
    model[2].bias = None


def weight_norm(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


CHANGES = {
    "replaced": (replace, r"0\.weight was replaced"),
    "number replaced": (replace_number, r"2\.bias was replaced"),
    "added": (add, "scale was added"),
    "module added": (add_module, r"1\.extra\.weight was added, 1\.extra\.bias was added"),
    "removed": (remove, r"2\.bias was removed"),
    "weight norm": (
        weight_norm,
        r"0\.parametrizations\.weight\.original0 was added.*0\.weight was removed",
    ),
}
CHANGED = list(itertools.product(ALL, CHANGES))


def changed_module(rank: int, world_size: int, name: str, what: str) -> None:
    change, words = CHANGES[what]
    model = mlp()
    wrapped = ALL[name](model)
    loss_of(wrapped, rank).backward()
    model[1].note = nn.Identity()  # no parameters: allowed
    loss_of(wrapped, rank).backward()
    change(model)
    remedy = rf"wrap it then: {name}\(wrapped\.detach"
    message = rf"before step 3 on rank {rank} {words}.*{remedy}"
    with pytest.raises(ModelMismatchError, match=message):
        loss_of(wrapped, rank)


@pytest.mark.parametrize(("name", "what"), CHANGED)
def test_a_changed_module_is_named_at_the_next_forward(name: str, what: str) -> None:
    run_case(changed_module, 2, CHANGED, name, what)


def torchs_names(rank: int, world_size: int, wrapper: str) -> None:
    for name, instead in TORCH_ARGUMENTS.items():
        with pytest.raises(TypeError) as caught:
            ALL[wrapper](mlp(), **{name: 1})
        message = str(caught.value)
        assert f"the arguments of {wrapper} must be" in message
        assert f"{name} is an argument of torch's DistributedDataParallel ({instead})" in message
    with pytest.raises(TypeError, match=rf"{wrapper} .* bucket_mb is unknown"):
        ALL[wrapper](mlp(), bucket_mb=1)


@pytest.mark.parametrize("wrapper", ALL)
def test_torchs_argument_names_are_mapped(wrapper: str) -> None:
    run_case(torchs_names, 2, ALL, wrapper)


def device_ids_by_place(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"bucket_size_mb must be .* but got \[0\]"):
        BucketedDDP(mlp(), [0])


def test_torchs_second_argument_is_no_size() -> None:
    run_ranks(device_ids_by_place, 1)


def test_every_argument_of_torchs_wrapper_has_an_answer() -> None:
    import inspect

    arguments = set(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    assert arguments - {"module", "process_group"} <= TORCH_ARGUMENTS.keys()


def out_of_step(rank: int, world_size: int, name: str, mistake: str) -> tuple[str, list[float]]:
    """One rank does something else in the third step; returns its error, or its last weights."""
    odd = rank == 1
    model = mlp()
    explicit = mistake in ("finishes twice", "two backwards, then finish")
    wrapped = ALL[name](model, auto_finish=not explicit)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(6):
        broken = odd and step == 2
        optimizer.zero_grad()
        try:
            loss_of(wrapped, rank).backward(retain_graph=True)
            if broken and mistake == "one backward more":
                loss_of(wrapped, rank).backward()
            if broken and mistake == "two backwards, then finish":
                loss_of(wrapped.module, rank).backward()
            if explicit:
                wrapped.finish_gradient_synchronization()
            if broken and mistake == "finishes twice":
                wrapped.finish_gradient_synchronization()
        except StepMismatchError as error:
            return str(error), []
        if not (broken and mistake == "no optimizer step"):
            optimizer.step()
        if broken and mistake == "changes a weight":
            with torch.no_grad():
                model[2].bias.add_(1)
    return "no error", [p.sum().item() for p in model.parameters()]


MISTAKES = [
    "one backward more",
    "two backwards, then finish",
    "finishes twice",
    "no optimizer step",
    "changes a weight",
]


CASES = [(name, 2, mistake) for name in ALL for mistake in MISTAKES]
CASES += [("BucketedDDP", 3, mistake) for mistake in MISTAKES]


@pytest.mark.parametrize(("name", "world_size", "mistake"), CASES)
def test_ranks_that_differ_end_with_an_error_on_all(
    name: str, world_size: int, mistake: str
) -> None:
    outcomes = run_ranks(out_of_step, world_size, name, mistake)
    if mistake == "two backwards, then finish" and name in ("NaiveDDP", "FlatDDP"):
        # Their reductions start after backward, so the rank has only summed two gradients.
        assert all(outcome.value == outcomes[0].value for outcome in outcomes)
        return
    number = 3 if mistake == "two backwards, then finish" else 4
    for outcome in outcomes:
        message, _ = outcome.value
        assert "every rank must make the same synchronisations" in message, message
        own = f"on rank {outcome.rank} it is making synchronisation "
        assert own in message, message
        assert f"making synchronisation {number}" in message, message
        assert "says: it is making synchronisation" in message, message


def late_hooks(rank: int, world_size: int, name: str) -> None:
    wrapped = ALL[name](mlp())
    seen: list[bool] = []

    def look(parameter: torch.Tensor) -> None:
        seen.append(parameter.grad is not None)

    for p in wrapped.parameters():
        p.register_post_accumulate_grad_hook(look)
    for _ in range(2):
        loss_of(wrapped, rank).backward()
    assert seen == [True] * 8


@pytest.mark.parametrize("name", ALL)
def test_hooks_registered_after_wrapping_see_gradients(name: str) -> None:
    run_case(late_hooks, 2, ALL, name)


def detached(rank: int, world_size: int, name: str) -> None:
    wrapped = ALL[name](mlp())
    model = wrapped.detach()
    with pytest.raises(RuntimeError, match=rf"{name} must not be called after"):
        loss_of(wrapped, rank)
    with torch.no_grad():
        loss_of(wrapped, rank)
    loss_of(ALL[name](model), rank).backward()


@pytest.mark.parametrize("name", ALL)
def test_a_detached_wrapper_does_not_train_silently(name: str) -> None:
    run_case(detached, 2, ALL, name)


def store_host_stops(rank: int, world_size: int) -> tuple[str, float]:
    """Rank 0 hosts the TCPStore of a second process group and is stopped."""
    timeout = timedelta(seconds=60)
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
        )
        port.fill_(store.port)
    dist.broadcast(port, 0)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=timeout)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    wrapped = BucketedDDP(mlp())
    loss_of(wrapped, rank).backward()
    pids = list(wrapped._ranks._pids)
    set_collective_timeout(3)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        loss_of(wrapped, rank).backward()
    except PeerFailureError as error:
        return str(error), time.monotonic() - begin
    finally:
        if rank == 1:
            os.kill(pids[0], signal.SIGKILL)
    return "no error", 0.0


def test_a_stopped_store_host_is_named_in_bounded_time() -> None:
    outcomes = run_ranks(store_host_stops, 2, check=False)
    message, seconds = outcomes[1].value
    assert "is stopped" in message, message
    assert "the store could not be reached (no answer within 3 s)" in message, message
    assert seconds < 60
