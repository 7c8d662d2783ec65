"""Every package builds alone, carries what a release needs, and does what its README shows."""

import email.parser
import io
import os
import re
import shlex
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from scripts import run_readme

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SIBLING_REQUIREMENTS = {
    "bench-harness": {"basics-model", "ddp-lite", "flashattn-triton", "shard-optim"},
    "shard-optim": {"ddp-lite"},
}
FIRST = tomllib.loads((ROOT / "packages" / NAMES[0] / "pyproject.toml").read_text())
REPOSITORY = FIRST["project"]["urls"]["Source"]
UV = shutil.which(os.environ.get("UV", "uv"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UV is None, reason="building needs uv, which is not on the PATH"),
]


def uv(*args: object, cwd: Path) -> str:
    """Runs uv outside any project and returns its standard output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    # Installs from the repository's address take this checkout's last commit.
    environment["GIT_CONFIG_COUNT"] = "1"
    environment["GIT_CONFIG_KEY_0"] = f"url.{ROOT.as_uri()}.insteadOf"
    environment["GIT_CONFIG_VALUE_0"] = REPOSITORY
    # Three gigabytes of torch come once over a network that may be slow; pytest ends what hangs.
    command = [UV, *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and wheel of every package, or what a release has built: $WHEELS."""
    if "WHEELS" in os.environ:
        return Path(os.environ["WHEELS"]).resolve()
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "-q", "--all-packages", "--out-dir", folder, cwd=ROOT)
    return folder


def find(dist: Path, name: str, suffix: str) -> Path:
    [path] = dist.glob(f"{name.replace('-', '_')}-*{suffix}")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_wheel_contents(dist: Path, name: str) -> None:
    module = name.replace("-", "_")
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(find(dist, name, ".whl")) as wheel:
        files = wheel.namelist()
        [metadata_file] = [f for f in files if f.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(wheel.read(metadata_file).decode())
        [licence] = [f for f in files if f.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(licence).startswith(b"MIT License")
    tops = {f.partition("/")[0] for f in files}
    assert tops == {module, metadata_file.partition("/")[0]}
    assert f"{module}/py.typed" in files
    assert not [f for f in files if re.match(r"(test_|conftest|tests$)", Path(f).name)]
    assert not [f for f in files if "tests" in Path(f).parts]
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert len(str(metadata.get_payload())) > 500, "the README becomes the index page"

    requirements = metadata.get_all("Requires-Dist") or []
    siblings = {r for r in requirements if r.startswith(tuple(NAMES))}
    assert len(siblings) == len(SIBLING_REQUIREMENTS.get(name, set()))
    assert all(">=" in r and "<" in r for r in siblings), siblings
    assert all("linux" in r for r in requirements if r.startswith("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_the_page_on_an_index(dist: Path, name: str) -> None:
    """The README with absolute links, each to a file of the repository, and no marks of tables."""
    with zipfile.ZipFile(find(dist, name, ".whl")) as wheel:
        [file] = [f for f in wheel.namelist() if f.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(wheel.read(file).decode())
    page = str(metadata.get_payload())
    assert metadata["Description-Content-Type"].startswith("text/markdown")
    assert "<!--" not in page
    raw = REPOSITORY.replace("//github.com/", "//raw.githubusercontent.com/")
    for token in MarkdownIt("commonmark").enable("table").parse(page):
        for child in token.children or []:
            target = str(child.attrGet("href") or child.attrGet("src") or "#")
            assert target.startswith(("https://", "#")), target
            here = re.match(rf"(?:{REPOSITORY}/blob|{raw})/main/([^#]+)", target)
            assert here is not None or not target.startswith((REPOSITORY, raw)), target
            assert here is None or (ROOT / here[1]).exists(), target
            assert child.type != "image" or target.startswith(raw), target
    warnings = io.StringIO()
    renderer = pytest.importorskip("readme_renderer.markdown")
    rendered = renderer.render(page, stream=warnings)
    assert rendered is not None, warnings.getvalue()
    blocks = run_readme.blocks(ROOT / "packages" / name / "README.md")
    assert rendered.count("<pre") == len(blocks)


@pytest.mark.parametrize("name", NAMES)
def test_sdist_contents(dist: Path, name: str) -> None:
    with tarfile.open(find(dist, name, ".tar.gz")) as sdist:
        files = [f.partition("/")[2] for f in sdist.getnames()]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"} <= set(files)
    assert f"src/{name.replace('-', '_')}/py.typed" in files
    assert not [f for f in files if f.startswith("tests")]


# ---- each wheel alone ----------------------------------------------------------------------------


def declared(wheel: Path) -> list[str]:
    """A wheel's own requirements, those of its extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        [file] = [f for f in archive.namelist() if f.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(archive.read(file).decode())
    return [r for r in metadata.get_all("Requires-Dist") or [] if "extra ==" not in r]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment, whose torch all tests share once it is compiled."""
    folder = tmp_path_factory.mktemp("alone")
    uv("venv", "-q", folder / "venv", cwd=folder)
    return folder / "venv" / "bin" / "python"


def install_alone(dist: Path, name: str, resolution: str, python: Path, folder: Path) -> None:
    """Brings the environment to exactly one wheel and its requirements.

    The versions are resolved without a look at what is installed. What uv's cache holds is not
    downloaded again (``--upgrade`` would), and the files are links into it.
    """
    wheel = find(dist, name, ".whl")
    # Requirements given by name are direct ones: lowest-direct takes the lowest of each.
    wanted = folder / "wanted.txt"
    wanted.write_text("\n".join([f"{name} @ {wheel.as_uri()}", *declared(wheel)]))
    pinned = folder / "pinned.txt"
    compile_ = ["pip", "compile", "-q", "--python", python, "--no-annotate", "-f", dist]
    uv(*compile_, "--resolution", resolution, wanted, "-o", pinned, cwd=dist)
    sync = ["pip", "sync", "-q", "--python", python, "--link-mode", "symlink", "-f", dist]
    uv(*sync, pinned, cwd=dist)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "resolution", [pytest.param("highest", marks=pytest.mark.release), "lowest-direct"]
)
def test_the_wheel_alone_is_enough(
    dist: Path, name: str, resolution: str, python: Path, tmp_path: Path
) -> None:
    """Only the declared requirements are there; siblings come from the folder just built."""
    install_alone(dist, name, resolution, python, tmp_path)
    freeze = uv("pip", "freeze", "--python", python, cwd=tmp_path)
    print(f"{name}, {resolution}: {' '.join(freeze.split())}")
    installed = {line.partition(" @ ")[0].partition("==")[0] for line in freeze.splitlines()}
    assert installed & set(NAMES) == {name} | SIBLING_REQUIREMENTS.get(name, set())
    assert ("torch==2.11.0" in freeze.split()) == (resolution == "lowest-direct")
    if name in ("ddp-lite", "shard-optim"):
        assert "numpy" not in installed, "the test is to show that NumPy is not needed"
    module = name.replace("-", "_")
    program = (
        f"import {module}, sys; assert {str(ROOT)!r} not in {module}.__file__;"
        f"[getattr({module}, public) for public in {module}.__all__]"
    )
    # torch says so by itself where NumPy, which it can do without, is not installed.
    numpy = "ignore:Failed to initialize NumPy"
    subprocess.run(
        [python, "-W", "error", "-W", numpy, "-c", program], check=True, cwd=tmp_path, timeout=120
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("resolution", ["highest", "lowest-direct"])
def test_pages_run_with_the_wheel_alone(
    dist: Path, name: str, resolution: str, python: Path, tmp_path: Path
) -> None:
    """The blocks of its README and further pages, and of those that need an extra."""
    install_alone(dist, name, resolution, python, tmp_path)
    package = ROOT / "packages" / name
    pages = [package / "README.md", *sorted(package.glob("docs/*.md"))]
    needed: dict[str, list[Path]] = {}  # pages by the extra that some of their blocks need
    for page in pages:
        run_readme.run(page, python)
        for extra in {b.words["extra"] for b in run_readme.blocks(page) if "extra" in b.words}:
            needed.setdefault(extra, []).append(page)
    for extra, its_pages in sorted(needed.items()):
        wheel = find(dist, name, ".whl")
        install = ["pip", "install", "-q", "--python", python, "--link-mode", "symlink"]
        uv(*install, "--resolution", resolution, "-f", dist, f"{wheel}[{extra}]", cwd=tmp_path)
        for page in its_pages:
            run_readme.run(page, python, extra=extra)


@pytest.mark.nightly
@pytest.mark.release
@pytest.mark.parametrize("name", NAMES)
def test_install_lines(dist: Path, name: str, tmp_path: Path) -> None:
    """The lines of a README that install it do so: from an index, a checkout, and from git."""
    page = ROOT / "packages" / name / "README.md"
    [block] = [block for block in run_readme.blocks(page) if "install" in block.words]
    lines = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    assert len(lines) == 3
    for line in lines:
        requirements = line[line.index("install") + 1 :]
        assert line == [*(["uv"] if "uv" in line else []), "pip", "install", *requirements]
        # What the lines call the index is the folder just built, and the repository is this one.
        resolve = ["pip", "install", "--dry-run", "--target", tmp_path, "-f", dist]
        report = uv(*resolve, *requirements, cwd=ROOT)
        assert re.search(rf"^ \+ {name}( @ |==)", report, re.MULTILINE), (line, report)
