"""The all-gather of updated parameters under the next forward.

Each module waits for its own parameters just before its forward runs, so the all-gathers of later
layers overlap the computation of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from shard_optim.buckets import Bucket


class ForwardWaits:
    """Hooks a module tree so that every read of parameters through it waits first.

    A module's parameters count as read when its ``forward`` starts; ``state_dict`` and
    ``load_state_dict`` of the root wait for everything. A parameter that receives a gradient
    although its module was not called was read too early, which raises during that backward.

    Args:
        module: the root; all its submodules are hooked.
        wait_all: waits for every all-gather.
    """

    def __init__(self, module: nn.Module, wait_all: Callable[[], None]) -> None:
        self._bucket_of: dict[int, Bucket] = {}
        self._read: set[int] = set()
        self._pending = False
        for child in module.modules():
            if next(child.parameters(recurse=False), None) is not None:
                child.register_forward_pre_hook(self._before_forward)
        module.register_state_dict_pre_hook(lambda *_: wait_all())
        module.register_load_state_dict_pre_hook(lambda *_: wait_all())

    def add(self, buckets: Iterable[Bucket]) -> None:
        """Makes modules wait for these buckets too."""
        for bucket in buckets:
            for param, name in zip(bucket.params, bucket.names, strict=True):
                self._bucket_of[id(param)] = bucket
                param.register_post_accumulate_grad_hook(self._check_read(name))

    def started(self) -> None:
        """All-gathers were launched: from here on, reads must wait."""
        self._pending = True
        self._read.clear()

    def settled(self) -> None:
        """All all-gathers were awaited: any read is safe."""
        self._pending = False

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self._pending:
            return
        for param in module.parameters(recurse=False):
            bucket = self._bucket_of.get(id(param))
            if bucket is not None:
                bucket.wait_gather()
                self._read.add(id(param))

    def _check_read(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(param: Tensor) -> None:
            if self._pending and id(param) not in self._read:
                raise RuntimeError(
                    'under overlap="next-forward" a parameter may be read only inside its own '
                    f"module's forward, but {name} received a gradient although its module was "
                    "not called; call wait() before the forward, or use overlap=None"
                )

        return on_gradient
