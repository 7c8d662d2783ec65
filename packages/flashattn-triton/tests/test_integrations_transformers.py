"""attn_implementation="flashattn-triton" in tiny, randomly initialised transformers models."""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from flashattn_triton.integrations import transformers as integration  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(autouse=True)
def _registered():
    integration.register()
    torch.compiler.reset()  # all models share the code objects whose compilations are counted


class CausalLayer(torch.nn.Module):
    """What an implementation asks a layer for."""

    is_causal = True


def causal_model(kind, implementation, **keywords):
    config = getattr(transformers, f"{kind}Config")(**(SIZES | keywords))
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation=implementation
    )
    assert model.config._attn_implementation == implementation
    return model.to(DEVICE)


#: For models that a compiler traces, which takes it a second for each layer.
ONE_LAYER = {"num_hidden_layers": 1}


def pair(kind, oracle="sdpa", **keywords):
    """The same random model with our attention and with the library's."""
    ours = causal_model(kind, integration.NAME, **keywords)
    theirs = causal_model(kind, oracle, **keywords)
    theirs.load_state_dict(ours.state_dict())
    return ours.train(), theirs.train()


def tokens(batch=2, length=19):
    return torch.randint(3, SIZES["vocab_size"], (batch, length), device=DEVICE)


def assert_same_results(ours, theirs, ids, mask=None):
    """Same logits and gradients, where tokens are not padding."""
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    results = []
    for model in (ours, theirs):
        model.zero_grad()
        logits = model(ids, attention_mask=mask, use_cache=False).logits[keep]
        torch.nn.functional.cross_entropy(logits, ids[keep]).backward()
        named = model.named_parameters()
        gradients = {name.removeprefix("_orig_mod."): p.grad for name, p in named}
        results.append((logits, gradients))
    (logits, gradients), (wanted_logits, wanted) = results
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


def padding(side, ids):
    mask = torch.ones_like(ids)
    if side == "left":
        mask[0, :7] = 0
    elif side == "right":
        mask[1, -5:] = 0
    elif side == "hole":
        mask[0, 4:6] = 0
    return mask


# Gemma 2 caps its scores, which the library computes in its eager implementation only.
MODELS = [
    ("Llama", "sdpa", {}),
    ("Llama", "sdpa", {"num_key_value_heads": 4}),
    ("Mistral", "sdpa", {"sliding_window": 6}),
    ("Qwen2", "sdpa", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("Gemma2", "eager", {"sliding_window": 6, "attn_logit_softcapping": 3.0}),
]


@pytest.mark.parametrize(("kind", "oracle", "keywords"), MODELS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_gradients(kind, oracle, keywords, side):
    ours, theirs = pair(kind, oracle, **keywords)
    ids = tokens()
    assert_same_results(ours, theirs, ids, None if side is None else padding(side, ids))


def test_a_mask_of_ones_is_no_mask(monkeypatch):
    ours, theirs = pair("Llama")
    monkeypatch.setattr(integration, "flash_attention_varlen", None)  # would fail if it were called
    ids = tokens()
    assert_same_results(ours, theirs, ids, torch.ones_like(ids))


def test_holes_in_the_padding():
    ids = tokens()
    ours, theirs = pair("Llama")
    assert_same_results(ours, theirs, ids, padding("hole", ids))
    ours, theirs = pair("Mistral", sliding_window=6)
    assert_same_results(ours, theirs, ids, padding("hole", ids))


@pytest.mark.parametrize(("kind", "keywords"), [("Llama", {}), ("Mistral", {"sliding_window": 6})])
def test_packed_sequences(kind, keywords):
    ours, theirs = pair(kind, **keywords)
    ids = tokens()
    lengths = [(8, 11), (3, 1, 15)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    positions = positions.to(DEVICE)
    logits = [m(ids, position_ids=positions, use_cache=False).logits for m in (ours, theirs)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    alone = ours(ids[:1, 8:], use_cache=False).logits
    torch.testing.assert_close(logits[0][:1, 8:], alone, rtol=1e-4, atol=1e-5)


def test_packed_sequences_by_cumulative_lengths():
    model, _ = pair("Llama")
    ids = tokens(batch=1)
    positions = torch.cat([torch.arange(8), torch.arange(11)])[None].to(DEVICE)
    starts = torch.tensor([0, 8, 19], dtype=torch.int32, device=DEVICE)
    keywords = {"position_ids": positions, "use_cache": False}
    expected = model(ids, **keywords).logits
    for longest in ({}, {"max_length_q": 11, "max_length_k": 11}):
        out = model(ids, cu_seq_lens_q=starts, cu_seq_lens_k=starts, **longest, **keywords).logits
        torch.testing.assert_close(out, expected)
    tensors = torch.randn(3, 2, 1, 19, 8, device=DEVICE)
    with pytest.raises(ValueError, match="cu_seq_lens_k must be a tensor where the other one is"):
        integration.attention_forward(CausalLayer(), *tensors, None, cu_seq_lens_q=starts)
    with pytest.raises(ValueError, match="one row of packed sequences, but got a batch of 2"):
        integration.attention_forward(
            CausalLayer(), *tensors, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts
        )


def test_a_row_of_padding_only():
    ours, _ = pair("Llama")
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1] = 0
    logits = ours(ids, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits[:1], ours(ids[:1]).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "oracle", "keywords"), MODELS)
@pytest.mark.parametrize("side", [None, "left"])
def test_decoding_with_a_cache(kind, oracle, keywords, side):
    ours, theirs = pair(kind, oracle, **keywords)
    ids = tokens(length=11)
    mask = torch.ones_like(ids) if side is None else padding(side, ids)
    generated = [
        model.eval().generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        for model in (ours, theirs)
    ]
    assert torch.equal(*generated)


def test_several_queries_after_a_cache():
    model, _ = pair("Llama")
    ids = tokens()
    with torch.no_grad():
        first = model(ids[:, :12], use_cache=True)
        rest = model(ids[:, 12:], past_key_values=first.past_key_values)
        whole = model(ids)
    torch.testing.assert_close(rest.logits, whole.logits[:, 12:], rtol=1e-4, atol=1e-5)


def test_a_bidirectional_encoder():
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ours, theirs = (
        transformers.BertModel._from_config(config, attn_implementation=name).to(DEVICE)
        for name in (integration.NAME, "sdpa")
    )
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    for side in (None, "left", "right", "hole"):
        mask = None if side is None else padding(side, ids)
        out, expected = (m(ids, attention_mask=mask).last_hidden_state for m in (ours, theirs))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)  # padding included


def test_a_compiled_model_without_graph_breaks():
    model, _ = pair("Llama", **ONE_LAYER)
    ids = tokens()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, use_cache=False), model(ids, use_cache=False))


@pytest.mark.parametrize(("kind", "keywords"), [("Llama", {}), ("Mistral", {"sliding_window": 6})])
def test_compiled_models_take_padding_without_graph_breaks(kind, keywords):
    ours, theirs = pair(kind, **ONE_LAYER, **keywords)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for side in ("left", "right", "hole"):
        ids = tokens()
        assert_same_results(compiled, theirs, ids, padding(side, ids))


def packed_rows():
    """Tokens, the same with another first document, and the positions of two packed rows."""
    ids = tokens()
    other = ids.clone()
    other[:, :3] = (other[:, :3] - 2) % 58 + 3
    rows = [torch.cat([torch.arange(n) for n in row]) for row in ((8, 11), (3, 1, 15))]
    return ids, other, torch.stack(rows).to(DEVICE)


# On a GPU a failed assertion ends the process's use of the device.
on_the_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="asserts on the device")


@on_the_cpu
@pytest.mark.parametrize(
    ("kind", "backend", "rows"),
    [
        ("Llama", "aot_eager", 1),
        ("Mistral", "eager", 2),
        pytest.param("Llama", "eager", 2, marks=pytest.mark.nightly),
        pytest.param("Mistral", "aot_eager", 1, marks=pytest.mark.nightly),
    ],
)
def test_compiled_models_refuse_rows_packed_by_positions(kind, backend, rows):
    model, _ = pair(kind, **ONE_LAYER, **({"sliding_window": 6} if kind == "Mistral" else {}))
    ids, _, positions = packed_rows()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ids, positions = ids[-rows:], positions[-rows:]
    with pytest.raises(RuntimeError, match="position_ids must number one sequence in each row"):
        compiled(ids, position_ids=positions, use_cache=False)
    one = torch.arange(19, device=DEVICE).expand_as(ids).clone() + 2
    out = compiled(ids, position_ids=one, use_cache=False).logits
    expected = model(ids, position_ids=one, use_cache=False).logits
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture
def packed_models(request):
    integration.register(packed=True, max_documents=request.param)
    yield
    integration.register()


@pytest.mark.usefixtures("packed_models")
@pytest.mark.parametrize(
    ("packed_models", "kind", "keywords"),
    [
        (None, "Mistral", {"sliding_window": 6}),
        (8, "Llama", {}),
        pytest.param(None, "Llama", {}, marks=pytest.mark.nightly),
        pytest.param(8, "Mistral", {"sliding_window": 6}, marks=pytest.mark.nightly),
    ],
    indirect=["packed_models"],
)
def test_compiled_models_take_rows_packed_by_positions_if_asked_to(kind, keywords):
    model, theirs = pair(kind, **ONE_LAYER, **keywords)
    ids, other, positions = packed_rows()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (positions, positions.flip(0), torch.arange(19, device=DEVICE).expand_as(ids) + 2):
        given = {"position_ids": rows.clone(), "use_cache": False}
        out, expected = (x(ids, **given).logits for x in (compiled, theirs))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    given = {"position_ids": positions, "use_cache": False}
    out, changed = (compiled(x, **given).logits for x in (ids, other))
    assert torch.equal(out[0, 8:], changed[0, 8:])  # no document sees another
    assert torch.equal(out[1, 3:], changed[1, 3:])
    weight = torch.randn_like(out)
    gradients = [
        torch.autograd.grad((x(ids, **given).logits * weight).sum(), list(x.parameters()))
        for x in (compiled, theirs)
    ]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("packed_models")
@pytest.mark.parametrize("packed_models", [None, 8], indirect=True)
def test_exported_models_take_rows_packed_by_positions_if_asked_to():
    model, theirs = pair("Llama", **ONE_LAYER)
    ids, _, positions = packed_rows()
    given = {"position_ids": torch.arange(19, device=DEVICE).expand_as(ids), "use_cache": False}
    program = torch.export.export(model, (ids,), given).module()
    given["position_ids"] = positions
    torch.testing.assert_close(
        program(ids, **given).logits, theirs(ids, **given).logits, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(("kind", "keywords"), [("Mistral", {"sliding_window": 6})])
def test_the_ways_out_for_rows_packed_by_positions(kind, keywords):
    model, theirs = pair(kind, **ONE_LAYER, **keywords)
    ids, other, positions = (x[:1] for x in packed_rows())
    starts = torch.tensor([0, 8, 19], dtype=torch.int32, device=DEVICE)
    given = {"position_ids": positions, "use_cache": False}
    expected = theirs(ids, **given).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out, changed = (
        compiled(x, cu_seq_lens_q=starts, cu_seq_lens_k=starts, **given).logits
        for x in (ids, other)
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(out[:, 8:], changed[:, 8:])  # no document sees another
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(model(ids, **given).logits, expected, rtol=1e-4, atol=1e-5)


@on_the_cpu
def test_exported_models_refuse_rows_packed_by_positions():
    model, _ = pair("Llama", **ONE_LAYER)
    ids, _, positions = packed_rows()
    given = {"position_ids": torch.arange(19).expand_as(ids), "use_cache": False}
    program = torch.export.export(model, (ids,), given).module()
    torch.testing.assert_close(program(ids, **given).logits, model(ids, **given).logits)
    with pytest.raises(RuntimeError, match="position_ids must number one sequence in each row"):
        program(ids, position_ids=positions, use_cache=False)


@pytest.mark.nightly  # traces whole models with dynamic shapes
def test_compiled_models_train_and_take_dynamic_shapes():
    model, theirs = pair("Llama")
    model.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (19, 37):
        assert_same_results(model, theirs, tokens(length=length))


def gpt_oss(implementation):
    """Attention sinks, sliding windows in every other layer, grouped heads, experts."""
    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=6
    )
    torch.manual_seed(3)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation=implementation)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model.to(DEVICE).train()


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attention_sinks_as_in_gpt_oss(side):
    ours, theirs = gpt_oss(integration.NAME), gpt_oss("eager")
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    mask = None if side is None else padding(side, ids)
    out, expected = (model(ids, attention_mask=mask).logits for model in (ours, theirs))
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(out[seen], expected[seen], rtol=1e-4, atol=1e-5)
    weight = torch.randn_like(out) * seen[..., None]
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    sinks = 0
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-5, msg=name)
        sinks += name.endswith("sinks") and bool(a.grad.any())
    assert sinks == 2


# ---- position biases -----------------------------------------------------------------------------


def t5(implementation):
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration._from_config(
        config, attn_implementation=implementation
    )
    assert model.config._attn_implementation == implementation
    return model.to(DEVICE)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_t5_has_the_gradients_of_its_position_biases(side):
    ours, theirs = t5(integration.NAME), t5("eager")
    theirs.load_state_dict(ours.state_dict())
    ids, labels = tokens(), tokens(length=8)
    mask = None if side is None else padding(side, ids)
    results = []
    for model in (ours, theirs):
        out = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        out.loss.backward()
        results.append((out.logits, {name: p.grad for name, p in model.named_parameters()}))
    (logits, gradients), (wanted_logits, wanted) = results
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-4, atol=1e-5)
    assert any("relative_attention_bias" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


def test_t5_generates_with_a_cache():
    ours, theirs = t5(integration.NAME).eval(), t5("eager").eval()
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    found, wanted = (
        model.generate(ids, attention_mask=padding("left", ids), max_new_tokens=6, do_sample=False)
        for model in (ours, theirs)
    )
    assert torch.equal(found, wanted)


def test_a_position_bias_of_packed_sequences_is_refused():
    module, x = CausalLayer(), torch.randn(1, 2, 6, 8)
    numbers = torch.tensor([[1, 1, 1, 2, 2, 2]])
    with pytest.raises(ValueError, match="position_bias must be None for packed sequences"):
        integration.attention_forward(
            module, x, x, x, numbers, position_bias=torch.zeros(1, 2, 6, 6)
        )


# ---- refusals ------------------------------------------------------------------------------------


def test_dropout_is_refused():
    with pytest.warns(UserWarning, match=r"from_pretrained\(\.\.\., attention_dropout=0\.0\)"):
        model = causal_model("Llama", integration.NAME, attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"got 0\.1\. Set attention_dropout=0 in"):
        model(tokens())
    model.eval()(tokens())


@pytest.mark.parametrize("name", [integration.NAME, integration.ALIAS])
def test_dropout_in_a_configuration_is_named_when_a_model_is_built(name):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=48)
    with pytest.warns(UserWarning, match=r"got attention_probs_dropout_prob=0\.1\. Turn it off by"):
        transformers.BertModel._from_config(config, attn_implementation=name)
    config.attention_probs_dropout_prob = 0.0
    transformers.BertModel._from_config(config, attn_implementation=name)


@pytest.mark.parametrize("name", [integration.NAME, integration.ALIAS])
@pytest.mark.parametrize("kind", ["Falcon", "GPTNeo", "GPTJ", "Bloom"])
def test_models_with_attention_of_their_own_are_refused_when_they_are_built(kind, name):
    model = getattr(transformers, f"{kind}Model")
    with pytest.raises(ValueError, match=f"attn_implementation of {kind}Model must be 'eager'"):
        model._from_config(model.config_class(), attn_implementation=name)


@pytest.mark.parametrize(
    ("kind", "settings", "why"),
    [
        ("PegasusX", {}, "not causal"),
        ("NllbMoe", {}, "not causal"),
        ("BigBirdPegasus", {}, "mask of scores"),
        ("Phimoe", {"sliding_window": 6}, "sliding window"),
    ],
)
def test_models_whose_layers_contradict_their_masks_are_refused(kind, settings, why):
    config = getattr(transformers, f"{kind}Config")(**settings)
    with torch.device("meta"), pytest.raises(ValueError, match=f"must be 'eager', because .*{why}"):
        getattr(transformers, f"{kind}Model")._from_config(
            config, attn_implementation=integration.NAME
        )


def test_layers_that_contradict_the_rule_of_a_padding_mask_are_refused():
    def causal(batch, head, query, key):
        return key <= query

    mask = integration.attention_mask(2, 5, 5, mask_function=causal, attention_mask=MASK)
    q = torch.randn(2, 2, 5, 8)
    layer = torch.nn.Module()
    layer.is_causal = True
    integration.attention_forward(layer, q, q, q, mask)
    layer.is_causal = False
    with pytest.raises(ValueError, match="got False with a mask that is causal"):
        integration.attention_forward(layer, q, q, q, mask)


MASK = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)


def test_layers_that_do_not_say_whether_they_are_causal_are_refused():
    tensors = torch.randn(3, 1, 2, 5, 8)
    with pytest.raises(ValueError, match="Identity must say by is_causal"):
        integration.attention_forward(torch.nn.Identity(), *tensors, None)


def test_the_alias_has_no_flash_in_it_and_computes_the_same():
    ours = causal_model("Llama", integration.ALIAS)
    theirs = causal_model("Llama", "sdpa")
    theirs.load_state_dict(ours.state_dict())
    assert not transformers.utils.generic.is_flash_attention_requested(ours.config)
    ids = tokens()
    assert_same_results(ours, theirs, ids, padding("left", ids))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_windows_on_both_sides(side):
    def gemma(name):
        config = transformers.Gemma3TextConfig(
            **SIZES, sliding_window=9, use_bidirectional_attention=True, query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        return transformers.Gemma3TextModel._from_config(config, attn_implementation=name)

    ours, theirs = gemma(integration.NAME).to(DEVICE), gemma("eager").to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    ids = tokens()
    mask = torch.ones_like(ids) if side is None else padding(side, ids)
    out, expected = (m(ids, attention_mask=mask).last_hidden_state for m in (ours, theirs))
    torch.testing.assert_close(out[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=1e-5)


def test_a_custom_mask_is_refused():
    model, _ = pair("Llama")
    with pytest.raises(
        ValueError, match=r"must be a padding mask .* but got shape \(2, 1, 19, 19\)"
    ):
        model(
            tokens(),
            attention_mask=torch.ones(2, 1, 19, 19, dtype=torch.bool, device=DEVICE).tril(),
        )


def test_a_static_cache_is_refused():
    model, _ = pair("Llama")
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="Use a dynamic cache"):
        model.eval()(tokens(), past_key_values=cache)


def test_attention_weights_are_refused():
    with pytest.raises(ValueError, match="output_attentions must be False"):
        integration.attention_forward(
            CausalLayer(), *torch.randn(3, 1, 1, 4, 8), None, output_attentions=True
        )


@pytest.mark.parametrize("name", integration.UNSUPPORTED)
def test_features_of_other_implementations_are_refused(name):
    tensors = torch.randn(3, 1, 1, 4, 8)
    with pytest.raises(ValueError, match=f"{name} must be None, because .* does not support"):
        integration.attention_forward(CausalLayer(), *tensors, None, **{name: object()})
    integration.attention_forward(CausalLayer(), *tensors, None, **{name: None})


def chunked(size):
    return lambda batch, head, query, key: (key // size == query // size) & (key <= query)


def windowed(size):
    return lambda batch, head, query, key: (key > query - size) & (key <= query)


@pytest.mark.parametrize(
    ("rule", "local_size", "accepted"),
    [
        (lambda batch, head, query, key: key <= query, None, True),
        (lambda batch, head, query, key: query >= 0, None, True),
        (lambda batch, head, query, key: (query - key).abs() <= 5, 5, True),
        (windowed(5), 5, True),
        (windowed(1), 1, True),
        (windowed(500), 500, True),
        (windowed(6), 5, False),
        (windowed(5), None, False),
        (chunked(8), 8, False),  # with a cache, where earlier chunks are unknown
        (lambda batch, head, query, key: (key <= query) | (key < 20), None, False),  # a prefix
        (lambda batch, head, query, key: key < query, None, False),
    ],
)
def test_only_bands_are_accepted(rule, local_size, accepted):
    arguments = {
        "batch_size": 2,
        "q_length": 23,
        "kv_length": 40,
        "q_offset": 17,
        "mask_function": rule,
        "local_size": local_size,
    }
    if accepted:
        assert integration.attention_mask(**arguments) is None
    else:
        with pytest.raises(ValueError, match="but got a rule that is none of these"):
            integration.attention_mask(**arguments)


@on_the_cpu
@pytest.mark.parametrize(
    ("rule", "keys", "message"),
    [
        (lambda batch, head, query, key: (key <= query) | (key < 6), 10, "none of these"),
        (lambda batch, head, query, key: key <= query, 12, "The last query must be at"),
        (chunked(4), 10, None),
    ],
)
def test_rules_are_checked_in_compiled_code(rule, keys, message):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def several():
        return integration.attention_mask(1, 10, keys, mask_function=rule)

    if message is None:
        assert several().item() is True
    else:
        with pytest.raises(RuntimeError, match=message):
            several()


def test_chunks_are_sequences():
    found = integration.attention_mask(1, 10, 10, mask_function=chunked(4), local_size=4)
    assert found.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 3, 3]]


def test_rules_of_single_positions_are_evaluated_like_others():
    def full(batch, head, query, key):
        return torch.tensor(True)

    arguments = {"batch_size": 2, "q_length": 9, "kv_length": 9, "use_vmap": True}
    assert integration.attention_mask(**arguments, mask_function=full) is None
    with pytest.raises(ValueError, match="but got a rule that is none of these"):
        integration.attention_mask(
            **arguments, mask_function=lambda batch, head, query, key: (key <= query) | (key < 4)
        )


def test_a_padding_mask_shorter_than_the_keys_is_refused():
    short = torch.tensor([[True, False, True]])
    with pytest.raises(ValueError, match=r"must cover all 4 keys, but got shape \(1, 3\)"):
        integration.attention_mask(1, 4, 4, attention_mask=short)


@pytest.mark.parametrize("keywords", [{}, {"sliding_window": 4}], ids=["full", "window"])
def test_a_padding_mask_longer_than_the_keys_is_that_of_the_first_positions(keywords):
    ours, theirs = pair("Mistral", **{"sliding_window": None} | keywords)
    ids, mask = tokens(length=12), torch.ones(2, 16, dtype=torch.int64, device=DEVICE)
    mask[0, :5] = 0
    found, wanted = (model.eval()(ids, attention_mask=mask).logits for model in (ours, theirs))
    keep = mask[:, :12].bool()
    torch.testing.assert_close(found[keep], wanted[keep], rtol=1e-4, atol=1e-5)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'flashattn-triton\[transformers\]'"):
        integration.register()
