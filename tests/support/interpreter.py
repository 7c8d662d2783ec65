"""Spares Triton's interpreter work that takes a third of its time.

Within a launch, the interpreter replaces what ``triton.language`` holds by its own, and it does so
again for each call of a function of the kernel, which finds all replaced already. Here it does so
once for a launch.
"""

from __future__ import annotations

from typing import Any


def replace_once_a_launch() -> None:
    """For all launches of this process from now on."""
    from triton.runtime import interpreter

    language = (interpreter.tl, interpreter.tl.core)
    replace = interpreter._patch_lang
    replaced: set[Any] = set()  # within the launch

    class Scope(interpreter._LangPatchScope):
        """Of a launch, which restores it at its end; functions of the kernel leave theirs."""

        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def replace_unless_replaced(function: Any) -> Any:
        seen = {x for x in function.__globals__.values() if x is language[0] or x is language[1]}
        if seen and seen <= replaced:
            return Scope()
        scope = replace(function)
        replaced.update(seen)
        return scope

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = replace_unless_replaced
