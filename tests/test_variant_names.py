"""Pages call each variant of a training step by one short name."""

import gzip
import json
from pathlib import Path

import pytest
from tools.pages.variant_names import MOST, short_name, short_names

ROWS = Path(__file__).resolve().parents[1] / "docs" / "results"


def published_labels() -> set[str]:
    """Labels of all variants of training steps in the repository's rows."""
    found = set()
    for file in ROWS.glob("*.jsonl*"):
        text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for line in text.splitlines():
            case = json.loads(line)
            if case["experiment"] == "train-step":
                shared = case.get("shared", {})
                found |= {({**shared, **row}).get("variant") for row in case["rows"]}
    return found - {None}


def test_every_published_variant_has_a_name_of_its_own() -> None:
    labels = sorted(published_labels())
    assert len(labels) > 60
    names = short_names(labels)
    assert len(set(names)) == len(labels)
    assert all(len(name) <= MOST and "," not in name and "(" not in name for name in names)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("BucketedDDP(comm_hook=auto)", "BucketedDDP"),  # the class as it is by default
        ("BucketedDDP", "BucketedDDP NCCL"),
        ("BucketedDDP(comm_hook=peer-copy)", "DDP copies"),
        ("torch DDP(bucket_cap_mb=100, gradient_as_bucket_view)", "torch DDP tuned"),
        ("FullyShardedDataParallel(reshard_after_forward=False)", "FSDP kept"),
        ("BucketedDDP + ShardedOptimizer", "DDP + ZeRO-1"),
    ],
)
def test_names(label: str, name: str) -> None:
    assert short_name(label) == name


def test_an_unknown_setting_and_a_shared_name_are_refused() -> None:
    with pytest.raises(ValueError, match="got 'colour=red' in 'FlatDDP"):
        short_name("FlatDDP(colour=red)")
    with pytest.raises(ValueError, match="must differ, but got FSDP twice"):
        short_names(["FullyShardedDataParallel", "FullyShardedDataParallel(compute_dtype=bf16)"])
    with pytest.raises(ValueError, match="at most 16 characters"):
        short_name("OverlapDDP(bucket_size_mb=1000, wire_dtype=bf16)")
