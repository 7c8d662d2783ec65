"""Checks of somebody's adapters: each returns a sentence that says what is wrong, or None.

The checks of ranks run on every rank of a gloo group on CPUs. Each takes the rank, the number of
ranks, a device and the loaded adapters. Ranks have different seeds and different data.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench_harness.training.proof import apart

#: Seconds by which the last rank is late, longer than a reduction of these sizes takes.
_LATE_S = 0.4
_CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
#: Of attention, whose adapters may compute in less than fp32.
_NEAR: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2}


class Absent(Exception):  # noqa: N818 - not an error of the adapters
    """A check does not apply: the adapter is missing or needs a GPU; the text says which."""


def load(path: Path) -> ModuleType:
    """The adapters of a file; the folder above its folder is importable, as for pytest."""
    for folder in (path.parent, path.parent.parent):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("checked_adapters", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"adapters must be a Python file, but got {path}. Name one.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _adapter(adapters: ModuleType, *names: str) -> Callable[..., Any]:
    """The first of several functions that the adapters have."""
    for name in names:
        if callable(getattr(adapters, name, None)):
            return getattr(adapters, name)  # type: ignore[no-any-return]
    raise Absent(f"the adapters have no {' and no '.join(names)}")


# --- attention ------------------------------------------------------------------------------


def _attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and natural logsumexp, with all scores stored."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    if causal:
        rows, columns = (torch.arange(n, device=query.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(columns > rows[:, None], -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def attention(
    adapters: ModuleType, kind: str, *, queries: int, keys: int, causal: bool
) -> str | None:
    """Forward, logsumexp and backward of one of the two functions."""
    names = [f"get_flashattention_autograd_function_{kind}", f"get_flash_autograd_function_{kind}"]
    get = _adapter(adapters, *names)
    if kind == "triton" and not torch.cuda.is_available():
        raise Absent("Triton kernels need a GPU")
    device, what = "cuda" if kind == "triton" else "cpu", f"{names[0]}()"
    torch.manual_seed(0)
    shapes = ((2, queries, 32), (2, keys, 32), (2, keys, 32))
    inputs = [torch.randn(s, device=device, requires_grad=True) for s in shapes]
    try:
        found = get().apply(*inputs, causal)
    except Exception as error:  # noqa: BLE001 - any error of theirs is told
        return _raised(f"Forward of {what}", error)
    expected, logsumexp = _attention(*inputs, causal=causal)
    if found.shape != expected.shape:
        shapes_told = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
        return f"The output of {what} has shape {shapes_told}."
    if not torch.allclose(found, expected, **_NEAR):
        return _why_output(found, inputs, causal=causal, what=what)
    saved = [t for t in found.grad_fn.saved_tensors if t.shape == inputs[0].shape[:-1]]
    if len(saved) != 1:
        return (
            f"{what} saves {len(saved)} tensors of shape {tuple(inputs[0].shape[:-1])}. Save one, "
            "the logsumexp of each query's scores."
        )
    if not torch.allclose(saved[0].float(), logsumexp, **_NEAR):
        if torch.allclose(saved[0].float() * math.log(2), logsumexp, **_NEAR):
            return f"The logsumexp that {what} saves is in base 2. Save the natural logarithm."
        return f"The tensor that {what} saves is not the logsumexp of the scaled scores."
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, weight)
    try:
        gradients = torch.autograd.grad(found, inputs, weight)
    except Exception as error:  # noqa: BLE001
        return _raised(f"Backward of {what}", error)
    for name, mine, theirs in zip(("dQ", "dK", "dV"), wanted, gradients, strict=True):
        if theirs is None or not torch.allclose(theirs, mine, **_NEAR):
            return f"{name} of {what} is wrong, while its forward is right." + _why_gradient(
                mine, theirs, inputs[0].shape[-1]
            )
    return None


def _raised(what: str, error: Exception) -> str:
    line = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{what} raises {type(error).__name__}: {line}"


def _why_output(found: Tensor, inputs: list[Tensor], *, causal: bool, what: str) -> str:
    if causal and torch.allclose(found, _attention(*inputs, causal=False)[0], **_NEAR):
        return f"{what} ignores is_causal: its output is that without a mask."
    unscaled = _attention(inputs[0] * math.sqrt(inputs[0].shape[-1]), *inputs[1:], causal=causal)[0]
    if torch.allclose(found, unscaled, **_NEAR):
        return f"{what} does not divide the scores by the square root of the head dimension."
    if not bool(found.isfinite().all()):
        return (
            f"The output of {what} has values that are not finite: look at rows of masked scores."
        )
    return f"The output of {what} differs from attention with all scores stored."


def _why_gradient(wanted: Tensor, found: Tensor | None, width: int) -> str:
    if found is None:
        return " Backward returns None for it."
    scale = math.sqrt(width)
    for factor, why in ((scale, "misses"), (1 / scale, "has twice")):
        if torch.allclose(found, wanted * factor, **_NEAR):
            return f" It {why} the factor 1/sqrt(head dimension)."
    return " Check D = rowsum(O * dO) and the mask in the recomputed probabilities."


# --- data parallelism -----------------------------------------------------------------------


class _Toy(nn.Module):
    """Tied weights, a frozen parameter, and matrices of very different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.wide = nn.Linear(8, 40, bias=False)
        self.frozen = nn.Parameter(torch.ones(40), requires_grad=False)
        self.narrow = nn.Linear(40, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.relu(self.wide(self.embedding(tokens))) * self.frozen
        logits: Tensor = self.head(self.narrow(hidden))
        return logits


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def _averaged(reference: nn.Module, world_size: int, step: int) -> dict[str, Tensor]:
    """The mean gradient over all ranks' data, computed here alone."""
    reference.zero_grad()
    for rank in range(world_size):
        (_loss(reference, step, rank) / world_size).backward()
    return {n: p.grad.clone() for n, p in reference.named_parameters() if p.grad is not None}


def data_parallel(
    rank: int,
    world_size: int,
    adapters: ModuleType,
    *,
    bucket_size_mb: float | str | None,
    late: bool,
) -> str | None:
    """Three steps beside one process, with the gradients of each compared.

    Args:
        bucket_size_mb: of the bucketed wrapper; "single" for the one of single parameters.
        late: the last rank begins its backward later than the others.
    """
    single = bucket_size_mb == "single"
    kinds = ("ddp_individual_parameters", "ddp") if single else ("ddp_bucketed",)
    wrap = _adapter(adapters, *(f"get_{kind}" for kind in kinds))
    after = _adapter(adapters, *(f"{kind}_on_after_backward" for kind in kinds))
    before = None if single else getattr(adapters, "ddp_bucketed_on_train_batch_start", None)
    arguments = () if single else (bucket_size_mb,)
    torch.manual_seed(rank)
    model = wrap(_Toy(), *arguments)
    inner = getattr(model, "module", model)
    name = apart({each: p.detach() for each, p in inner.named_parameters()})
    if name is not None:
        return (
            f"Ranks begin with different values of {name}. Broadcast rank 0's parameters when the "
            "model is wrapped."
        )
    reference = _Toy()
    reference.load_state_dict(inner.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if before is not None:
            before(model, optimizer)
        if late and rank == world_size - 1:
            time.sleep(_LATE_S)
        _loss(model, step, rank).backward()
        after(model, optimizer)
        found = {name: _copied(p.grad) for name, p in inner.named_parameters()}
        wanted = _averaged(reference, world_size, step)
        wrong = _agreed(next((n for n, g in wanted.items() if not _equal(found[n], g)), None))
        if wrong is not None:
            time.sleep(2 * _LATE_S)  # what was not awaited has arrived by now
            settled = _copied(dict(inner.named_parameters())[wrong].grad)
            return _agreed(_why_averaged(wrong, found[wrong], settled, wanted[wrong]))
        if found["frozen"] is not None:
            return "The frozen parameter has a gradient. Leave parameters alone that have none."
        optimizer.step()
        plain.step()
    ends = dict(inner.named_parameters())
    for name, parameter in reference.named_parameters():
        if not _equal(ends[name], parameter):
            return f"{name} differs from one process after three steps, with the right gradients."
    if inner.head.weight is not inner.embedding.weight:
        return (
            "The tied weights are two tensors after wrapping. Keep a shared parameter one tensor."
        )
    return None


def _agreed(told: str | None) -> str | None:
    """What the first rank with something to tell says; every rank calls it."""
    return next((each for each in _gathered(told) if each is not None), None)


def _gathered(value: Any) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def _copied(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().clone()


def _equal(found: Tensor | None, wanted: Tensor) -> bool:
    return found is not None and torch.allclose(found, wanted, **_CLOSE)


def _why_averaged(
    name: str, found: Tensor | None, settled: Tensor | None, wanted: Tensor
) -> str | None:
    """The reason why a gradient is not the mean; None on a rank where it is."""
    every = _gathered(found)
    ranks = len(every)
    if found is None:
        return f"{name} has no gradient after backward."
    if _equal(found, wanted):
        return None
    if settled is not None and not torch.equal(found, settled):
        return (
            f"The reduction of {name} is not awaited: its gradient changed after "
            "on_after_backward had returned. Wait for each handle before the gradient is used."
        )
    if torch.allclose(found, wanted * ranks, **_CLOSE):
        return (
            f"The gradient of {name} is the sum over the ranks, {ranks} times the mean. Divide it "
            "by the number of ranks."
        )
    if torch.allclose(found, wanted / ranks, **_CLOSE):
        return f"The gradient of {name} is divided by the number of ranks twice."
    if not all(_equal(other, found) for other in every):
        return (
            f"The gradient of {name} differs between ranks: it was not reduced, or it was reduced "
            "before all of it was there."
        )
    return f"The gradient of {name} is the same on all ranks, but not the mean of theirs."


# --- sharded optimizer ----------------------------------------------------------------------


def sharded_optimizer(
    _rank: int, _world_size: int, adapters: ModuleType, *, harder: bool
) -> str | None:
    """Steps of a sharded AdamW beside a plain one; harder: a later group and a changed rate."""
    make = _adapter(adapters, "get_sharded_optimizer")
    torch.manual_seed(0)
    model = _Toy()
    reference = copy.deepcopy(model)

    def begun(make_one: Callable[..., Any], owner: _Toy) -> Any:
        later = list(owner.narrow.parameters()) if harder else []
        first = [p for p in owner.parameters() if all(p is not one for one in later)]
        one = make_one(first, lr=0.1, weight_decay=0.1, betas=(0.9, 0.99))
        if harder:
            one.add_param_group({"params": later, "lr": 0.05})
        return one

    optimizer = begun(lambda first, **given: make(first, torch.optim.AdamW, **given), model)
    plain = begun(torch.optim.AdamW, reference)
    for step in range(4):
        for owner, one in ((model, optimizer), (reference, plain)):
            one.zero_grad()
            if harder and step == 2:
                for group in one.param_groups:
                    group["lr"] *= 0.1
            _loss(owner, step, 0).backward()
            one.step()
        ends = {name: p.detach() for name, p in model.named_parameters()}
        wanted = reference.named_parameters()
        wrong = _agreed(next((n for n, p in wanted if not _equal(ends[n], p)), None))
        if wrong is not None:
            every = _gathered(ends[wrong])
            if not all(_equal(each, every[0]) for each in every):
                return (
                    f"Ranks have different values of {wrong} after step {step + 1}. After its own "
                    "update a rank must send its share to the others."
                )
            if harder and step == 2:
                return (
                    f"{wrong} is wrong from the step on in which param_groups got another lr. The "
                    "optimizer of a shard must read the groups of the sharded one."
                )
            return (
                f"{wrong} differs from an unsharded AdamW after step {step + 1}. All settings, and "
                "those of later groups, must reach the optimizer of each shard."
            )
    return None


# --- fully sharded --------------------------------------------------------------------------


class _Matrices(nn.Module):
    """An embedding and linear layers without biases, and a norm that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.wide = nn.Linear(8, 40, bias=False)
        self.norm = nn.LayerNorm(40)
        self.narrow = nn.Linear(40, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.narrow(torch.relu(self.norm(self.wide(self.embedding(tokens)))))
        return logits


def fully_sharded(rank: int, world_size: int, adapters: ModuleType) -> str | None:
    """Two steps in fp32 beside one process, and what a rank holds."""
    wrap = _adapter(adapters, "get_fsdp")
    after = _adapter(adapters, "fsdp_on_after_backward")
    gather = _adapter(adapters, "fsdp_gather_full_params")
    torch.manual_seed(0)
    reference = _Matrices()
    model = wrap(copy.deepcopy(reference))
    whole = sum(p.numel() for p in reference.parameters())
    held = sum(p.numel() for p in model.parameters())
    if held > 0.75 * whole:
        return (
            f"A rank holds {held} of {whole} parameters after wrapping. Keep 1/{world_size} of "
            "each matrix."
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, step, rank).backward()
        after(model, optimizer)
        optimizer.step()
        begin = {name: p.detach().clone() for name, p in reference.named_parameters()}
        _averaged(reference, world_size, step)
        plain.step()
        found = gather(model)
        ends = dict(reference.named_parameters())
        if missing := [name for name in ends if name not in found]:
            return (
                f"fsdp_gather_full_params has no {missing[0]}. Return the names that the module "
                "had before it was wrapped."
            )
        wrong = _agreed(next((n for n, p in ends.items() if not _equal(found[n], p)), None))
        if wrong is not None:
            moved, wanted = found[wrong] - begin[wrong], ends[wrong] - begin[wrong]
            if torch.allclose(moved, wanted * world_size, **_CLOSE):
                return (
                    f"{wrong} moves {world_size} times as far as it should: its gradient is the "
                    "sum over the ranks, not the mean."
                )
            return f"{wrong} differs from one process after step {step + 1}."
    return None
