"""The all-gather of updated parameters under the next forward.

Each module waits for its own parameters just before its forward runs, so the all-gathers of later
layers overlap the computation of earlier ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from shard_optim.buckets import Bucket


class ForwardWaits:
    """Hooks a module tree so that every read of parameters through it waits first.

    A module's parameters count as read when its ``forward`` starts; ``state_dict`` and
    ``load_state_dict`` of the root wait for everything. A parameter that receives a gradient
    although its module was not called was read too early, which ``check_read`` finds.

    Args:
        module: the root; all its submodules are hooked.
        wait_all: waits for every all-gather.
    """

    def __init__(self, module: nn.Module, wait_all: Callable[[], None]) -> None:
        self._module = module
        self._reads: dict[nn.Module, tuple[list[Bucket], set[int]]] = {}
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
        for child in self._module.modules():
            own = {id(param) for param in child.parameters(recurse=False)} & bucket_of.keys()
            if own and child not in self._reads:
                self._reads[child] = [], set()
                child.register_forward_pre_hook(self._before_forward)
            if own:
                awaited, keys = self._reads[child]
                awaited += {bucket_of[key] for key in own}
                keys |= own

    def started(self) -> None:
        """All-gathers were launched: from here on, reads must wait."""
        self._pending = True
        self._unread = set(self._names)

    def settled(self) -> None:
        """All all-gathers were awaited: any read is safe."""
        self._pending = False

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self._pending:
            awaited, keys = self._reads[module]
            for bucket in awaited:
                bucket.wait_gather()
            self._unread -= keys

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
                        "although its module was not called; call wait() before the forward, or "
                        "use overlap=None"
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
