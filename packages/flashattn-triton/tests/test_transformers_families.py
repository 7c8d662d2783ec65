"""The table of transformers' families, checked by a sample of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

TOOL = Path(__file__).parents[1] / "tools" / "compare_transformers.py"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore"),  # of the models' own configurations
]
# One family of each kind: a decoder, windows, sinks, an encoder, cross-attention, images, refused.
SAMPLE = ["llama", "gemma3_text", "gpt_oss", "bert", "modernbert", "bart", "t5", "vit", "falcon"]


def verdicts(rows: Any) -> dict[str, str]:
    return {family: verdict for family, verdict, _ in rows}


def test_the_table_says_what_the_tool_finds() -> None:
    tool = runpy.run_path(str(TOOL))
    tool["register"]()
    import transformers

    transformers.AttentionInterface.register(tool["ALIAS"], tool["counted"])
    table = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in tool["PAGE"].read_text(encoding="utf-8").splitlines()
        if line.count("|") == 4 and "---" not in line
    ]
    stated = verdicts(table)
    found = verdicts(tool["rows"](SAMPLE))
    assert found == {family: stated[family] for family in SAMPLE}
    assert not [row for row in table if "NameError" in row[2] or "KeyError" in row[2]]
