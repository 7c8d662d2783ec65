"""Comm hooks: other ways to average a bucket, chosen with ``BucketedDDP(..., comm_hook=...)``.

A hook is called as ``hook(flat, bucket)`` when a bucket is complete. It reduces ``flat``, one
dimension, length ``bucket.padded_numel``, in place and returns something with ``wait()``. Hooks
run in the same order on every rank.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.buckets import Bucket
from ddp_lite.collectives import Averager, Chain, SideStream, Waitable, require_floating
from ddp_lite.peer.copies import PeerCopies


class CompressTo:
    """Averages in another dtype, the smallest example of a hook.

    Args:
        dtype: what travels, such as ``torch.bfloat16``. Unlike ``wire_dtype`` this keeps the
            flat gradients in their own dtype and sums in the backend's way.

    Raises:
        ValueError: ``dtype`` is not floating-point.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        require_floating(dtype, "dtype")
        self._dtype = dtype
        self._side = SideStream()
        self.settings = str(dtype)

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts averaging ``flat`` in place."""
        average = Averager(bucket.process_group, bucket.device)
        small = flat.to(self._dtype)

        def send() -> Waitable:
            return average([small])

        def receive() -> None:
            flat.copy_(small)

        return Chain([send, receive], [flat, small], bucket.device, self._side.on(bucket.device))


class HierarchicalAverage:
    """Averages over a two-dimensional mesh: inside each node, across nodes, inside again.

    Only 1/(ranks per node) of the gradients crosses between nodes: reduce-scatter inside the
    node, all-reduce of each shard across nodes, all-gather inside the node.

    Args:
        mesh: shape (nodes, ranks per node), covering exactly the wrapper's process group.
        inside: copies between the GPUs of this node, made with the mesh's second group, in place
            of that group's collectives.

    Raises:
        ValueError: the mesh does not have two dimensions, or ``inside`` is for other ranks.
    """

    def __init__(self, mesh: DeviceMesh, *, inside: PeerCopies | None = None) -> None:
        if mesh.ndim != 2:
            raise ValueError(
                f"the mesh must have two dimensions (nodes, ranks per node), but got {mesh.ndim}. "
                "Build it with init_device_mesh(device, (nodes, ranks_per_node))"
            )
        self._across, self._inside = mesh.get_group(0), mesh.get_group(1)
        self._size = mesh.size()
        self._side = SideStream()
        self._copies = inside
        if inside is not None and inside.memory.group.group_name != self._inside.group_name:
            raise ValueError(
                "inside must be made with the mesh's second group, mesh.get_group(1), but got "
                f"copies of the group {inside.memory.group.group_name}. Build "
                "PeerMemory(mesh.get_group(1))"
            )
        self.settings = f"copies inside {inside is not None}"

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts averaging ``flat`` in place."""
        if bucket.process_group.size() != self._size:
            raise ValueError(
                f"the mesh must cover the wrapper's process group, but it has {self._size} ranks "
                f"and the group {bucket.process_group.size()}"
            )
        shard = flat.new_empty(flat.numel() // self._inside.size())

        copies = self._copies
        # Copies average inside the node; NCCL sums.
        divisor = self._size if copies is None else self._across.size()

        def scatter_inside() -> Waitable:
            if copies is not None:
                return copies.reduce_scatter([shard], [flat])
            work: Waitable | None = dist.reduce_scatter_tensor(
                shard, flat, group=self._inside, async_op=True
            )
            assert work is not None
            return work

        def reduce_across() -> Waitable:
            shard.mul_(1.0 / divisor)
            work: Waitable | None = dist.all_reduce(shard, group=self._across, async_op=True)
            assert work is not None
            return work

        def gather_inside() -> Waitable:
            if copies is not None:
                return copies.all_gather([flat], [shard])
            work: Waitable | None = dist.all_gather_into_tensor(
                flat, shard, group=self._inside, async_op=True
            )
            assert work is not None
            return work

        stages = [scatter_inside, reduce_across, gather_inside]
        return Chain(stages, [flat, shard], bucket.device, self._side.on(bucket.device))


class PowerSGD:
    """Rank-r compression with error feedback (Vogels, Karimireddy, Jaggi 2019, Algorithm 1).

    Every gradient of at least two dimensions is a matrix M (rows × the rest) and travels as
    P = M·Q and Q = Mᵀ·P with r columns; what P·Qᵀ misses is added to the next step's M. Smaller
    gradients, and matrices that r columns would not compress, travel whole. Lossy: convergence
    has to be checked. Keep one instance per wrapper, which must not re-bucket.

    Args:
        rank: number of columns r.
        seed: of the first Q, the same on all ranks.

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
        self._side = SideStream()

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts replacing ``flat`` by the compressed average."""
        average = Averager(bucket.process_group, bucket.device)
        error = self._errors.setdefault(bucket.index, torch.zeros_like(flat))
        matrices, rest = self._split(flat, bucket)
        _, unsent_rest = self._split(error, bucket)
        queries = self._queries.setdefault(bucket.index, self._first_queries(matrices))
        products: list[Tensor] = []
        whole: list[Tensor] = []

        def send_products() -> Waitable:
            flat.add_(error)  # M, the gradient and what was not sent before
            products.extend(m @ q for m, q in zip(matrices, queries, strict=True))
            whole.extend(piece.clone() for piece in rest)
            return average([*products, *whole])

        def send_queries() -> Waitable | None:
            bases = [torch.linalg.qr(p).Q for p in products]
            products[:] = bases
            queries[:] = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
            return average(queries) if queries else None

        def decompress() -> None:
            error.copy_(flat)
            for matrix, basis, query in zip(matrices, products, queries, strict=True):
                torch.mm(basis, query.T, out=matrix)
            error.sub_(flat)  # M - P·Qᵀ
            for piece, averaged, unsent in zip(rest, whole, unsent_rest, strict=True):
                piece.copy_(averaged)
                unsent.zero_()

        stages = [send_products, send_queries, decompress]
        used = [flat, error, *queries]
        return Chain(stages, used, bucket.device, self._side.on(bucket.device))

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
