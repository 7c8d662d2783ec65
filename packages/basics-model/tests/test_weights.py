"""Files of weights: what comes back, what other programs read, and every file that is refused."""

import errno
import json
import random
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from basics_model import (
    ModelConfig,
    TransformerLM,
    load_safetensors,
    save_safetensors,
    sdpa_attention,
)
from basics_model.attention import softmax_attention


def describe(config: ModelConfig, **changes: Any) -> dict[str, str]:
    """Metadata of a file whose configuration has some changed fields."""
    return {"format": "pt", "basics_model.config": json.dumps(asdict(config) | changes)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_model_comes_back_as_it_was(
    config: ModelConfig, tmp_path: Path, dtype: torch.dtype
) -> None:
    model = TransformerLM(config, dtype=dtype)
    save_safetensors(tmp_path / "model.safetensors", model)
    loaded = load_safetensors(str(tmp_path / "model.safetensors"), attention=softmax_attention)
    assert loaded.config == config
    assert loaded.blocks[0].attention.attention is softmax_attention
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    for (name, value), (its_name, its_value) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert (name, dtype) == (its_name, its_value.dtype)
        assert torch.equal(value, its_value), name
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_loaded_model_does_not_depend_on_its_file(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    model = TransformerLM(config)
    save_safetensors(path, model)
    loaded = load_safetensors(path)
    path.write_bytes(b"")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_other_programs_read_the_state_dicts_names(config: ModelConfig, tmp_path: Path) -> None:
    model = TransformerLM(config)
    save_safetensors(tmp_path / "a.safetensors", model)
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors.keys() == model.state_dict().keys()
    assert torch.equal(tensors["embedding.weight"], model.embedding.weight)


def test_parameters_that_share_memory_are_saved(config: ModelConfig, tmp_path: Path) -> None:
    """Views of one buffer, as wrappers leave them, and a transposed one."""
    model = TransformerLM(config)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    model.lm_head.weight.data = model.lm_head.weight.data.T.contiguous().T
    save_safetensors(tmp_path / "a.safetensors", model)
    loaded = load_safetensors(tmp_path / "a.safetensors").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def test_files_with_other_contents_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = TransformerLM(config).state_dict()
    key = "blocks.0.feed_forward.up.weight"
    without = {name: value for name, value in tensors.items() if name != key}
    whole = describe(config)
    cases: dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None]] = {
        "its metadata has no basics_model.config, but []": (tensors, None),
        "unexpected keyword argument 'depth'": (tensors, describe(config, depth=2)),
        "num_heads must divide d_model": (tensors, describe(config, num_heads=3)),
        "must be an integer of at least 1, but got '16'": (tensors, describe(config, d_model="16")),
        "Expecting value": (tensors, {"basics_model.config": "config"}),
        "must be a mapping, not list": (tensors, {"basics_model.config": "[1]"}),
        "its 21 tensors are too few for 1000000000 layers": (
            tensors,
            describe(config, num_layers=10**9),
        ),
        "its tensor 'embedding.weight' has the shape (31, 16), but its configuration needs "
        "(1000000000000, 16)": (tensors, describe(config, vocab_size=10**12)),
        f"its tensor {key!r} has the shape None, but its configuration needs (40, 16)": (
            without,
            whole,
        ),
        "its tensor 'bias' has the shape (1,), but its configuration needs None": (
            tensors | {"bias": torch.zeros(1)},
            whole,
        ),
        f"its tensor {key!r} has the shape (16, 40)": (
            tensors | {key: tensors[key].T.contiguous()},
            whole,
        ),
        "its dtypes are ['F16', 'F32'], not one of": (tensors | {key: tensors[key].half()}, whole),
        "its dtypes are ['I64'], not one of F16, BF16, F32, F64": (
            {name: value.long() for name, value in tensors.items()},
            whole,
        ),
    }
    for cause, (content, metadata) in cases.items():
        save_file(content, path, metadata=metadata)
        with pytest.raises(ValueError, match="damaged or other file") as caught:
            load_safetensors(path)
        assert str(caught.value).startswith(f"{path} must be a file of save_safetensors, but got")
        assert cause in str(caught.value)


def test_damaged_files_are_refused_or_keep_names_and_shapes(
    config: ModelConfig, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    model = TransformerLM(config)
    save_safetensors(path, model)
    whole = path.read_bytes()
    generator = random.Random(0)
    header = int.from_bytes(whole[:8], "little") + 8
    damaged = [b"", b"{}", *(whole[:length] for length in range(8, len(whole), 997))]
    for _ in range(200):
        place = generator.randrange(header)
        flipped = whole[place] ^ (1 << generator.randrange(8))
        damaged.append(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            loaded = load_safetensors(path)
        except ValueError as error:
            refused += str(path) in str(error)
            continue
        refused += loaded.state_dict().keys() == model.state_dict().keys()
    assert refused == len(damaged)


def test_a_wrong_device_is_not_blamed_on_the_file(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_safetensors(path, TransformerLM(config))
    with pytest.raises(RuntimeError, match="device type at start of device string: nowhere"):
        load_safetensors(path, device="nowhere")


def test_missing_files_and_folders_are_os_errors(config: ModelConfig, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere" / "a.safetensors"
    for call in (load_safetensors, lambda path: save_safetensors(path, TransformerLM(config))):
        with pytest.raises(FileNotFoundError) as caught:
            call(missing)
        assert caught.value.filename == str(missing)


def test_a_full_disk_is_an_os_error_and_keeps_the_file(config: ModelConfig, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_safetensors(path, TransformerLM(config))
    content = path.read_bytes()
    for limit in (0, 100, 5000):
        _, hard = before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                save_safetensors(path, TransformerLM(config))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
        assert list(tmp_path.iterdir()) == [path]
        assert path.read_bytes() == content


def test_without_the_extra_the_error_says_how_to_get_it(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    path = tmp_path / "a.safetensors"
    for call in (load_safetensors, lambda path: save_safetensors(path, TransformerLM(config))):
        with pytest.raises(ImportError, match=r'pip install "basics-model\[safetensors\]"'):
            call(path)
    assert not path.exists()


@pytest.mark.gpu
def test_weights_of_a_gpu_come_back_on_a_gpu(config: ModelConfig, tmp_path: Path) -> None:
    model = TransformerLM(config, device="cuda")
    save_safetensors(tmp_path / "a.safetensors", model)
    loaded = load_safetensors(tmp_path / "a.safetensors", attention=sdpa_attention, device="cuda")
    assert loaded.embedding.weight.is_cuda
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
