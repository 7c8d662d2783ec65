"""PowerSGD as a comm hook of ``ddp_lite.BucketedDDP``, to copy and change.

::

    torchrun --nproc-per-node 2 examples/power_sgd.py

It trains the same small model with exact gradients and with PowerSGD, and prints both losses.
"""

from __future__ import annotations

import math
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lite import Bucket, BucketedDDP
from ddp_lite.reduce import Waitable
from ddp_lite.wire import Chain


class PowerSGD:
    """Rank-r compression with error feedback (Vogels, Karimireddy, Jaggi 2019, Algorithm 1).

    Every gradient of at least two dimensions is a matrix M (rows × the rest) and travels as
    P = M·Q and Q = Mᵀ·P with r columns; the part of M that P·Qᵀ misses is added to the next step's
    M. Smaller gradients, and matrices that r columns would not compress, travel whole. Lossy:
    convergence has to be checked. Keep one instance per wrapper, which must not re-bucket.

    Args:
        rank: number of columns r.
        seed: of the first Q, the same on all ranks.

    Attributes:
        settings: compared over the ranks by ``BucketedDDP``.

    Raises:
        ValueError: ``rank`` is not a positive integer.
    """

    def __init__(self, rank: int = 2, *, seed: int = 0) -> None:
        if not isinstance(rank, int) or rank < 1:
            raise ValueError(f"rank must be an integer of at least 1, but got {rank!r}. Use 2 or 4")
        self._rank = rank
        self._seed = seed
        self.settings = f"rank {rank}, seed {seed}"
        self._errors: dict[int, Tensor] = {}
        self._queries: dict[int, list[Tensor]] = {}

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts replacing ``flat`` by the compressed average."""
        group = bucket.process_group
        error = self._errors.setdefault(bucket.index, torch.zeros_like(flat))
        matrices, rest = self._split(flat, bucket)
        _, unsent_rest = self._split(error, bucket)
        queries = self._queries.setdefault(bucket.index, self._first_queries(matrices))
        products: list[Tensor] = []
        whole: list[Tensor] = []

        def average(tensors: list[Tensor]) -> dist.Work | None:
            """One all-reduce for all of them, in a tensor that is copied back when it has ended."""
            packed.append(torch.cat([t.reshape(-1) for t in tensors]).div_(group.size()))
            return dist.all_reduce(packed[-1], group=group, async_op=True)

        packed: list[Tensor] = []

        def unpack(tensors: list[Tensor]) -> None:
            pieces = packed.pop().split([t.numel() for t in tensors])
            for tensor, piece in zip(tensors, pieces, strict=True):
                tensor.copy_(piece.view(tensor.shape))

        def send_products() -> Waitable | None:
            flat.add_(error)  # M, the gradient and the part that was not sent before
            products.extend(m @ q for m, q in zip(matrices, queries, strict=True))
            whole.extend(piece.clone() for piece in rest)
            return average([*products, *whole])

        def send_queries() -> Waitable | None:
            unpack([*products, *whole])
            bases = [torch.linalg.qr(p).Q for p in products]
            products[:] = bases
            queries[:] = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
            return average(queries) if queries else None

        def decompress() -> None:
            if queries:
                unpack(queries)
            error.copy_(flat)
            for matrix, basis, query in zip(matrices, products, queries, strict=True):
                torch.mm(basis, query.T, out=matrix)
            error.sub_(flat)  # M - P·Qᵀ
            for piece, averaged, unsent in zip(rest, whole, unsent_rest, strict=True):
                piece.copy_(averaged)
                unsent.zero_()

        stages = [send_products, send_queries, decompress]
        used = [flat, error, *queries]
        return Chain(stages, used, bucket.device)

    def _split(self, flat: Tensor, bucket: Bucket) -> tuple[list[Tensor], list[Tensor]]:
        """Views of ``flat``: matrices to compress, (rows, columns), and pieces sent whole."""
        matrices, rest = [], []
        for parameter, span in zip(bucket.parameters, bucket.slices, strict=True):
            rows = parameter.shape[0] if parameter.ndim >= 2 else 1
            columns = parameter.numel() // rows
            if self._rank * (rows + columns) < parameter.numel():
                matrices.append(flat[span].view(rows, columns))
            else:
                rest.append(flat[span])
        return matrices, rest

    def _first_queries(self, matrices: list[Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        return [
            torch.randn(m.shape[1], self._rank, generator=generator, dtype=torch.float64).to(m)
            / math.sqrt(m.shape[1])
            for m in matrices
        ]


def train(hook: PowerSGD | None, steps: int = 250) -> float:
    """Learns a linear map from this rank's own batches; returns the last loss."""
    teacher = nn.Linear(32, 16, bias=False).requires_grad_(False)
    teacher.weight.copy_(torch.randn(16, 32, generator=torch.Generator().manual_seed(5)) / 6)
    torch.manual_seed(1)
    student = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    wrapped = BucketedDDP(student, comm_hook=hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    batches = torch.Generator().manual_seed(dist.get_rank())
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(16, 32, generator=batches)
        optimizer.zero_grad()
        loss = (wrapped(x) - teacher(x)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    """Trains with and without compression."""
    dist.init_process_group("gloo")
    exact, compressed = train(None), train(PowerSGD(1))
    if dist.get_rank() == 0:
        print(f"loss with exact gradients {exact:.4f}, with PowerSGD {compressed:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun, or for --help
        sys.exit(__doc__)
    main()
