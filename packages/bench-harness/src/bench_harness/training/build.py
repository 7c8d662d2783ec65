"""From the settings of a variant to a training that can take steps."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from basics_model import CapturedStep
from bench_harness.core import CaseSkipped
from bench_harness.subject import workload_of
from bench_harness.training import settings as of
from bench_harness.training.elementwise import use_liger
from bench_harness.training.optimizers import dtype_of, make_optimizer, matrix_names, state_bytes
from bench_harness.training.peer import peer_copies, peer_hook
from bench_harness.workload import attention_by_name, imported

if TYPE_CHECKING:
    from torch import Tensor

    from bench_harness.workload import Workload


@dataclass
class Training:
    """A variant that has been built and can take steps.

    Attributes:
        workload: the model, this rank's batch and its precision.
        module: what forward calls: the model, or the wrapper around it.
        numel, gradient_bytes, state_bytes: of the whole model, counted before any parameter is
            sharded.
        finish: makes averaged gradients usable; called after backward.
        close: removes hooks and lets go of what the wrapper holds.
        after_replay: called after each replay of a recorded step, so that lost ranks are named.
        captured: the recorded step, which :meth:`step` replays.
    """

    workload: Workload
    module: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    numel: int
    gradient_bytes: int
    state_bytes: int
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    after_replay: Callable[[], object] | None = None
    captured: CapturedStep[Tensor] | None = None

    def forward(self) -> Tensor:
        """The loss of this rank's batch, with all gradients reset before."""
        self.optimizer.zero_grad(set_to_none=True)
        return self.workload.loss(self.module)

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over ranks."""
        self.workload.backward(loss)
        self.finish()

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()

    def step(self) -> Tensor:
        """A whole training step; returns its loss, detached and still on the device.

        Of a recorded step, the loss is overwritten by the next one.
        """
        return self._step() if self.captured is None else self.captured()

    def _step(self) -> Tensor:
        loss = self.forward()
        self.backward(loss)
        self.update()
        return loss.detach()

    def capture(self) -> None:
        """Records the step as a CUDA graph; takes none. A step must have been taken before."""
        self.captured = CapturedStep(self._step, after_replay=self.after_replay)

    def wait(self) -> None:
        """Waits until the optimizer has updated all parameters."""
        wait = getattr(self.optimizer, "wait", None)
        if wait is not None:
            wait()

    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by name, whole, on every rank. Collective for sharded ones."""
        self.wait()
        gather = getattr(self.module, "full_parameters", None)
        if gather is not None:
            whole: dict[str, Tensor] = gather()
            return whole
        named = self.workload.module.named_parameters()
        return {name: _whole(parameter.detach()) for name, parameter in named}

    def stats(self) -> dict[str, int | None]:
        """Collectives and bytes of the last step, as a wrapper of ddp-lite counts them."""
        stats = getattr(self.module, "stats", None)
        found = stats() if callable(stats) else None
        return {
            "collectives": getattr(found, "collectives", None),
            "in_backward": getattr(found, "started_in_backward", None),
            "buckets": getattr(found, "reductions", None)
            or len(getattr(self.optimizer, "buckets", ()))
            or None,
            "payload_bytes": getattr(found, "bytes", None),
        }


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


@contextmanager
def training(
    variant: of.Settings, config: Mapping[str, Any], device: torch.device
) -> Iterator[Training]:
    """Builds a variant, from the same initial weights on every call, and frees it afterwards.

    Args:
        config: of the case: ``size`` and dimensions, ``batch`` and ``sequence``, or ``model`` and
            ``input`` of an imported module.

    Raises:
        CaseSkipped: the variant cannot run here; the text says why.
    """
    # What the variant before held is out of reach only now that its function has returned.
    gc.collect()
    if variant.cuda_graph and device.type != "cuda":
        raise CaseSkipped(
            f"cuda_graph must run on a CUDA device, but got {device.type}. Remove cuda_graph."
        )
    # A CUDA graph cannot be recorded on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()) if variant.cuda_graph else nullcontext():
        workload = _workload(variant, config, device)
        made = _wrapped(variant, workload)
        try:
            yield made
        finally:
            made.captured = None
            made.close()
            for parameter in workload.module.parameters():
                parameter.grad = None


def _workload(variant: of.Settings, config: Mapping[str, Any], device: torch.device) -> Workload:
    workload = workload_of(
        config,
        device,
        precision=variant.precision,
        seed=config.get("seed", 0),
        batch_seed=dist.get_rank() if dist.is_initialized() else 0,
        attention=attention_by_name(variant.attention),
        checkpoint_blocks=variant.checkpoint_blocks,
        keep_attention=variant.keep_attention,
        chunked_loss=variant.loss == "chunked",
    )
    if variant.elementwise == "liger":
        use_liger(workload.module)
    if variant.compile != "off":
        # Without a GPU nothing is worth generating code for.
        backend = config.get("backend") or ("inductor" if device.type == "cuda" else "aot_eager")
        for part in _blocks(workload.module) if variant.compile == "blocks" else [workload.module]:
            part.compile(backend=backend, dynamic=False)
    return workload


def _blocks(module: nn.Module) -> list[nn.Module]:
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


def _wrapped(variant: of.Settings, workload: Workload) -> Training:
    """Puts the wrapper around the model, and makes the optimizer."""
    wrapper, module, device = variant.wrapper, workload.module, workload.device
    matrices: set[str] = set()
    if isinstance(variant.optimizer, of.Muon):
        matrices = matrix_names(_blocks(module), module)
    whole = (
        workload.parameters(),
        sum(p.nbytes for p in module.parameters() if p.requires_grad),
        state_bytes(variant.optimizer, module, matrices),
    )
    if isinstance(wrapper, of.FSDP2):
        _shard(wrapper, module, device)
        optimizer = _optimizer(variant, module, device, matrices)
        return Training(workload, module, optimizer, *whole)
    if isinstance(wrapper, of.FullySharded):
        fully_sharded, copies = _fully_sharded(wrapper, module)
        return Training(
            workload,
            fully_sharded,
            _optimizer(variant, fully_sharded, device, matrices),
            *whole,
            fully_sharded.finish_gradient_synchronization,
            getattr(fully_sharded, "detach", lambda: None),
            None if copies is None else copies.memory.watch,
        )
    if isinstance(wrapper, of.TorchDDP):
        around = nn.parallel.DistributedDataParallel(
            module,
            bucket_cap_mb=wrapper.bucket_cap_mb,
            gradient_as_bucket_view=wrapper.gradient_as_bucket_view,
            static_graph=wrapper.static_graph,
        )
        if dist.get_backend() == "fake":  # its all-reduce returns what DDP does not understand
            from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

            around.register_comm_hook(None, noop_hook)
        optimizer = _optimizer(variant, module, device, matrices)
        return Training(workload, around, optimizer, *whole)
    if isinstance(wrapper, of.NoWrapper):
        optimizer = _optimizer(variant, module, device, matrices)
        if isinstance(variant.optimizer, of.Sharded) and variant.optimizer.overlap:
            optimizer.attach(module)
        return Training(workload, module, optimizer, *whole)
    if isinstance(wrapper, of.Imported):
        around = imported(wrapper.name, "wrapper")(module, **dict(wrapper.arguments))
        optimizer = _optimizer(variant, module, device, matrices)
        finish = getattr(around, "finish_gradient_synchronization", lambda: None)
        return Training(
            workload, around, optimizer, *whole, finish, getattr(around, "detach", lambda: None)
        )
    ours = _ddp_lite(wrapper, module)
    optimizer = _optimizer(variant, module, device, matrices)
    finish = ours.finish_gradient_synchronization
    return Training(workload, ours, optimizer, *whole, finish, ours.detach)


def _optimizer(
    variant: of.Settings, module: nn.Module, device: torch.device, matrices: set[str]
) -> Any:
    arguments: Any = variant.optimizer
    if not variant.wrapper.averages and isinstance(arguments, of.TorchOptimizer):
        # Updates from gradients that differ would make the ranks' weights differ, which ddp-lite
        # refuses. With a learning rate of 0 the same kernels leave all weights as they are.
        arguments = dataclasses.replace(arguments, lr=0.0)
    return make_optimizer(arguments, module, device, matrices, capturable=variant.cuda_graph)


def _ddp_lite(wrapper: of.Arguments, module: nn.Module) -> Any:
    import ddp_lite

    if not isinstance(wrapper, of.Bucketed):
        assert isinstance(wrapper, of.Naive)
        classes: dict[type[of.Arguments], Callable[..., ddp_lite.DataParallelBase]] = {
            of.Naive: ddp_lite.NaiveDDP,
            of.Flat: ddp_lite.FlatDDP,
            of.Overlap: ddp_lite.OverlapDDP,
        }
        simple = classes[type(wrapper)](module, missing_gradients=wrapper.missing_gradients)
        simple.stats()  # kept from here on
        return simple
    group = dist.group.WORLD
    if wrapper.nccl_high_priority or wrapper.nccl_max_ctas is not None:
        group = _nccl_group(wrapper.nccl_high_priority, wrapper.nccl_max_ctas)
    size, last = wrapper.bucket_size_mb, wrapper.last_bucket_size_mb
    wrapped = ddp_lite.BucketedDDP(
        module,
        None if size == "one" else size,
        last_bucket_size_mb=None if last == "same" else last,
        copy=wrapper.copy,
        wire_dtype=dtype_of(wrapper.wire_dtype),
        comm_hook=_comm_hook(wrapper, group),
        missing_gradients=wrapper.missing_gradients,
        process_group=group,
    )
    wrapped.stats()  # kept from here on
    return wrapped


def _comm_hook(wrapper: of.Bucketed, group: Any) -> Any:
    """A new hook for each wrapper, because some hooks keep state of one wrapper."""
    name = wrapper.comm_hook
    if name is None:
        return "collectives"
    if name == "auto":
        return "auto"
    if name == "peer-copy" and wrapper.wire_dtype is None:
        return peer_hook(wrapper, group)
    instead = {
        "peer-copy": "Leave out wire_dtype, or comm_hook",
        "compress-bf16": "Use wire_dtype = 'bf16'",
        "power-sgd": "Copy the hook of examples/power_sgd.py",
        "reduce-scatter": "Use the optimizer 'sharded' with reduce_gradients = true and without a "
        "wrapper",
    }
    raise CaseSkipped(
        f"comm_hook must be measurable, but got {name!r} (wire_dtype {wrapper.wire_dtype}), which "
        f"only earlier rows have. {instead[name]}."
    )


_NCCL_GROUPS: dict[tuple[dist.ProcessGroup, bool, int | None], dist.ProcessGroup] = {}


def _nccl_group(high_priority: bool, max_ctas: int | None) -> dist.ProcessGroup:
    """A group with these NCCL settings, made once: a communicator is never given back."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) != "nccl":
        raise CaseSkipped(
            f"NCCL settings must have a group of NCCL, but got {dist.get_backend(world)}. Remove "
            "them."
        )
    key = (world, high_priority, max_ctas)
    if key not in _NCCL_GROUPS:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
        if max_ctas is not None:
            options.config.max_ctas = max_ctas
        made = dist.new_group(pg_options=options)
        assert isinstance(made, dist.ProcessGroup), "every rank is in the group"
        _NCCL_GROUPS[key] = made
    return _NCCL_GROUPS[key]


def _shard(wrapper: of.FSDP2, module: nn.Module, device: torch.device) -> None:
    """Shards every block, then the rest, as FSDP2 is meant to be applied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(wrapper.param_dtype),
        reduce_dtype=dtype_of(wrapper.reduce_dtype),
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Blocks take their inputs as they are. FSDP2 would cast the fp32 tables of rotary positions in
    # forward, but not when a checkpoint around the block recomputes it (seen under torch 2.11).
    inner = dataclasses.replace(policy, cast_forward_inputs=False)
    for part in [*_blocks(module), module]:
        fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=wrapper.reshard_after_forward,
            mp_policy=policy if part is module else inner,
        )
    if wrapper.prefetch:
        blocks: Any = _blocks(module)  # of FSDP2's own class by now
        for position, block in enumerate(blocks):
            before = blocks[max(0, position - wrapper.prefetch) : position]
            block.set_modules_to_forward_prefetch(
                blocks[position + 1 : position + 1 + wrapper.prefetch]
            )
            block.set_modules_to_backward_prefetch(before[::-1])


def _fully_sharded(wrapper: of.FullySharded, module: nn.Module) -> tuple[Any, Any]:
    """The sharded module, and its collectives by copies between GPUs; None where it uses NCCL."""
    from shard_optim import FullyShardedDataParallel

    group: Any = None
    if wrapper.nccl_max_ctas is not None:
        group = _nccl_group(high_priority=False, max_ctas=wrapper.nccl_max_ctas)
    if wrapper.replicas > 1:
        from torch.distributed.device_mesh import init_device_mesh

        world_size = dist.get_world_size()
        if world_size % wrapper.replicas:
            raise CaseSkipped(
                f"replicas must divide the world size {world_size}, but got {wrapper.replicas}. "
                "Correct the number."
            )
        device = next(module.parameters()).device.type
        group = init_device_mesh(device, (wrapper.replicas, world_size // wrapper.replicas))
    copies = peer_copies(group) if wrapper.communication == "peer-copy" else None
    wrapped = FullyShardedDataParallel(
        module,
        process_group=group,
        reshard_after_forward=wrapper.reshard_after_forward,
        compute_dtype=dtype_of(wrapper.compute_dtype),
        reduce_dtype=dtype_of(wrapper.reduce_dtype),
        prefetch=wrapper.prefetch,
        communication=copies,
    )
    return wrapped, copies
