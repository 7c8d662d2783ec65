"""Checkpoints: content, and survival of every way in which a save can end early."""

import errno
import io
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW

import basics_model
from basics_model import (
    Checkpoint,
    ModelConfig,
    TransformerLM,
    cross_entropy,
    load_checkpoint,
    save_checkpoint,
)
from basics_model.checkpoint import restore_rng_state


def small(step: int) -> Checkpoint:
    return Checkpoint(step=step, model={"weight": torch.full((4,), float(step))})


def train(model: TransformerLM, optimizer: AdamW, steps: int) -> None:
    for _ in range(steps):
        tokens = torch.randint(model.config.vocab_size, (2, 8))  # from torch's generator
        optimizer.zero_grad()
        cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def test_resumed_run_equals_an_uninterrupted_one(config: ModelConfig, tmp_path: Path) -> None:
    model = TransformerLM(config)
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 3)
    path = tmp_path / "3.pt"
    save_checkpoint(
        path,
        Checkpoint(
            step=3,
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            extra={"config": {"name": "x"}, "position": 3, "list": [1, 2.5, None, (True,)]},
        ),
    )
    train(model, optimizer, 2)

    torch.manual_seed(1234)
    resumed = TransformerLM(config)
    successor = AdamW(resumed.parameters(), lr=9.0)
    loaded = load_checkpoint(path)
    resumed.load_state_dict(loaded.model)
    successor.load_state_dict(dict(loaded.optimizer))
    restore_rng_state(loaded.rng)
    train(resumed, successor, 2)

    assert loaded.step == 3
    assert loaded.extra == {"config": {"name": "x"}, "position": 3, "list": [1, 2.5, None, (True,)]}
    for name, value in model.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


# One process per moment, forked after a single import of torch; prints how each of them ended.
KILLED = """
import os, signal, sys, torch
from basics_model import Checkpoint, save_checkpoint

real_save, real_fsync = torch.save, os.fsync
calls = 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def half_write(content, file):
    file.write(b"x" * 1000)
    file.flush()
    die()

def die_after_write(content, file):
    real_save(content, file)
    file.flush()
    die()

def fsync(descriptor):
    global calls
    calls += 1
    if moment == f"fsync-{calls}":
        die()
    real_fsync(descriptor)

os.fsync = fsync
for argument in sys.argv[1:]:
    moment, path = argument.split("=")
    torch.save = {"half-write": half_write, "written": die_after_write}.get(moment, real_save)
    child = os.fork()
    if child == 0:
        save_checkpoint(path, Checkpoint(step=2, model={"weight": torch.full((4,), 2.0)}))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def start_child(program: str, *arguments: str) -> subprocess.Popen[str]:
    source = Path(basics_model.__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": str(source)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Killed before the rename, the old one stays; killed after it, the new one is there."""
    survivors = {"half-write": 1, "written": 1, "fsync-1": 1, "fsync-2": 2}
    paths = {moment: tmp_path / moment / "1.pt" for moment in survivors}
    for path in paths.values():
        path.parent.mkdir()
        save_checkpoint(path, small(1))
    with start_child(KILLED, *(f"{moment}={path}" for moment, path in paths.items())) as child:
        output, _ = child.communicate(timeout=120)
    assert output.split() == [str(-signal.SIGKILL.value)] * len(survivors)
    for moment, path in paths.items():
        assert load_checkpoint(path).step == survivors[moment], moment
        assert list(path.parent.glob("*.pt")) == [path]
        save_checkpoint(path, small(5))
        assert load_checkpoint(path).step == 5
        leftovers = [entry.name for entry in path.parent.iterdir() if entry != path]
        assert leftovers == [], moment


ENDLESS = """
import sys, torch
from basics_model import Checkpoint, save_checkpoint

step = 1
while True:
    weight = torch.full((200_000,), float(step))
    save_checkpoint(sys.argv[1], Checkpoint(step=step, model={"weight": weight}))
    if step == 1:
        print("saved", flush=True)
    step += 1
"""


def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "latest.pt"
    with start_child(ENDLESS, str(path)) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "saved\n"
            time.sleep(0.0137)
        finally:
            child.kill()
    loaded = load_checkpoint(path)
    assert (loaded.model["weight"] == loaded.step).all()


def test_failed_save_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "latest.pt"
    save_checkpoint(path, small(1))

    def full_disk(content: Any, file: Any) -> None:
        file.write(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, small(2))
    assert load_checkpoint(path).step == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.pt"]


# As if the disk became full after so many bytes; prints what each save raised.
FULL_DISK = """
import resource, sys, torch
from basics_model import Checkpoint, save_checkpoint

weights = {name: torch.zeros(2500) for name in "abc"}
for limit in range(0, 32_000, 500):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_checkpoint(sys.argv[1], Checkpoint(step=2, model=weights))
    except Exception as error:
        result = f"{type(error).__name__} {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print(result)
"""


def test_a_full_disk_is_an_os_error_with_the_files_name(tmp_path: Path) -> None:
    """Wherever it becomes full: after some bytes ``torch.save`` complains of other things."""
    path = tmp_path / "1.pt"
    save_checkpoint(path, Checkpoint(step=1, model={}))
    content = path.read_bytes()
    with start_child(FULL_DISK, str(path)) as child:
        output, _ = child.communicate(timeout=60)
    assert output.splitlines() == [f"OSError [Errno 27] File too large: '{path}'"] * 64
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == content


def test_file_and_folder_reach_the_disk_around_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "latest.pt"
    events = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        events.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    save_checkpoint(path, small(1))
    assert events == [".latest.pt.tmp", "rename", tmp_path.name]


def test_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save_checkpoint(tmp_path / "nowhere" / "a.pt", small(1))
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("value", [np.float64(1.5), np.arange(3), Path("a")], ids=repr)
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "latest.pt"
    save_checkpoint(path, small(1))
    state = Checkpoint(step=2, model={}, extra={"deep": [{"value": value}]})
    with pytest.raises(ValueError, match=r"must hold tensors, numbers, .* but got (numpy|pathlib)"):
        save_checkpoint(path, state)
    with pytest.raises(ValueError, match="step must be an integer"):
        save_checkpoint(path, Checkpoint(step=1.5, model={}))  # type: ignore[arg-type]
    assert load_checkpoint(path).step == 1
    assert list(tmp_path.iterdir()) == [path]


class Payload:
    """Runs code when a pickle that is not weights-only is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PAYLOAD_TARGET"],)


def test_loading_never_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ran"
    monkeypatch.setenv("PAYLOAD_TARGET", str(target))
    torch.save({"format": 1, "payload": Payload()}, tmp_path / "evil.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(), protocol=2))
    for name in ("evil.pt", "plain.pt"):
        with pytest.raises(ValueError, match=f"{name} must be .* damaged or other file"):
            load_checkpoint(tmp_path / name)
    assert not target.exists()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    numpy_archive = io.BytesIO()
    np.savez(numpy_archive, weight=np.zeros(4))
    for content in (b"", b"not a checkpoint", numpy_archive.getvalue()):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.pt must be .* damaged or other file"):
            load_checkpoint(path)
    for content in ({"format": 2, "step": 1}, {"step": 1}, [1], torch.zeros(2)):
        torch.save(content, path)
        with pytest.raises(ValueError, match=r"a\.pt must be a checkpoint of format 1, but got"):
            load_checkpoint(path)
    whole: dict[str, Any] = {"step": 1, "model": {}, "optimizer": {}, "rng": {}, "extra": {}}
    for change in ({"step": "1"}, {"step": True}, {"model": None}, {"rng": [1]}, {"more": {}}):
        torch.save({"format": 1} | whole | change, path)
        with pytest.raises(ValueError, match=r"a\.pt must be a checkpoint that holds step"):
            load_checkpoint(path)
    torch.save({"format": 1, "step": 1}, path)
    with pytest.raises(ValueError, match=r"holds step .*, but got step \(int\)"):
        load_checkpoint(path)


@pytest.mark.parametrize("checksums", [True, False], ids=["crc32", "crc32-switched-off"])
def test_a_damaged_file_never_loads_other_values(tmp_path: Path, checksums: bool) -> None:
    """Any flipped bit, any missing end: the saved values come back, or an error with the path."""
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(checksums)
    try:
        model = {"weight": torch.arange(64.0), "bias": torch.ones(3, dtype=torch.bfloat16)}
        save_checkpoint(path, Checkpoint(step=7, model=model, extra={"lr": 0.1, "name": "run"}))
        assert torch.serialization.get_crc32_options() == checksums
    finally:
        torch.serialization.set_crc32_options(True)
    whole = path.read_bytes()
    generator = random.Random(0)
    damaged = [whole[:length] for length in range(0, len(whole), 97)]
    for place in range(0, len(whole), 7):
        flipped = whole[place] ^ (1 << generator.randrange(8))
        damaged.append(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    refused = same = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            loaded = load_checkpoint(path)
        except ValueError as error:
            refused += str(path) in str(error)
            continue
        same += 1
        assert (loaded.step, loaded.extra) == (7, {"lr": 0.1, "name": "run"})
        assert loaded.model.keys() == model.keys()
        assert all(torch.equal(loaded.model[name], value) for name, value in model.items())
    assert refused + same == len(damaged)
    assert refused > len(damaged) / 3


@pytest.mark.gpu
def test_gpu_generator_state_is_kept(tmp_path: Path) -> None:
    torch.randn(3, device="cuda")
    path = tmp_path / "a.pt"
    save_checkpoint(path, Checkpoint(step=1, model={}))
    expected = torch.randn(3, device="cuda")
    restore_rng_state(load_checkpoint(path).rng)
    assert torch.equal(torch.randn(3, device="cuda"), expected)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("rng_state", r"basics_model\.checkpoint\."),
        ("linear_cross_entropy", r"basics_model\.loss\."),
        ("AdamW", r"torch\.optim\."),
        ("clip_gradients", r"torch\.nn\.utils, where its name is clip_grad_norm_\."),
    ],
)
def test_a_name_that_moved_says_where_it_is(name: str, place: str) -> None:
    with pytest.raises(ImportError, match=f"{name} must be imported from {place}"):
        getattr(basics_model, name)
