"""Folders of strangers: checked before they are believed, never unpickled."""

import io
import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.serialization import config as serialization_config

from ranks import run_ranks
from shard_optim import (
    CollectiveError,
    FullyShardedDataParallel,
    ShardedOptimizer,
    full_state,
    load,
    save,
)
from shard_optim.checkpoint_files import Part, StoredTensor, read_elements


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0)))
    model.append(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last))
    model.register_buffer("table", torch.arange(6.0).view(2, 3).t())
    return model


def step(model, optimizer):
    sum(param.square().sum() for param in model.parameters()).backward()
    optimizer.step()


def fully_sharded():
    model = FullyShardedDataParallel(build())
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def stage_1():
    model = build()
    return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def assert_equal(found, expected):
    """Two whole states."""
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
    for index, state in expected["optimizer"]["state"].items():
        for key, value in state.items():
            assert torch.equal(found["optimizer"]["state"][index][key], value), (index, key)
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def check_model_and_optimizer_of_stage_1(rank, world_size, folder):
    """One folder for stages 1 to 3."""
    model, optimizer = stage_1()
    step(model, optimizer)
    save(folder, model, optimizer)
    expected = full_state(model, optimizer)
    for make in (stage_1, fully_sharded):
        other, other_optimizer = make()
        step(other, other_optimizer)
        step(other, other_optimizer)
        load(folder, other, other_optimizer)
        found = full_state(other, other_optimizer)
        if rank == 0:
            assert_equal(found, expected)
    save(f"{folder}-optimizer", optimizer=optimizer)
    with pytest.raises(ValueError, match=r"holds the optimizer alone\. Load the optimizer"):
        load(f"{folder}-optimizer", model, optimizer)


def test_one_folder_for_all_stages(tmp_path):
    run_ranks(check_model_and_optimizer_of_stage_1, 2, str(tmp_path / "saved"))


# --- strangers' folders ----------------------------------------------------------------------


class Malicious:
    """Unpickling one creates a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (self.target, "w")


def check_code(rank, world_size, folder):
    saved, ran = f"{folder}/saved", Path(folder, "ran")
    model, optimizer = fully_sharded()
    save(saved, model, optimizer)
    before = full_state(model, optimizer)
    data = pickle.dumps(Malicious(str(ran)))
    Path(saved, ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"must be as it was written.*\.metadata differs"):
        load(saved, model, optimizer)
    described(saved, lambda content: content.update(metadata_crc32=zlib.crc32(data)))
    load(saved, model, optimizer)  # which does not read the pickle
    assert not ran.exists()
    assert_equal(full_state(model, optimizer), before)


def test_no_code_of_a_checkpoint_runs(tmp_path):
    run_ranks(check_code, 1, str(tmp_path))


def described(folder, change):
    """Rewrites the description, with a right checksum."""
    path = Path(folder, "contents.json")
    content = json.loads(path.read_text().splitlines()[0])
    change(content)
    line = json.dumps(content)
    path.write_text(f"{line}\n{zlib.crc32(line.encode())}\n")


def first_part(content):
    return content["tensors"]["model.0.weight"]["parts"][0]


MOMENT = "state.{}.elements.more"
LIES = [
    ("not stored exactly once", lambda c: first_part(c).update(count=3)),
    ("not stored exactly once", lambda c: first_part(c).update(first=2)),
    ("sizes that are no counts", lambda c: first_part(c).update(offset=-1)),
    ("sizes that are no counts", lambda c: c["tensors"]["table_" * 3].update(shape=[1e9])),
    ("is no file of a rank", lambda c: first_part(c).update(file="../x")),
    ("is no file of a rank", lambda c: first_part(c).update(file="/dev/zero")),
    ("is no file of a rank", lambda c: first_part(c).update(file="a\n/../../x")),
    ("is no file of a rank", lambda c: first_part(c).update(file="..")),
    ("it ends before", lambda c: first_part(c).update(offset=10**9)),
    ("takes .* bytes", lambda c: first_part(c).update(offset=0, length=10**5)),
    ("takes 8 bytes", lambda c: first_part(c).update(length=8)),
    (r"torch\.load must be a dtype", lambda c: c["tensors"]["model.0.weight"].update(dtype="load")),
    ("is damaged", lambda c: c.update(tensors=[])),
    ("is damaged", lambda c: c.update(values={"header": {"class": "x", "fields": {}}})),
    ("the checksum of model.0.weight differs", lambda c: first_part(c).update(crc32=1)),
    ("has shape", lambda c: c["tensors"]["model.0.weight"].update(shape=[35])),
    ("has shape", lambda c: c["tensors"]["model.0.weight"].update(shape=[5, 7])),
    ("is torch.float64 in it", lambda c: c["tensors"]["model.0.bias"].update(dtype="float64")),
    ("must hold model.0.weight", lambda c: c["tensors"].pop("model.0.weight")),
    ("where AdamW holds", lambda c: c["tensors"].pop("state.1.elements.exp_avg_sq")),
    (
        "state of state.99.elements.more, .*in none of its groups",
        lambda c: c["tensors"].update({MOMENT.format(99): c["tensors"]["b"]}),
    ),
    (
        "'exp_avg' of .* shape",
        lambda c: c["tensors"]["state.1.elements.exp_avg"].update(shape=[35]),
    ),
    ("'more' of .* shape", lambda c: c["tensors"].update({MOMENT.format(1): c["tensors"]["b"]})),
    ("it holds model.more", lambda c: c["tensors"].update({"model.more": c["tensors"].pop("b")})),
]


def check_lies(rank, world_size, folder):
    model, optimizer = fully_sharded()
    step(model, optimizer)
    save(f"{folder}/good", model, optimizer)
    before = full_state(model, optimizer)
    for number, (text, lie) in enumerate(LIES):
        copy = f"{folder}/{number}"
        shutil.copytree(f"{folder}/good", copy)

        def change(content, lie=lie):
            tensors = content["tensors"]
            tensors["b"] = {"dtype": "float32", "shape": [0], "parts": []}
            tensors["table_" * 3] = {"dtype": "float32", "shape": [0], "parts": []}
            lie(content)

        with Path(copy, "__0_0.distcp").open("ab") as file:
            file.write(bytes(10**6))
        described(copy, change)
        with pytest.raises(ValueError, match=text):
            load(copy, model, optimizer)
    assert_equal(full_state(model, optimizer), before)


def test_descriptions_that_lie_are_refused(tmp_path):
    run_ranks(check_lies, 1, str(tmp_path))


@pytest.mark.parametrize("alignment", [64, 4096])
def test_elements_are_found_at_any_alignment(tmp_path, alignment):
    values, buffer = torch.arange(10.0), io.BytesIO(b"before")
    buffer.seek(0, os.SEEK_END)
    with serialization_config.patch("save.storage_alignment", alignment):
        torch.save(values, buffer)

    def read(data):
        (tmp_path / "file").write_bytes(data)
        where = {"offset": 6, "length": len(data) - 6, "crc32": zlib.crc32(data[6:])}
        part = Part(first=0, count=10, file="file", **where)
        stored = StoredTensor(dtype=values.dtype, shape=(10,), parts=[part])
        return read_elements(tmp_path, "key", stored, 3, 4)

    assert torch.equal(read(buffer.getvalue()), values[3:7])
    with pytest.raises(ValueError, match="key is not stored as"):
        read(buffer.getvalue().replace(b"little", b"big\0\0\0"))


def check_special_files(rank, world_size, folder):
    model, _ = fully_sharded()
    save(f"{folder}/good", model)
    for name in ("__0_0.distcp", "contents.json", ".metadata"):
        copy = Path(folder, f"copy-{name}")
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
            shutil.copytree(f"{folder}/good", copy)
            (copy / name).unlink()
            make(copy / name)
            with pytest.raises(ValueError, match=f"{name} is damaged: it is no regular file"):
                load(copy, model)
            shutil.rmtree(copy)


def test_files_without_an_end_are_refused(tmp_path):
    run_ranks(check_special_files, 1, str(tmp_path), timeout=60)


def check_missing_file(rank, world_size, folder):
    model, _ = fully_sharded()
    save(folder, model)
    if rank == 0:
        Path(folder, "__1_0.distcp").unlink()
    dist.barrier()
    expected = r"__1_0.distcp, which rank 1 of the run that saved wrote, is missing"
    with pytest.raises(FileNotFoundError, match=expected):
        load(folder, model)
    dist.barrier()
    if rank == 0:
        Path(folder, "contents.json").unlink()  # as in a folder of something else
    dist.barrier()
    expected = r"contents.json, which shard_optim.save\(\) writes, is missing.*load_full_state"
    with pytest.raises(FileNotFoundError, match=expected):
        load(folder, model)


def test_a_missing_file_is_named(tmp_path):
    run_ranks(check_missing_file, 2, str(tmp_path / "saved"))


def check_two_folders(rank, world_size, folder):
    """A file system that shows one rank an older "latest"."""
    model, optimizer = fully_sharded()
    for number in range(2):
        step(model, optimizer)
        save(f"{folder}/{number}", model, optimizer)
    before = full_state(model, optimizer)
    with pytest.raises(ValueError, match="rank 1 has read another one than rank 0"):
        load(f"{folder}/{rank}", model, optimizer)
    with pytest.raises((FileNotFoundError, CollectiveError), match="which a save writes last"):
        load(f"{folder}/{0 if rank else 7}", model, optimizer)
    after = full_state(model, optimizer)
    if rank == 0:
        assert_equal(after, before)


def test_ranks_that_read_different_folders(tmp_path):
    run_ranks(check_two_folders, 2, str(tmp_path))


def check_two_background_saves(rank, world_size, folder):
    """A save on a slow disk is waited for by the next over the same group."""
    model, optimizer = fully_sharded()
    group = dist.new_group(backend="gloo")
    saves = []
    for number in range(3):
        step(model, optimizer)
        saves.append(save(f"{folder}/{number}", model, optimizer, background_group=group))
        if rank == 1 and number == 0:
            saves[0].result()  # this rank is later than the other
    for each in saves:
        each.result()
    load(f"{folder}/2", model, optimizer)


def test_background_saves_wait_for_each_other(tmp_path):
    run_ranks(check_two_background_saves, 2, str(tmp_path))
    assert len(list(tmp_path.glob("*/.metadata"))) == 3
