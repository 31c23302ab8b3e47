"""Prove the project on a machine with a GPU that has never seen it: tests, rates and comparisons, in one JSON file.

Uses the Python that runs it and what is installed there: it installs nothing and names what is missing. Every part runs
in a process of its own with a time limit, so a part that fails, hangs or crashes the card costs that part only.

    python tools/gpu.py [--minutes 9] [--only NAME ...] [--out bench/results/gpu.json]

Without a GPU everything runs on the CPU with small shapes, which shows that the parts work, and nothing is written
unless --out is given.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MIN_PART_S = 20.0
"A part is not started with less time than this."
TAIL = 4000


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command whose standard output ends with JSON (`measures`), or pytest."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    measures: bool = False


def parts(*, gpu: bool) -> list[Part]:
    """Return the parts, the cheapest evidence first."""
    tests = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    together = ("-p", "xdist", "-n", str(min(6, (os.cpu_count() or 1) // 2))) if find_spec("xdist") else ()
    quick = ("--tiny", "1") if not gpu else ()
    rates = "import json, _gpu; print(json.dumps(_gpu.matrix_rates(%s)))" % ("_gpu.SIZE" if gpu else "256")
    return [
        Part(name="matrix rates", command=("-c", rates), limit_s=60, measures=True),
        *(
            Part(
                name=f"tests/gpu/{name}",
                command=(
                    "-m",
                    "pytest",
                    "-p",
                    "pytest_timeout",
                    "--timeout=100",
                    "-q",
                    "--tb=short",
                    "--show-capture=no",
                    *together,
                    f"tests/gpu/{name}",
                ),
                limit_s=150,
            )
            for name in tests
        ),
        Part(
            name="scoring_gpu",
            command=("bench/scoring_gpu.py", "--json", "--rounds", "2", "--rows", "4096" if gpu else "200", *quick),
            limit_s=180,
            measures=True,
        ),
        Part(
            name="writing_gpu",
            command=("bench/writing_gpu.py", "--json", "--rounds", "1", "--rows", "512" if gpu else "32", *quick),
            limit_s=150,
            measures=True,
        ),
        Part(
            name="training_gpu",
            command=("bench/training_gpu.py", "--json", "--steps", "14" if gpu else "6", *quick),
            limit_s=240,
            measures=True,
        ),
    ]


def missing() -> list[str]:
    """Return the requirements of the project and of its tests that are not installed, or too old."""
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    tests = ("pytest>=8", "pytest-timeout>=2.3", "hypothesis>=6.110", "pillow>=11.3", "packaging")
    for line in [*project["dependencies"], *tests]:
        requirement = Requirement(line)
        try:
            if not requirement.specifier.contains(version(requirement.name), prereleases=True):
                found.append(f"{line} ({version(requirement.name)} is installed)")
        except PackageNotFoundError:
            found.append(line)
    return found


def write_metadata(folder: str) -> None:
    """Write what an installation would say of the project's version: jobs record it, and it is not installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = Path(folder, f"torchlake-{project['version']}.dist-info")
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: torchlake\nVersion: {project['version']}\n")


def run(part: Part, left_s: float, metadata: str) -> dict[str, Any]:
    """Run a part; returns its seconds, its outcome, and its numbers or the end of its output."""
    if left_s < MIN_PART_S:
        return {"outcome": "not started: no time left"}
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "bench"), metadata, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TORCHLAKE_PROGRESS": "0"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those of other projects warn, and warnings are errors
    limit, began = min(part.limit_s, left_s), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *part.command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit)
        outcome = "passed" if process.returncode == 0 else f"failed with exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {limit:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    found: dict[str, Any] = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    numbers = _last_json(output) if part.measures else None
    if numbers is not None:
        found["result"] = numbers
    if not part.measures:
        found["tests"] = _counts(output)
    if outcome != "passed":
        found["output"] = (output + errors)[-TAIL:]
    return found


def _last_json(output: str) -> Any:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                return None
    return None


def _counts(output: str) -> dict[str, int]:
    """Return pytest's counts: {"passed": 12, "failed": 1}."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", lines[-1])} if lines else {}


def main() -> int:
    """Run every part within the time, print a line for each, and write the JSON file."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--minutes", type=float, default=9.0, help="for everything (default 9)")
    options.add_argument(
        "--only", nargs="+", default=[""], help="parts whose names begin so; the file keeps the others"
    )
    options.add_argument("--out", type=Path, help="default bench/results/gpu.json if there is a GPU")
    given = options.parse_args()
    lacking = missing()
    if lacking:
        print("Not installed here:\n  " + "\n  ".join(lacking), file=sys.stderr)
        print(f"Install them with: {sys.executable} -m pip install {' '.join(map(repr, lacking))}", file=sys.stderr)
        return 2
    import torch

    gpu, until = torch.cuda.is_available(), time.monotonic() + given.minutes * 60
    out = given.out or (ROOT / "bench" / "results" / "gpu.json" if gpu else None)
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name() if gpu else None,
        "gpus": torch.cuda.device_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", "pyarrow")},
        "cuda": torch.version.cuda,
    }
    result["parts"] = _earlier(out, result)
    chosen = [part for part in parts(gpu=gpu) if part.name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory() as metadata:
        write_metadata(metadata)
        for part in chosen:
            result["parts"][part.name] = found = run(part, until - time.monotonic(), metadata)
            print(
                f"{part.name}: {found['outcome']} {found.get('tests', '')} {found.get('seconds', 0):.0f} s", flush=True
            )
            if out is not None:  # after each part: what is measured stays if the machine is taken away
                out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    failed = [part.name for part in chosen if result["parts"][part.name]["outcome"] != "passed"]
    print(f"{len(chosen) - len(failed)} of {len(chosen)} parts passed" + (f"; see {out}" if out else ""))
    return 1 if failed else 0


def _earlier(out: Path | None, machine: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of the file that is there, if they ran on the same card with the same libraries."""
    if out is None or not out.exists():
        return {}
    found = json.loads(out.read_text(encoding="utf-8"))
    return dict(found["parts"]) if {**found, "parts": None} == {**machine, "parts": None} else {}


if __name__ == "__main__":
    sys.exit(main())
