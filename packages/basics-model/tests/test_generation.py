"""Sampling: filters against hand-made distributions, generation against step-by-step decoding."""

import math

import pytest
import torch

from basics_model import ModelConfig, TransformerLM, generate
from basics_model.generation import filter_logits

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.75}, [1, 2, 3]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        # Of the two left by top-k, 0.4 and 0.3, the first has 0.57 of the probability.
        ({"top_k": 2, "top_p": 0.5}, [1]),
        ({"top_k": 2, "top_p": 0.6}, [1, 3]),
    ],
    ids=str,
)
def test_filters_keep_the_right_tokens(filters: dict[str, float], expected: list[int]) -> None:
    filtered = filter_logits(LOGITS, **filters)
    assert kept(filtered) == expected
    assert torch.equal(filtered[expected], LOGITS[expected])


def test_filters_work_per_row_and_leave_the_input() -> None:
    logits = torch.stack([LOGITS, LOGITS.flip(0)])
    before = logits.clone()
    filtered = filter_logits(logits, top_k=1)
    assert [kept(row) for row in filtered] == [[1], [2]]
    assert torch.equal(logits, before)


def test_equal_logits_still_leave_k() -> None:
    assert len(kept(filter_logits(torch.zeros(10), top_k=3))) == 3


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 0}, {"top_k": 2.0}, {"top_k": True}, {"top_p": 0.0}, {"top_p": 1.5}],
    ids=str,
)
def test_wrong_filters_are_refused(filters: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(filters))} must be"):
        filter_logits(LOGITS, **filters)


def test_greedy_takes_the_most_likely_token_of_the_window(config: ModelConfig) -> None:
    model = TransformerLM(config)
    prompt = torch.randint(config.vocab_size, (3, 5))
    result = generate(model, prompt, max_new_tokens=20, temperature=0)  # past the context length
    assert result.shape == (3, 25)
    assert torch.equal(result[:, :5], prompt)
    for end in range(5, 25):
        window = result[:, max(0, end - config.context_length) : end]
        assert torch.equal(result[:, end], model(window)[:, -1].argmax(-1))


def test_samples_follow_the_distribution(config: ModelConfig) -> None:
    model = TransformerLM(config)
    prompt = torch.zeros(4000, 1, dtype=torch.long)
    temperature = 2.0
    drawn = generate(model, prompt, max_new_tokens=1, temperature=temperature)[:, 1]
    counts = drawn.bincount(minlength=config.vocab_size)
    probabilities = torch.softmax(model(prompt[:1])[0, -1] / temperature, dim=-1)
    # Five standard deviations of a binomial count, and one for the rare tokens.
    bound = 5 * (4000 * probabilities).sqrt() + 1
    assert ((counts - 4000 * probabilities).abs() <= bound).all()


def test_generator_decides_the_sample(config: ModelConfig) -> None:
    model = TransformerLM(config)
    prompt = torch.zeros(1, 2, dtype=torch.long)
    one, same, other = (
        generate(model, prompt, max_new_tokens=30, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_top_k_of_one_is_greedy(config: ModelConfig) -> None:
    model = TransformerLM(config)
    prompt = torch.zeros(2, 2, dtype=torch.long)
    greedy = generate(model, prompt, max_new_tokens=8, temperature=0)
    assert torch.equal(generate(model, prompt, max_new_tokens=8, top_k=1), greedy)
    assert torch.equal(generate(model, prompt, max_new_tokens=8, top_p=1e-9), greedy)


def test_stop_token_ends_rows(config: ModelConfig) -> None:
    model = TransformerLM(config)
    prompt = torch.randint(config.vocab_size, (2, 4))
    free = generate(model, prompt, max_new_tokens=10, temperature=0)
    stop = int(free[0, 6])  # row 0 is over after at most three new tokens
    ended = generate(model, prompt, max_new_tokens=10, temperature=0, stop_token=stop)
    for row, reference in zip(ended.tolist(), free.tolist(), strict=True):
        new, expected = row[4:], reference[4:]
        length = expected.index(stop) + 1 if stop in expected else len(expected)
        assert new[:length] == expected[:length]
        assert set(new[length:]) <= {stop}
    alone = generate(model, prompt[:1], max_new_tokens=10, temperature=0, stop_token=stop)
    assert alone[0, -1] == stop
    assert (alone[0, 4:-1] != stop).all()


def test_nothing_to_add(config: ModelConfig) -> None:
    prompt = torch.zeros(1, 3, dtype=torch.long)
    assert torch.equal(generate(TransformerLM(config), prompt, max_new_tokens=0), prompt)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), {}, r"at least one token, but got shape \(1, 0\)"),
        (torch.zeros(3, dtype=torch.long), {}, r"prompt must be \(batch, seq\)"),
        (
            torch.zeros(1, 1, dtype=torch.long),
            {"temperature": -1.0},
            "temperature .* got -1.0",
        ),
        (torch.zeros(1, 1, dtype=torch.long), {"temperature": math.nan}, "temperature .* got nan"),
        (
            torch.zeros(1, 1, dtype=torch.long),
            {"top_k": 0},
            "top_k must be an integer of at least 1",
        ),
        (torch.zeros(1, 1, dtype=torch.long), {"max_new_tokens": 2.0}, "max_new_tokens must be an"),
        (
            torch.zeros(1, 1, dtype=torch.long),
            {"temperature": 0, "top_p": 5},
            "top_p must be above 0",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    config: ModelConfig, prompt: torch.Tensor, settings: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(TransformerLM(config), prompt, **({"max_new_tokens": 2} | settings))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_whose_logits_are_not_finite_is_refused(
    config: ModelConfig, value: float, temperature: float
) -> None:
    model = TransformerLM(config)
    torch.nn.init.constant_(model.norm.weight, value)
    prompt = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="logits must not be NaN"):
        generate(model, prompt, max_new_tokens=2, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_any_low_temperature_is_greedy(config: ModelConfig, temperature: float) -> None:
    model = TransformerLM(config)
    prompt = torch.zeros(2, 2, dtype=torch.long)
    greedy = generate(model, prompt, max_new_tokens=8, temperature=0)
    cold = generate(model, prompt, max_new_tokens=8, temperature=temperature, top_p=0.9)
    assert torch.equal(cold, greedy)


def test_infinite_logits_do_not_break_the_filter() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0])
    assert kept(filter_logits(logits, top_p=0.999)) == [0, 2]
