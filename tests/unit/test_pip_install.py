"""The command that messages give for what is missing: it installs into the Python that runs torchlake."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from torchlake import errors

BIN = Path(sys.executable).parent


def test_pip_alone_is_named_where_it_belongs_to_this_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "pip"
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert errors.pip_install("ray") == f"{sys.executable} -m pip install ray"
    monkeypatch.setenv("PATH", f"{BIN}:{tmp_path}")
    assert errors.pip_install("torchlake[ray]", "onnx>=1") == "pip install 'torchlake[ray]' 'onnx>=1'"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])  # no pip there, as in an environment that uv made
    assert errors.pip_install("ray") == f"uv pip install --python {sys.executable} ray"


def test_a_hint_leaves_later_imports_alone() -> None:
    """setuptools replaces distutils, unless it believes that pip is starting."""
    code = "from torchlake import errors; errors.pip_install('ray'); import distutils, setuptools; print(distutils)"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "setuptools" in done.stdout


def test_an_extra_is_found_without_a_release() -> None:
    """No index is asked for torchlake, because it is installed."""
    command = shlex.split(errors.pip_install("torchlake[lora]"))
    command = [sys.executable, "-m", "pip"] if command[0] == "pip" else command[: command.index("install")]
    done = subprocess.run(
        [*command, "install", "--dry-run", "--no-index", "torchlake[lora]"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "peft" in done.stdout
