"""The wheel and the source archive: what they contain, and that PyPI accepts and renders them."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the repository's list of files"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source archive of the files that git tracks."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        copy = tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    # The second is built from the first, as PyPI's users do; hatchling is installed, so nothing is downloaded.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONWARNINGS": "default"})
    (wheel,), (archive,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, archive


def test_pypi_accepts_them(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_wheel_has_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    sources = ROOT / "src"
    expected = {str(path.relative_to(sources)) for path in sources.rglob("*.py")}
    expected |= {"torchlake/py.typed", "torchlake/cli/demo.yaml", "torchlake/reporting/page.html"}
    expected.add("torchlake/processes/cpus.json")
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
        assert b"torchlake = torchlake.cli.main:main" in wheel.read(_in_dist_info(names, "entry_points.txt"))
    assert {name for name in names if ".dist-info/" not in name} >= expected
    assert all(name.startswith("torchlake/") for name in names if ".dist-info/" not in name)
    assert _in_dist_info(names, "licenses/LICENSE")
    assert [name for name in names if "test" in name] == ["torchlake/models/structured/shortest.py"]


def test_the_source_archive_has_what_a_build_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/torchlake/py.typed"} <= names
    assert not [name for name in names if name.startswith((".venv", ".bench", "runs/", "demo/"))]


def test_the_readme_is_rendered_with_links_that_lead_somewhere(built: tuple[Path, Path]) -> None:
    from readme_renderer import markdown

    with zipfile.ZipFile(built[0]) as wheel:
        metadata = BytesParser().parsebytes(wheel.read(_in_dist_info(set(wheel.namelist()), "METADATA")))
    assert metadata["Description-Content-Type"] == "text/markdown"
    html = markdown.render(metadata.get_payload())
    assert html is not None
    links = re.findall(r'(?:href|src)="([^"]+)"', html)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def _in_dist_info(names: set[str], file: str) -> str:
    (name,) = (name for name in names if name.endswith(f".dist-info/{file}"))
    return name
