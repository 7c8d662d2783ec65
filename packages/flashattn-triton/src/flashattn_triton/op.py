"""The operators ``forward`` and ``backward``, their one derivative, and the cache before kernels.

Both are in ``torch.ops.flashattn_triton``: opaque to compilers, each with fake results (shapes and
strides), and the rules of :mod:`~flashattn_triton.operator_rules`. Tensors are in the layout
of the problem, as callers have them; a problem travels as numbers (:meth:`Problem.pack`).

    attend      plain tensors   CachedCall, inside Attend where a gradient is wanted
                all others      forward, whose autograd kernel is Attend too

PyTorch's dispatcher takes the host longer than a small problem takes a GPU. Plain tensors in eager
mode therefore go past the operators, to what the operators run themselves: a :class:`CachedCall`,
found by :func:`key_of`. Tensor subclasses, ``torch.func``, compilers and dispatch modes see the
operators.

:class:`Attend` is a Function of one level, the form into which PyTorch turns every Function under
``torch.func``. The dispatcher calls it once for each transform, so it needs no rules for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils.flop_counter import register_flop_formula

from flashattn_triton.dispatch import choose
from flashattn_triton.higher_derivatives import backward_tangents, forward_tangents
from flashattn_triton.inputs import check_inputs, check_starts
from flashattn_triton.launch import (
    BackwardTensors,
    dot_precision,
    empty_result,
    empty_row_statistic,
)
from flashattn_triton.mask_and_bias import BIAS, GIVEN, NOTHING, SINKS, STARTS, Given, normalised
from flashattn_triton.operator_rules import (
    RESULTS,
    TENSORS,
    backward_flops,
    forward_flops,
    register_for,
    tangents_flops,
    vmap_rule,
)
from flashattn_triton.problem import Problem, as_given, heads_first
from flashattn_triton.tiers import Needs, forward_launcher, gradients_launcher

ONLY_INPUTS: Needs = (True, False, False)
PLAIN = (Tensor, torch.nn.Parameter)
_is_batched = torch._C._functorch.is_legacy_batchedtensor

# ---- the cache -----------------------------------------------------------------------------------

# Calls by their kind, and launchers of their backward passes. It is emptied when it is full:
# lengths that never repeat would otherwise fill memory. Threads may share it: each reads or stores
# an entry by one operation, and entries that two of them make are equal. None holds a tensor.
_cache: dict[Any, Any] = {}
_LIMIT = 4096


def _store(key: Any, entry: Any) -> None:
    if len(_cache) >= _LIMIT:
        _cache.clear()
    _cache[key] = entry


def key_of(problem: Problem, query: Tensor, key: Tensor, value: Tensor, given: Given) -> Any:
    """What decides what is launched.

    Two ``cu_seqlens`` at one address say that sequences have as many keys as queries.

    Raises:
        RuntimeError: a tensor has no memory.
    """
    bits = query.data_ptr() | key.data_ptr() | value.data_ptr()
    others: list[Any] = []
    if given is not NOTHING:
        slopes, bias, prefix_lengths, mask, sinks, starts_q, starts_k = given
        if not (slopes is bias is prefix_lengths is mask is sinks is None):
            for x in (slopes, bias, prefix_lengths, mask, sinks):
                if x is None:
                    others.append(None)
                else:
                    others += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
        if starts_q is not None and starts_k is not None:
            first, second = starts_q.data_ptr(), starts_k.data_ptr()
            others += (
                starts_q.shape, starts_k.shape, starts_q.stride(), starts_k.stride(),
                starts_q.dtype, starts_k.dtype, starts_q.device, starts_k.device,
                first == second, (first | second) % 16 and (first % 16, second % 16),
            )  # fmt: skip
    return (
        problem, query.shape, key.shape, value.shape, query.stride(), key.stride(), value.stride(),
        query.dtype, key.dtype, value.dtype, query.device, key.device, value.device,
        _alignment((query, key, value)) if bits % 16 else (), dot_precision(query.dtype), *others,
    )  # fmt: skip


def _alignment(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The addresses' remainders by 16; nothing if all are multiples."""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    if bits % 16 == 0:
        return ()
    return tuple([0 if x is None else x.data_ptr() % 16 for x in tensors])


class CachedCall:
    """What is worked out once for all tensors with one key: the tier, and its launchers."""

    __slots__ = ("launch", "masked", "normal", "plan", "problem")

    def __init__(
        self, problem: Problem, query: Tensor, key: Tensor, value: Tensor, given: Given
    ) -> None:
        """Checks the tensors, and chooses the tier."""
        check_inputs(problem, query, key, value, *given[STARTS:])
        used = normalised(problem, query, key, given)
        # Whether tensors of this kind can be used as they are given.
        self.normal = all(x is y for x, y in zip(given, used, strict=True))
        self.masked = any(x is not None for x in given[:STARTS])
        self.problem = problem
        q, k, v = (heads_first(x, problem.layout) for x in (query, key, value))
        self.plan = choose(q, k, v, problem, tensors=used.names)
        self.launch = forward_launcher((query, key, value), problem, self.plan, used)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, given: Given
    ) -> tuple[Tensor, Tensor]:
        """Output in the layout of the inputs, and logsumexp (B, H, N_q), or (H, T_q)."""
        if self.problem.packed:  # by other starts than those that this call was made with
            starts_q, starts_k = given[STARTS:]
            check_starts(query, key, starts_q, starts_k, *self.problem.longest)  # type: ignore[arg-type]
        return self.launch((query, key, value), given)

    def backward(
        self, tensors: BackwardTensors, given: Given, needs: Needs, into: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """dQ, dK and dV, also those of bias and sinks if one ``needs`` them.

        ``into``: fp32 tensors, to which the first three are added, or nothing.
        """
        query, key, value, out, lse, grad_out, grad_lse = tensors
        lse = lse.contiguous()  # what was saved may come back with other strides
        if grad_out.dtype != query.dtype and self.plan.tiling is not None:
            grad_out = grad_out.to(query.dtype)  # what kernels multiply
        tensors = (query, key, value, out, lse, grad_out, grad_lse)
        key_ = (
            self, needs, query.stride(), key.stride(), value.stride(), out.stride(),
            grad_out.stride(), None if grad_lse is None else grad_lse.stride(),
            _alignment(tensors if given is NOTHING else (*tensors, *given)),
            dot_precision(query.dtype),
            tuple([None if x is None else x.stride() for x in given]) if self.masked else (),
            out.dtype, tuple([(x.stride(), x.data_ptr() % 16) for x in into]) if into else (),
        )  # fmt: skip
        launch = _cache.get(key_)
        if launch is None:
            launch = gradients_launcher(tensors, self.problem, self.plan, given, needs, into)
            _store(key_, launch)
        if into:
            return launch(tensors, given, into)
        return launch(tensors, given)


def _new_call(cache_key: Any, *arguments: Any) -> CachedCall:
    call = CachedCall(*arguments)
    _store(cache_key, call)
    return call


def call_for(*arguments: Any) -> CachedCall:
    """The call for the arguments of :func:`key_of`, which raises its errors."""
    cache_key = key_of(*arguments)
    return _cache.get(cache_key) or _new_call(cache_key, *arguments)


# ---- the operators -------------------------------------------------------------------------------

_INPUTS = "Tensor query, Tensor key, Tensor value"
NUMBERS = (  # of Problem.pack
    "str layout, SymInt max_seqlen_q, SymInt max_seqlen_k, str causal, float scale, "
    "SymInt? window_left, SymInt? window_right, float? softcap, bool deterministic, "
    "str implementation, ScalarType? out_dtype, bool largest_only, int[]? tiling"
)
_PROBLEM = f"{', '.join(f'Tensor? {name}' for name in GIVEN)}, {NUMBERS}"
OUT_DTYPE, LARGEST_ONLY = -3, -2  # at the end of what follows key and value
_LIBRARY = torch.library.Library("flashattn_triton", "DEF")
_LIBRARY.define(f"forward({_INPUTS}, {_PROBLEM}) -> (Tensor out, Tensor lse)")
_LIBRARY.define(
    f"backward({_INPUTS}, Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, {_PROBLEM}, "
    "bool[] needs) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
)
_DIRECTION = ", ".join(f"Tensor? t_{name}" for name in ("query", "key", "value", "bias", "sinks"))
_LIBRARY.define(
    f"tangents({_INPUTS}, {_DIRECTION}, Tensor out, Tensor lse, {_PROBLEM}) "
    "-> (Tensor t_out, Tensor t_lse)"
)
FORWARD = torch.ops.flashattn_triton.forward.default
BACKWARD = torch.ops.flashattn_triton.backward.default
# Tangents of output and logsumexp, which follow those of query, key, value, bias and sinks.
TANGENTS = torch.ops.flashattn_triton.tangents.default
TENSORS_OF_TANGENTS = 10 + len(GIVEN)


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    call, given = _call_of(query, key, value, rest)
    return call.forward(query, key, value, given)


def _backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, lse, grad_out, grad_lse, *arguments, needs = rest
    call, given = _call_of(query, key, value, arguments)
    tensors = (query, key, value, out, lse, grad_out, grad_lse)
    gradients = call.backward(tensors, given, tuple(needs))
    gradients = (*gradients, *[None] * (5 - len(gradients)))
    return tuple([query.new_empty(0) if x is None else x for x in gradients])


def _call_of(
    query: Tensor, key: Tensor, value: Tensor, rest: Sequence[Any]
) -> tuple[CachedCall, Given]:
    """The call of an operator, and its tensors that are :data:`GIVEN`."""
    given, problem = Given(*rest[: len(GIVEN)]), Problem.unpack(rest[len(GIVEN) :])
    if all(x is None for x in given):
        given = NOTHING
    return call_for(problem, query, key, value, given), given


def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    layout = rest[len(GIVEN)]
    lse = empty_row_statistic(heads_first(query, layout))
    if rest[LARGEST_ONLY]:
        out = query.new_empty(0)
    else:
        out = empty_result(query, value.shape[-1], layout, rest[OUT_DTYPE])
    return out, as_given(lse, layout)


def _fake_backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *arguments, needs = rest[RESULTS:]
    layout = arguments[len(GIVEN)]
    gradients = [
        empty_result(x, x.shape[-1], layout) if needs[0] else query.new_empty(0)
        for x in (query, key, value)
    ]
    for needed, x in zip(needs[1:], (arguments[BIAS], arguments[SINKS]), strict=True):
        gradients.append(x.new_empty(x.shape) if needed else query.new_empty(0))
    return tuple(gradients)


# ---- the derivative ------------------------------------------------------------------------------


class Attend(_SingleLevelFunction):
    """``apply(call, query, key, value, *given)``: output and logsumexp, with their derivative.

    ``call`` is a :class:`CachedCall`, or the numbers of a problem, with which the operators run
    below this level. ``given`` are tensors named :data:`GIVEN`, or nothing for as many times None.
    """

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def forward(
        ctx: Any,
        call: CachedCall | tuple[Any, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *given: Tensor | None,
    ) -> Any:
        """Output and logsumexp."""
        if isinstance(call, CachedCall):
            out, lse = call.forward(query, key, value, Given(*given) if given else NOTHING)
        else:
            out, lse = _below(FORWARD, query, key, value, *given, *call)
        ctx.save_for_backward(query, key, value, out, lse, *given)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and value, and of the bias and the sinks."""
        query, key, value, out, lse, *rest = ctx.saved_tensors
        if grad_out is None:
            if grad_lse is None:
                return (None,) * (4 + len(rest))
            grad_out = torch.zeros_like(out)
        call, given, needs = ctx.call, Given(*rest) if rest else NOTHING, ONLY_INPUTS
        if rest and (call.masked if isinstance(call, CachedCall) else True):
            needed = ctx.needs_input_grad
            needs = (any(needed[1:4]), needed[4 + BIAS], needed[4 + SINKS])
        tensors = (query, key, value, out, lse, grad_out, grad_lse)
        # With a graph of its own, the backward pass must say that it has no derivative. Tensors of
        # ``torch.autograd.grad(is_grads_batched=True)`` have no memory, and that of negative views,
        # as of ``x.conj().imag``, has the other sign: PyTorch resolves both for operators.
        gradients: Any
        if isinstance(call, CachedCall) and not (
            torch.is_grad_enabled()
            or _is_watched()
            or any(x is not None and (_is_batched(x) or x.is_neg()) for x in (grad_out, grad_lse))
        ):
            gradients = call.backward(tensors, given, needs)
        else:
            numbers = call.problem.pack() if isinstance(call, CachedCall) else call
            gradients = _wanted(BACKWARD(*tensors, *given, *numbers, list(needs)), needs)
        if not rest:
            return None, *gradients[:3]
        dbias, dsinks = (None, None) if needs == ONLY_INPUTS else gradients[3:]
        return None, *gradients[:3], *Given(bias=dbias, sinks=dsinks)


class _AttendOutput(Attend):
    """:class:`Attend` without the logsumexp, so that autograd has one result less to wrap."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        return Attend.forward(ctx, *arguments)[0]


class _AttendBackward(_SingleLevelFunction):
    """The operator ``backward``; its derivative is that of :mod:`.higher_derivatives`."""

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        ctx.save_for_backward(*arguments[: TENSORS + RESULTS])
        ctx.numbers = arguments[TENSORS + RESULTS :]
        ctx.set_materialize_grads(False)
        return _below(BACKWARD, *arguments)

    @staticmethod
    def backward(ctx: Any, *direction: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of all tensors but output and logsumexp, which follow from the others."""
        *numbers, needs = ctx.numbers
        query, key, value, out, lse, grad_out, grad_lse, *given = ctx.saved_tensors
        direction = tuple(_wanted(direction, needs))
        inputs = (query, key, value)
        tangents = TANGENTS(*inputs, *direction, out, lse, *given, *numbers)
        gradients = backward_tangents(
            inputs, direction, out, lse, tangents, grad_out, grad_lse, given,
            Problem.unpack(numbers),
        )  # fmt: skip
        rest = (None,) * len(ctx.numbers)
        tangents = (tangents[0], None if grad_lse is None else tangents[1])
        *of_rows, dbias, dsinks = gradients
        of_given = Given(bias=dbias, sinks=dsinks)
        return *of_rows, None, None, *tangents, *of_given, *rest


class _AttendTangents(_SingleLevelFunction):
    """The operator ``tangents``, with its derivative."""

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        tangents = _below(TANGENTS, *arguments)
        ctx.save_for_backward(*arguments[:TENSORS_OF_TANGENTS], *tangents)
        ctx.numbers = arguments[TENSORS_OF_TANGENTS:]
        return tangents

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, tout, tlse = ctx.saved_tensors
        inputs, direction, (out, lse, *given) = tensors[:3], tensors[3:8], tensors[8:]
        results = (out, lse, (tout, tlse), grad_out, grad_lse)
        problem = Problem.unpack(ctx.numbers)
        *of_rows, dbias, dsinks = backward_tangents(inputs, direction, *results, given, problem)
        needs = [True, given[BIAS] is not None, given[SINKS] is not None]
        of_direction = BACKWARD(*inputs, out, lse, grad_out, grad_lse, *given, *ctx.numbers, needs)
        of_direction = [
            None if x is None else y for x, y in zip(direction, of_direction, strict=True)
        ]
        of_given = Given(bias=dbias, sinks=dsinks)
        return *of_rows, *of_direction, None, None, *of_given, *[None] * len(ctx.numbers)


def _tangents(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator ``tangents``, by tiles of PyTorch's operators."""
    tensors, numbers = arguments[:TENSORS_OF_TANGENTS], arguments[TENSORS_OF_TANGENTS:]
    inputs, direction, (out, lse, *given) = tensors[:3], tensors[3:8], tensors[8:]
    return forward_tangents(inputs, direction, out, lse, given, Problem.unpack(numbers))


def _fake_tangents(*arguments: Any) -> tuple[Tensor, Tensor]:
    out, lse = arguments[8:10]
    return torch.empty_like(out), torch.empty_like(lse)


def _unpack(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A tensor and its tangent. Compiled code enters the only level there is without a record."""
    return (None, None) if x is None else forward_ad.unpack_dual(x, level=0)


def _forward_of_duals(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """The operator ``forward`` of tensors of which some have a tangent."""
    primals, tangents = zip(*map(_unpack, tensors), strict=True)
    if tangents[3] is not None:
        raise RuntimeError(
            "alibi_slopes must be constants, but got a dual tensor. Pass what has a tangent as "
            "bias."
        )
    results = FORWARD(*primals, *numbers)
    direction = _differentiated(tangents, 3)
    moved = TANGENTS(*primals[:3], *direction, *results, *primals[3:], *numbers)
    return tuple(forward_ad.make_dual(x, t, level=0) for x, t in zip(results, moved, strict=True))


def _backward_of_duals(tensors: Sequence[Any], numbers: Sequence[Any]) -> Any:
    """The operator ``backward`` of tensors of which some have a tangent."""
    primals, tangents = zip(*map(_unpack, tensors), strict=True)
    *arguments, needs = numbers
    results = BACKWARD(*primals, *numbers)
    direction = _differentiated(tangents, 3 + RESULTS)
    out, lse, grad_out, grad_lse, *given = primals[3:]
    t_out, t_lse = tangents[3:5]
    of_results = (
        torch.zeros_like(out) if t_out is None else t_out,
        torch.zeros_like(lse) if t_lse is None else t_lse,
    )
    moved = backward_tangents(
        primals[:3], direction, out, lse, of_results, grad_out, grad_lse, given,
        Problem.unpack(arguments),
    )  # fmt: skip
    tangent, lse_tangent = tangents[5:7]
    moved = _wanted(moved, needs)
    if tangent is not None or lse_tangent is not None:  # the gradients are linear in both
        if tangent is None:
            tangent = torch.zeros_like(out)
        more = BACKWARD(*primals[:5], tangent, lse_tangent, *given, *numbers)
        moved = [x if x is None else x + y for x, y in zip(moved, more, strict=True)]
    return tuple(
        x if t is None else forward_ad.make_dual(x, t, level=0)
        for x, t in zip(results, moved, strict=True)
    )


def _wanted(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """The five gradients of a backward pass, None in place of those that are not needed."""
    needed = (*[needs[0]] * 3, *needs[1:])
    return [x if need else None for x, need in zip(gradients, needed, strict=True)]


def _differentiated(tensors: Sequence[Tensor | None], start: int) -> list[Tensor | None]:
    """Query, key, value, bias and sinks, of tensors whose :data:`GIVEN` begin at ``start``."""
    return [*tensors[:3], tensors[start + BIAS], tensors[start + SINKS]]


def _below(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Runs an operator without its autograd kernel of this level.

    A Function switches both modes of differentiation off, which levels of ``torch.func`` below this
    one still need.
    """
    both_modes = torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True)
    with both_modes[0], both_modes[1], torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def _differentiable(
    operator: Callable[..., Any],
    apply: Callable[..., Any],
    of_duals: Callable[..., Any],
    n_tensors: int,
) -> Callable[..., Any]:
    def kernel(*arguments: Any) -> Any:
        tensors = [x for x in arguments[:n_tensors] if x is not None]
        if any(_unpack(x)[1] is not None for x in tensors):  # which kernels would silently drop
            return of_duals(arguments[:n_tensors], arguments[n_tensors:])
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            with enable_single_level_autograd_function():
                return apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return kernel


# ---- registration --------------------------------------------------------------------------------

for _name, _operator, _apply, _of_duals, _n_tensors, _run, _fake, _flops in (
    (
        "forward", FORWARD, lambda *given: Attend.apply(given[TENSORS:], *given[:TENSORS]),
        _forward_of_duals, TENSORS, _forward, _fake_forward, forward_flops,
    ),
    (
        "backward", BACKWARD, _AttendBackward.apply, _backward_of_duals, TENSORS + RESULTS,
        _backward, _fake_backward, backward_flops,
    ),
    (
        "tangents", TANGENTS, _AttendTangents.apply,
        lambda tensors, rest: _tangents(*tensors, *rest), TENSORS_OF_TANGENTS, _tangents,
        _fake_tangents, tangents_flops,
    ),
):  # fmt: skip
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _differentiable(_operator, _apply, _of_duals, _n_tensors), "Autograd")
    torch.library.register_fake(f"flashattn_triton::{_name}", _fake, lib=_LIBRARY)
    _vmap = vmap_rule(_operator, _n_tensors - len(GIVEN))
    torch.library.register_vmap(f"flashattn_triton::{_name}", _vmap, lib=_LIBRARY)
    register_flop_formula(_operator.overloadpacket, get_raw=True)(_flops)


# ---- calls ---------------------------------------------------------------------------------------


def _is_watched() -> bool:
    """Whether a compiler, a transform, a mode or forward mode is to see the operators."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
    )


def _cached_call(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, given: Given
) -> CachedCall | None:
    """The call for plain tensors in eager mode; None if the operators must run."""
    if _is_watched() or query.is_meta:  # on meta, results are the shapes that operators promise
        return None
    if type(query) not in PLAIN or type(key) not in PLAIN or type(value) not in PLAIN:
        return None
    if given is not NOTHING:
        for x in given:
            if x is not None and (type(x) not in PLAIN or x.is_neg()):
                return None
    try:  # not around a new call, whose errors are the caller's
        cache_key = key_of(problem, query, key, value, given)
    except RuntimeError:  # no memory: wrappers left over from a transform that has ended
        return None
    return _cache.get(cache_key) or _new_call(cache_key, problem, query, key, value, given)


def attend(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    given: Given = NOTHING,
    *,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Output and logsumexp of ``problem``; the latter may be None if it is not asked for.

    Tensors are in its layout; ``given`` are those named :data:`GIVEN`, :data:`NOTHING` if all are
    None. Raises the errors of the public functions.
    """
    by_definition = problem.implementation == "reference"
    call = None if by_definition else _cached_call(problem, query, key, value, given)
    if call is None:
        check_inputs(problem, query, key, value, *given[STARTS:])
        given = normalised(problem, query, key, given)
        if by_definition:
            from flashattn_triton.reference import attend_by_definition

            return attend_by_definition(problem, query, key, value, given)
        if type(query) not in PLAIN:
            register_for(query, FORWARD, BACKWARD)
        out, lse = FORWARD(query, key, value, *given, *problem.pack())
        return out, lse
    differentiated = query.requires_grad or key.requires_grad or value.requires_grad
    if given is not NOTHING:
        if not call.normal:
            given = normalised(problem, query, key, given)
        if call.masked:
            differentiated = differentiated or any(x is not None and x.requires_grad for x in given)
    if not differentiated or not torch.is_grad_enabled():
        return call.forward(query, key, value, given)
    tensors = (query, key, value) if given is NOTHING else (query, key, value, *given)
    if return_lse:
        out, lse = Attend.apply(call, *tensors)
        return out, lse
    return _AttendOutput.apply(call, *tensors), None
