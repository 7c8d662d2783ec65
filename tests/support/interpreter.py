"""Spares Triton's interpreter work whose results it has already, or never reads.

Within a launch, the interpreter replaces what ``triton.language`` holds by its own, and it does so
again for each call of a function of the kernel, which finds all replaced already. Every sum and
product of integers is computed once more in 64 bits for an assertion that only ``debug`` switches
on. Each array looks its dtype up in a table that is made anew.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def spare_work() -> None:
    """For all launches of this process from now on."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    look_up = interpreter._get_np_dtype
    of_numbers = functools.cache(look_up)

    def dtype_of(kind: Any) -> Any:  # of a number, a pointer, or a block of either
        return look_up(kind) if kind.scalar.is_ptr() else of_numbers(kind.scalar)

    interpreter._get_np_dtype = dtype_of

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
