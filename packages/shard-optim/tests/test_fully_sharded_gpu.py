"""Parameters in shards over NCCL: values, slow streams, memory; on one GPU as a group of one."""

import gc
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fully_sharded_models import poison
from ranks import run_ranks
from shard_optim import FullyShardedDataParallel
from shard_optim.accounting import fully_sharded_buffers, rank_memory

WIDTH, VOCAB = 256, 512


class Block(nn.Module):
    def __init__(self, width, checkpointed):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def compute(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        if self.checkpointed:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


class Net(nn.Module):
    def __init__(self, device, depth=6, width=WIDTH, checkpointed=False):
        super().__init__()
        with torch.device(device):
            self.embed = nn.Embedding(VOCAB, width)
            self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(depth))
            self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(device, **settings):
    torch.manual_seed(0)
    return Net(device, **settings)


def batch(rank, step, device):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCAB, (4, 64), generator=generator).to(device)


def loss_of(model, tokens):
    logits = model(tokens).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def check_values(rank, world_size, settings, compiled, checkpointed):
    """fp32: equal to averaged replicas. Every buffer is poisoned before each gather."""
    device = torch.device("cuda", rank)
    plain, module = (build(device, checkpointed=checkpointed) for _ in range(2))
    if compiled:
        for each in (*plain.blocks, *module.blocks):
            each.compile()
    model = FullyShardedDataParallel(module, **settings)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=1e-3, fused=True) for each in (plain, model)
    ]
    poison(model)
    for step in range(4):
        tokens = batch(rank, step, device)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(each, tokens)
            loss.backward()
            if each is plain:
                for param in plain.parameters():
                    dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
    found = model.full_parameters()
    for name, param in plain.named_parameters():
        # The embedding's gradient is summed with atomic additions, in any order.
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-4, atol=1e-5)


def check_mesh(rank, world_size, shape):
    """Two levels, one of which has a single rank."""
    check_values(rank, world_size, {"process_group": init_device_mesh("cuda", shape)}, False, False)


def check_no_synchronization(rank, world_size, reshard, early=False):
    """After warm-up, nothing in a step makes the host wait for the device."""
    device = torch.device("cuda", rank)
    model = FullyShardedDataParallel(
        build(device), compute_dtype=torch.bfloat16, reshard_after_forward=reshard
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if early:
        model.update_in_backward(optimizer)
    batches = [batch(rank, step, device) for step in range(5)]
    try:
        for step, tokens in enumerate(batches):
            if step == 2:
                with warnings.catch_warnings():  # that it may miss some waits
                    warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                    torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_recorded(rank, world_size, reshard):
    """A step that is recorded as a CUDA graph and replayed trains like the step itself."""
    device = torch.device("cuda", rank)
    results = []
    for recorded in (False, True):
        with torch.cuda.stream(torch.cuda.Stream()):
            model = FullyShardedDataParallel(
                build(device), compute_dtype=torch.bfloat16, reshard_after_forward=False
            )
            optimizer = torch.optim.AdamW(
                model.parameters(), lr=1e-3, fused=True, capturable=recorded
            )
            tokens = batch(rank, 0, device)

            def step(model=model, optimizer=optimizer, tokens=tokens):
                optimizer.zero_grad()
                loss = loss_of(model, tokens)
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                return loss.detach()

            losses = []
            for number in range(7):
                tokens.copy_(batch(rank, number, device))
                if recorded and number == 3:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(
                        graph,
                        stream=torch.cuda.current_stream(),
                        capture_error_mode="thread_local",
                    ):
                        loss = step()
                if recorded and number >= 3:
                    graph.replay()
                else:
                    loss = step()
                losses.append(float(loss))
            results.append((losses, model.full_parameters()))
        # Other streams, such as that of the comparison, do not wait for this one.
        torch.cuda.synchronize()
    (losses, weights), (again, replayed) = results
    assert again == pytest.approx(losses, rel=1e-3)
    for name, value in weights.items():
        torch.testing.assert_close(replayed[name], value, rtol=1e-2, atol=1e-3)


def check_recorded_copies(rank, world_size, reshard):
    """By copies between GPUs, replays train bit for bit as the step does, and are watched.

    Messages take several windows, rank 1 is late, and there are exchanges between the replays.
    """
    from ddp_lite.peer import PeerCopies, PeerMemory  # which shard-optim does not require

    device = torch.device("cuda", rank)
    memory = PeerMemory(dist.group.WORLD, buffer_mb=1)
    inputs, results = torch.empty(64, WIDTH, device=device), []
    for recorded in (False, True):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.manual_seed(0)
            with device:  # no embedding, whose gradient is summed in any order
                module = nn.Sequential(*(Block(WIDTH, checkpointed=False) for _ in range(5)))
            if rank:
                for block in module:
                    block.up.register_forward_pre_hook(lambda *_: torch.cuda._sleep(100_000))
            model = FullyShardedDataParallel(
                module,
                compute_dtype=torch.bfloat16,
                reshard_after_forward=reshard,
                communication=PeerCopies(memory),
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)

            def step(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(inputs.bfloat16()).float().square().mean()
                loss.backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                return loss.detach()

            losses = []
            for number in range(9):
                generator = torch.Generator().manual_seed(100 * number + rank)
                inputs.copy_(torch.randn(64, WIDTH, generator=generator))
                if recorded and number == 3:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(
                        graph,
                        stream=torch.cuda.current_stream(),
                        capture_error_mode="thread_local",
                    ):
                        loss = step()
                if recorded and number >= 3:
                    graph.replay()
                    memory.watch()
                else:
                    loss = step()
                losses.append(loss.clone())
                if number % 3 == 2:
                    with torch.no_grad():
                        losses.append(model(inputs.bfloat16()).float().square().mean())
            results.append((torch.stack(losses), model.full_parameters()))
        # Other streams, such as that of the comparison, do not wait for this one.
        torch.cuda.synchronize()
    (losses, weights), (again, replayed) = results
    assert torch.equal(losses, again), (losses, again)
    for name, value in weights.items():
        assert torch.equal(replayed[name], value), name


def check_slow_streams(rank, world_size):
    """Sleeps on the compute stream before and after each block change nothing: no race."""
    device = torch.device("cuda", rank)
    results = []
    for slow in (False, True):
        model = FullyShardedDataParallel(build(device), compute_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if slow:
            for number, block in enumerate(model.module.blocks):
                if (number + rank) % 2:
                    sleep = lambda *_: torch.cuda._sleep(2_000_000)  # noqa: E731
                    block.up.register_forward_pre_hook(sleep)
                    block.down.register_full_backward_hook(sleep)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step, device)).backward()
            optimizer.step()
        results.append(model.full_parameters())
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5)


def check_two_streams(rank, world_size):
    """Forward on a stream of its own, backward called on another, and memory is reused at once."""
    device = torch.device("cuda", rank)
    results = []
    for apart in (False, True):
        model = FullyShardedDataParallel(build(device), compute_dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        main = torch.cuda.current_stream(device)
        stream = torch.cuda.Stream(device) if apart else main
        for step in range(6):
            optimizer.zero_grad()
            tokens = batch(rank, step, device)
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                loss = loss_of(model, tokens)
                # What the freed buffers are reused for, while slow work may still read them.
                sizes = [slot.whole.numel() for slot in model.slots]
                spoiled = [
                    torch.full((size,), float("nan"), dtype=torch.bfloat16, device=device)
                    for size in sizes
                ]
                torch.cuda._sleep(1_000_000)
            main.wait_stream(stream)
            loss.backward()
            spoiled += [torch.full((8 * WIDTH**2,), float("nan"), device=device) for _ in range(4)]
            optimizer.step()
            del spoiled, loss
        torch.cuda.synchronize()
        results.append(model.full_parameters())
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5)


def check_memory(rank, world_size):
    """What the device holds besides activations is what ``accounting`` predicts, within 3 %."""
    device, width, depth = torch.device("cuda", rank), 1024, 8
    dist.all_reduce(torch.zeros(1, device=device))
    torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)
    module = build(device, depth=depth, width=width)
    numel = sum(param.numel() for param in module.parameters())
    before = torch.cuda.memory_allocated() - 4 * numel
    model = FullyShardedDataParallel(module, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    buffers = fully_sharded_buffers([8 * width**2] * depth, [VOCAB * width] * 2, reduced=0)
    predicted = rank_memory(numel, world_size=world_size, stage=3)
    with torch.no_grad():  # activations and gathered parameters, all of which are gone afterwards
        torch.cuda.reset_peak_memory_stats()
        model(batch(rank, 0, device))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before > predicted.parameters + buffers
    assert torch.cuda.memory_allocated() - before < 1.03 * predicted.parameters
    loss_of(model, batch(rank, 0, device)).backward()
    torch.cuda.synchronize()
    # Nothing is gathered, and no gradient on its way, when a backward pass has ended.
    expected = predicted.parameters + predicted.gradients
    measured = torch.cuda.memory_allocated() - before
    assert abs(measured - expected) < 0.03 * expected, (measured, expected)
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    expected = predicted.parameters + predicted.optimizer_state
    measured = torch.cuda.memory_allocated() - before
    assert abs(measured - expected) < 0.03 * expected, (measured, expected)


def check_update_in_backward(rank, world_size, reshard):
    """Bit for bit as without it: eager, recorded, and with sleeps before each update and block."""
    device, results = torch.device("cuda", rank), []
    inputs = torch.empty(64, WIDTH, device=device)
    for early, recorded, slow in (
        (False, False, False),
        (True, False, False),
        (True, False, True),
        (True, True, False),
        (True, True, True),
    ):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.manual_seed(0)
            with device:  # no embedding, whose gradient is summed in any order
                module = nn.Sequential(*(Block(WIDTH, checkpointed=False) for _ in range(6)))
            model = FullyShardedDataParallel(
                module,
                compute_dtype=torch.bfloat16,
                reduce_dtype=torch.bfloat16,
                reshard_after_forward=reshard,
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
            if early:
                model.update_in_backward(optimizer)
            if slow:
                sleep = lambda *_: torch.cuda._sleep(2_000_000)  # noqa: E731
                optimizer.register_step_pre_hook(sleep)
                for block in list(module)[rank::2]:
                    block.up.register_full_backward_hook(sleep)

            def step(model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(inputs.bfloat16()).float().square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            losses = []
            for number in range(7):
                generator = torch.Generator().manual_seed(100 * number + rank)
                inputs.copy_(torch.randn(64, WIDTH, generator=generator))
                if recorded and number == 3:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(
                        graph,
                        stream=torch.cuda.current_stream(),
                        capture_error_mode="thread_local",
                    ):
                        loss = step()
                if recorded and number >= 3:
                    graph.replay()
                else:
                    loss = step()
                losses.append(loss.clone())
            results.append((torch.stack(losses), model.full_parameters()))
        torch.cuda.synchronize()
    for losses, weights in results[1:]:
        assert torch.equal(losses, results[0][0]), (losses, results[0][0])
        for name, value in results[0][1].items():
            assert torch.equal(weights[name], value), name


def check_memory_of_updates(rank, world_size):
    """The peak of a step holds the gradients of at most five of sixteen units, not of all."""
    device, width, peaks = torch.device("cuda", rank), 1024, []
    inputs = torch.randn(8, width, device=device)
    for early in (False, True):
        with device:
            module = nn.Sequential(*(Block(width, checkpointed=False) for _ in range(16)))
        model = FullyShardedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if early:
            model.update_in_backward(optimizer)
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
        del module, model, optimizer
        gc.collect()
    unit = 4 * 8 * width**2 // world_size  # bytes of one unit's gradient shards
    assert peaks[0] - peaks[1] > 10 * unit, [peak / unit for peak in peaks]


CHECKS = {
    "eager": (check_values, ({}, False, False)),
    "two ahead": (check_values, ({"prefetch": 2}, False, False)),
    "kept": (check_values, ({"reshard_after_forward": False}, False, False)),
    "checkpointed": (check_values, ({}, False, True)),
    "compiled": (check_values, ({}, True, False)),
    "compiled, kept": (check_values, ({"reshard_after_forward": False}, True, False)),
    "mesh of 1 x 2": (check_mesh, ((1, 2),)),
    "mesh of 2 x 1": (check_mesh, ((2, 1),)),
    "no host synchronization, kept": (check_no_synchronization, (False,)),
    "no host synchronization, resharded": (check_no_synchronization, (True,)),
    "no host synchronization, updates in backward": (check_no_synchronization, (True, True)),
    "recorded, kept": (check_recorded, (False,)),
    "recorded, resharded": (check_recorded, (True,)),
    "recorded copies, kept": (check_recorded_copies, (False,)),
    "recorded copies, resharded": (check_recorded_copies, (True,)),
    "updates in backward, kept": (check_update_in_backward, (False,)),
    "updates in backward, resharded": (check_update_in_backward, (True,)),
    "memory of updates": (check_memory_of_updates, ()),
    "slow streams": (check_slow_streams, ()),
    "two streams": (check_two_streams, ()),
    "memory": (check_memory, ()),
}


def run_all(rank, world_size, names):
    """What each check raised: one start of the ranks serves them all."""
    errors = {}
    for name in names:
        check, arguments = CHECKS[name]
        try:
            check(rank, world_size, *arguments)
        except Exception:  # noqa: BLE001 - reported under the check's own name
            errors[name] = traceback.format_exc()
        gc.collect()
    return errors


def errors_of(world_size, names):
    outcomes = run_ranks(run_all, world_size, list(names), backend="nccl", timeout=240)
    return {name: "\n".join(o.value[name] for o in outcomes if name in o.value) for name in names}


@pytest.fixture(scope="module")
def errors():
    return errors_of(2, CHECKS)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("name", CHECKS)
def test_over_nccl(errors, name):
    assert not errors[name], errors[name]


ALONE = [name for name in CHECKS if "copies" not in name and "mesh" not in name]


@pytest.fixture(scope="module")
def errors_alone():
    return errors_of(1, ALONE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALONE)
def test_on_one_gpu(errors_alone, name):
    assert not errors_alone[name], errors_alone[name]
