"""Every block of code of the site's own pages runs, as scripts/run_readme.py describes the blocks.

Unlike the READMEs, whose blocks are programs of their own, a page of the site is read from top to
bottom: Python blocks that follow one another are one program. Programs, and what ``torchrun``
starts, are forked from a process that has torch imported already, which makes the start of one take
a tenth of a second.
"""

import itertools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from scripts import run_readme

from ranks import run_ranks

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for folder in ("start", "tutorials", "how-to", "explanations")
    for page in (ROOT / "docs" / folder).glob("*.md")
)
TORCHRUN = re.compile(r"torchrun --nproc-per-node (?P<ranks>\d) (?P<file>\w+\.py)\n")
GROUPS: list[dist.ProcessGroup | None] = []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_blocks_run(page: Path, tmp_path: Path) -> None:
    gpus = torch.cuda.device_count()
    for blocks in programs(run_readme.blocks(page)):
        first = blocks[0]
        launched = TORCHRUN.fullmatch(first.text)
        if first.language == "console" and launched:
            file = tmp_path / launched["file"]
            run_forked(file.read_text(), file, int(launched["ranks"]), tmp_path)
        elif "gpu" in first.words and gpus < int(first.words.get("ranks", 1)):
            run_forked(run_readme.imports_of(first.text), page, 1, tmp_path)
        elif first.language == "python" and not set(first.words) & {"file", "gpu"}:
            program = ""
            for block in blocks:  # the line numbers of an error are those of the page
                program += "\n" * (block.line - program.count("\n")) + block.text
            run_forked(program, page, int(first.words.get("ranks", 1)), tmp_path)
        else:
            for block in blocks:
                run_readme.run_block(block, tmp_path, Path(sys.executable))


def run_forked(program: str, file: Path, world_size: int, folder: Path) -> None:
    # A store in this process, as torchrun keeps one: no port has to be chosen.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (program, str(file), str(folder), store.port)
    run_ranks(run_program, world_size, *arguments, timeout=240)


def programs(blocks: list[run_readme.Block]) -> Iterator[list[run_readme.Block]]:
    """Blocks that run together: Python blocks without a word, and each other one alone."""
    blocks = [block for block in blocks if block.language != "text"]
    for plain, group in itertools.groupby(
        blocks, lambda block: block.language == "python" and not block.words
    ):
        if plain:
            yield list(group)
        else:
            yield from ([block] for block in group)


def run_program(rank: int, world_size: int, text: str, file: str, folder: str, port: int) -> None:
    # Programs make their own group. The launcher's is forgotten but kept: another rank may still be
    # connecting to this one.
    GROUPS.append(dist.group.WORLD)
    dist.destroy_process_group()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.chdir(folder)
    sys.path.insert(0, folder)
    exec(compile(text, file, "exec"), {"__name__": "__main__"})


def test_most_pages_show_code() -> None:
    with_code = [page for page in PAGES if run_readme.blocks(page)]
    assert len(with_code) >= 0.8 * len(PAGES)


@pytest.mark.parametrize(("gpus", "runs"), [(0, False), (1, False), (2, True)])
def test_a_block_for_two_gpus_needs_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, runs: bool
) -> None:
    """With fewer, its imports run and nothing else."""
    page = tmp_path / "page.md"
    page.write_text("```python gpu ranks=2\nimport math\nprint(math.pi)\n```\n")
    monkeypatch.setattr(run_readme, "_count_gpus", lambda python: gpus)
    [block] = run_readme.blocks(page)
    command = run_readme._prepare(block, tmp_path, Path(sys.executable))
    assert ("print" in (tmp_path / command[-1]).read_text()) == runs
