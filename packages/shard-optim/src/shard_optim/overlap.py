"""The all-gather of updated parameters under the next forward.

Each module waits for its own parameters just before its forward runs, so the all-gathers of later
layers overlap the computation of earlier ones. A compiled module waits before its compiled code
starts, for everything inside it: a wait in the middle would cut its graph in two.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shard_optim.buckets import Bucket


@dataclass(eq=False)
class Reads:
    """What a call of one module reads.

    Attributes:
        buckets: to wait for, each once.
        keys: identities of the parameters.
    """

    buckets: list[Bucket] = field(default_factory=list)
    keys: set[int] = field(default_factory=set)


class ForwardWaits:
    """Makes every read of parameters through a module tree wait first.

    A module's parameters count as read when its ``forward`` starts, or that of the outermost
    compiled module around it; ``state_dict`` and ``load_state_dict`` of the root wait for
    everything. A parameter that receives a gradient although its module was not called was read
    too early, which ``check_read`` finds.

    Args:
        module: the root. What is to be compiled in it has been.
        wait_all: waits for every all-gather.
    """

    def __init__(self, module: nn.Module, wait_all: Callable[[], None]) -> None:
        self._module = module
        self._reads: dict[nn.Module, Reads] = {}
        self._names: dict[int, str] = {}
        self._unread: set[int] = set()
        self._pending = False
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
                    if reader not in self._reads:
                        self._reads[reader] = Reads()
                        self._wait_before(reader)
                    reads = self._reads[reader]
                    reads.keys.add(key)
                    if bucket_of[key] not in reads.buckets:
                        reads.buckets.append(bucket_of[key])

    def _wait_before(self, module: nn.Module) -> None:
        compiled = module._compiled_call_impl
        if compiled is None:
            module.register_forward_pre_hook(self._before_forward)
            return

        # A hook would become part of the graph, or be left out of one made without it.
        def wait_and_call(*args: Any, **kwargs: Any) -> Any:
            self._before_forward(module, args)
            return compiled(*args, **kwargs)

        module._compiled_call_impl = wait_and_call

    def started(self) -> None:
        """All-gathers were launched: from here on, reads must wait."""
        self._pending = True
        self._unread = set(self._names)

    def settled(self) -> None:
        """All all-gathers were awaited: any read is safe."""
        self._pending = False

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._pending:
            reads = self._reads[module]
            for bucket in reads.buckets:
                bucket.wait_gather()
            self._unread -= reads.keys

    def check_read(self, params: Iterable[Tensor]) -> None:
        """Call with parameters that received gradients, during the backward that made them.

        Raises:
            RuntimeError: if a module read one of them without being called, so without waiting.
        """
        if self._pending and self._unread:
            for param in params:
                if id(param) in self._unread:
                    raise RuntimeError(
                        'under overlap="next-forward" a parameter may be read only inside its own '
                        f"module's forward, but {self._names[id(param)]} received a gradient "
                        "although its module was not called, or was compiled after attach(); "
                        "compile before attach(), call wait() before the forward, or use "
                        "overlap=None"
                    )

    def hook_gradients(self, buckets: Iterable[Bucket]) -> None:
        """Makes every gradient of these buckets' parameters call ``check_read``."""
        waits_if_alive = weakref.ref(self)  # a hook must not keep other parameters alive

        def on_gradient(param: Tensor) -> None:
            waits = waits_if_alive()
            if waits is not None:
                waits.check_read((param,))

        for bucket in buckets:
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(on_gradient)


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
    """Whether ``module.compile()`` or ``torch.compile(module)`` made it so."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported just to find out
    wrapped = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return wrapped or module._compiled_call_impl is not None
