"""Times variants of the fastest training step in turns, and ranks the kernels of a recorded step.

::

    torchrun --nproc-per-node 2 packages/basics-model/tools/time_step_variants.py --out out

Each variant is the whole step of one size under ``FullyShardedDataParallel`` as one CUDA graph. It
differs from today's step by what :data:`VARIANTS` names. Losses of the first steps are compared
with those of "today". Rows go to ``rows.jsonl`` as they come; ``kernels-VARIANT.txt`` ranks the
kernels of one replayed step by what they waste: their time less the time of their bytes at 3 TB/s,
where the compiler knows the bytes. ``--products`` times the matrix products of a block alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from basics_model import CapturedStep, ModelConfig, TransformerLM, model_config
from basics_model import attention as rotary
from basics_model import model as parts
from ddp_lite.peer import PeerCopies, PeerMemory
from flashattn_triton import flash_attention
from shard_optim import FullyShardedDataParallel
from shard_optim.fully_sharded import unit as units

DEVICE = "cuda"
BANDWIDTH = 3.0e12  # bytes per second, of a copy on an H100
LOSSES, WARMUP = 6, 6  # steps whose losses are compared, all before the recording

# --- products of several weights that lie side by side ----------------------------------------


def joined(weights: list[Tensor]) -> Tensor:
    """Weights one below the other: a view where they are neighbours in memory, else a copy."""
    first, end = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != end or not weight.is_contiguous():
            return torch.cat(weights)
        end += weight.nbytes
    rows = sum(len(weight) for weight in weights)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


@torch.library.custom_op("step::product", mutates_args=())
def product(x: Tensor, weights: list[Tensor]) -> Tensor:
    """(N, M) times the transpose of the joined weights."""
    return x @ joined(weights).t()


@product.register_fake
def _(x: Tensor, weights: list[Tensor]) -> Tensor:
    return x.new_empty((len(x), sum(len(weight) for weight in weights)))


@torch.library.custom_op("step::product_input", mutates_args=())
def product_input(grad: Tensor, weights: list[Tensor]) -> Tensor:
    """The gradient of :func:`product`'s input."""
    return grad @ joined(weights)


@product_input.register_fake
def _(grad: Tensor, weights: list[Tensor]) -> Tensor:
    return grad.new_empty((len(grad), weights[0].shape[1]))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, *weights)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    x, *weights = ctx.saved_tensors
    rows = [len(weight) for weight in weights]
    return product_input(grad, weights), list((grad.t() @ x).split(rows))


product.register_autograd(_product_backward, setup_context=_keep)


def together(x: Tensor, *weights: Tensor) -> Tensor:
    """(..., M) times the transpose of the joined weights, in autocast's dtype."""
    rows = parts.shared_input(x).flatten(0, -2)
    return product(rows, list(weights)).unflatten(0, x.shape[:-1])


def joined_attention(self: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``SelfAttention.forward`` with one product for query, key and value."""
    heads = together(x, self.query.weight, self.key.weight, self.value.weight)
    heads = heads.unflatten(-1, (3, -1, self.head_dim))
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(-3))
    query = rotary.apply_rotary(query, cos, sin)
    key = rotary.apply_rotary(key, cos, sin)
    return self.output(self.attention(query, key, value).transpose(1, 2).flatten(-2))


def joined_swiglu(self: Any, x: Tensor) -> Tensor:
    """``SwiGLU.forward`` with one product for gate and up."""
    both = together(x, self.gate.weight, self.up.weight)
    gate, up = both.chunk(2, -1)
    return self.down(F.silu(gate) * up)


def copied_swiglu(self: Any, x: Tensor) -> Tensor:
    """As :func:`joined_swiglu`, but the weights are copied side by side."""
    both = F.linear(parts.shared_input(x), torch.cat([self.gate.weight, self.up.weight]))
    gate, up = both.chunk(2, -1)
    return self.down(F.silu(gate) * up)


def kernel_swiglu(self: Any, x: Tensor) -> Tensor:
    """As :func:`joined_swiglu`, with kernels of its own for what follows the product."""
    both = together(x, self.gate.weight, self.up.weight)
    return self.down(gated(both))


# --- SwiGLU: one pass forward, one pass backward ------------------------------------------------


@triton.jit
def _gate_kernel(both, out, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(both + row * 2 * F + at, inside).to(tl.float32)
    up = tl.load(both + row * 2 * F + F + at, inside).to(tl.float32)
    tl.store(out + row * F + at, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def _gate_backward_kernel(grad, both, out, F: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < F
    gate = tl.load(both + row * 2 * F + at, inside).to(tl.float32)
    up = tl.load(both + row * 2 * F + F + at, inside).to(tl.float32)
    dh = tl.load(grad + row * F + at, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    tl.store(out + row * 2 * F + at, dh * up * (sigmoid + silu * (1 - sigmoid)), inside)
    tl.store(out + row * 2 * F + F + at, dh * silu, inside)


@torch.library.custom_op("step::gated", mutates_args=())
def gated(both: Tensor) -> Tensor:
    """silu(gate) ∘ up of (..., 2·F), whose first half is the gate."""
    width = both.shape[-1] // 2
    out = both.new_empty((*both.shape[:-1], width))
    grid = (out.numel() // width, triton.cdiv(width, 2048))
    _gate_kernel[grid](both, out, width, 2048, num_warps=8)
    return out


@gated.register_fake
def _(both: Tensor) -> Tensor:
    return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))


@torch.library.custom_op("step::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, both: Tensor) -> Tensor:
    """The gradient of both halves, in one buffer."""
    width, out = grad.shape[-1], torch.empty_like(both)
    grid = (grad.numel() // width, triton.cdiv(width, 2048))
    _gate_backward_kernel[grid](grad.contiguous(), both, out, width, 2048, num_warps=8)
    return out


@gated_backward.register_fake
def _(grad: Tensor, both: Tensor) -> Tensor:
    return torch.empty_like(both)


gated.register_autograd(
    lambda ctx, grad: gated_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

# --- norms: residual sum and norm in one pass, their backward in another ------------------------


@triton.jit
def _norm_kernel(x, delta, weight, total, out, scale, M, EPS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < M
    value = tl.load(x + row * M + at, inside, 0.0).to(tl.float32)
    value += tl.load(delta + row * M + at, inside, 0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value) / M + EPS)
    tl.store(total + row * M + at, value, inside)
    w = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * M + at, value * factor * w, inside)
    tl.store(scale + row, factor)


@triton.jit
def _norm_backward_kernel(  # type: ignore[no-untyped-def]
    grad, grad_total, total, scale, weight, out, partial, rows, M,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < M
    w = tl.load(weight + at, inside, 0.0).to(tl.float32)
    collected = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        place = row * M + at
        dy = tl.load(grad + place, inside, 0.0).to(tl.float32)
        value = tl.load(total + place, inside, 0.0).to(tl.float32)
        beside = tl.load(grad_total + place, inside, 0.0).to(tl.float32)
        factor = tl.load(scale + row)
        normed = value * factor
        collected += dy * normed
        dy *= w
        dx = factor * (dy - normed * (tl.sum(dy * normed) / M))
        tl.store(out + place, beside + dx, inside)
    tl.store(partial + tl.program_id(0) * M + at, collected, inside)


@torch.library.custom_op("step::add_norm", mutates_args=())
def add_norm(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, its norm, and the norm's factor of each row."""
    width = x.shape[-1]
    total, out = torch.empty_like(x), torch.empty_like(x)
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_kernel[(scale.numel(),)](
        x, delta, weight, total, out, scale, width, 1e-5, block, num_warps=4
    )
    return total, out, scale


@add_norm.register_fake
def _(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), scale


@torch.library.custom_op("step::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad: Tensor, grad_total: Tensor, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x (and of delta), and parts of the weight's, one a program."""
    width, rows = total.shape[-1], scale.numel()
    out = torch.empty_like(total)
    programs = min(rows, 528)
    partial = scale.new_empty((programs, width))
    block = triton.next_power_of_2(width)
    _norm_backward_kernel[(programs,)](
        grad.contiguous(), grad_total.contiguous(), total, scale, weight, out, partial, rows,
        width, block, 2, num_warps=8,
    )  # fmt: skip
    return out, partial


@add_norm_backward.register_fake
def _(
    grad: Tensor, grad_total: Tensor, total: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    programs = min(scale.numel(), 528)
    return torch.empty_like(total), scale.new_empty((programs, total.shape[-1]))


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    total, _, scale = output
    ctx.save_for_backward(total, scale, inputs[2])


def _norm_backward(
    ctx: Any, grad_total: Tensor, grad: Tensor, _: Any
) -> tuple[Tensor, Tensor, Tensor]:
    total, scale, weight = ctx.saved_tensors
    out, partial = add_norm_backward(grad, grad_total, total, scale, weight)
    return out, out, partial.sum(0).to(weight.dtype)


add_norm.register_autograd(_norm_backward, setup_context=_keep_norm)


def carried_block(self: Any, carried: Any, cos: Tensor, sin: Tensor) -> Any:
    """``Block.forward``, whose residual stream is a sum that the next norm makes."""
    x, delta = carried
    x, normed, _ = add_norm(x, delta, self.attention_norm.weight)
    delta = self.attention(normed, cos, sin)
    x, normed, _ = add_norm(x, delta, self.feed_forward_norm.weight)
    return x, self.feed_forward(normed)


def carried_model(self: Any, token_ids: Tensor, targets: Tensor | None = None) -> Tensor:
    """``TransformerLM.forward`` around :func:`carried_block`."""
    positions = torch.arange(token_ids.shape[1], device=token_ids.device)
    cos, sin = rotary.rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
    x = self.embedding(token_ids)
    carried = x, torch.zeros_like(x)
    for block in self.blocks:
        carried = block(carried, cos, sin)
    _, normed, _ = add_norm(*carried, self.norm.weight)
    return self.lm_head(normed, targets)


# --- AdamW as soon as a unit's gradients are averaged -------------------------------------------


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    param, grad, first, second, copy, steps, n, lr, decay,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    step = tl.load(steps)
    correction1 = 1 - tl.exp2(step * tl.log2(tl.full((), BETA1, tl.float32)))
    correction2 = 1 - tl.exp2(step * tl.log2(tl.full((), BETA2, tl.float32)))
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(grad + at, inside).to(tl.float32)
        m = tl.load(first + at, inside)
        v = tl.load(second + at, inside)
        p = tl.load(param + at, inside)
        p -= lr * decay * p
        m += (1 - BETA1) * (g - m)
        v = BETA2 * v + (1 - BETA2) * g * g
        p -= lr / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + EPS)
        tl.store(first + at, m, inside)
        tl.store(second + at, v, inside)
        tl.store(param + at, p, inside)
        tl.store(copy + at, p, inside)


class UnitAdamW:
    """Updates each unit's shards when its gradients have arrived, and writes their bf16 copies.

    Args:
        module: whose units are updated.
        lr, weight_decay: of AdamW, whose other settings are torch's.
        overlapped: the update runs on a stream of its own, beside the rest of backward.
        programs: at most so many for a parameter.
    """

    def __init__(
        self,
        module: FullyShardedDataParallel,
        *,
        lr: float,
        weight_decay: float,
        overlapped: bool,
        programs: int = 2**20,
    ) -> None:
        self.lr, self.weight_decay, self.programs = lr, weight_decay, programs
        self.moments = {
            unit: (torch.zeros_like(unit.shard), torch.zeros_like(unit.shard))
            for unit in module.units
        }
        self.steps = torch.zeros((), device=DEVICE)
        self.stream = torch.cuda.Stream() if overlapped else torch.cuda.current_stream()
        self.kept: list[Tensor] = []  # read by the other stream
        self.written: set[Any] = set()

    def begin(self) -> None:
        """Before backward."""
        self.steps += 1

    def end(self) -> None:
        """After backward."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.kept.clear()

    @torch.no_grad()
    def update(self, reduction: Any) -> None:
        """In place of :meth:`UnitReduction.finish`."""
        unit, plan = reduction.unit, reduction.plan
        unit.ranks.call(unit.reduce_words, reduction.work.wait)
        reduction.inputs.clear()
        self.kept.append(reduction.output)
        self.stream.wait_stream(torch.cuda.current_stream())
        averages = torch.split_with_sizes(reduction.output, plan.ranges)[:: plan.stride]
        first, second = self.moments[unit]
        with torch.cuda.stream(self.stream):
            for cut, grad, copy in zip(unit.cuts, averages, unit._sources, strict=True):
                part = slice(cut.shard_offset, cut.shard_offset + cut.chunk)
                grid = (min(triton.cdiv(cut.chunk, 2048), self.programs),)
                _adamw_kernel[grid](
                    unit.shard[part], grad, first[part], second[part], copy, self.steps, cut.chunk,
                    self.lr, self.weight_decay, 0.9, 0.999, 1e-8, 2048, num_warps=8,
                )  # fmt: skip
        self.written.add(unit)


# --- variants -----------------------------------------------------------------------------------

Forwards = dict[type[nn.Module], Callable[..., Tensor]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from today's step.

    Attributes:
        forwards: in place of those of modules.
        inductor: options of the compiler.
        adamw: torch's fused one, or :class:`UnitAdamW` "at-once", "overlapped", or "narrow", which
            is overlapped on few multiprocessors.
        float8: the name of one of torchao's recipes for the products of blocks.
    """

    forwards: Forwards = dataclasses.field(default_factory=dict)
    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)
    adamw: str = "torch"
    float8: str | None = None


FEED_FORWARD: Forwards = {parts.SwiGLU: joined_swiglu}
JOINED: Forwards = FEED_FORWARD | {parts.SelfAttention: joined_attention}
KERNEL: Forwards = JOINED | {parts.SwiGLU: kernel_swiglu}
CARRIED: Forwards = KERNEL | {parts.Block: carried_block, TransformerLM: carried_model}
VARIANTS = {
    "today": Variant(),
    "all": Variant(forwards=CARRIED, adamw="overlapped"),
    "joined": Variant(forwards=JOINED),
    "carried": Variant(forwards=CARRIED),
    "overlapped": Variant(adamw="overlapped"),
    "kernel": Variant(forwards=KERNEL),
    "at-once": Variant(adamw="at-once"),
    "narrow": Variant(adamw="narrow"),
    "tuned": Variant(inductor={"coordinate_descent_tuning": True}),
    "float8": Variant(float8="tensorwise"),
    "searched": Variant(
        inductor={"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
    ),
    "joined-ff": Variant(forwards=FEED_FORWARD),
    "separate-norms": Variant(inductor={"triton.mix_order_reduction": False}),
    "float8-rows": Variant(float8="rowwise"),
    "copied-ff": Variant(forwards={parts.SwiGLU: copied_swiglu}),
}


def configuration(options: argparse.Namespace) -> ModelConfig:
    """The model's, with the dimensions that are given in place of the size's."""
    return model_config(
        options.size,
        context_length=options.sequence,
        d_ff=options.d_ff,
        num_layers=options.num_layers,
    )


class Step:
    """One variant's step, recorded after the first steps.

    Attributes:
        losses: mean over ranks, of the first steps.
    """

    def __init__(self, variant: Variant, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        group = dist.group.WORLD
        assert group is not None
        memory = PeerMemory(group)
        config = configuration(options)
        model = TransformerLM(config, attention=causal, device=DEVICE)
        if variant.float8 is not None:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            recipe = Float8LinearConfig.from_recipe_name(variant.float8)
            convert_to_float8_training(model.blocks, config=recipe)
        for block in model.blocks:
            block.compile(dynamic=False, options=variant.inductor or None)
        self.module = FullyShardedDataParallel(
            model,
            compute_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            reshard_after_forward=False,
            communication=PeerCopies(memory),
        )
        adam = {"lr": 1e-4, "weight_decay": 1e-2}
        self.unit_adamw: UnitAdamW | None = None
        updated = list(self.module.parameters())
        if variant.adamw != "torch":
            self.unit_adamw = UnitAdamW(
                self.module,
                overlapped=variant.adamw != "at-once",
                programs=24 if variant.adamw == "narrow" else 2**20,
                **adam,
            )
            updated = list(self.module.replicated.params)
        self.optimizer = torch.optim.AdamW(updated, fused=True, capturable=True, **adam)
        draw = torch.Generator(DEVICE).manual_seed(dist.get_rank())
        shape = (options.batch, options.sequence + 1)
        tokens = torch.randint(config.vocab_size, shape, device=DEVICE, generator=draw)
        self.tokens, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.losses = [self._mean(self.take()) for _ in range(max(LOSSES, WARMUP))][:LOSSES]
        self.recorded = CapturedStep(self.take, after_replay=memory.watch)

    def _mean(self, loss: Tensor) -> float:
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return float(loss)

    def take(self) -> Tensor:
        """A whole step."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.module(self.tokens, self.targets)
        if self.unit_adamw is not None:
            self.unit_adamw.begin()
        loss.backward()
        if self.unit_adamw is not None:
            self.unit_adamw.end()
        self.optimizer.step()
        return loss.detach().clone()


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Our attention."""
    return flash_attention(query, key, value, causal=True, layout="bhsd")


@contextmanager
def patched(variant: Variant) -> Iterator[list[UnitAdamW]]:
    """Puts a variant's functions in place; what is yielded takes its :class:`UnitAdamW`."""
    holder: list[UnitAdamW] = []
    finish, launch = units.UnitReduction.finish, units.Unit.launch_gather

    def finish_or_update(reduction: Any) -> None:
        if holder:
            holder[0].update(reduction)
        else:
            finish(reduction)

    def launch_without_cast(unit: Any, generation: int, phase: str) -> None:
        if holder and unit in holder[0].written:
            with mock.patch.object(torch, "_foreach_copy_"):
                launch(unit, generation, phase)
        else:
            launch(unit, generation, phase)

    with (
        mock.patch.object(units.UnitReduction, "finish", finish_or_update),
        mock.patch.object(units.Unit, "launch_gather", launch_without_cast),
    ):
        before = {kind: kind.forward for kind in variant.forwards}
        for kind, forward in variant.forwards.items():
            kind.forward = forward  # type: ignore[method-assign]
        made = UnitAdamW.__init__

        def remember(self: UnitAdamW, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            holder.append(self)

        try:
            with mock.patch.object(UnitAdamW, "__init__", remember):
                yield holder
        finally:
            for kind, forward in before.items():
                kind.forward = forward  # type: ignore[method-assign]


def measure(name: str, options: argparse.Namespace, *, profiled: bool) -> dict[str, Any]:
    """One round of a variant: losses, blocks of steps in ms, peak memory, and a kernel table."""
    torch._dynamo.reset()
    begin = time.perf_counter()
    with (
        patched(VARIANTS[name]) as holder,
        torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True),
    ):
        step = Step(VARIANTS[name], options)
        samples = []
        torch.cuda.reset_peak_memory_stats()
        for _ in range(options.blocks):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(options.calls):
                step.recorded()
            torch.cuda.synchronize()
            samples.append(1e3 * (time.perf_counter() - start) / options.calls)
        if profiled:
            rank_kernels(name, step, Path(options.out))
        row = {
            "variant": name,
            "ms": [round(sample, 2) for sample in samples],
            "losses": step.losses,
            "last_loss": step._mean(step.recorded().clone()),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        }
        holder.clear()
        del step
    gc.collect()
    torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - begin, 1)}


def rank_kernels(name: str, step: Step, folder: Path) -> None:
    """Writes the kernels of one replay, by wasted time; a profile of it; and the compiled code."""
    from torch._inductor.codecache import PyCodeCache
    from torch.profiler import ProfilerActivity, profile

    dist.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step.recorded()
        torch.cuda.synchronize()
    if dist.get_rank() != 0:
        return
    gigabytes: dict[str, float] = {}
    code = folder / f"code-{name}"
    code.mkdir(exist_ok=True)
    for module in PyCodeCache.modules:
        for key, value in vars(module).items():
            size = getattr(value, "inductor_meta", {}).get("kernel_num_gb")
            if size is not None:
                gigabytes[key] = size
        if module.__file__ and "def call(" in Path(module.__file__).read_text():
            shutil.copy(module.__file__, code)
    times: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us())
    rows = []
    for kernel, each in times.items():
        least = 1e6 * 1e9 * gigabytes.get(kernel, 0.0) / BANDWIDTH  # microseconds
        rows.append((sum(each) - len(each) * least, kernel, each, least))
    rows.sort(reverse=True)
    with (folder / f"kernels-{name}.txt").open("w") as file:
        print("waste_ms total_ms count mean_us least_us name", file=file)
        for waste, kernel, each, least in rows:
            print(
                f"{waste / 1e3:8.3f} {sum(each) / 1e3:8.3f} {len(each):5d} "
                f"{statistics.mean(each):9.2f} {least:8.2f} {kernel[:140]}",
                file=file,
            )
    recorded.export_chrome_trace(str(folder / f"trace-{name}.json"))


# --- products alone -----------------------------------------------------------------------------


def time_products(options: argparse.Namespace) -> None:
    """Each product of a block and of the head, as the step calls it, and joined ones beside."""
    config = configuration(options)
    width, wide, tokens = config.d_model, config.d_ff, options.batch * options.sequence
    shapes = {"one of qkv, output": (width, width), "qkv": (width, 3 * width),
              "gate or up": (width, wide), "gate and up": (width, 2 * wide),
              "down": (wide, width), "head, 2048 tokens": (width, config.vocab_size)}  # fmt: skip
    for name, (k, n) in shapes.items():
        rows = 2048 if "head" in name else tokens
        sizes = ((rows, k), (n, k), (rows, n))
        sets = [
            [torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for size in sizes]
            for _ in range(4)  # more than the cache holds
        ]
        calls = {
            "forward": lambda x, w, y: x @ w.t(),
            "input": lambda x, w, y: y @ w,
            "weight": lambda x, w, y: y.t() @ x,
        }
        row = {"product": name, "k": k, "n": n, "rows": rows}
        for library in ("cublas", "cublaslt"):
            torch.backends.cuda.preferred_blas_library(library)
            for kind, call in calls.items():
                for _ in range(3):
                    call(*sets[0])
                torch.cuda.synchronize()
                samples = []
                for _ in range(3):
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    start.record()
                    for number in range(48):
                        call(*sets[number % 4])
                    end.record()
                    torch.cuda.synchronize()
                    samples.append(start.elapsed_time(end) / 48)
                ms = statistics.median(samples)
                row[f"{kind}_{library}_us"] = round(1e3 * ms, 1)
                row[f"{kind}_{library}_tflops"] = round(2e-9 * rows * k * n / ms, 1)
        torch.backends.cuda.preferred_blas_library("default")
        write(options, row)


def write(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """Prints a row on rank 0 and adds it to the file."""
    if dist.get_rank() == 0:
        with (Path(options.out) / "rows.jsonl").open("a") as file:
            print(json.dumps(row), file=file)
        print(json.dumps(row), flush=True)


def main() -> None:
    """Parses arguments and measures until the time is used up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="out")
    parser.add_argument("--size", default="xl")
    parser.add_argument("--d-ff", type=int)
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--profiled", default="today,all")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=7.0)
    options = parser.parse_args()
    begin = time.perf_counter()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device(DEVICE, torch.cuda.current_device()))
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch._inductor.config.benchmark_kernel = True  # kernels know their bytes
    torch.cuda.set_stream(torch.cuda.Stream())
    if options.products:
        time_products(options)
    names = options.variants.split(",")
    reference: list[float] | None = None
    for number in range(options.rounds):
        for name in names:
            late = torch.tensor(time.perf_counter() - begin, device=DEVICE)
            dist.all_reduce(late, dist.ReduceOp.MAX)
            if late > 60 * options.minutes:
                continue
            try:
                profiled = number == 0 and name in options.profiled.split(",")
                row = measure(name, options, profiled=profiled)
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - the other variants still run
                row = {"variant": name, "error": f"{type(error).__name__}: {error}"[:2000]}
            if "losses" in row:
                reference = reference or row["losses"]
                pairs = zip(row["losses"], reference, strict=True)
                row["worst_loss"] = max(abs(own - other) / other for own, other in pairs)
            write(options, row)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
