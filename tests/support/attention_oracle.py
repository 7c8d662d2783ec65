"""Comparison of attention's results with the fp32 or fp64 oracle, and the tolerances of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_inputs import Inputs
from flashattn_triton.problem import Problem
from flashattn_triton.reference import attend_by_definition, attention_reference

# ---- tolerances ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What an error may be for one dtype.

    Output and gradients, by the root mean square and by the largest element of what follows:
    |x - oracle| <= ratio · |same - oracle| + rounding + unstored, where ``same`` is the same
    computation in PyTorch at the same precision; rounding is the most that
    2 · |((x + 0.3) - 0.3) - x| can be in that dtype, one rounding of the result itself; and
    unstored (of gradients only) is the effect of recomputing P and dS instead of storing P: see
    :func:`off_by_rounding`. PyTorch's largest error is the largest over ``ORDERS`` of summation:
    that of one order is luck, which differs between processors and may be small by chance.

    Logsumexp: |x - oracle| <= logsumexp · max(1, |oracle|).
    """

    oracle: torch.dtype
    ratio: float
    logsumexp: float


TOLERANCES = {
    # The oracle must be more precise than the tested computation, hence fp64.
    torch.float32: Tolerance(oracle=torch.float64, ratio=2.0, logsumexp=1e-5),
    # Rounding P, dS and the results to 2^-11 or 2^-8 hides what fp32 accumulation adds, so the
    # oracle is fp32. The logsumexp never leaves fp32: exact products of half inputs, summed and
    # exponentiated in fp32, so it is as good as for fp32 inputs.
    torch.float16: Tolerance(oracle=torch.float32, ratio=2.0, logsumexp=1e-5),
    torch.bfloat16: Tolerance(oracle=torch.float32, ratio=2.0, logsumexp=1e-5),
}
# Whatever the dtype, L and D = rowsum(dO ∘ O) are kept in fp32, whose unit roundoff is 2^-24.
# P = exp(S - L) inherits L's absolute error: a rounding of the maximum's logarithm and of the sum.
LOGSUMEXP_ROUNDINGS = 2
# dS = P ∘ (dP - D) cancels. In a row with one visible key both terms are equal, and what is left
# over is the order in which E products were summed twice: of the order of √E roundings. PyTorch's
# softmax happens to leave exactly nothing there; no formula that recomputes P does.
D_ROUNDINGS = 16
# Orders of the columns of Q and K, over which QK^T is summed: the given one, and random ones.
ORDERS = 4
# With a soft-cap the kernels and PyTorch compute tanh and its derivative by different formulas.
SOFTCAP_RATIO = 3.0


def tolerance_of(dtype: torch.dtype, options: Problem) -> Tolerance:
    tolerance = TOLERANCES[dtype]
    return tolerance if options.softcap is None else replace(tolerance, ratio=SOFTCAP_RATIO)


# ---- comparison ----------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | Tensor]


def differentiate(attend: Attend, inputs: Inputs, lse_gradient: bool) -> dict[str, Tensor]:
    """Runs ``attend`` and its backward pass on the inputs."""
    leaves = [inputs.query, inputs.key, inputs.value]
    result = attend(*leaves)
    leaves += [] if inputs.bias is None else [inputs.bias]
    out, lse = result if isinstance(result, tuple) else (result, None)
    loss = (out.double() * inputs.grad_out.double()).sum()
    if lse is not None and lse_gradient:
        finite = torch.isfinite(lse)  # the gradient of a constant -inf would be 0 · -inf in the sum
        loss = loss + torch.where(finite, lse, 0.0).mul(inputs.grad_lse).sum()
    gradients = torch.autograd.grad(loss, leaves)
    results = dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))
    results["out"] = out.detach()
    return results if lse is None else results | {"lse": lse.detach()}


def reference(inputs: Inputs, dtype: torch.dtype, lse_gradient: bool) -> dict[str, Tensor]:
    """The definition's results in ``dtype``, gradients included."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        problem, given = inputs.options, converted.given
        if not inputs.case.packed:
            return attention_reference(q, k, v, problem, given, dtype=dtype)
        starts_q, starts_k = inputs.case.cu_seqlens("cpu")
        given = given._replace(cu_seqlens_q=starts_q, cu_seqlens_k=starts_k)
        problem = replace(problem, layout="thd")
        return attend_by_definition(problem, q, k, v, given, dtype=dtype)

    query, key, value = (
        x.detach().to(dtype).requires_grad_() for x in (inputs.query, inputs.key, inputs.value)
    )
    tensors = dict(inputs.tensors)
    if inputs.bias is not None:
        tensors["bias"] = inputs.bias.detach().to(dtype).requires_grad_()
    converted = replace(inputs, query=query, key=key, value=value, tensors=tensors)
    return differentiate(attend, converted, lse_gradient)


def in_other_orders(inputs: Inputs, lse_gradient: bool) -> Iterator[dict[str, Tensor]]:
    """The definition's results in the case's dtype, with QK^T summed in other orders."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(ORDERS - 1):
        order = torch.randperm(inputs.query.shape[-1], generator=generator).to(inputs.query.device)
        query, key = (x.detach()[..., order].requires_grad_() for x in (inputs.query, inputs.key))
        moved = replace(inputs, query=query, key=key)
        results = reference(moved, inputs.case.dtype, lse_gradient)
        back = torch.argsort(order)
        yield results | {name: results[name][..., back] for name in ("dq", "dk")}


def off_by_rounding(inputs: Inputs, lse: Tensor) -> Inputs:
    """Inputs whose gradients are what errors in L and in D change the true gradients by.

    P = exp(S - L) is linear in exp(-L), and gradients are linear in dO and dL, so an error of L_i
    is a factor on row i of both. D - dL is all that the backward pass knows of dL, so an error of
    D is a dL of the same size: that of a sum of E products, ‖dO_i‖ · rms(V).
    """
    sign = torch.where(inputs.grad_lse < 0, -1.0, 1.0) * 2.0**-24
    of_lse = sign * LOGSUMEXP_ROUNDINGS * lse.abs().clamp(min=1).nan_to_num(posinf=0.0)
    terms = inputs.grad_out.float().norm(dim=-1) * inputs.value.float().square().mean().sqrt()
    of_d = sign * D_ROUNDINGS * (terms.transpose(0, 1) if inputs.case.packed else terms)
    per_row = of_lse.transpose(0, 1) if inputs.case.packed else of_lse  # (H, T) to (T, H)
    return replace(
        inputs,
        grad_out=inputs.grad_out.double() * per_row[..., None],
        grad_lse=(inputs.grad_lse.double() * of_lse + of_d).detach(),
    )


@dataclass(frozen=True)
class Size:
    """Root mean square and largest element of an error."""

    rms: float
    largest: float

    @classmethod
    def of(cls, x: Tensor) -> Size:
        return cls(x.double().square().mean().sqrt().item(), x.abs().max().item())


def check_results(inputs: Inputs, results: Mapping[str, Tensor], lse_gradient: bool) -> None:
    case = inputs.case
    tolerance = tolerance_of(case.dtype, case.options)
    oracle = reference(inputs, tolerance.oracle, lse_gradient)
    unstored = reference(off_by_rounding(inputs, oracle["lse"]), torch.float64, True)
    same = [reference(inputs, case.dtype, lse_gradient)]
    failures = []
    for name, actual in results.items():
        expected = oracle[name]
        assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
        if name == "lse":
            assert actual.dtype == torch.float32, f"lse is {actual.dtype}"
            torch.testing.assert_close(  # -inf equals -inf and nothing else
                actual.to(expected.dtype),
                expected,
                rtol=tolerance.logsumexp,
                atol=tolerance.logsumexp,
                msg=lambda text: f"lse: {text}",
            )
            continue
        assert actual.dtype == case.dtype, f"{name} is {actual.dtype}, not {case.dtype}"
        assert torch.isfinite(actual).all(), f"{name} has non-finite elements"
        if expected.numel() == 0:
            continue
        error = Size.of(actual.to(expected.dtype) - expected)
        eps, whole = torch.finfo(case.dtype).eps, Size.of(expected)
        slack = Size(eps * whole.rms, eps * (whole.largest + 0.3))
        if name != "out":
            of_recomputing = Size.of(unstored[name])
            slack = Size(slack.rms + of_recomputing.rms, slack.largest + of_recomputing.largest)

        baseline = Size.of(same[0][name].to(expected.dtype) - expected)
        if error.largest > tolerance.ratio * baseline.largest + slack.largest:
            same += [] if len(same) > 1 else in_other_orders(inputs, lse_gradient)
            differences = [x[name].to(expected.dtype) - expected for x in same]
            baseline = Size(baseline.rms, max(Size.of(x).largest for x in differences))
        for what in ("rms", "largest"):
            found, other = getattr(error, what), getattr(baseline, what)
            allowed = tolerance.ratio * other + getattr(slack, what)
            if not found <= allowed:
                failures.append(
                    f"{name}: {what} error {found:.3e} > {allowed:.3e} (PyTorch: {other:.3e})"
                )
    assert not failures, f"{case}: " + "; ".join(failures)
