"""Byte-level encoding and a memory-mapped dataset of token windows.

A text's UTF-8 bytes are its tokens, so any file trains a model with a vocabulary of 256 and needs
no conversion. Files of wider tokens, made by any tokenizer, work the same way.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from basics_model.files import refusing_damage
from basics_model.sizes import require_integer

BYTE_VOCAB_SIZE = 256
"""Vocabulary size of byte-level encoding."""

SAMPLE_TEXT = Path(__file__).with_name("pride_and_prejudice.txt")
"""File with the first 15 chapters of Pride and Prejudice by Jane Austen, 125 KB of ASCII text.

The novel was published in 1813 and its author died in 1817, so it is in the public domain. The
text is Project Gutenberg's, as the R package janeaustenr 1.0.0 distributes it, without changes.
"""

_PACKED = {".npz", ".pt", ".pth", ".safetensors", ".parquet", ".zip", ".gz", ".bz2", ".xz", ".zst"}


def encode_bytes(text: str) -> Tensor:
    """Returns the UTF-8 bytes of ``text`` as token ids, (length,) int64."""
    return torch.from_numpy(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64))


def decode_bytes(token_ids: Tensor) -> str:
    """Returns the text of byte-level token ids (length,); invalid UTF-8 becomes U+FFFD.

    Raises:
        ValueError: not one-dimensional, or an id outside 0 to 255.
    """
    if token_ids.ndim != 1:
        raise ValueError(f"token_ids must be (length,), but got shape {tuple(token_ids.shape)}.")
    try:
        return bytes(token_ids.tolist()).decode(errors="replace")
    except ValueError:
        raise ValueError("byte-level token ids must be between 0 and 255.") from None


def open_tokens(path: Path | str, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """Memory-maps a file of tokens without reading it.

    Args:
        path: a one-dimensional ``.npy`` file, or a headerless file of little-endian integers. With
            the default dtype, any text file is such a file.
        dtype: of a headerless file's tokens; a ``.npy`` file knows its own.

    Returns:
        A read-only array (tokens,).

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: it is empty, damaged, an archive or a compressed file by its name, not
            one-dimensional, or not a whole number of integers. The message names the file.
    """
    path, kind = Path(path), np.dtype(dtype).newbyteorder("<")
    suffix = path.suffix.lower()
    if suffix in _PACKED:
        raise ValueError(
            f"{path} must be a .npy file or a file of integers alone, but got a {suffix} file. "
            "Unpack it, or save its tokens with numpy.save."
        )
    what = "a whole .npy file" if suffix == ".npy" else f"a whole number of {kind.name} values"
    with (
        path.open("rb"),  # what the system refuses is no damage
        refusing_damage(path, what, "Write the file again."),
    ):
        if suffix == ".npy":
            tokens = np.lib.format.open_memmap(path, mode="r")
        else:
            tokens = np.memmap(path, dtype=kind, mode="r")
    _check_tokens(tokens, f" in {path}")
    return tokens


def _check_tokens(tokens: npt.NDArray[Any], where: str = "") -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise ValueError(
            "tokens must be a one-dimensional array of at least one integer, but got "
            f"{tokens.dtype} of shape {tokens.shape}{where}."
        )


@dataclass(eq=False)
class TokenDataset:
    """Windows of a long token sequence, as (inputs, next tokens).

    :meth:`get_batch` draws random windows. Which ones depends only on the seed and on how many
    batches came before: each draw makes the starts of the whole job's batch and takes this rank's
    rows. So ranks never share rows, any number of ranks that divides the same global batch sees the
    same data, and :attr:`position` is all that a checkpoint has to keep.

    Args:
        tokens: (length,) integers, usually from :func:`open_tokens`.
        context_length: tokens per window.
        seed: selects the order.
        rank, world_size: which share of every batch is this process's.
        vocab_size: the model's. Batches with other token ids are refused while they are on the CPU,
            because a GPU ends the process at one.

    Raises:
        ValueError: tokens that are not (length,) integers, or no more than ``context_length``;
            counts out of range; from batches: token ids below 0 or from ``vocab_size`` on, or a
            mapped file that became shorter.
    """

    tokens: npt.NDArray[Any]
    context_length: int
    _: KW_ONLY
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    vocab_size: int = 2**63
    position: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        _check_tokens(np.asarray(self.tokens))
        require_integer("context_length", self.context_length, least=1)
        for name in ("seed", "rank", "world_size", "vocab_size"):
            require_integer(name, getattr(self, name), least=0)
        if self.context_length >= len(self.tokens):
            raise ValueError(
                "context_length must be below the number of tokens, but got "
                f"{self.context_length} of {len(self.tokens)}. Shorten it or use a longer text."
            )
        if self.rank >= self.world_size:
            raise ValueError(
                f"rank must be below world_size {self.world_size}, but got {self.rank}."
            )

    def __len__(self) -> int:
        """Number of different windows."""
        return len(self.tokens) - self.context_length

    def get_batch(
        self, batch_size: int, *, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor]:
        """Draws this rank's next batch and moves :attr:`position` on.

        Args:
            batch_size: rows per rank.
            device: where the batch goes; copies to a GPU do not block.

        Returns:
            Inputs, and targets one token later, each (batch_size, context_length) int64.
        """
        require_integer("batch_size", batch_size, least=1)
        generator = np.random.default_rng([self.seed, self.position])
        starts = generator.integers(len(self), size=(self.world_size, batch_size))
        self.position += 1
        return self._windows(starts[self.rank], torch.device(device))

    def sequential_batches(
        self, batch_size: int, *, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Walks over all non-overlapping windows in order, as an evaluation needs.

        Every rank sees all of them; the last batch may be smaller, and a tail shorter than a window
        is left out. :attr:`position` does not move.
        """
        require_integer("batch_size", batch_size, least=1)
        starts = np.arange(0, len(self), self.context_length)
        batches = (starts[first:][:batch_size] for first in range(0, len(starts), batch_size))
        return (self._windows(batch, torch.device(device)) for batch in batches)

    def state_dict(self) -> dict[str, int]:
        """Seed and position, from which a continued run draws the next batch."""
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues where a saved dataset stopped; ValueError for what no dataset saves."""
        for name in ("seed", "position"):
            require_integer(name, state[name], least=0)
        self.seed, self.position = int(state["seed"]), int(state["position"])

    def _windows(self, starts: npt.NDArray[Any], device: torch.device) -> tuple[Tensor, Tensor]:
        mapped: Any = self.tokens
        while isinstance(mapped, np.ndarray):
            mapped = mapped.base
        if isinstance(mapped, mmap.mmap) and mapped.size() < len(mapped):  # reading would kill us
            raise ValueError(
                f"a mapped file of tokens must keep {len(mapped)} bytes, but got {mapped.size()}."
            )
        span = self.context_length + 1
        rows = np.stack([self.tokens[start : start + span] for start in starts])
        windows = torch.from_numpy(rows.astype(np.int64))  # [batch, context + 1]
        outside = windows.clamp(0, self.vocab_size - 1) != windows  # uint64 wraps around at 2^63
        if bool(outside.any()):
            raise ValueError(
                f"token ids must be from 0 to {self.vocab_size - 1}, but got "
                f"{rows[outside.numpy()][0]}. Check the tokens, their dtype and vocab_size."
            )
        if device.type == "cuda":
            windows = windows.pin_memory()
        windows = windows.to(device, non_blocking=True)
        return windows[:, :-1], windows[:, 1:]
