"""Run the tests of Spark DataFrames with versions of pyspark, each in an environment of its own.

    python tools/engines.py 3.5 4.0

An environment has pyspark, and after it the packages of the Python that runs this script. It is made once.
"""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/unit/engines/test_spark_frames.py",)


def main(versions: list[str]) -> int:
    """Run the tests with each version, and return the exit status of the first that fails."""
    for version in versions:
        print(f"pyspark {version}", flush=True)
        # Older versions warn about libraries that are newer than they are.
        command = [str(environment(version)), "-m", "pytest", "-m", "slow or not slow", "-o", "filterwarnings=ignore"]
        status = subprocess.run([*command, *TESTS], cwd=ROOT, check=False).returncode
        if status:
            return status
    return 0


def environment(version: str) -> Path:
    """Return the Python of the environment with this version of pyspark."""
    folder = ROOT / ".bench" / "envs" / f"pyspark-{version}"
    python = folder / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    link = Path(paths["purelib"], "torchlake-packages.pth")
    if not link.exists():  # it is written last
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", f"pyspark=={version}.*"], check=True)
        link.write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
