"""The files for contributors and for GitHub: they parse, and what they call exists."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import torchlake

ROOT = Path(__file__).parents[2]
YAML = [*sorted(ROOT.glob(".github/**/*.yml")), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def make_targets(text: str) -> set[str]:
    """The targets of calls of make in a shell script or a document."""
    calls = re.findall(r"(?:^|[`\s])make((?: +[a-z][\w-]*)+)", re.sub(r"#.*", "", text), re.MULTILINE)
    return {target for call in calls for target in call.split()}


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in parsed(workflow)["jobs"].values() for step in job["steps"]]


def test_the_files_parse() -> None:
    assert [str(path) for path in YAML if not isinstance(parsed(path), dict)] == []


def test_make_targets_exist() -> None:
    template = (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")
    block = "\n".join(re.findall(r"```bash\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.S))
    called = make_targets((ROOT / ".ci" / "run").read_text()) | make_targets(template) | make_targets(block)
    assert {"check", "test", "faults"} <= called
    assert called <= set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))


def test_continuous_integration_runs_what_a_person_runs() -> None:
    commands = [step["run"] for step in steps(ROOT / ".github" / "workflows" / "ci.yml") if "run" in step]
    assert commands == [".ci/run", "make engines PYSPARK_VERSIONS=${{ matrix.pyspark }}"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_actions_are_pinned_by_commit() -> None:
    """The version is in a comment behind it."""
    found = []
    for workflow in WORKFLOWS:
        text = workflow.read_text(encoding="utf-8")
        used = [step["uses"] for step in steps(workflow) if "uses" in step]
        found += [f"{workflow.name}: uses no action"] if not used else []
        for action in used:
            line = re.search(rf"uses: {re.escape(action)} # v\d+\.\d+\.\d+$", text, re.MULTILINE)
            if line is None or not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action):
                found.append(f"{workflow.name}: {action}")
    assert found == []


def test_only_the_job_that_publishes_may_have_a_token() -> None:
    for workflow in WORKFLOWS:
        assert parsed(workflow)["permissions"] == {"contents": "read"}
    jobs = parsed(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert "permissions" not in jobs["build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["environment"]["name"] == "pypi"


def test_hooks_are_the_checks_of_make() -> None:
    ruff, local = parsed(ROOT / ".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{PINS['ruff']}"
    (paths,) = set(re.findall(r"ruff (?:format --check|check) ([\w ]+)$", MAKEFILE, re.MULTILINE))
    assert {hook["files"] for hook in ruff["hooks"]} == {f"^({'|'.join(paths.split())})/"}
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}
    (mypy,) = local["hooks"]
    assert mypy["entry"].replace(".venv/bin", "$(BIN)") in MAKEFILE


def test_the_citation_is_of_this_version() -> None:
    citation = parsed(ROOT / "CITATION.cff")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == project["version"] == torchlake.__version__
    assert citation["abstract"] == project["description"]
    assert (citation["license"], citation["keywords"]) == (project["license"], project["keywords"])


def test_the_image_is_built_from_files_that_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for name in line.split()]
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    assert text.index("\nUSER torchlake\n") < text.index("\nENTRYPOINT ")


@pytest.mark.slow  # it downloads the libraries and trains
@pytest.mark.timeout(3000)
def test_the_image_runs_the_demo() -> None:
    docker = shutil.which("docker") or shutil.which("podman")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker or Podman that runs")
    subprocess.run([docker, "build", "--quiet", "--tag", "torchlake-test", str(ROOT)], check=True)
    command = [docker, "run", "--rm", "--shm-size", "1g", "torchlake-test"]
    user = subprocess.run(
        [*command[:-1], "--entrypoint", "id", "torchlake-test", "-un"], capture_output=True, text=True
    )
    assert user.stdout.strip() == "torchlake"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "complete and unchanged" in done.stdout
