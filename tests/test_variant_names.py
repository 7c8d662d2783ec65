"""Pages call each variant of a training step by one short name."""

import gzip
import json
from pathlib import Path

import pytest
from tools.pages.fill import names, short_names

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
    """Of at most 16 characters: what a column of a phone's table holds."""
    found = names()
    assert set(found) == published_labels()
    assert len(set(found.values())) == len(found)
    assert all(len(name) <= 16 and "," not in name and "(" not in name for name in found.values())


def test_a_label_without_a_name_is_refused() -> None:
    assert short_names(["BucketedDDP(comm_hook=auto)", "FlatDDP"]) == ["BucketedDDP", "FlatDDP"]
    with pytest.raises(ValueError, match=r"got 'FlatDDP\(colour=red\)'. Add one of at most 16"):
        short_names(["FlatDDP", "FlatDDP(colour=red)"])
