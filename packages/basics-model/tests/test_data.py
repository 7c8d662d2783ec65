"""Byte encoding, token files and window sampling."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from basics_model import SAMPLE_TEXT, TokenDataset, decode_bytes, encode_bytes, open_tokens


@pytest.mark.parametrize("text", ["", "plain", "naïve ☃ 🎉\n\0"])
def test_bytes_round_trip(text: str) -> None:
    token_ids = encode_bytes(text)
    assert token_ids.dtype == torch.int64
    assert token_ids.tolist() == list(text.encode())
    assert decode_bytes(token_ids) == text


def test_invalid_bytes_decode_to_replacements() -> None:
    assert decode_bytes(torch.tensor([0xFF, 65])) == "\ufffdA"
    with pytest.raises(ValueError, match="between 0 and 255"):
        decode_bytes(torch.tensor([256]))
    with pytest.raises(ValueError, match=r"must be \(length,\)"):
        decode_bytes(torch.zeros(2, 2, dtype=torch.long))


def test_the_sample_text_is_readable_english() -> None:
    tokens = open_tokens(SAMPLE_TEXT)
    text = decode_bytes(torch.from_numpy(tokens[:300].astype(np.int64)))
    assert text.startswith("PRIDE AND PREJUDICE\n\nBy Jane Austen\n")
    assert "It is a truth universally acknowledged, that a single man in possession\n" in text
    assert 50_000 < len(tokens) < 200_000
    assert int(tokens.max()) < 128
    chapters = [line for line in SAMPLE_TEXT.read_text().splitlines() if line[:8] == "Chapter "]
    assert chapters == [f"Chapter {number}" for number in range(1, 16)]


def test_text_file_is_a_token_file(tmp_path: Path) -> None:
    path = tmp_path / "text.md"
    path.write_text("snow ☃")
    tokens = open_tokens(path)
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable
    assert decode_bytes(torch.tensor(tokens.tolist())) == "snow ☃"


@pytest.mark.parametrize("suffix", ["npy", "bin"])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_wider_tokens(tmp_path: Path, suffix: str, dtype: str) -> None:
    tokens = np.arange(9000, 9100).astype(dtype)
    path = tmp_path / f"tokens.{suffix}"
    if suffix == "npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    opened = open_tokens(path, dtype)
    assert isinstance(opened, np.memmap)
    assert np.array_equal(opened, tokens)
    inputs, _ = TokenDataset(opened, 10).get_batch(3)
    assert inputs.dtype == torch.int64
    assert int(inputs.min()) >= 9000


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_tokens(tmp_path / "missing.txt")
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(
        ValueError,
        match=r"empty\.txt must be a whole number of uint8 values",
    ):
        open_tokens(empty)
    empty.write_bytes(b"abc")
    with pytest.raises(ValueError, match="must be a whole number of uint16 values"):
        open_tokens(empty, "uint16")
    square, real = tmp_path / "square.npy", tmp_path / "real.npy"
    np.save(square, np.zeros((2, 2), np.int64))
    np.save(real, np.zeros(4))
    for path in (square, real):
        with pytest.raises(ValueError, match="array of at least one integer, but got"):
            open_tokens(path)


def test_damaged_arrays_are_refused_with_their_name(tmp_path: Path) -> None:
    """Cut anywhere, one bit changed in the header, or another kind of file."""
    whole, path = tmp_path / "whole.npy", tmp_path / "damaged.npy"
    np.save(whole, np.arange(100, dtype=np.uint16))
    content = whole.read_bytes()
    damaged = [content[:size] for size in range(0, len(content), 7)]
    for bit in range(0, 8 * (len(content) - 200), 5):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(changed))
    archive = io.BytesIO()
    np.savez(archive, tokens=np.arange(9))
    pickled = io.BytesIO()
    np.save(pickled, np.array([1, None], dtype=object), allow_pickle=True)
    empty = io.BytesIO()
    np.save(empty, np.zeros(0, np.uint16))
    damaged += [archive.getvalue(), pickled.getvalue(), empty.getvalue(), b"text"]
    refused = []
    for each in damaged:
        path.write_bytes(each)
        try:
            tokens = open_tokens(path)
        except ValueError as error:
            refused.append(str(error))
        else:  # such as another length that still fits
            assert tokens.ndim == 1
            assert np.issubdtype(tokens.dtype, np.integer)
    assert all(str(path) in message for message in refused)
    assert len(refused) > 0.8 * len(damaged)


@pytest.mark.parametrize("suffix", [".npz", ".txt.gz", ".bz2", ".PT", ".safetensors"])
def test_archives_are_no_tokens(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"tokens{suffix}"
    path.write_bytes(b"PK\x03\x04 not tokens")
    with pytest.raises(ValueError, match=rf"tokens{suffix} must be .* Unpack it, or save"):
        open_tokens(path)


@pytest.mark.parametrize("dtype", ["float32", "m8[s]", "M8[s]", "?", "S4", "object"])
def test_other_values_than_integers_are_no_tokens(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(bytes(16))
    with pytest.raises(ValueError, match=r"must be .* but got .*tokens\.bin|tokens\.bin must be"):
        open_tokens(path, dtype)


def test_arrays_have_their_suffix_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "TOKENS.NPY"
    with path.open("wb") as file:
        np.save(file, np.arange(300, 310))
    assert open_tokens(path).tolist() == list(range(300, 310))


@pytest.mark.parametrize(
    ("ids", "found"),
    [(np.arange(20) - 3, "-3"), (np.full(20, 2**63, np.uint64), str(2**63))],
    ids=["negative", "uint64"],
)
def test_ids_that_no_vocabulary_has_are_refused(ids: np.ndarray, found: str) -> None:
    dataset = TokenDataset(ids, 4)
    with pytest.raises(
        ValueError, match=rf"must be from 0 to {2**63 - 1}, but got {found}\. Check"
    ):
        next(iter(dataset.sequential_batches(4)))
    with pytest.raises(ValueError, match=f"must be from 0 to {2**63 - 1}, but got"):
        dataset.get_batch(100)


def test_ids_outside_of_the_models_vocabulary_are_refused_on_the_cpu() -> None:
    """A GPU would end the process at the first of them, without a name."""
    dataset = TokenDataset(np.arange(90), 4, vocab_size=80)
    batches = dataset.sequential_batches(8)
    assert int(next(batches)[1].max()) == 32
    with pytest.raises(ValueError, match=r"must be from 0 to 79, but got 80\. .* and vocab_size\."):
        list(batches)
    TokenDataset(np.arange(90), 4, vocab_size=90).get_batch(100)
    with pytest.raises(ValueError, match="vocab_size must be an integer"):
        TokenDataset(np.arange(90), 4, vocab_size=80.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_a_mapped_file_that_becomes_shorter_is_an_error_and_no_bus_error(
    tmp_path: Path, suffix: str
) -> None:
    """Of a part of the tokens, too: the held-out end is what is lost first."""
    path, tokens = tmp_path / f"tokens.{suffix}", np.zeros(100_000, np.uint8)
    if suffix == "npy":
        np.save(path, tokens)
    else:
        path.write_bytes(tokens.tobytes())
    held_out = TokenDataset(open_tokens(path)[50_000:], 64)
    held_out.get_batch(2)
    with path.open("rb+") as file:
        file.truncate(10_000)
    with pytest.raises(ValueError, match=r"a mapped file of tokens must keep .*, but got 10000"):
        held_out.get_batch(2)


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = TokenDataset(np.arange(100), 7).get_batch(16)
    assert inputs.shape == targets.shape == (16, 7)
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs - inputs[:, :1], torch.arange(7).expand(16, 7))


def test_every_window_can_be_drawn_and_none_runs_over() -> None:
    dataset = TokenDataset(np.arange(12), 5)
    assert len(dataset) == 7
    inputs, targets = dataset.get_batch(500)
    assert set(inputs[:, 0].tolist()) == set(range(7))
    assert int(targets.max()) == 11


def test_shortest_text_has_one_window() -> None:
    inputs, targets = TokenDataset(np.arange(6), 5).get_batch(2)
    assert inputs.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert targets.tolist() == [[1, 2, 3, 4, 5]] * 2


def test_order_depends_on_seed_and_position_only() -> None:
    def starts(dataset: TokenDataset) -> list[int]:
        return dataset.get_batch(8)[0][:, 0].tolist()

    tokens = np.arange(10_000)
    seeds = (5, np.int64(5), 6)  # as a NumPy generator returns them
    one, same, other = (TokenDataset(tokens, 4, seed=seed) for seed in seeds)
    first, second = starts(one), starts(one)
    assert first != second
    torch.manual_seed(99)
    np.random.seed(99)
    assert [starts(same), starts(same)] == [first, second]
    assert starts(other) != first


def test_state_continues_with_the_next_batch() -> None:
    tokens = np.arange(10_000)
    dataset = TokenDataset(tokens, 4, seed=5)
    dataset.get_batch(8)
    state = dataset.state_dict()
    expected = dataset.get_batch(8)[0]
    resumed = TokenDataset(tokens, 4)
    resumed.load_state_dict(state)
    assert torch.equal(resumed.get_batch(8)[0], expected)
    assert resumed.position == 2
    for damage in ({"position": -1}, {"seed": 1.5}):
        with pytest.raises(ValueError, match="must be an integer of at least 0"):
            resumed.load_state_dict(state | damage)
    assert resumed.position == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_split_the_same_global_batch(world_size: int) -> None:
    tokens = np.arange(10_000)
    whole = TokenDataset(tokens, 4, seed=1)
    ranks = [
        TokenDataset(tokens, 4, seed=1, rank=r, world_size=world_size) for r in range(world_size)
    ]
    for _ in range(3):
        parts = [dataset.get_batch(5)[0] for dataset in ranks]
        assert torch.equal(torch.cat(parts), whole.get_batch(5 * world_size)[0])


def test_sequential_batches_cover_every_window_once() -> None:
    dataset = TokenDataset(np.arange(24), 5)  # windows start at 0, 5, 10 and 15; 3 tokens left
    batches = list(dataset.sequential_batches(3))
    assert [inputs.shape for inputs, _ in batches] == [(3, 5), (1, 5)]
    assert torch.cat([inputs for inputs, _ in batches]).flatten().tolist() == list(range(20))
    assert torch.cat([targets for _, targets in batches]).flatten().tolist() == list(range(1, 21))
    assert dataset.position == 0


def test_impossible_datasets_are_refused() -> None:
    tokens = np.arange(5)
    with pytest.raises(ValueError, match="below the number of tokens, but got 5 of 5"):
        TokenDataset(tokens, 5)
    with pytest.raises(ValueError, match="below the number of tokens, but got 9 of 5"):
        TokenDataset(tokens, 9)
    for context in (0, 2.0, True):
        with pytest.raises(ValueError, match="context_length must be an integer of at least 1"):
            TokenDataset(tokens, context)
    for name in ("seed", "rank", "world_size"):
        for number in (-1, 1.0):
            with pytest.raises(ValueError, match=f"{name} must be an integer of at least 0, but"):
                TokenDataset(tokens, 2, **{name: number})
    for wrong in (np.full(20, 1.5), np.zeros((20, 4), np.int64), np.ones(20, np.bool_)):
        with pytest.raises(ValueError, match="one-dimensional array of at least one integer, but"):
            TokenDataset(wrong, 2)
    with pytest.raises(ValueError, match="rank must be below world_size 2, but got 2"):
        TokenDataset(tokens, 2, rank=2, world_size=2)
    for number in (0, -1, 2.0):
        for batches in (TokenDataset.get_batch, TokenDataset.sequential_batches):
            with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
                batches(TokenDataset(tokens, 2), number)


@pytest.mark.gpu
def test_batches_reach_the_gpu() -> None:
    tokens = np.arange(100)
    inputs, targets = TokenDataset(tokens, 7).get_batch(4, device="cuda")
    assert inputs.is_cuda
    expected = TokenDataset(tokens, 7).get_batch(4)
    assert torch.equal(inputs.cpu(), expected[0])
    assert torch.equal(targets.cpu(), expected[1])
