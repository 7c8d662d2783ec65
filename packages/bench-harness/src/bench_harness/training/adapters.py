"""Wrappers and optimizers where there is more to do than to call their constructor.

Each function takes the constructor, what it is put around, and arguments. Those that it names are
this package's own; the others are passed on. :mod:`bench_harness.training.constructors` says which
short name means which function.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from bench_harness.core import CaseSkipped
from bench_harness.training.constructors import Call, construct

if TYPE_CHECKING:
    from torch import Tensor


def averaging(cls: Callable[..., Any], module: nn.Module, **arguments: Any) -> Any:
    """A wrapper of ddp-lite that counts its collectives."""
    wrapped = cls(module, **arguments)
    wrapped.stats()  # kept from here on
    return wrapped


def bucketed(
    cls: Callable[..., Any],
    module: nn.Module,
    *,
    comm_hook: Literal["collectives", "auto", "peer-copy"] = "collectives",
    **arguments: Any,
) -> Any:
    """:class:`ddp_lite.BucketedDDP`.

    Args:
        comm_hook: "peer-copy" is :class:`ddp_lite.peer.PeerCopyAverage`. Beside ``copy``, each
            bucket is packed into a flat tensor, whose copies are few. "auto" is ddp-lite's own
            choice.

    Raises:
        CaseSkipped: these GPUs cannot copy to each other.
    """
    hook: Any = comm_hook
    if comm_hook == "peer-copy":
        if arguments.get("wire_dtype") is not None:
            raise CaseSkipped(
                f"wire_dtype must be left out beside comm_hook=peer-copy, but got "
                f"{arguments['wire_dtype']}. Leave out one of them."
            )
        from ddp_lite.peer import PeerCopyAverage

        # Each wrapper has a hook of its own, which keeps state; making it is collective.
        peer = PeerCopyAverage(_peer_memory(dist.group.WORLD))
        hook = (lambda flat, bucket: peer.copies.average([flat])) if arguments.get("copy") else peer
    return averaging(cls, module, comm_hook=hook, **arguments)


def torch_ddp(
    cls: Callable[..., Any], module: nn.Module, *, bucket_cap_mb: float = 25, **arguments: Any
) -> Any:
    """torch's DistributedDataParallel; its signature has no default for the size of buckets."""
    around = cls(module, bucket_cap_mb=bucket_cap_mb, **arguments)
    if dist.get_backend() == "fake":  # its all-reduce returns what DDP does not understand
        from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

        around.register_comm_hook(None, noop_hook)
    return around


def fsdp2(
    fully_shard: Callable[..., Any],
    module: nn.Module,
    *,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    prefetch: int = 0,
    symmetric_memory: bool = False,
) -> nn.Module:
    """Shards every block, then the rest, as FSDP2 is meant to be applied.

    Args:
        param_dtype: dtype in which parameters are gathered and used; None keeps theirs.
        reduce_dtype: dtype in which gradients are reduced; None takes ``param_dtype``.
        prefetch: how many blocks are gathered ahead on request, in forward and in backward; 0
            leaves it to FSDP2, which gathers one ahead in backward.
        symmetric_memory: gathers go through NCCL's symmetric memory, over a group whose policy is
            zero thread blocks, so that on one host copy engines carry them.

    Raises:
        CaseSkipped: ``symmetric_memory`` without NCCL, or with a torch that does not offer it.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

    if symmetric_memory and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise CaseSkipped(
            "symmetric_memory must have a torch whose FSDP2 has set_symm_mem_for_comm, but got "
            f"torch {torch.__version__}. Install a newer one."
        )
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    device = next(module.parameters()).device.type
    if symmetric_memory:
        mesh = DeviceMesh.from_group(nccl_group(zero_ctas=True), device)
    else:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
    # Blocks take their inputs as they are. FSDP2 would cast the fp32 tables of rotary positions in
    # forward, but not when a checkpoint around the block recomputes it (seen under torch 2.11).
    inner = dataclasses.replace(policy, cast_forward_inputs=False)
    blocks: Any = blocks_of(module)
    for part in [*blocks, module]:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy if part is module else inner,
        )
    if symmetric_memory:
        for part in [*blocks, module]:
            part.set_symm_mem_for_comm()
    if prefetch:
        for position, block in enumerate(blocks):
            before = blocks[max(0, position - prefetch) : position]
            block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 1 + prefetch])
            block.set_modules_to_backward_prefetch(before[::-1])
    return module


def fully_sharded(
    cls: Callable[..., Any],
    module: nn.Module,
    *,
    replicas: int = 1,
    nccl_max_ctas: int | None = None,
    communication: Literal["peer-copy"] | None = None,
    **arguments: Any,
) -> Any:
    """:class:`shard_optim.FullyShardedDataParallel`.

    Args:
        replicas: how many groups of ranks hold all shards each; more than 1 makes a mesh of two
            levels, whose gradients are also averaged across the groups.
        nccl_max_ctas: at most so many thread blocks for a NCCL kernel, of a group of its own.
        communication: "peer-copy" is :class:`ddp_lite.peer.PeerCopies`.

    Raises:
        CaseSkipped: ``replicas`` does not divide the ranks, the group is not NCCL's, or these GPUs
            cannot copy to each other.
    """
    group: Any = None
    if nccl_max_ctas is not None:
        group = nccl_group(max_ctas=nccl_max_ctas)
    if replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        world_size = dist.get_world_size()
        if world_size % replicas:
            raise CaseSkipped(
                f"replicas must divide the world size {world_size}, but got {replicas}. Correct "
                "the number."
            )
        device = next(module.parameters()).device.type
        group = init_device_mesh(device, (replicas, world_size // replicas))
    copies = peer_copies(group) if communication == "peer-copy" else None
    wrapped = cls(module, process_group=group, communication=copies, **arguments)
    if copies is not None:
        wrapped.peer_watch = copies.memory.watch  # names lost ranks after a recorded step
    return wrapped


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of a model, each of which is compiled or sharded on its own.

    They are its list named ``blocks``, or else the list of modules with the most parameters.

    Raises:
        ValueError: the model has none.
    """
    blocks = getattr(module, "blocks", None)
    if not isinstance(blocks, nn.ModuleList):
        lists = [each for each in module.modules() if isinstance(each, nn.ModuleList) and len(each)]
        if not lists:
            raise ValueError(
                f"the model must have its blocks in an nn.ModuleList, but got "
                f'{type(module).__name__}, which has none. Set compile = "model" or "off".'
            )
        blocks = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()))
    return list(blocks)


_NCCL_GROUPS: dict[tuple[Any, ...], dist.ProcessGroup] = {}


def nccl_group(*, max_ctas: int | None = None, zero_ctas: bool = False) -> dist.ProcessGroup:
    """A group with these NCCL settings, made once: a communicator is never given back.

    Raises:
        CaseSkipped: the ranks talk over something else.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) != "nccl":
        raise CaseSkipped(
            f"NCCL settings must have a group of NCCL, but got {dist.get_backend(world)}. Remove "
            "them."
        )
    key = (world, max_ctas, zero_ctas)
    if key not in _NCCL_GROUPS:
        options = dist.ProcessGroupNCCL.Options()
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        if zero_ctas:
            config: Any = options.config
            config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        made = dist.new_group(pg_options=options)
        assert isinstance(made, dist.ProcessGroup), "every rank is in the group"
        _NCCL_GROUPS[key] = made
    return _NCCL_GROUPS[key]


def peer_copies(group: Any = None) -> Any:
    """Collectives by copies among a group, or all ranks, for ``communication=``; collective.

    Raises:
        CaseSkipped: these GPUs cannot copy to each other.
    """
    from ddp_lite.peer import PeerCopies

    return PeerCopies(_peer_memory(group or dist.group.WORLD))


def _peer_memory(group: Any) -> Any:
    """Memory that the GPUs of a group share; collective."""
    from ddp_lite.peer import PeerMemory, choose_communication

    choice = choose_communication(group, 2**30)
    if choice.name != "peer-copy":
        raise CaseSkipped(
            f"peer-copy must have GPUs of one host with peer access, but {choice.reason}. "
            f"Leave peer-copy out."
        )
    return PeerMemory(group)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters that an optimizer is made for.

    Attributes:
        module: the model, or the wrapper that holds shards.
        matrices: of :func:`matrix_names`.
        capturable: whether AdamW's step may be recorded in a CUDA graph.
    """

    module: nn.Module
    device: torch.device
    matrices: set[str] = field(default_factory=set)
    capturable: bool = False

    def settings(self, lr: float, fused: bool | None) -> dict[str, Any]:
        """Arguments of torch's optimizers; one kernel for all parameters by default on CUDA."""
        return {"lr": lr, "fused": self.device.type == "cuda" if fused is None else fused}


def matrix_names(blocks: Iterable[nn.Module], module: nn.Module) -> set[str]:
    """Names of the matrices in a model's blocks, which Muon updates; ask before sharding."""
    inside = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2}
    return {name for name, p in module.named_parameters() if id(p) in inside}


def state_bytes(optimizer: Call, module: nn.Module, matrices: set[str]) -> int:
    """Bytes of the state that an optimizer keeps for a whole model with fp32 state.

    An imported one is taken to keep two moments, as AdamW does.
    """
    size = 2 if optimizer.name == "shard-optim-adamw" else 4

    def moments(name: str) -> int:
        if optimizer.name == "sgd":
            return 1 if optimizer.get("momentum") else 0
        return 1 if optimizer.name == "muon" and name in matrices else 2

    return sum(size * moments(name) * p.numel() for name, p in module.named_parameters())


def make_optimizer(optimizer: Call, over: Parameters) -> Any:
    """An optimizer over the parameters of a model, or over the shards of a sharded one."""
    return construct(
        "optimizer", optimizer, over.module.parameters() if ":" in optimizer.name else over
    )


def plain(
    cls: type[torch.optim.Optimizer],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
    update_in_backward: bool = False,
    **arguments: Any,
) -> Any:
    """One of torch's optimizers.

    Args:
        fused: one kernel for all parameters; None means on CUDA only.
        offload_state, update_in_backward: as of :func:`without_flags`.
    """
    arguments |= over.settings(lr, fused) | ({"capturable": True} if over.capturable else {})
    how = {"offload_state": offload_state, "update_in_backward": update_in_backward}
    return without_flags(cls, over, **how, **arguments)


def without_flags(
    cls: Any,
    over: Parameters,
    *,
    lr: float = 1e-4,
    offload_state: bool = False,
    update_in_backward: bool = False,
    **arguments: Any,
) -> Any:
    """An optimizer without flags that choose an implementation, as :class:`shard_optim.AdamW`.

    Args:
        offload_state: the state rests in host memory, by :class:`shard_optim.ShardedOptimizer`.
        update_in_backward: of a ``fully-sharded`` model, each unit as its gradients are averaged.
    """
    if offload_state:
        from shard_optim import ShardedOptimizer

        return ShardedOptimizer(
            over.module.parameters(), cls, lr=lr, offload_state=True, **arguments
        )
    optimizer = cls(over.module.parameters(), lr=lr, **arguments)
    if update_in_backward:
        cast(Any, over.module).update_in_backward(optimizer)
    return optimizer


def muon(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
) -> MuonAndAdamW:
    """:class:`torch.optim.Muon` for the matrices of the blocks, AdamW for everything else.

    Under ``fully-sharded``, :class:`shard_optim.ShardedOptimizer` updates each matrix whole.
    """
    return MuonAndAdamW(over.module, over.matrices, **over.settings(lr, fused))


def zero_redundancy(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    offload_state: bool = False,
    **arguments: Any,
) -> Any:
    """AdamW in :class:`torch.distributed.optim.ZeroRedundancyOptimizer`."""
    arguments |= over.settings(lr, fused)
    return cls(over.module.parameters(), torch.optim.AdamW, **arguments)


def sharded(
    cls: Callable[..., Any],
    over: Parameters,
    *,
    lr: float = 1e-4,
    fused: bool | None = None,
    communication: Literal["peer-copy"] | None = None,
    **arguments: Any,
) -> Any:
    """AdamW in :class:`shard_optim.ShardedOptimizer`.

    Args:
        communication: "peer-copy" is :class:`ddp_lite.peer.PeerCopies`.
    """
    arguments |= over.settings(lr, fused)
    copies = peer_copies() if communication == "peer-copy" else None
    return cls(over.module.named_parameters(), torch.optim.AdamW, communication=copies, **arguments)


class MuonAndAdamW:
    """Muon for the matrices of a model's blocks, and AdamW for everything else.

    Args:
        module: the model. If it is sharded, each matrix is updated whole, by the rank that owns it.
        matrices: names of those that Muon updates.
        lr: learning rate of both; Muon's is adjusted to updates of AdamW's size.
        fused: AdamW in one kernel.
    """

    def __init__(self, module: nn.Module, matrices: set[str], *, lr: float, fused: bool) -> None:
        import shard_optim

        named = dict(module.named_parameters())
        inside = [p for name, p in named.items() if name in matrices]
        how: dict[str, Any] = {"lr": lr, "adjust_lr_fn": "match_rms_adamw"}
        muon: torch.optim.Optimizer
        if isinstance(module, shard_optim.FullyShardedDataParallel):
            muon = shard_optim.ShardedOptimizer(inside, torch.optim.Muon, partition="whole", **how)
        else:
            muon = torch.optim.Muon(inside, **how)
        others = [p for name, p in named.items() if name not in matrices]
        self._both = (muon, torch.optim.AdamW(others, lr=lr, fused=fused))

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of both by parameter."""
        return {key: value for each in self._both for key, value in each.state.items()}

    def step(self) -> None:
        """Updates all parameters."""
        for each in self._both:
            each.step()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drops or clears all gradients."""
        for each in self._both:
            each.zero_grad(set_to_none=set_to_none)
