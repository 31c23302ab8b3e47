"""The doctor names what is there, what is missing, and the remedy."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from torchlake.display import plain
from torchlake.errors import UsageError, pip_install
from torchlake.processes import hardware
from torchlake.reporting import doctor as diagnosing
from torchlake.reporting.doctor import CORE, OPTIONAL, doctor

ROOT = Path(__file__).parents[3]


def test_a_whole_installation() -> None:
    found = doctor()
    assert not found.broken
    assert set(found.facts) == {"versions", "optional", "machine", "devices", "storage", "environment"}
    assert all(found.facts["versions"][name] for name in ("python", *CORE))
    assert set(found.facts["optional"]) == set(OPTIONAL)
    assert 1 <= found.facts["machine"]["cores_usable"] <= found.facts["machine"]["cores"]
    assert 0 < found.facts["machine"]["memory_available"] <= found.facts["machine"]["memory"]
    json.dumps(plain(found), allow_nan=False)


def test_a_containers_limits_are_what_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"cpu.max": "50000 100000", "memory.max": str(2**30), "memory.current": str(2**29), "memory.stat": ""}
    for name, content in limits.items():
        (tmp_path / name).write_text(content + "\n")
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    found = doctor()
    machine = found.facts["machine"]
    assert (machine["cores_usable"], machine["cores_cgroup_limit"]) == (1, 0.5)
    assert (machine["memory_available"], machine["memory_cgroup_limit"]) == (2**29, 2**30)
    assert any("Only 0.5 GiB of memory are free" in problem for problem in found.problems)


def test_a_missing_library_comes_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "_version", lambda name: None if name in ("torch", "ray", "polars") else "99.0")
    found = doctor()
    assert found.broken
    assert f"The core library torch is missing: {pip_install('torch')}" in found.problems
    assert found.facts["optional"]["ray"] == f"missing: {pip_install('torchlake[ray]')}"
    assert found.facts["optional"]["polars"] == f"missing: {pip_install('torchlake[frames]')}"


@pytest.mark.parametrize(
    ("name", "found", "problem"),
    [
        ("torch", "2.9.1+cu128", True),
        ("torch", "2.10.0+cpu", False),
        ("transformers", "5.4.9", True),
        ("transformers", "5.23.0", False),
        ("ray", "2.54.0", True),
        ("ray", "missing: pip install ray", False),
    ],
)
def test_versions_below_a_security_fix_are_named(name: str, found: str, problem: bool) -> None:
    problems = diagnosing._below_floors({name: found})
    assert bool(problems) == problem
    assert all(f" install '{name}>=" in line for line in problems)


def test_a_broken_torch_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libc10.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    found = doctor()
    assert found.broken
    assert any("torch cannot be imported (OSError: libc10.so" in problem for problem in found.problems)


def test_little_disk_and_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosing, "LOW_DISK_BYTES", 2**62)
    monkeypatch.setattr(diagnosing, "LOW_MEMORY_BYTES", 2**62)
    problems = doctor().problems
    assert any("of memory are free" in problem for problem in problems)
    assert sum("Free some space" in problem for problem in problems) == 2


def test_no_java_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = doctor()
    assert "only the Spark engine needs it" in found.facts["environment"]["java"]
    assert not any("Java" in problem for problem in found.problems)


def test_every_extra_is_looked_for() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(filter(None, OPTIONAL.values())) == extras.keys() - {"docs", "test"}
    for library, extra in OPTIONAL.items():
        assert extra is None or any(re.match(rf"{library}\b(?!-)", one) for one in extras[extra]), library


def test_the_hub_cache_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models--a--b", "models--c--d", "datasets--e--f"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert doctor().facts["environment"]["Hub cache"] == f"{tmp_path}: 2 models; HF_HOME moves it"


def test_a_file_with_other_content_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    for _ in range(2):
        assert diagnosing.write_requirements("vllm", str(file)).file == file
    for content in (b"\xff\xfe", b"other\n"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="there is a file with other lines"):
            diagnosing.write_requirements("vllm", str(file))
