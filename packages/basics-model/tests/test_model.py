"""The Transformer: structure, initialisation, causality, precision, compilation."""

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from basics_model import ModelConfig, TransformerLM, cross_entropy, sdpa_attention
from basics_model.attention import Attention, softmax_attention
from basics_model.model import RMSNorm, SwiGLU


def tokens(config: ModelConfig, batch: int = 2, seq: int | None = None) -> Tensor:
    return torch.randint(config.vocab_size, (batch, seq or config.context_length))


def oracle(model: TransformerLM, token_ids: Tensor) -> Tensor:
    """The whole model again, from its state dict, in fp64 and with complex rotations."""
    config = model.config
    weight = {name: value.double() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        y = x @ weight[f"{name}.weight"].T
        return y.view(*y.shape[:2], config.num_heads, config.head_dim).transpose(1, 2)

    def rotate(x: Tensor) -> Tensor:
        pair = torch.arange(config.head_dim // 2).double()
        angles = torch.arange(x.shape[2])[:, None] / config.rope_theta ** (
            2 * pair / config.head_dim
        )
        turned = torch.view_as_complex(x.reshape(*x.shape[:3], -1, 2)) * torch.exp(1j * angles)
        return torch.view_as_real(turned).flatten(-2)

    x = weight["embedding.weight"][token_ids]
    mask = torch.full((x.shape[1], x.shape[1]), -math.inf).double().triu(1)
    for i in range(config.num_layers):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.attention_norm")
        q = rotate(heads(h, f"{block}.attention.query"))
        k = rotate(heads(h, f"{block}.attention.key"))
        v = heads(h, f"{block}.attention.value")
        scores = (q @ k.mT / math.sqrt(config.head_dim) + mask).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).reshape(x.shape)
        x = x + mixed @ weight[f"{block}.attention.output.weight"].T
        h = norm(x, f"{block}.feed_forward_norm")
        gate = h @ weight[f"{block}.feed_forward.gate.weight"].T
        up = h @ weight[f"{block}.feed_forward.up.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weight[f"{block}.feed_forward.down.weight"].T
    return norm(x, "norm") @ weight["lm_head.weight"].T


@pytest.mark.parametrize("attention", [sdpa_attention, softmax_attention])
@pytest.mark.parametrize("seq", [1, 7, 12, 50])  # also far beyond the context length
def test_forward_equals_the_oracle(config: ModelConfig, seq: int, attention: Attention) -> None:
    model = TransformerLM(config, attention=attention)
    token_ids = tokens(config, 3, seq)
    logits = model(token_ids)
    assert logits.shape == (3, seq, config.vocab_size)
    torch.testing.assert_close(logits.double(), oracle(model, token_ids), atol=5e-6, rtol=1e-5)


def test_gradients_equal_finite_differences(config: ModelConfig) -> None:
    model = TransformerLM(config, dtype=torch.float64)
    token_ids = tokens(config, 2, 6)

    def loss() -> Tensor:
        return cross_entropy(model(token_ids), token_ids)

    loss().backward()
    step = (
        1e-4  # central differences err by step², the fp32 rotary tables by the same on both sides
    )
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter.add_(direction, alpha=step)
            above = loss()
            parameter.sub_(direction, alpha=2 * step)
            below = loss()
            parameter.add_(direction, alpha=step)
        slope = (parameter.grad * direction).sum()
        torch.testing.assert_close(
            slope, (above - below) / (2 * step), atol=1e-6, rtol=1e-4, msg=name
        )


def test_later_tokens_never_change_earlier_logits(config: ModelConfig) -> None:
    model = TransformerLM(config)
    token_ids = tokens(config)
    before = model(token_ids)
    token_ids[:, 5] = (token_ids[:, 5] + 1) % config.vocab_size
    after = model(token_ids)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_attention_receives_heads_and_is_the_callers(config: ModelConfig) -> None:
    seen = []

    def recording(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        seen.append((query.shape, key.shape, value.shape))
        return sdpa_attention(query, key, value)

    token_ids = tokens(config)
    model = TransformerLM(config, attention=recording)
    logits = model(token_ids)
    assert seen == [(torch.Size([2, 4, 12, 4]),) * 3] * config.num_layers
    twin = TransformerLM(config)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin(token_ids), logits)


def test_state_dict_holds_parameters_only(config: ModelConfig) -> None:
    model = TransformerLM(config)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert not list(model.buffers())


def test_parameters_are_registered_in_forward_order(config: ModelConfig) -> None:
    names = [name for name, _ in TransformerLM(config, device="meta").named_parameters()]
    assert names[0] == "embedding.weight"
    assert names[-2:] == ["norm.weight", "lm_head.weight"]
    assert len(names) == 9 * config.num_layers + 3


def test_initialisation_is_truncated_normal() -> None:
    config = ModelConfig(
        vocab_size=2000, context_length=8, d_model=128, d_ff=512, num_layers=1, num_heads=2
    )
    model = TransformerLM(config)
    # Cutting a normal at three deviations leaves 0.98658 of its standard deviation.
    shrink = 0.98658
    for module in model.modules():
        if isinstance(module, nn.Linear):
            std = math.sqrt(2 / (module.in_features + module.out_features))
        elif isinstance(module, nn.Embedding):
            std = 1.0
        elif isinstance(module, RMSNorm):
            assert (module.weight == 1).all()
            continue
        else:
            continue
        weight = module.weight.detach()
        assert float(weight.abs().max()) <= 3 * std * (1 + 1e-6)
        assert float(weight.abs().max()) > 2.7 * std
        assert float(weight.std()) == pytest.approx(shrink * std, rel=0.02)
        assert abs(float(weight.mean())) < 0.05 * std


def test_initialisation_follows_the_seed(config: ModelConfig) -> None:
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(TransformerLM(config))
    first, same, other = (model.lm_head.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_meta_model_becomes_real(config: ModelConfig) -> None:
    """The usual route of large models: build on meta, allocate, then draw or load the weights."""
    model = TransformerLM(config, device="meta").to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    token_ids = tokens(config)
    torch.testing.assert_close(
        model(token_ids).double(), oracle(model, token_ids), atol=5e-6, rtol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_dtype_of_parameters_is_the_logits(config: ModelConfig, dtype: torch.dtype) -> None:
    model = TransformerLM(config, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    logits = model(tokens(config))
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("attention", [sdpa_attention, softmax_attention])
def test_autocast_trains_in_bf16_close_to_fp32(config: ModelConfig, attention: Attention) -> None:
    model = TransformerLM(config, attention=attention)
    token_ids = tokens(config)
    reference = model(token_ids)
    cross_entropy(reference, token_ids).backward()
    reference = reference.detach()
    exact = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(token_ids)
        loss = cross_entropy(logits, token_ids)
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    # bf16 keeps 8 bits, so every product rounds by up to 2^-9; a block has a few in a row.
    assert float((logits.detach() - reference).norm() / reference.norm()) < 0.015
    for parameter, gradient in zip(model.parameters(), exact, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert float((parameter.grad - gradient).norm() / gradient.norm()) < 0.04


def test_rms_norm_computes_in_fp32() -> None:
    norm = RMSNorm(512)
    x = (300 * torch.randn(4, 512)).to(torch.float16)  # squares overflow fp16
    expected = F.rms_norm(x.double(), (512,), eps=1e-5)
    output = norm(x)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=1e-3)


def test_swiglu_equals_its_formula() -> None:
    layer = SwiGLU(6, 10)
    x = torch.randn(2, 3, 6)
    gate, up, down = layer.gate.weight, layer.up.weight, layer.down.weight
    expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    ("attention", "lengths"), [(sdpa_attention, (6, 20)), (softmax_attention, (6,))]
)
def test_model_is_one_graph(
    config: ModelConfig, attention: Attention, lengths: tuple[int, ...]
) -> None:
    """Traced without a graph break, and again for a longer sequence; ``aot_eager`` needs no C++."""
    model = TransformerLM(dataclasses.replace(config, num_layers=1), attention=attention)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for seq in lengths:
        token_ids = tokens(config, 2, seq)
        torch.testing.assert_close(compiled(token_ids), model(token_ids))
        cross_entropy(compiled(token_ids), token_ids).backward()
    torch.compiler.reset()


@pytest.mark.gpu
def test_inductor_compiles_a_training_step(config: ModelConfig) -> None:
    model = TransformerLM(config, device="cuda")
    token_ids = tokens(config).cuda()
    cross_entropy(model(token_ids), token_ids).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True)
    cross_entropy(compiled(token_ids), token_ids).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [sdpa_attention, softmax_attention])
def test_gpu_equals_cpu(config: ModelConfig, attention: Attention) -> None:
    model = TransformerLM(config, attention=attention)
    token_ids = tokens(config)
    expected = model(token_ids)
    moved = model.to("cuda")(token_ids.to("cuda"))
    torch.testing.assert_close(moved.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "token_ids",
    [torch.zeros(5, dtype=torch.long), torch.zeros(1, 5), torch.zeros(1, 5, dtype=torch.int32)],
    ids=["one-dimensional", "float", "int32"],
)
def test_wrong_token_ids_are_refused(config: ModelConfig, token_ids: Tensor) -> None:
    with pytest.raises(ValueError, match=r"token_ids must be \(batch, seq\) int64, but got shape"):
        TransformerLM(config)(token_ids)


def test_positions_turn_heads_as_in_a_longer_sequence(config: ModelConfig) -> None:
    """Scores depend on distances: all positions moved, the logits stay; other ones change them."""
    model, token_ids = TransformerLM(config), tokens(config)
    n = token_ids.shape[1]
    expected = model(token_ids)
    torch.testing.assert_close(model(token_ids, positions=torch.arange(n)), expected)
    moved = model(token_ids, positions=torch.arange(5, 5 + n))
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(model(token_ids, positions=3 * torch.arange(n)), expected, atol=1e-3)
    with pytest.raises(ValueError, match=r"positions must be \(.*\), one for each token"):
        model(token_ids, positions=torch.arange(n + 1))


@pytest.mark.parametrize("checkpoint_blocks", [1, 2, 3, 5, 9])
def test_checkpointed_blocks_give_the_same_gradients(
    config: ModelConfig, checkpoint_blocks: int
) -> None:
    deep = dataclasses.replace(config, num_layers=5)
    plain = TransformerLM(deep)
    recomputing = TransformerLM(deep, checkpoint_blocks=checkpoint_blocks)
    recomputing.load_state_dict(plain.state_dict())
    token_ids = tokens(deep)
    for model in (plain, recomputing):
        cross_entropy(model(token_ids), token_ids).backward()
    for ours, theirs in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_checkpointing_keeps_less_for_backward(config: ModelConfig) -> None:
    """Of eight blocks, what is kept for backward: everything, or the input of every n-th."""
    deep = dataclasses.replace(config, num_layers=8)
    token_ids = tokens(deep, 4)
    kept = {}
    for checkpoint_blocks in (0, 1, 4):
        model = TransformerLM(deep, checkpoint_blocks=checkpoint_blocks)
        parameters = {x.untyped_storage().data_ptr() for x in model.parameters()}
        saved: dict[int, int] = {}

        def pack(x: Tensor, saved: dict[int, int] = saved, own: set[int] = parameters) -> Tensor:
            if x.untyped_storage().data_ptr() not in own:
                saved[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(token_ids).sum()
        kept[checkpoint_blocks] = sum(saved.values())
        del loss
    assert kept[0] > 3 * kept[1] > 3 * kept[4] > 0


# The compiler itself asks the block's input, which is no leaf, for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing_that_keeps_attention_runs_it_once(
    config: ModelConfig, compiled: bool
) -> None:
    """Backward recomputes the products of a block, but not its attention; gradients stay."""
    plain = TransformerLM(config)
    recomputing = TransformerLM(config, checkpoint_blocks=1, keep_attention=True)
    recomputing.load_state_dict(plain.state_dict())
    torch._dynamo.reset()
    if compiled:
        for block in (*plain.blocks, *recomputing.blocks):
            # Without code generation; the backend that splits forward from backward as inductor.
            block.compile(backend="aot_eager_decomp_partition", dynamic=False)
    token_ids = tokens(config)
    counts = []
    for model in (plain, recomputing):
        loss = cross_entropy(model(token_ids), token_ids)
        with ProfiledOperators() if compiled else DispatchedOperators() as backward:
            loss.backward()
        counts.append(backward.counts)
    plainly, again = counts
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert again[f"{attention}_backward"] == plainly[f"{attention}_backward"] == config.num_layers
    assert again[attention] == 0
    # Seven products of a block run again, or six: the last one's result is not needed.
    assert again["aten::mm"] - plainly["aten::mm"] >= 6 * config.num_layers
    for ours, theirs in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)


class DispatchedOperators(TorchDispatchMode):
    """Counts the operators that run; not those whose outputs a mode above this one has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


class ProfiledOperators(torch.autograd.profiler.profile):
    """Counts the operators of compiled code, which would not be run under a mode."""

    @property
    def counts(self) -> Counter[str]:
        return Counter({event.key: event.count for event in self.key_averages()})


def test_impossible_checkpointing_is_refused(config: ModelConfig) -> None:
    for wrong in (-1, 1.5, "1", True):
        message = f"checkpoint_blocks must be an integer of at least 0, but got {wrong!r}"
        with pytest.raises(ValueError, match=message):
            TransformerLM(config, checkpoint_blocks=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 1 beside keep_attention, but got 2"):
        TransformerLM(config, checkpoint_blocks=2, keep_attention=True)
