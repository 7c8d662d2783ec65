"""An optimizer whose state lives on 1/world_size of the ranks.

ZeRO stage 1 of Rajbhandari et al. 2020 (https://arxiv.org/abs/1910.02054), around any
``torch.optim.Optimizer`` class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_lite.ranks import resolve_group
from shard_optim.bucket_plan import Partition
from shard_optim.bucket_reduction import GradientReducer
from shard_optim.buckets import Bucket, ForwardWaits, Placement
from shard_optim.communication import (
    Communication,
    PeerCopy,
    check_first_step,
    check_gradient,
    resolve_communication,
)
from shard_optim.fully_sharded.own_shards import OwnShards
from shard_optim.fully_sharded.whole_matrix import WholeMatrices
from shard_optim.gradient_norm import check_clipping, clip_sharded_
from shard_optim.history import LateComparison
from shard_optim.kept_moments import by_value
from shard_optim.mesh import resolve_mesh
from shard_optim.offload import check_offload, offloaded
from shard_optim.optimizer_class import check_class, check_update, default_settings
from shard_optim.optimizer_state import OptimizerState
from shard_optim.origin import ORIGIN, check_loaded, describe, say_once, sharded_in, sharded_of
from shard_optim.parameter_groups import (
    all_params,
    as_groups,
    by_number,
    describe_groups,
    name_of,
    settings_in,
)
from shard_optim.place import check_layout
from shard_optim.shard_update import MASTER, LocalOptimizer, settings_of

Overlap = Literal["next-forward"]


class _Parts(defaultdict[Any, Any]):
    """State of this rank's parts, or of one of them, put together anew for every reader."""

    def clear(self, *_: Any, **__: Any) -> NoReturn:
        """Raises TypeError: what is changed here would not change in the optimizer."""
        raise TypeError(
            "state of a ShardedOptimizer must be changed as a whole, but an entry was put into it "
            "or removed. Call load_state_dict(), assign optimizer.state ({} forgets all moments), "
            "or change a tensor in place."
        )

    pop = popitem = __delitem__ = update = setdefault = __ior__ = clear

    def __setitem__(self, key: Any, value: Any) -> None:
        own: Any = self.get(key)  # Lightning puts every tensor back after moving it to a device
        tensors = isinstance(own, Tensor) and isinstance(value, Tensor)
        if own is not value and not (
            tensors
            and own.dtype == value.dtype
            and torch.equal(by_value(own).to(value.device), by_value(value))
        ):
            self.clear()

    def __missing__(self, key: Any) -> Any:
        if self.default_factory is None:
            raise KeyError(key)
        return self.default_factory()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy is the reader's own


class ShardedOptimizer(Optimizer):
    """Wraps ``optimizer_cls`` so that each rank updates, and keeps state for, 1/world_size.

    One step is three phases:

    1. **Reduce.** Every rank hands its part of each gradient to its local optimizer. Either
       gradients are equal on all ranks already, averaged by a data-parallel wrapper (stage 1), or
       ``reduce_gradients=True`` averages them by one reduce-scatter per bucket during backward,
       which frees ``param.grad`` (stage 2).
    2. **Update.** ``optimizer_cls`` steps this rank's shards, a few buckets at a time.
    3. **Gather.** Each bucket's owners send their updated elements to everyone, in place, as
       soon as the bucket is updated. Awaited before ``step`` returns, or under the next forward
       with ``overlap="next-forward"``.

    A real ``torch.optim.Optimizer``: ``param_groups`` hold the whole parameters and keep identity,
    so learning-rate schedulers, hooks and ``zero_grad`` work; hyperparameters are read from them
    at every step. ``state`` maps each parameter that this rank owns part of to that part's state.
    Tensors in it may be changed in place, and ``state`` be assigned; other changes are refused.

    Parameters become views of flat buffers (``buckets.py``), so construct this after moving
    the model to its device and dtype. A parameter that is frozen at construction takes no space
    in them until the first step that finds it trainable.

    Over the parameters of a ``FullyShardedDataParallel`` (stage 3), which averages gradients and
    gathers updated shards itself, two options are left: ``offload_state=True``, and
    ``partition="whole"`` for matrices. With that each matrix has an owner, which gets its values
    and gradients from all ranks in ``step``, updates it whole, and hands the shards back. Clip by
    the model's ``clip_grad_norm_``.

    Args:
        params: as for any optimizer: parameters, (name, parameter) pairs, or groups of either.
            The same on every rank, with the same values. Whole ones, or those of one
            ``FullyShardedDataParallel``.
        optimizer_cls: the class to shard.
        process_group: the data-parallel ranks; None means the default group.
        partition: "flat" gives every rank an equal contiguous slice of each bucket, for optimizers
            that treat every element alike; "whole" gives ranks whole parameters, for optimizers
            that look at shapes.
        bucket_size_mb: size of one collective in MB (1024² bytes). None: an eighth of the
            parameters, but between 25 and 1000 MB; the first "flat" ones are smaller.
        master_dtype: if given, parameters of another floating dtype are updated through copies of
            this dtype (1/world_size of them per rank) and rounded back after each step.
        reduce_gradients: average gradients in shards, during backward. The model must then not be
            in a data-parallel wrapper. Gradients are consumed by ``step``. Gradients that are not
            finite reach all ranks with the average, like any others.
        overlap: None, or "next-forward" to let modules wait for updated parameters just in time;
            needs ``attach(module)`` before the first step.
        offload_state: keep optimizer state in host memory, from where a few parameters' state at a
            time visits the device in ``step`` (``offload.py``). Master copies stay on the device.
            At stage 3 with "flat" only.
        communication: what reduce-scatters gradients and gathers parameters, in place of the
            process group's own collectives: "peer-copy" for copies between the GPUs of one host,
            or an object for the same group.
        kwargs: for ``optimizer_cls``: its defaults, and foreach, fused or capturable.

    Raises:
        RuntimeError: without a process group, or if ranks disagree (every rank raises).
        ValueError: for an unknown partition, or one that ``optimizer_cls`` cannot work under; for
            parameters of several models, or an option that their stage does not have.
    """

    tells_origin = True

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        partition: Partition = "flat",
        bucket_size_mb: float | None = None,
        master_dtype: torch.dtype | None = None,
        reduce_gradients: bool = False,
        overlap: Overlap | None = None,
        offload_state: bool = False,
        communication: Communication | PeerCopy | None = None,
        **kwargs: Any,
    ) -> None:
        if overlap not in (None, "next-forward"):
            raise ValueError(
                f"overlap must be None or 'next-forward', but got {overlap!r}. Use one of them."
            )
        check_class(optimizer_cls, kwargs)
        if offload_state:
            check_offload(kwargs)
        group = resolve_group(process_group, before="a ShardedOptimizer is made")
        self.optimizer_cls = optimizer_cls
        self.partition: Partition = partition
        self.class_arguments = kwargs
        self._constructed = False
        self._overlap = overlap
        self._waits: ForwardWaits | None = None
        self._taken: list[Tensor | None] | None = None  # whole gradients that shards were given of
        self._steps = 0
        make = offloaded(optimizer_cls) if offload_state else optimizer_cls
        self.local: LocalOptimizer | OwnShards = LocalOptimizer(
            make,
            partition=partition,
            merge=reduce_gradients and partition == "flat",
            master_dtype=master_dtype,
            kwargs=kwargs,
        )
        self._placement = Placement(partition, bucket_size_mb)

        groups = as_groups(params)
        check_update(
            optimizer_cls,
            settings_of(groups[0]),
            kwargs,
            where=f'partition="{partition}"',
            remedy='Pass partition="whole".' if partition == "flat" else None,
        )
        super().__init__(groups, default_settings(optimizer_cls, settings_of(groups[0]), kwargs))
        if not self.all_params():
            raise ValueError(
                "params must hold at least one parameter, but got none. Pass model.parameters()."
            )
        over = sharded_in(self.param_groups)
        self._over_shards = self._first_step_checked = over is not None
        if over is None:
            device = self.all_params()[0].device
            self.mesh = resolve_mesh(group, device=device, owner="ShardedOptimizer")
        else:
            given = {
                "process_group": process_group,
                "bucket_size_mb": bucket_size_mb,
                "master_dtype": master_dtype,
                "reduce_gradients": reduce_gradients or None,
                "overlap": overlap,
                "communication": communication,
            }
            for name, value in given.items():
                if value is not None:
                    raise ValueError(
                        f"{name} must be left out over the parameters of a "
                        "FullyShardedDataParallel, which averages, gathers and casts itself, but "
                        f"got {value!r}. Pass it to the model, if it has such an argument."
                    )
            self.mesh = over.ranks
            update = OwnShards if partition == "flat" else WholeMatrices
            self.local = update(self.param_groups, make, kwargs)
        self.ranks = self.mesh.shards
        self.process_group = self.ranks.group
        self.rank, self.world_size = self.ranks.rank, self.ranks.size
        self._communication = moves = resolve_communication(communication, self.ranks)
        self._reducer = GradientReducer(moves, self.ranks) if reduce_gradients else None
        self._comparison = LateComparison(self.mesh, self.ranks.device)
        if over is None:
            self._agree(self.param_groups)
            self._place(range(len(self.all_params())))
        self._constructed = True
        self.register_state_dict_post_hook(ShardedOptimizer._tell_part)  # type: ignore[arg-type]

    @property
    def buckets(self) -> list[Bucket]:
        """The flat buffers that hold the trainable parameters."""
        return self._placement.buckets

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """This rank's state, by the whole parameter that it belongs to a part of."""
        params, found = self.all_params(), {}
        for index, state in self.local.states().items():
            if own := {key: value for key, value in state.items() if key != MASTER}:
                found[params[index]] = _Parts(None, own)
        return _Parts(_Parts, found)

    @state.setter
    def state(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Replaces it: by an empty one, to forget all moments. Master copies stay."""
        if self._constructed:  # the base class's constructor sets one too
            parts = {number: dict(state.get(p, {})) for number, p in enumerate(self.all_params())}
            for number, own in self.local.states().items():
                parts[number] |= {key: own[key] for key in own if key == MASTER}
            self.local.install(parts, self.param_groups)

    # --- parameters and groups -------------------------------------------------------------

    def all_params(self) -> list[Tensor]:
        """Every parameter over all groups, in order: position is its key in a state dict."""
        return all_params(self.param_groups)

    def name_of(self, index: int) -> str:
        """The parameter's name if groups carry names, else its number, group and shape."""
        return name_of(self.param_groups, index)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at any time. Every rank must add the same group.

        Raises:
            RuntimeError: on every rank, if the groups differ between ranks.
            ValueError: for a parameter listed twice or of an unsupported memory layout.
        """
        first = len(self.all_params())
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, first)
            if self._constructed and isinstance(self.local, OwnShards):
                self.local.add_group(group)
            elif self._constructed:
                self._agree([group])
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise
        self._listed = self._list()
        if self._constructed and not self._over_shards:
            self._place(range(first, first + len(group["params"])))

    def _list(self) -> list[list[int]]:
        return [[id(param) for param in group["params"]] for group in self.param_groups]

    def _check_group(self, group: dict[str, Any], first: int) -> None:
        params = group["params"]
        if len({id(param) for param in params}) != len(params):
            raise ValueError(
                "each parameter may be listed once, but a group lists one twice. "
                "Pass module.parameters(), which yields tied parameters once."
            )
        seen = {p.data_ptr(): self.name_of(i) for i, p in enumerate(self.all_params()[:first])}
        for index, param in enumerate(params, start=first):
            if self._constructed and not self._over_shards and sharded_of(param) is not None:
                raise ValueError(
                    "parameters must be whole like those of the other groups, but "
                    f"{self.name_of(index)} is one of a FullyShardedDataParallel. Make an "
                    "optimizer for each model."
                )
            if param.is_complex():
                raise ValueError(
                    f"parameters must be real, but got {self.name_of(index)} of {param.dtype}. "
                    "Make torch.view_as_real() of it the parameter."
                )
            check_layout(param, self.name_of(index), seen)

    def _agree(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises on every rank unless all ranks describe the same optimizer."""
        cls = self.optimizer_cls
        title = (
            f"{cls.__module__}.{cls.__qualname__}, partition {self.partition}, "
            f"bucket_size_mb {self._placement.bucket_size_mb}, "
            f"reduce_gradients {self._reducer is not None}, communication "
            f"{type(self._communication).__qualname__}, {len(self.param_groups)} groups"
        )
        lines = describe_groups(groups, first=len(self.param_groups) - len(groups))
        self.mesh.agree(
            [title, *lines],
            must="construct the sharded optimizer from the same class, groups and parameters",
            remedy="Build the same optimizer on every rank.",
        )

    def _place(self, numbers: Iterable[int]) -> None:
        """Makes buckets for these parameters, and for frozen ones that have become trainable."""
        added = self._placement.place(self.param_groups, numbers, self._communication, self.ranks)
        if not added:
            return
        if self._reducer is not None:
            self._reducer.add(added)
        if self._waits is not None:
            self._waits.add(added)
        if isinstance(self.local, LocalOptimizer):
            self.local.add(self.param_groups, added)

    # --- step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters on all ranks.

        Args:
            closure: re-evaluates the model and returns the loss; called once, with gradients on.
            kwargs: passed to the local optimizer's ``step``.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: if a parameter is no longer in the memory that is updated; at the first
                step also, on every rank, if ranks have different weights, or different gradients
                that a wrapper should have averaged.
            StepMismatchError: on every rank, if another one steps otherwise; over NCCL later.
            CollectiveError: if a peer died or timed out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reduce_gradients()  # 1. reduce
        if self.ranks.size > 1 and not self._over_shards:  # where a backward compares
            passes = 0 if self._reducer is None else self._reducer.passes
            words = f"a step after {passes} reductions, with {settings_in(self.param_groups)}"
            if self.ranks.has_own_connections:
                self.ranks.together(words, lambda: None)
            else:
                self._comparison.exchange(f"made {words}")
        self._taken = None
        self._steps += 1
        self.ranks.step = self._steps
        for bucket in self.local.update(self.param_groups, **kwargs):  # 2. update
            bucket.launch_gather()  # 3. gather
        if self._reducer is not None:
            self._reducer.discard(used=True)
        if self._waits is None:
            self.wait()
        else:
            self._waits.started()
        return loss

    def _collected(self) -> bool:
        """Whether the shards have their gradients, and nobody has dropped these since."""
        if self._reducer is not None:
            self._reducer.heed_zero_grad()
            return self._reducer.complete
        pairs = zip(self._taken or (), self.all_params(), strict=False)
        return self._taken is not None and all(grad is param.grad for grad, param in pairs)

    def _reduce_gradients(self) -> None:
        """Gives every shard its averaged gradient, once per step."""
        if self._collected():
            if self._reducer is not None and self._reducer.active:
                raise RuntimeError(
                    "no backward may run between clipping or unscaling and step, but gradients "
                    "have arrived; clip after the last backward"
                )
            return
        if self._list() != self._listed:
            raise RuntimeError(
                "param_groups must list the parameters that they were made of, in their order, but "
                "a list was changed. Freeze a parameter by requires_grad_(False) to leave it out, "
                "and add others by add_param_group()."
            )
        if self._overlap is not None and self._waits is None:
            raise RuntimeError(
                'overlap="next-forward" needs to know the module whose forward waits. Call '
                "attach(module) before the first step."
            )
        if self._placement.frozen:
            self._place(())
        for bucket in self.buckets:
            bucket.check_storage()
        # First, because a rank that lacks a gradient has launched fewer reductions so far.
        if self._reducer is not None:
            self._reducer.finish()
        self.wait()
        if not self._first_step_checked:
            for index, param in enumerate(self.all_params() if self._reducer is None else ()):
                check_gradient(param.grad, self.name_of(index))
            check_first_step(
                self.all_params(),
                gradients=self._reducer is None,
                name_of=self.name_of,
                ranks=self.ranks,
            )
            self._first_step_checked = True
        if self._reducer is None:
            self.local.take_gradients()
            self._taken = [param.grad for param in self.all_params()]
        elif isinstance(self.local, LocalOptimizer):
            self.local.take_reduced(self._reducer.slices(), self._reducer.unused())

    def wait(self) -> None:
        """Waits until every parameter holds its updated values.

        On CUDA the current stream waits, not the host. Only needed under
        ``overlap="next-forward"``, before parameters are read other than by a module's forward.
        """
        for bucket in self.buckets:
            bucket.wait_gather()
        if self._waits is not None:
            self._waits.settled()

    def attach(self, module: nn.Module) -> None:
        """Makes ``module`` wait for parameters just in time, for ``overlap="next-forward"``.

        Every parameter of this optimizer must belong to ``module``, and be read only while the
        ``forward`` of a module that owns it runs. Whatever lists parameters waits for everything,
        as ``parameters()`` and ``state_dict()`` do; reads of attributes call ``wait()`` first.

        Compile the module, or parts of it, before: a compiled part waits for all parameters
        inside it when it is called, so compile layer by layer to keep the overlap.

        Raises:
            RuntimeError: without ``overlap="next-forward"``, or if called twice.
            TypeError: if ``module`` is no module.
            ValueError: if a parameter is not in ``module``.
        """
        if self._overlap is None or self._waits is not None:
            state = "attach() was called before" if self._waits else "overlap is None"
            raise RuntimeError(
                'attach() is for overlap="next-forward" and happens once, but '
                f"{state}. Construct a new optimizer for another module."
            )
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"module must be a torch.nn.Module, but got {type(module).__name__}. Pass a model."
            )
        inside = {id(param) for param in module.parameters()}
        for index, param in enumerate(self.all_params()):
            if id(param) not in inside:
                raise ValueError(
                    "the attached module must own every parameter of the optimizer, but "
                    f"{self.name_of(index)} is not in it. Attach the module that contains it."
                )
        self._waits = ForwardWaits(module, self.wait, hook_gradients=self._reducer is None)
        if self._reducer is not None:
            self._reducer.check_read = self._waits.check_read
        self._waits.add(self.buckets)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, ``reduce_gradients=True`` lets gradients accumulate without communication.

        For gradient accumulation: the first backward outside it reduces everything.
        """
        return nullcontext() if self._reducer is None else self._reducer.paused()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets all gradients, reduced ones too; to None always under ``reduce_gradients``."""
        if self._reducer is not None:
            self._reducer.drop()
        self.local.drop_gradients()
        self._taken = None
        super().zero_grad(set_to_none or self._reducer is not None)

    def clip_grad_norm_(self, max_norm: float, *, norm_type: float = 2.0) -> Tensor:
        """Scales gradients so that their norm over all parameters is at most ``max_norm``.

        Every rank calls this, after backward and before ``step``, which uses the scaled gradients;
        ``param.grad``, where it still exists, is left in an unspecified state.
        With ``GradScaler``, unscale first.

        Args:
            max_norm: largest norm allowed.
            norm_type: p of the p-norm; ``inf`` for the largest magnitude.

        Returns:
            The norm before clipping, fp32, shape (), equal on all ranks.

        Raises:
            ValueError: for a negative ``max_norm``, or a norm type that is not positive.
        """
        check_clipping(max_norm, norm_type)
        if self._over_shards:
            raise RuntimeError(
                "gradients of a FullyShardedDataParallel must be clipped by the model, which knows "
                "the parameters that every rank holds whole. Call clip_grad_norm_() of the model."
            )
        return clip_sharded_(
            self.local_gradients(),
            max_norm,
            norm_type=norm_type,
            ranks=self.ranks,
            device=self.all_params()[0].device,
        )

    def local_gradients(self) -> list[Tensor]:
        """This rank's shards of the averaged gradients, which the next ``step`` will use.

        Every rank calls this after backward: it completes the reduction.
        """
        self._reduce_gradients()
        return self.local.gradients()

    # --- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: fast, no communication, for this rank of as many ranks only.

        ``shard_optim.save`` and ``full_state`` take the parts of all ranks.

        Returns:
            ``state`` by parameter number, ``param_groups`` as in a plain state dict, and ``shard``,
            which says whose part it is (``origin.py``).
        """
        self.wait()
        return super().state_dict()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ShardedOptimizer holds a process group and cannot be pickled or copied. Save its "
            "state by shard_optim.save() or full_state(), and make another one."
        )

    def _tell_part(self, state_dict: dict[str, Any]) -> None:
        """The first hook on ``state_dict()``: adds master copies and whose part it is."""
        state_dict["state"] = self.local.states()
        state_dict[ORIGIN] = self._origin()
        if state_dict["state"]:  # trainers ask before the first step too
            say_once(self, "optimizer", self.mesh)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` returned on this rank of a group of the same size.

        A collective call, in which the ranks compare what each of them loads.

        Raises:
            TypeError: if it is no dictionary.
            ValueError: on every rank, if one of them was given a part of another rank, partition,
                model, optimizer class or moment; nothing has changed then.
            CollectiveError: if a peer died or timed out.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                "state_dict must be what state_dict() returned on this rank, but got "
                f"{type(state_dict).__name__}. Load this rank's own file."
            )
        given = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, given)
            given = given if replaced is None else replaced
        problem, own = None, OptimizerState(self)
        try:
            own.check_part(given)
        except ValueError as error:
            problem = str(error)
        self.wait()
        check_loaded(self.mesh, [(given.get(ORIGIN), self._origin())], problem=problem)
        own.install_part(by_number(given), given["param_groups"])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _origin(self) -> dict[str, Any]:
        """What of each parameter this rank owns, as which rank of how many, and when."""
        held = {index: place for index, place in self.local.places().items() if place.held}
        stage = 3 if self._over_shards else 1 if self._reducer is None else 2
        origin = describe(self.mesh, self._steps, held, stage=stage)
        groups = [len(group["params"]) for group in self.param_groups]
        settings = {"partition": self.partition, "optimizer": self.optimizer_cls.__qualname__}
        return origin | settings | {"groups": groups}
