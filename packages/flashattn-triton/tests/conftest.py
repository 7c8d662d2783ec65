"""What every attention test shares: cases, inputs, the tolerance table, and the comparison.

Ask for them by name; nothing is imported from here. What the fixtures return stands in
``attention_cases.py``, ``attention_inputs.py`` and ``attention_oracle.py`` of ``tests/support``.

``case``, ``gpu_case``
    A test with one of these arguments runs once for each :class:`Case`: ``case`` is the small
    matrix (CPU, Triton interpreter), ``gpu_case`` the full one (mark such tests ``gpu``). A
    case's id spells it: B2-H4x2-T113x203-D64-bf16-causal. ``case.options`` is the
    ``Problem``; ``case.keywords`` the arguments of ``flash_attention`` that mean the same.

``strided_case``, ``plain_case``, ``plain_causal_case``
    Parts of ``case``: the few worth repeating for every ``layout``; those that the assignment's
    Function can express (equal heads, no mask or the causal one, the default scale); one of these.

``hopper_case``
    The part of ``gpu_case`` that the Hopper tier takes.

``varlen_case``, ``gpu_varlen_case``
    The same for packed batches; ``case.seqlens`` holds (queries, keys) for each sequence.

``tensor_case``, ``dense_tensor_case``, ``gpu_tensor_case``
    The same for calls with ALiBi slopes, a bias or prefixes, which ``inputs.tensors`` holds under
    the names of ``flash_attention``'s arguments.

``dense_case(...)``, ``packed_case(...)``
    Make a :class:`Case` of one's own.

``make_inputs(case, device="cpu", layout="bhsd")``
    An :class:`Inputs`: query, key, value (views shaped (B, H, N, D) that require gradients;
    packed (T, H, D) for varlen cases), a bias if the case has one, and random gradients
    of output and logsumexp.
    ``layout``: "bhsd" contiguous, "bshd" (heads and sequence transposed), "padded" (rows with gaps
    full of NaN), "strided" (last stride 2, gaps full of NaN), "expanded" (stride-0 key heads).

``assert_close_to_oracle(attend, inputs)``
    ``attend(query, key, value)`` returns (output, logsumexp), or the output alone. Compares
    output, logsumexp and the three gradients with the fp32/fp64 oracle. The backward pass
    starts from both gradients of ``inputs``; with ``lse_gradient=False``, or where only the output
    is returned, from the output's alone.

``assert_results_close(inputs, results, lse_gradient=True)``
    The same for results computed without autograd: a mapping with any of "out", "lse", "dq", "dk",
    "dv", for tests of launchers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import pytest
from torch import Tensor

import attention_inputs
import background
import interpreter
from attention_cases import (
    CASES,
    STRIDED_LENGTHS,
    TENSOR_CASES,
    VARLEN_CASES,
    Case,
    dense,
    full_matrix,
    full_tensor_matrix,
    full_varlen_matrix,
    is_for_hopper,
    is_plain,
    packed,
)
from attention_inputs import Inputs
from attention_oracle import Attend, check_results, differentiate
from flashattn_triton import triton_versions


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    background.put_last(items)


def pytest_collection_finish(session: pytest.Session) -> None:
    background.start_all(session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    background.stop_all(session)


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Triton's; that of a version which is not known stays as it is."""
    if os.environ.get("TRITON_INTERPRET") == "1" and triton_versions.refusal() is None:
        interpreter.spare_work()


@pytest.fixture(scope="session")
def dense_case() -> Callable[..., Case]:
    return dense


@pytest.fixture(scope="session")
def packed_case() -> Callable[..., Case]:
    return packed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    matrices: dict[str, Callable[[], list[Case]]] = {
        "case": lambda: CASES,
        "strided_case": lambda: [c for c in CASES if c.lengths in STRIDED_LENGTHS],
        "plain_case": lambda: [c for c in CASES if is_plain(c)],
        "plain_causal_case": lambda: [c for c in CASES if is_plain(c) and c.lengths == ((65, 65),)],
        "tensor_case": lambda: TENSOR_CASES,
        "dense_tensor_case": lambda: [c for c in TENSOR_CASES if not c.packed],
        "gpu_tensor_case": lambda: TENSOR_CASES + list(full_tensor_matrix()),
        "varlen_case": lambda: VARLEN_CASES,
        "gpu_case": lambda: CASES + list(full_matrix()),
        "gpu_varlen_case": lambda: VARLEN_CASES + list(full_varlen_matrix()),
        "hopper_case": lambda: [c for c in full_matrix() if is_for_hopper(c)],
    }
    for name, cases in matrices.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases(), ids=str)


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., Inputs]:
    return attention_inputs.make_inputs


@pytest.fixture(scope="session")
def assert_results_close() -> Callable[..., None]:
    def check(inputs: Inputs, results: Mapping[str, Tensor], *, lse_gradient: bool = True) -> None:
        check_results(inputs, results, lse_gradient)

    return check


@pytest.fixture(scope="session")
def assert_close_to_oracle() -> Callable[..., None]:
    def check(attend: Attend, inputs: Inputs, *, lse_gradient: bool = True) -> None:
        results = differentiate(attend, inputs, lse_gradient)
        check_results(inputs, results, lse_gradient and "lse" in results)

    return check


@pytest.fixture
def long_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper forward kernel has its shapes for long sequences, whatever the length."""
    from flashattn_triton.hopper import configs

    for key, rows in configs.FORWARD.items():
        monkeypatch.setitem(configs.FORWARD, key, rows[-1:])
