"""The documentation pages name tests that exist, and answers for every argument of torch's."""

import inspect
import re
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

PACKAGE = Path(__file__).parents[1]


def rows(page: str) -> list[list[str]]:
    lines = (PACKAGE / "docs" / page).read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return [row for row in cells if not row[0].startswith(("---", "mistake", "torch DDP"))]


def test_every_mistake_has_a_test() -> None:
    source = "\n".join(file.read_text() for file in PACKAGE.glob("tests/test_*.py"))
    existing = set(re.findall(r"^def (test_\w+)", source, flags=re.MULTILINE))
    found = rows("mistakes.md")
    assert len(found) >= 15
    for mistake, _, test in found:
        assert test.strip("`") in existing, mistake


def test_every_argument_of_torch_s_wrapper_is_on_the_page() -> None:
    listed = {
        name
        for row in rows("from-torch-ddp.md")
        for name in re.findall(r"`(\w+)[=(`]", row[0] + "`")
    }
    arguments = set(inspect.signature(DistributedDataParallel).parameters)
    assert arguments - listed == set()
