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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from basics_model import CapturedStep, ModelConfig, TransformerLM, model_config
from ddp_lite.peer import PeerCopies, PeerMemory
from flashattn_triton import flash_attention
from shard_optim import AdamW, FullyShardedDataParallel

DEVICE = "cuda"
BANDWIDTH = 3.0e12  # bytes per second, of a copy on an H100
LOSSES, WARMUP = 6, 6  # steps whose losses are compared, all before the recording

# --- variants -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What differs from today's step.

    Attributes:
        inductor: options of the compiler.
        own_adamw: ``shard_optim.AdamW``, with moments in bf16, instead of torch's fused one.
        in_backward: whether units are updated within backward, beside it.
        priority: of the stream of the computation; a lower number goes first.
        float8: the name of one of torchao's recipes for the products of blocks.
    """

    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)
    own_adamw: bool = False
    in_backward: bool = True
    priority: int = 0
    float8: str | None = None


VARIANTS = {
    "today": Variant(),
    "after": Variant(in_backward=False),
    "first": Variant(priority=-1),
    "early-launch": Variant(inductor={"triton.enable_pdl": True}),
    "moments": Variant(own_adamw=True),
    "moments-after": Variant(own_adamw=True, in_backward=False),
    "float8": Variant(float8="tensorwise"),
    "float8-rows": Variant(float8="rowwise"),
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
        adam: dict[str, Any] = {"lr": 1e-4, "weight_decay": 1e-2}
        params = self.module.parameters()
        self.optimizer: torch.optim.Optimizer
        if variant.own_adamw:
            self.optimizer = AdamW(params, **adam)
        else:
            self.optimizer = torch.optim.AdamW(params, fused=True, capturable=True, **adam)
        if variant.in_backward:
            self.module.update_in_backward(self.optimizer)
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
        loss.backward()
        self.optimizer.step()
        return loss.detach().clone()


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Our attention."""
    return flash_attention(query, key, value, causal=True, layout="bhsd")


def measure(name: str, options: argparse.Namespace, *, profiled: bool) -> dict[str, Any]:
    """One round of a variant: losses, blocks of steps in ms, peak memory, and a kernel table."""
    torch._dynamo.reset()
    begin = time.perf_counter()
    with (
        torch.cuda.stream(torch.cuda.Stream(priority=VARIANTS[name].priority)),
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
    parser.add_argument("--profiled", default="today,carried,all")
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
