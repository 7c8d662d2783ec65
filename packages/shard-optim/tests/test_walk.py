"""The design that a reader is promised, as ``tools/walk.py`` counts it."""

import runpy
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


# They compare the ranks' settings.
COMPARISON = {"history.py", "parameter_groups.py"}


def test_one_step_reads_five_files() -> None:
    walk = runpy.run_path(str(PACKAGE / "tools/walk.py"))["walk"]
    calls = walk(PACKAGE / "src")
    assert len({file for package, file, _ in calls if package == "shard_optim"} - COMPARISON) <= 5
    assert {file for package, file, _ in calls if package == "ddp_lite"} == {"ranks.py"}
