"""The folder that Hugging Face's ``kernels`` library loads, and attention through what it loads."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "lay_out_kernel.py"
spec = importlib.util.spec_from_file_location("lay_out_kernel", TOOL)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# In a process of its own, outside the repository: first the installed package, then the copy.
PROGRAM = """
import sys
from pathlib import Path
import torch
import flashattn_triton
from kernels import get_local_kernel

copy = get_local_kernel(Path(sys.argv[1]))
assert copy is not flashattn_triton
assert Path(copy.__file__).is_relative_to(sys.argv[1])
generator = torch.Generator().manual_seed(0)
query, key, value = (
    torch.randn(2, 4, 37, 16, generator=generator, requires_grad=True) for _ in range(3)
)
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
gradients = torch.autograd.grad(expected.sum(), (query, key, value))
for package in (flashattn_triton, copy):
    out = package.flash_attention(query, key, value, causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.sum(), (query, key, value))
    torch.testing.assert_close(found, gradients, rtol=1e-5, atol=1e-5)
from_inside = [name for name, module in sys.modules.items() if sys.argv[1] in
               str(getattr(module, "__file__", ""))]
assert len(from_inside) > 5, from_inside
assert not any(name.startswith("flashattn_triton.") for name in from_inside), from_inside
"""


def test_kernels_loads_the_folder_and_attention_is_right(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    build = tool.lay_out(folder)
    assert build == folder / "build" / "torch-universal"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, str(folder)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_refers_to_the_installed_package(tmp_path: Path) -> None:
    build = tool.lay_out(tmp_path / "repository")
    files = list(build.rglob("*.py"))
    assert len(files) == len(list(tool.SOURCE.rglob("*.py")))
    for path in files:
        # Examples in docstrings are for users of the package.
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        found = re.findall(rf"^\s*(?:from|import) {tool.NAME}\b.*", code, flags=re.MULTILINE)
        found += re.findall(rf"torch\.ops\.{tool.NAME}\.|[\"']{tool.NAME}(?:::|[\"'])", code)
        assert not found, (path, found)


@pytest.mark.parametrize(
    ("line", "depth", "relative"),
    [
        ("from flashattn_triton import ops", 1, "from . import ops"),
        ("from flashattn_triton.ops import f", 1, "from .ops import f"),
        (
            "    from flashattn_triton.hopper.launch import f",
            2,
            "    from ..hopper.launch import f",
        ),
        ("from flashattn_triton_extra import f", 1, "from flashattn_triton_extra import f"),
    ],
)
def test_imports_made_relative(line: str, depth: int, relative: str) -> None:
    assert tool.imports_made_relative(line, depth=depth) == relative


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(FileExistsError, match="FOLDER must be empty"):
        tool.lay_out(tmp_path)
    assert (tmp_path / "file").read_text() == "kept"
