"""A model's weights and configuration as one safetensors file.

Other programs read such a file without this package: it holds the tensors of the state dict under
their names, and the fields of :class:`basics_model.ModelConfig` as JSON in its metadata.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from basics_model.attention import Attention, sdpa_attention
from basics_model.files import refusing_damage, written_whole
from basics_model.model import TransformerLM
from basics_model.sizes import ModelConfig

_CONFIG = "basics_model.config"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def save_safetensors(path: Path | str, model: TransformerLM) -> None:
    """Writes a model's weights and configuration, so that ``path`` never holds part of a file.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: as :func:`basics_model.save_checkpoint`.
    """
    safetensors = _import_safetensors()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"format": "pt", _CONFIG: json.dumps(asdict(model.config))}
    with written_whole(Path(path)) as temporary:
        try:
            safetensors.torch.save_file(tensors, temporary, metadata=metadata)
        except safetensors.SafetensorError as error:  # it has the number in its message alone
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


def load_safetensors(
    path: Path | str, *, attention: Attention = sdpa_attention, device: torch.device | str = "cpu"
) -> TransformerLM:
    """Builds the model that a file of :func:`save_safetensors` describes, with its weights.

    Names, shapes and dtypes are checked before anything is allocated, and no code of the file runs.
    Changed values go unnoticed, since the format has no checksums.

    Args:
        path: the file.
        attention: as given to :class:`basics_model.TransformerLM`.
        device: where the parameters are made.

    Returns:
        A model whose parameters have the file's dtype.

    Raises:
        ImportError: the package safetensors is not installed.
        OSError: the file is missing or cannot be read.
        ValueError: the file, which is named, is damaged, of another kind, or of no configuration
            that its tensors fit.
    """
    safetensors = _import_safetensors()
    with (
        Path(path).open("rb"),  # the package's own error names no file
        refusing_damage(path, "a file of save_safetensors", "Export the model again."),
        safetensors.safe_open(path, framework="pt") as file,
    ):
        model = _described_model(file, attention)
        tensors = {name: file.get_tensor(name) for name in model.state_dict()}
    model.to_empty(device=device).load_state_dict(tensors)
    return model


def _described_model(file: Any, attention: Attention) -> TransformerLM:
    """The model of a file's configuration on the meta device, if the file holds its tensors."""
    metadata = file.metadata() or {}
    if _CONFIG not in metadata:
        raise ValueError(f"its metadata has no {_CONFIG}, but {sorted(metadata)}")
    config = ModelConfig(**json.loads(metadata[_CONFIG]))
    tensors = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    found = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    if config.num_layers > len(found):  # before that many layers are built
        raise ValueError(f"its {len(found)} tensors are too few for {config.num_layers} layers")
    dtypes = {tensor.get_dtype() for tensor in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        raise ValueError(f"its dtypes are {sorted(dtypes)}, not one of {', '.join(_DTYPES)}")
    model = TransformerLM(config, attention=attention, device="meta", dtype=_DTYPES[dtypes.pop()])
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"its tensor {name!r} has the shape {found.get(name)}, but its configuration needs "
                f"{expected.get(name)}"
            )
    return model


def _import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "the package safetensors must be installed for files of weights, but it is not. "
            'Install it: pip install "basics-model[safetensors]".'
        ) from error
    return safetensors
