"""Counts the versions of each kernel that random problems of one kind would compile.

Batch, heads, aligned strides, scale and window size never choose another version of a kernel.
These properties of lengths do, and only of the Hopper tier's main kernels:

- whole tiles: whether the number of keys is a multiple of the backward kernel's tile of 128 keys
  (64 for the tiles of head_dims up to 256), so that the last tile needs no mask;
- a shifted diagonal: whether a bottom-right mask is another than the top-left one, because there
  are more or fewer keys than queries, or in a packed batch because cu_seqlens are two tensors;
- a halved diagonal tile: whether, in the forward kernel's tiles for up to 1,024 queries of
  head_dim 64, the first of two consumers sees at most half of its last tile of keys;
- few queries: the forward kernel has other tiles for up to 1,024 queries of head_dim 64;
- few keys: under a causal mask, up to 1,024 keys of head_dim 128, a tile of dQ to which one program
  alone adds is stored (see :mod:`flashattn_triton.hopper.backward`).

Run as a program, in a process where TRITON_INTERPRET is not set: it prints a JSON object with the
versions of each kernel, by tier. The launchers themselves are called, with tensors on the "meta"
device, as compile_kernels.py and compile_hopper.py do; the compiler is replaced by a function that
notes what it is asked for, so that this takes no longer than starting Triton.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
import triton.compiler
from launch_kernels import hopper_backward, hopper_forward, triton_backward, triton_forward
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from flashattn_triton.configs import TABLE
from flashattn_triton.hopper import backward, forward
from flashattn_triton.launch import Launch
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import Problem, new_problem

HEAD_DIM = 64
TILING = TABLE[220, HEAD_DIM, 2]
asked_for: Counter[str] = Counter()


class AbsentHopper:
    """What launchers ask of a driver before they compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> None:
        """The index of "meta" tensors' device."""

    def get_current_stream(self, device: None) -> int:
        return 0


def note(source: Any, *rest: Any, **options: Any) -> SimpleNamespace:
    """Stands for the compiler, which Triton calls for every version that it has not."""
    asked_for[source.fn.__name__] += 1
    return SimpleNamespace()


def portable(tensors: list[torch.Tensor], grad_lse: torch.Tensor | None, options: Any) -> None:
    query, key, value, grad_out, lse = tensors
    triton_forward(query, key, value, options, TILING.forward)
    triton_backward(query, key, value, grad_out, lse, grad_out, grad_lse, options, TILING)


def hopper(tensors: list[torch.Tensor], grad_lse: torch.Tensor | None, options: Any) -> None:
    query, key, value, grad_out, lse = tensors
    hopper_forward(query, key, value, options)
    hopper_backward(query, key, value, torch.empty_like(query), lse, grad_out, grad_lse, options)


def random_problem(
    generator: random.Random, heads_per_kv: int, *, lse_gradient: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None, Problem]:
    """Batch, heads, lengths, order and gaps of memory, scale and window differ, and nothing else.

    Strides are multiples of 16 elements. Of Hopper's configurations, more than 2,048 queries and
    a window with a left edge have one, whatever else there is.
    """
    batch, kv_heads = generator.randint(1, 4), generator.randint(1, 4)
    gap = generator.choice([0, 16, 64])
    heads_first = generator.random() < 0.5

    def empty(heads: int, rows: int) -> torch.Tensor:
        shape = (heads, rows) if heads_first else (rows, heads)
        x = torch.empty(batch, *shape, HEAD_DIM + gap, dtype=torch.bfloat16, device="meta")
        return x[..., :HEAD_DIM] if heads_first else x[..., :HEAD_DIM].transpose(1, 2)

    n_queries, n_keys = generator.randint(2049, 9000), generator.randint(2, 9000)
    n_keys += n_keys % 128 == 0  # whole tiles need no mask, which is another kernel
    n_keys += n_keys == n_queries  # as is a diagonal that starts in the first tile's corner
    query, grad_out = (empty(kv_heads * heads_per_kv, n_queries) for _ in range(2))
    key, value = (empty(kv_heads, n_keys) for _ in range(2))
    lse = torch.empty(query.shape[:3], device="meta")
    options = new_problem(
        head_dim=HEAD_DIM,
        causal="bottom-right",
        scale=generator.choice([0.125, 1.0, generator.random() + 0.01]),
        window=(generator.choice([0, 1, 16, generator.randint(0, 9000)]), None),
    )
    return [query, key, value, grad_out, lse], lse if lse_gradient else None, options


def random_hopper_problem(
    generator: random.Random, head_dims: tuple[int, int], *, packed: bool
) -> None:
    """Both passes of a causal problem of any lengths from 1 to 9,000, without a window."""
    batch = 1 if packed else generator.randint(1, 4)
    kv_heads, heads_per_kv = generator.randint(1, 4), generator.randint(1, 3)
    n_queries, n_keys = generator.randint(1, 9000), generator.randint(1, 9000)
    if generator.random() < 0.3:
        n_queries = generator.randint(1, 1024)
    if generator.random() < 0.3:
        n_keys = 128 * -(-n_keys // 128)
    if generator.random() < 0.3:
        n_queries = n_keys

    def empty(heads: int, rows: int, width: int) -> torch.Tensor:
        return torch.empty(batch, heads, rows, width, dtype=torch.bfloat16, device="meta")

    query, grad_out = (empty(kv_heads * heads_per_kv, n_queries, width) for width in head_dims)
    key, value = (empty(kv_heads, n_keys, width) for width in head_dims)
    given, longest = NOTHING, (0, 0)
    if packed:  # starts are on the host, because all "meta" tensors have one address
        starts = torch.zeros(generator.randint(2, 40), dtype=torch.int32)
        other = starts if n_queries == n_keys else starts.clone()
        given, longest = Given(cu_seqlens_q=starts, cu_seqlens_k=other), (n_queries, n_keys)
    causal: Literal[True, "bottom-right"] = generator.choice([True, "bottom-right"])
    scale = generator.random() + 0.01
    options = new_problem(head_dim=head_dims[0], longest=longest, causal=causal, scale=scale)
    lse = torch.empty(query.shape[:3], device="meta")
    hopper_forward(query, key, value, options, given)
    hopper_backward(query, key, value, grad_out, lse, grad_out, None, options, given)


def count_hopper(head_dims: tuple[int, int], *, packed: bool) -> dict[str, int]:
    """Versions of each kernel after a hundred problems, but for those compiled before."""
    asked_for.clear()
    generator = random.Random(0)
    for _ in range(100):
        random_hopper_problem(generator, head_dims, packed=packed)
    return dict(asked_for)


def count(run: Callable[..., None], heads_per_kv: int, *, lse_gradient: bool) -> dict[str, int]:
    """Versions of each kernel after forty problems."""
    asked_for.clear()
    generator = random.Random(0)
    for _ in range(40):
        run(*random_problem(generator, heads_per_kv, lse_gradient=lse_gradient))
    return dict(asked_for)


def main() -> None:
    driver.set_active(AbsentHopper())
    triton.compiler.compile = note
    forward.multiprocessors = lambda device: 132
    forward.current_device = backward.current_device = lambda: None
    Launch.__call__ = lambda self, addresses: self.compile(addresses)
    counts = {
        "portable, as many key heads": count(portable, 1, lse_gradient=False),
        "portable, grouped heads": count(portable, 3, lse_gradient=False),
        "portable, gradient of the logsumexp": count(portable, 1, lse_gradient=True),
        "hopper": count(hopper, 2, lse_gradient=False),
        "hopper, gradient of the logsumexp": count(hopper, 2, lse_gradient=True),
        **{
            f"hopper {'packed' if packed else 'dense'} {head_dim}/{value_dim}": count_hopper(
                (head_dim, value_dim), packed=packed
            )
            for packed in (False, True)
            for head_dim, value_dim in ((64, 64), (128, 128), (192, 128), (256, 256))
        },
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
