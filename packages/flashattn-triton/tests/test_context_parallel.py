"""Attention of sequences spread over ranks: what one process computes, in every order and mask."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from torch.utils.flop_counter import FlopCounterMode

from flashattn_triton import (
    context_parallel,
    flash_attention,
    flash_attention_varlen,
    largest_scores,
)
from flashattn_triton.context_parallel import (
    RankLostError,
    all_gather_attention,
    context_parallel_attention,
    explain,
    ring_attention,
    shard_tokens,
    token_positions,
    unshard_tokens,
)
from flashattn_triton.context_parallel.join_kernel import join_on_gpu
from flashattn_triton.context_parallel.schedules import choose, join
from flashattn_triton.context_parallel.transfers import (
    SLOTS,
    Copies,
    PeerMemory,
    Transfers,
)
from flashattn_triton.context_parallel.zigzag import Zigzag
from ranks import run_case, run_ranks, set_collective_timeout

WAYS: dict[str, Any] = {"ring": ring_attention, "all-gather": all_gather_attention}
OF_GPUS = {"ring by messages": functools.partial(ring_attention, communication="messages"), **WAYS}
BANDS = [(None, None), (None, 0), (5, 0), (0, 0), (3, 9), (None, 4)]
STARTS = [(0, 48), (0, 37), (0, 5, 5, 47, 48, 51, 99), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_calls_of_all_parts_see_every_visible_pair_once(world_size: int, band: Any) -> None:
    left, right = band
    for starts in STARTS:
        order, total = Zigzag(world_size, starts), starts[-1]
        document = torch.bucketize(torch.arange(total), torch.tensor(starts[1:]), right=True)
        ahead = torch.arange(total) - torch.arange(total)[:, None]
        visible = document == document[:, None]
        visible &= (ahead <= (total if right is None else right)) & (
            ahead >= -(total if left is None else left)
        )
        for in_parts in (True, False):
            seen = torch.zeros(total, total, dtype=torch.int64)
            for rank in range(world_size):
                rows = tokens(order, rank)
                for source in range(world_size) if in_parts else [None]:
                    keys = torch.arange(total) if source is None else tokens(order, source)
                    for call in order.calls(rank, source, band):
                        pairs = (rows[call.queries, None], keys[None, call.keys])
                        seen[pairs] += pairs_of(call)
            assert torch.equal(seen, visible.long()), (starts, in_parts)


def tokens(order: Zigzag, rank: int) -> Tensor:
    return torch.cat([torch.arange(*span) for span in order.spans(rank)])


def pairs_of(call: Any) -> Tensor:
    """Which rows of keys each row of queries sees, by the arguments of the call."""
    causal, window = call.mask
    found = torch.zeros(call.starts_q[-1], call.starts_k[-1], dtype=torch.int64)
    for (q, q_end), (k, k_end) in zip(
        itertools.pairwise(call.starts_q), itertools.pairwise(call.starts_k), strict=True
    ):
        diagonal = k_end - k - (q_end - q) if causal else 0
        left, right = window or (None, None)
        right = 0 if causal else right
        ahead = torch.arange(k_end - k) - torch.arange(q_end - q)[:, None] - diagonal
        sees = torch.ones_like(ahead, dtype=torch.bool)
        for side, far in ((left, ahead < -(left or 0)), (right, ahead > (right or 0))):
            if side is not None:
                assert side >= 0
                sees &= ~far
        found[q:q_end, k:k_end] += sees
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_ranks_have_equal_work(world_size: int) -> None:
    for starts in STARTS:
        lengths = [Zigzag(world_size, starts).length(r) for r in range(world_size)]
        assert max(lengths) - min(lengths) <= 2
    starts = (0, 64 * world_size, 160 * world_size, 192 * world_size)
    order = Zigzag(world_size, starts)
    work = [
        sum(int(pairs_of(c).sum()) for s in range(world_size) for c in order.calls(r, s, (None, 0)))
        for r in range(world_size)
    ]
    assert max(work) == min(work)


def test_tokens_know_their_positions() -> None:
    whole = token_positions(cu_seqlens=(0, 3, 3, 5))
    assert whole.tolist() == [0, 1, 2, 0, 1]
    order = Zigzag(2, (0, 8))
    assert [order.spans(rank) for rank in (0, 1)] == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]


def test_a_window_leaves_most_parts_out() -> None:
    order = Zigzag(8, (0, 8 * 64))
    for rank in range(8):
        sources = [s for s in range(8) if order.calls(rank, s, (16, 0))]
        assert set(sources) <= {rank - 1, rank, rank + 1}


# -- against one process ---------------------------------------------------------------------------

PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full, heads behind the sequence": {"layout": "bshd"},
    "a window": {"causal": "bottom-right", "window": (5, None)},
    "a window on both sides": {"window": (3, 9)},
    "sinks, a soft-cap": {"causal": True, "sinks": True, "softcap": 2.0},
    "one ragged sequence": {"causal": True, "starts": (0, 37)},
    "packed": {"causal": True, "starts": (0, 5, 5, 47, 48, 51, 99)},
    "packed, full, many short": {"starts": (0, 1, 2, 3, 3, 9, 11)},
    "packed, a window, sinks": {
        "causal": True, "window": (7, 0), "sinks": True, "starts": (0, 40, 61, 100)
    },
    "bf16": {"causal": True, "dtype": torch.bfloat16},
    "bf16, packed, a window": {
        "causal": True, "window": (30, 0), "dtype": torch.bfloat16, "starts": (0, 60, 64, 131)
    },
}  # fmt: skip
EQUALITIES = [(way, name) for way in WAYS for name in PROBLEMS]


def compare(rank: int, world_size: int, way: str, name: str, on_gpus: bool = False) -> None:
    options = dict(PROBLEMS[name])
    dtype, starts = options.pop("dtype", torch.float32), options.pop("starts", None)
    device = "cuda" if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    n = 12 * world_size if starts is None else starts[-1]
    shapes: list[Any] = [(2, h, n, d) for h, d in ((4, 16), (2, 16), (2, 8))]
    dim, of_lse, keywords = 2, 2, dict(options)
    attend: Any = flash_attention
    if starts is not None:
        shapes, dim, of_lse = [(n, h, d) for _, h, _, d in shapes], 0, 1
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
        keywords["cu_seqlens_q"] = keywords["cu_seqlens_k"] = cu_seqlens
        options["cu_seqlens"], attend = starts, flash_attention_varlen
    elif options.get("layout") == "bshd":
        shapes, dim = [(b, n, h, d) for b, h, n, d in shapes], 1
    whole = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    has_sinks = options.pop("sinks", False)
    keywords.pop("sinks", None)
    if has_sinks:
        whole.append(torch.randn(4, device=device, requires_grad=True))
        keywords["sinks"] = whole[3]

    def shard(x: Tensor, dim: int) -> Tensor:
        return shard_tokens(x.detach(), dim=dim, cu_seqlens=starts)

    def one_process(leaves: list[Tensor], keywords: Any, grads: Any = None) -> tuple[Any, Any]:
        results = attend(*leaves[:3], return_lse=True, **keywords)
        grads = [torch.randn_like(x) for x in results] if grads is None else grads
        return grads, [*results, *torch.autograd.grad(results, leaves, grads)]

    grads, expected = one_process(whole, keywords)
    own = [shard(x, dim) for x in whole[:3]] + [x.detach().clone() for x in whole[3:]]
    for x in own:
        x.requires_grad_()
    if has_sinks:
        options["sinks"] = own[3]
    results = OF_GPUS[way](*own[:3], return_lse=True, **options)
    of_results = [shard(grads[0], dim), shard(grads[1], of_lse)]
    found = [*results, *torch.autograd.grad(results, own, of_results)]
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    dims = [dim, of_lse, dim, dim, dim]
    for x, y in zip(found[5:], expected[5:], strict=True):  # sinks: the sum over ranks
        dist.all_reduce(x)
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    if way == "ring":
        given = {x: y for x, y in keywords.items() if x != "sinks"}
        largest = largest_scores(whole[0].detach(), whole[1].detach(), **given)
        torch.testing.assert_close(
            context_parallel.largest_scores(*own[:2], **options), largest, rtol=1e-4, atol=1e-4
        )
    back = unshard_tokens(results[0].detach(), dim=dim, cu_seqlens=starts)
    assert back.shape == expected[0].shape
    if dtype == torch.float32:
        for x, y, d in zip(found, expected, dims, strict=False):
            torch.testing.assert_close(x, shard(y, d), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(back, expected[0].detach(), rtol=1e-4, atol=1e-5)
        return
    doubles = [x.detach().double().requires_grad_() for x in whole]
    keywords["implementation"] = "reference"
    _, exact = one_process(doubles, keywords, [grads[0].double(), grads[1].double()])
    for i in (0, 2, 3, 4):  # output and gradients; the logsumexp is not rounded
        exactly = shard(exact[i], dims[i])
        errors = [square(x, exactly) for x in (found[i], shard(expected[i], dims[i]))]
        of_all = torch.stack(errors)  # of few numbers they differ by chance
        dist.all_reduce(of_all)
        assert of_all[0].sqrt() <= 1.1 * of_all[1].sqrt(), (i, of_all.sqrt())


def square(x: Tensor, exact: Tensor) -> Tensor:
    return (x.detach().double() - exact).square().sum()


@pytest.mark.parametrize(("way", "name"), EQUALITIES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_compute_what_one_process_does(world_size: int, way: str, name: str) -> None:
    run_case(compare, world_size, EQUALITIES, way, name)


class SharedFiles:
    """The memory of ranks that are processes of one host, for CPUs: files that all have mapped."""

    def __init__(self, folder: str, nbytes: int) -> None:
        dist.barrier()
        self._mapped = [
            torch.from_file(f"{folder}/{rank}", shared=True, size=nbytes, dtype=torch.uint8)
            for rank in range(dist.get_world_size())
        ]

    view = PeerMemory.view

    def copy(self, targets: Any, sources: Any) -> Any:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return self

    def wait(self) -> None:
        """Nothing is under way on a CPU."""

    def meet(self, group: dist.ProcessGroup) -> None:
        dist.barrier(group)


def carry(rank: int, world_size: int, folder: str) -> None:
    def keys_of(rank: int) -> tuple[Tensor, Tensor]:
        k = torch.arange(rows[rank] * 2 * 3).view(-1, 2, 3) + 100 * rank
        return k.bfloat16(), k[..., :1].bfloat16()

    group, rows = dist.group.WORLD, [4 + (r % 2) for r in range(world_size)]
    assert group is not None
    own = keys_of(rank)
    memory: Any = SharedFiles(folder, Copies.nbytes(own, max(rows), SLOTS))
    ways: list[Transfers] = [Copies(memory, group, own, max(rows)), Transfers(group, own)]
    for transfers in ways:
        for step in range(1, world_size):
            source, reader = (rank - step) % world_size, (rank + step) % world_size
            hidden, hides = (source, step) == (0, 2), (rank, step) == (0, 2)
            n = 0 if hidden else rows[source]
            found = transfers.fetch(step, n, is_read=not hides).wait()
            for x, y in zip(found, keys_of(source), strict=True):
                assert torch.equal(x, y[:n])
            sums = transfers.zeros(step, n)
            assert not any(x.any() for x in sums)
            for x in sums:
                x += 10 * rank + step
            coming = transfers.give_back(step, sums, is_read=not hides)
            for x, y in zip(coming.wait(), own, strict=True):
                assert x.shape == (y[:0] if hides else y).shape
                assert (x == 10 * reader + step).all()


def test_transfers_bring_keys_and_bring_gradients_back(tmp_path: Path) -> None:
    """Over more steps than there are slots, with ranks of other lengths and parts left out."""
    run_ranks(carry, 5, str(tmp_path))


@pytest.mark.parametrize("n", [1, 16, 21])
def test_a_kernel_joins_as_torch_does(n: int) -> None:
    out, part = torch.randn(2, n, 3, 6).unbind()
    lse, part_lse = torch.randn(2, 3, 30).unbind()
    lse[0, 0] = part_lse[1, 0] = lse[2, 0] = part_lse[2, 0] = float("-inf")
    lse, part_lse = lse[:, :n], part_lse[:, :n]
    found = out.clone(), lse.clone()
    join_on_gpu(*found, part, part_lse)
    join(out, lse, part, part_lse)
    torch.testing.assert_close(found, (out, lse))


# -- compilers, checkpoints, modes -----------------------------------------------------------------


class Operators(TorchDispatchMode):
    """Counts the passes over ranks that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def use(rank: int, world_size: int, what: str) -> None:
    x, weight = torch.randn(2, 1, 2, 8, 16).unbind()
    x.requires_grad_()

    def attend(x: Tensor) -> Tensor:
        y: Tensor = context_parallel_attention(x * 2, x, x, causal=True, window=(9, None))
        return y * weight

    (expected,) = torch.autograd.grad(attend(x).sum(), x)
    if what == "a compiler":
        starts, p = torch.tensor([0, 3, 8 * world_size]), x.detach()[0].transpose(0, 1)

        def packed(p: Tensor, starts: Tensor) -> Tensor:
            y: Tensor = all_gather_attention(p * 2, p, p, cu_seqlens=starts, causal=True)
            return y.sin()

        p.requires_grad_()
        compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
        found = []
        for attend_packed in (packed, compiled):
            out = attend_packed(p, starts)
            found.append([out.detach(), *torch.autograd.grad(out.sum(), p)])
        for result, y in zip(*found, strict=True):
            torch.testing.assert_close(result, y)
    elif what == "deterministic gradients":
        for _ in range(2):
            again = torch.autograd.grad(attend(x).sum(), x)[0]
            assert torch.equal(again, expected)
    elif what == "a checkpoint":
        keep = [torch.ops.flashattn_triton.context_forward.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, keep)
        for context_fn, times in ((noop_context_fn, 1), (contexts, 0)):
            out = checkpoint(attend, x, use_reentrant=False, context_fn=context_fn)
            with Operators() as backward:
                (gradient,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(gradient, expected)
            assert backward.counts["context_forward"] == times
            assert backward.counts["context_backward"] == 1
    elif what == "no gradients":
        with torch.no_grad():
            assert torch.equal(attend(x), attend(x.detach()))
        with torch.inference_mode():
            assert not attend(x).requires_grad
    elif what == "counted operations":
        with FlopCounterMode(display=False) as counter:
            attend(x).sum().backward()
        all_pairs = 2 * (8 * world_size) ** 2  # of two heads
        assert counter.get_total_flops() * world_size == 2 * all_pairs * 16 * (2 + 5)
        starts, p = torch.tensor([0, 3, 8 * world_size]), x.detach()[0].transpose(0, 1)
        with FlopCounterMode(display=False) as counter:
            all_gather_attention(p, p, p, cu_seqlens=starts)
        pairs = 2 * (3**2 + (8 * world_size - 3) ** 2)
        assert counter.get_total_flops() == 2 * (pairs // 2 // world_size) * 2 * 16 * 2
    elif what == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            assert context_parallel_attention(x, x, x).dtype == torch.bfloat16
    elif what == "second derivatives":
        with pytest.raises(RuntimeError, match="context_backward"):
            torch.autograd.grad(attend(x).sum(), x, create_graph=True)[0].sum().backward()
    elif what == "groups":
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("shard", "context"))
        by_mesh = context_parallel_attention(x, x, x, mesh["context"], causal=True)
        assert torch.equal(by_mesh, context_parallel_attention(x, x, x, causal=True))
        alone = context_parallel_attention(x, x, x, mesh["shard"], causal=True)
        assert torch.equal(alone, flash_attention(x, x, x, causal=True))
        with pytest.raises(ValueError, match="a mesh of one dimension"):
            context_parallel_attention(x, x, x, mesh)
        words = explain(x, x, x, causal=True)
        assert words.startswith("ring: keys travel under the calls for other keys; 2 calls forward")
        assert words.endswith(", and as many backward; by messages, which are for all devices")
        asked = explain(x, x, x, causal=True, communication="messages")
        assert asked.endswith("; by messages, as asked")
        assert explain(x, x, x, mesh["shard"]).startswith("no other rank")
        with pytest.raises(ValueError, match="query must have at least one sequence where ranks"):
            context_parallel_attention(x[:0], x[:0], x[:0])


USES = [
    "a compiler",
    "deterministic gradients",
    "a checkpoint",
    "no gradients",
    "counted operations",
    "autocast",
    "second derivatives",
    "groups",
]


@pytest.mark.parametrize("what", USES)
def test_use_with(what: str) -> None:
    run_case(use, 2, USES, what)


MODELS = {"one sequence": (0, 24), "packed": (0, 9, 10, 25)}


def of_transformers(rank: int, world_size: int, name: str) -> None:
    import transformers

    from flashattn_triton.integrations.transformers import NAME, register

    starts = MODELS[name]
    register(context_parallel=dist.group.WORLD)
    sizes = {
        "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
    }  # fmt: skip
    torch.manual_seed(0)
    ours, theirs = (
        transformers.MistralForCausalLM._from_config(
            transformers.MistralConfig(**sizes), attn_implementation=name
        )
        for name in (NAME, "sdpa")
    )
    theirs.load_state_dict(ours.state_dict())
    ids, weight = torch.randint(3, 61, (1, starts[-1])), torch.randn(1, starts[-1], 61)
    documents = [ids[:, a:b] for a, b in itertools.pairwise(starts)]
    expected = torch.cat([theirs(x, use_cache=False).logits for x in documents], dim=1)
    (expected * weight).sum().backward()

    packed = starts if len(starts) > 2 else None
    keywords: dict[str, Any] = {}
    if packed is not None:
        keywords = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(starts))
    positions = token_positions(cu_seqlens=starts)[None]
    own = shard_tokens(ids, cu_seqlens=packed)
    logits = ours(own, position_ids=positions, use_cache=False, **keywords).logits
    torch.testing.assert_close(logits, shard_tokens(expected.detach(), cu_seqlens=packed))
    (logits * shard_tokens(weight, cu_seqlens=packed)).sum().backward()
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        dist.all_reduce(x.grad)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="attention_mask must be None, and caches empty"):
        ours(own, position_ids=positions, attention_mask=torch.ones_like(own), use_cache=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    run_case(of_transformers, 2, list(MODELS), name)


def test_the_choice() -> None:
    long = Zigzag(4, (0, 2**18))
    causal, window = (None, 0), (4096, 0)
    for mask in (causal, window):
        found = choose(long, mask, 8, 256, 2)
        assert found == ("ring", "keys travel under the calls for other keys")
    lengths = range(1000, 12000, 500)
    packed = Zigzag(4, tuple(itertools.accumulate(lengths, initial=0)))
    assert choose(packed, causal, 8, 256, 2)[0] == "ring"
    way, reason = choose(packed, window, 8, 256, 2)
    assert way == "all-gather"
    assert reason.startswith("a ring would have 24 calls: ")
    many = Zigzag(32, tuple(itertools.accumulate(range(5000, 17000, 60), initial=0)))  # ranks
    assert choose(many, window, 1, 256, 2)[0] == "ring"
    assert choose(many, window, 1, 256, 2)[1].startswith("less memory: gathered ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 2, 6, 16)}, "key must have query's 6 tokens, but got 8"),
        ({"query": torch.zeros(1, 2, 8, 16).double()}, "query must be float16, bfloat16 or"),
        ({"query": torch.zeros(2, 8, 16)}, "query must be .* with 4 dimensions"),
        ({"cu_seqlens": (0, 8), "layout": "bhsd"}, "layout must be None with cu_seqlens"),
        ({"sinks": torch.zeros(3)}, r"sinks must be a floating tensor of shape \(2,\)"),
        ({"return_lse": 1}, "return_lse must be True or False"),
        ({"window": 3}, "window must be None or a pair"),
        ({"communication": "nccl"}, "communication must be one of auto, messages, peer-copy, but"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 8, 16)
    given = {"query": x, "key": x, "value": x, **change}
    for function in (ring_attention, explain):
        with pytest.raises(ValueError, match=message):
            function(**given)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((0, 2.5, 8), r"at least two integers that rise .* but got \[0, 2\.5, 8\]"),
        ((0, 5), "must end with the number of tokens of all ranks, 8, but got 5"),
        (torch.tensor([0, 9]), "must end with the number of tokens of all ranks, 8, but got 9"),
    ],
    ids=str,
)
def test_mistaken_starts(starts: Any, message: str) -> None:
    """One rank refuses what several do."""
    x = torch.zeros(8, 2, 16)
    for function in (ring_attention, explain):
        with pytest.raises(ValueError, match=message):
            function(x, x, x, cu_seqlens=starts)
    with pytest.raises(ValueError, match=message):
        context_parallel.largest_scores(x, x, cu_seqlens=starts)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"softmax_scale": 0.5}, r"got softmax_scale, a name of flash-attn\. Use scale=0\.5"),
        ({"tiling": None}, "context_parallel must be called by its own .* but got tiling"),
    ],
)
def test_unknown_keywords(keywords: dict[str, Any], message: str) -> None:
    x = torch.zeros(1, 2, 8, 16)
    for function in (ring_attention, context_parallel.largest_scores):
        inputs = (x,) * (2 if function is context_parallel.largest_scores else 3)
        with pytest.raises(TypeError, match=message):
            function(*inputs, **keywords)


def test_mistakes_with_tokens() -> None:
    with pytest.raises(TypeError, match="group must be a process group, a mesh of one dimension"):
        shard_tokens(torch.zeros(1, 8), "context")
    with pytest.raises(ValueError, match="length or cu_seqlens must be given, and not both"):
        token_positions()
    with pytest.raises(ValueError, match=r"cu_seqlens must be at least two integers that rise"):
        token_positions(cu_seqlens=(0, 4, 3))


# -- ranks that differ -----------------------------------------------------------------------------

DIFFERENCES = {
    "masks": r"visible positions before and after: \(-1, 0\) on rank 0; \(-1, -1\) on rank 1",
    "windows": r"before and after: \(9, 0\) on rank 0; \(8, 0\) on rank 1",
    "lengths": r"tokens of a rank: 2 x 12 on rank 0; 2 x 10 on rank 1",
    "packed lengths": r"tokens of a rank: as cu_seqlens says on rank 0; 8 instead of 10 on rank 1",
    "cu_seqlens": "cu_seqlens: other values on rank 1 than on rank 0",
    "heads": r"query: torch.float32 \(4, 16\) on rank 0; torch.float32 \(2, 16\) on rank 1",
    "ways": "pass: forward, ring on rank 0; forward, all-gather on rank 1",
    "a mask that was equal before": r"before and after: \(-1, 0\) on rank 0; \(-1, -1\) on rank 1",
}


def differ(rank: int, world_size: int, name: str) -> str:
    x, packed = torch.randn(2, 4, 12, 16), torch.randn(10, 2, 16)
    differs = rank == 1
    attend: Any = ring_attention
    options: dict[str, Any] = {"causal": True}
    if name == "masks":
        options["causal"] = not differs
    elif name == "a mask that was equal before":
        for causal in (True, False):
            ring_attention(x, x, x, causal=causal)
        options["causal"] = not differs
    elif name == "windows":
        options["window"] = (9 - rank, None)
    elif name == "lengths" and differs:
        x = x[:, :, :10]
    elif name == "packed lengths":
        x, options["cu_seqlens"] = packed[: 8 if differs else 10], (0, 12, 20)
    elif name == "cu_seqlens":
        x, options["cu_seqlens"] = packed, (0, 12 + 4 * rank, 20)
    elif name == "heads" and differs:
        x = x[:, :2]
    elif name == "ways" and differs:
        attend = all_gather_attention
    with pytest.raises(ValueError, match="every rank must attend with the same") as raised:
        attend(x, x, x, **options)
    y = torch.randn(2, 4, 12, 16)
    assert ring_attention(y, y, y).isfinite().all()  # the group goes on
    return str(raised.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_named_on_every_rank(name: str) -> None:
    for message in run_case(differ, 2, list(DIFFERENCES), name):
        assert re.search(DIFFERENCES[name], message), message


def lose(rank: int, world_size: int, way: str) -> str:
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = WAYS[way](x, x, x, causal=True)
    set_collective_timeout(2)
    if rank == 1:
        return ""
    with pytest.raises(RankLostError, match="every rank must take part in") as raised:
        out.sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_lost_rank_is_an_error_of_the_others(way: str) -> None:
    outcomes = run_ranks(lose, 3, way)
    for outcome in outcomes[::2]:
        assert f"failed on rank {outcome.rank} of 3" in outcome.value
        assert "A rank is lost or makes other calls" in outcome.value


def replay(rank: int, world_size: int, way: str) -> None:
    """A CUDA graph of both passes, on other numbers than those that were recorded."""
    x = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad_out = torch.randn_like(x)

    def both(x: Tensor) -> tuple[Tensor, ...]:
        out = WAYS[way](x, x, x, causal=True)
        return out.detach(), *torch.autograd.grad(out, x, grad_out)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            both(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        recorded = both(x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    again = both(x.detach().clone().requires_grad_())
    for found, expected in zip(recorded, again, strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-7)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_cuda_graph(way: str) -> None:
    run_ranks(replay, 2, way, backend="nccl")


# CPUs have seen all problems. A test of its own for each: they compile beside each other.
ON_GPUS = [
    ("ring", "bf16", 2),
    ("ring", "bf16", 3),
    ("ring", "bf16", 4),
    ("ring", "bf16, packed, a window", 3),
    ("ring", "bf16, packed, a window", 4),
    ("ring", "sinks, a soft-cap", 2),
    ("ring", "sinks, a soft-cap", 4),
    ("ring by messages", "bf16", 2),
    ("ring by messages", "bf16", 4),
    ("all-gather", "bf16", 2),
    ("all-gather", "bf16", 3),
    ("all-gather", "bf16, packed, a window", 2),
    ("all-gather", "bf16, packed, a window", 4),
]


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("way", "name", "world_size"), ON_GPUS)
def test_gpus_compute_what_one_does(way: str, name: str, world_size: int) -> None:
    """Ranks that share a GPU, where there are fewer, send through the host."""
    backend = "nccl" if torch.cuda.device_count() >= world_size else "gloo"
    run_ranks(compare, world_size, way, name, True, backend=backend, timeout=200)
