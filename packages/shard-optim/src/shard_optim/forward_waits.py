"""The all-gather of updated parameters under the next forward.

Each module waits for its own parameters just before it runs, so the all-gathers of later layers
overlap the computation of earlier ones. A compiled module waits before its compiled code starts,
for everything inside it: a wait in the middle would cut its graph in two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shard_optim.bucket_layout import Bucket
from shard_optim.fully_sharded.unit_plan import is_compiled


@dataclass(eq=False, kw_only=True)
class WaitingCall:
    """Takes the place of a module's call: waits for what it reads, then calls it.

    Attributes:
        waits: whose parameters are awaited.
        call: the module's own call, compiled or not.
        compiled: whether it is.
        buckets: to wait for, each once.
        keys: identities of the parameters.
    """

    waits: ForwardWaits
    call: Callable[..., Any]
    compiled: bool
    buckets: list[Bucket] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Waits if it must, and calls the module."""
        waits = self.waits
        if waits.pending:
            for bucket in self.buckets:
                bucket.wait_gather()
            waits.unread -= self.keys
        return self.call(*args, **kwargs)


class _WaitingParameters(dict[str, Any]):
    """The table of a module's own parameters; listing it waits for them first.

    ``parameters()`` and what is made from it, such as an average of weights, list the tables of the
    module and of all modules inside it. Reads of single attributes do not, and cost no more.
    """

    def __init__(self, own: dict[str, Any], wait_all: Callable[[], None]) -> None:
        super().__init__(own)
        self._wait_all = wait_all

    def items(self) -> Any:
        """Waits, and lists the parameters."""
        self._wait_all()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are ordinary tables."""
        return dict, (dict(self),)


class ForwardWaits:
    """Makes every read of parameters through a module tree wait first.

    A module's parameters count as read when the module is called, or when the outermost compiled
    module around it is called. ``state_dict``, ``load_state_dict`` and ``parameters()`` of the
    root wait for all parameters. ``check_read`` finds parameters that were read too early: they
    receive a gradient although their module was not called.

    Args:
        module: the root, after every ``compile()`` of a module in it.
        wait_all: waits for every all-gather.
        hook_gradients: whether every gradient calls ``check_read``; else somebody else does.

    Attributes:
        pending: whether all-gathers may be under way.
        unread: identities of the parameters that were not awaited since they were launched.
    """

    def __init__(
        self, module: nn.Module, wait_all: Callable[[], None], *, hook_gradients: bool
    ) -> None:
        self._module, self._hook_gradients = module, hook_gradients
        self.pending = False
        self.unread: set[int] = set()
        self._calls: dict[nn.Module, WaitingCall] = {}
        self._names: dict[int, str] = {}
        if not _is_compiled(module):  # whose compiled code would look into the table
            module._parameters = _WaitingParameters(module._parameters, wait_all)
        module.register_state_dict_pre_hook(lambda *_: wait_all())
        module.register_load_state_dict_pre_hook(lambda *_: wait_all())

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Makes the modules that own parameters of these buckets wait for them too."""
        bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
        for bucket in buckets:
            self._names |= zip(map(id, bucket.params), bucket.names, strict=True)
        for owner, reader in _owners_and_readers(self._module):
            for key in map(id, owner.parameters(recurse=False)):
                if key in bucket_of:
                    if reader not in self._calls:
                        # Around the call, where ``module.compile()`` puts its own, and not in a
                        # hook: a hook would become part of a compiled module's graph, or be left
                        # out of one made without it, and it costs several times as much.
                        own = reader._compiled_call_impl or reader._call_impl
                        waiting = WaitingCall(waits=self, call=own, compiled=_is_compiled(reader))
                        reader.__dict__["_compiled_call_impl"] = waiting  # not copied or pickled
                        self._calls[reader] = waiting
                    call = self._calls[reader]
                    call.keys.add(key)
                    if bucket_of[key] not in call.buckets:
                        call.buckets.append(bucket_of[key])
        waits_if_alive = weakref.ref(self)  # a hook must not keep other parameters alive

        def on_gradient(param: Tensor) -> None:
            waits = waits_if_alive()
            if waits is not None:
                waits.check_read((param,))

        for param in (
            (p for bucket in buckets for p in bucket.params) if self._hook_gradients else ()
        ):
            param.register_post_accumulate_grad_hook(on_gradient)

    def started(self) -> None:
        """All-gathers were launched: from here on, reads must wait."""
        self.pending = True
        self.unread = set(self._names)

    def settled(self) -> None:
        """All all-gathers were awaited: any read is safe."""
        self.pending = False

    def check_read(self, params: Iterable[Tensor]) -> None:
        """Call with parameters that received gradients, during the backward that made them.

        Raises:
            RuntimeError: if a module read one of them without being called, so without waiting.
        """
        if self.pending and self.unread:
            for param in params:
                if id(param) in self.unread:
                    raise RuntimeError(
                        'under overlap="next-forward" a parameter may be read only inside its own '
                        f"module's forward, but {self._names[id(param)]} received a gradient "
                        "although its module was not called, or was compiled after attach(); "
                        "compile before attach(), call wait() before the forward, or use "
                        "overlap=None"
                    )


def _owners_and_readers(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module with the one whose call reads its parameters, for each path that leads to it.

    That is the outermost compiled module on the path, or else the module itself.
    """
    seen: set[tuple[nn.Module, nn.Module]] = set()
    paths: list[tuple[nn.Module, nn.Module | None]] = [(root, None)]
    while paths:
        module, around = paths.pop()
        if around is None and _is_compiled(module):
            around = module
        pair = module, module if around is None else around
        if pair not in seen:
            seen.add(pair)
            yield pair
            paths += [(child, around) for child in module.children()]


def _is_compiled(module: nn.Module) -> bool:
    call = module._compiled_call_impl
    return call.compiled if isinstance(call, WaitingCall) else is_compiled(module)
