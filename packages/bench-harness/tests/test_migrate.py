"""``bench-harness migrate`` on programs as people write them; nothing in them is run."""

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

from bench_harness.cli import main
from bench_harness.migrate import PAGES, changes, rules

ROOT = Path(__file__).parents[3]
NEWEST_TORCH = torch.__version__ >= "2.15"  # the one that the rules were written for

TORCH_DDP = """
import os
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

raise SystemExit("this program must not run")

def main(rank: int) -> None:
    model = nn.Linear(4, 4).cuda()
    model = DDP(model, [rank], find_unused_parameters=True, process_group=None)
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    first = state["module.weight"]
"""

ZERO = """
import torch
import torch.distributed.optim

optimizer = torch.distributed.optim.ZeroRedundancyOptimizer(
    model.parameters(),
    optimizer_class=torch.optim.AdamW,
    parameters_as_bucket_view=True,
    lr=1e-3,
)
optimizer.consolidate_state_dict(to=0)
"""

FSDP = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.set_requires_gradient_sync(False)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
"""

FLASH_ATTN = """
from flash_attn import flash_attn_func, flash_attn_qkvpacked_func

out = flash_attn_func(q, k, v, dropout_p=0.0, causal=True)
out = flash_attn_func(q, k, v, dropout_p=p, causal=True)
out = flash_attn_func(q, k, v, dropout_p=0.1, alibi_slopes=None)
out = flash_attn_qkvpacked_func(qkv)
"""

FLEX = """
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask

mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128)
out = flex.flex_attention(q, k, v, None, mask, enable_gqa=True)
"""


def found(source: str) -> list[tuple[int, str]]:
    return [(change.line, change.what) for change in changes(source, rules())]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            TORCH_DDP,
            [
                (12, "DistributedDataParallel"),
                (12, "DistributedDataParallel(device_ids=...)"),
                (12, "DistributedDataParallel(find_unused_parameters=...)"),
                (13, ".register_comm_hook()"),
                (13, "bf16_compress_hook"),
                (15, "'module.weight'"),
            ],
        ),
        (
            ZERO,
            [
                (5, "ZeroRedundancyOptimizer"),
                (7, "ZeroRedundancyOptimizer(optimizer_class=...)"),
                (8, "ZeroRedundancyOptimizer(parameters_as_bucket_view=...)"),
                (11, ".consolidate_state_dict()"),
            ],
        ),
        (
            FSDP,
            [
                (5, "MixedPrecisionPolicy"),
                (7, "fully_shard"),
                (7, "fully_shard(mesh=...)"),
                (7, "fully_shard(mp_policy=...)"),
                (8, "fully_shard"),
                (8, "fully_shard(mesh=...)"),
                (8, "fully_shard(mp_policy=...)"),
                (9, ".set_requires_gradient_sync()"),
                (10, "clip_grad_norm_"),
            ],
        ),
        (
            FLASH_ATTN,
            [
                (2, "flash_attn.flash_attn_func"),
                (5, "flash_attn_func(dropout_p=...)"),
                (6, "flash_attn_func(dropout_p=...)"),
                (7, "flash_attn_qkvpacked_func"),
            ],
        ),
        (
            FLEX,
            [
                (5, "create_block_mask"),
                (6, "flex_attention"),
                (6, "flex_attention(score_mod=...)"),
                (6, "flex_attention(block_mask=...)"),
                (6, "flex_attention(enable_gqa=...)"),
            ],
        ),
    ],
    ids=["torch-ddp", "zero-redundancy", "fsdp2", "flash-attn", "flex"],
)
def test_changes_line_by_line(source: str, expected: list[tuple[int, str]]) -> None:
    assert found(source) == expected


def test_a_program_without_any_of_them_has_nothing_to_change() -> None:
    source = "import torch\ntorch.nn.utils.clip_grad_norm_(p, 1.0)\nx.unshard()\ny = 'module.z'\n"
    assert found(source) == []
    # Names of the program itself are not torch's.
    assert found("class DistributedDataParallel: ...\nDistributedDataParallel(1)\n") == []


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "train.py"
    program.write_text(TORCH_DDP)
    assert main(["migrate", str(program)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{program}:12:13: DistributedDataParallel: use ddp_lite.")
    assert lines[-1] == f"see {PAGES}packages/ddp-lite/docs/from-torch-ddp.md"
    assert main(["migrate", str(program), "--json"]) == 1
    first = json.loads(capsys.readouterr().out)[0]
    assert {"file": str(program), "line": 12, "column": 13}.items() <= first.items()
    assert set(first) == {"file", "line", "column", "what", "advice", "page"}
    program.write_text("print(1)\n")
    assert main(["migrate", str(program)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [("def (:\n", "the file must be Python"), (None, "FILE must be a Python file")],
)
def test_what_is_no_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    program = tmp_path / "train.py"
    if content is not None:
        program.write_text(content)
    assert main(["migrate", str(program)]) == 2
    assert message in capsys.readouterr().err


def test_rules_name_things_that_exist() -> None:
    """Names and arguments of torch's in the rules are those of the installed torch."""
    peers = {
        DistributedDataParallel: "DistributedDataParallel",
        ZeroRedundancyOptimizer: "ZeroRedundancyOptimizer",
        fully_shard: "fully_shard",
        flex_attention: "flex_attention",
    }
    for peer, name in peers.items():
        [rule] = [r for r in rules() if any(n.endswith("." + name) for n in r["names"])]
        arguments = list(inspect.signature(peer).parameters)
        if NEWEST_TORCH:  # older ones lack some of its arguments and methods
            methods = vars(FSDPModule) if peer is fully_shard else dir(peer)
            assert set(rule["arguments"]) <= set(arguments), name
            assert set(rule["methods"]) <= set(methods), name
        assert list(rule["positional"]) == arguments[: len(rule["positional"])], name
        for qualified in rule["also"]:
            module, _, attribute = qualified.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), qualified


def test_pages_exist() -> None:
    for rule in rules():
        assert (ROOT / rule["page"]).is_file(), rule["page"]
