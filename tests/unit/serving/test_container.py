"""The image's entry point, with torchlake's wheel in an environment of its own, as its Dockerfile installs it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from serving_runs import free_port, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples" / "serve" / "entrypoint.sh"
MODEL = Path("/opt/ml/model")
MOUNT = """
mount -t overlay overlay -o lowerdir=/opt,upperdir={0}/upper,workdir={0}/work /opt
mkdir -p {1}
mount --bind -o ro {2} {1}
exec {3} serve "$@"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and with the libraries that are installed here."""
    folder = tmp_path_factory.mktemp("image")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONWARNINGS": "default"})
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    (wheel,), (packages,) = folder.glob("*.whl"), folder.glob("env/lib/*/site-packages")
    install = [str(folder / "env" / "bin" / "pip"), "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    # Path files of a folder that a path file names are not read, so an editable torchlake there is not seen.
    (packages / "libraries.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    show = "import torchlake; print(torchlake.__file__)"
    found = subprocess.run([folder / "env/bin/python", "-c", show], capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(packages))
    return folder / "env" / "bin"


def mounts(folder: Path) -> bool:
    """Whether a process may have a view of its own of the files."""
    for name in ("upper", "work"):
        (folder / name).mkdir(exist_ok=True)
    command = MOUNT.format(folder, MODEL, folder, "true")
    return subprocess.run(["unshare", "-rm", "sh", "-ec", command], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("place", [MODEL, None], ids=str)
def test_the_entry_point_of_the_image(installed: Path, tiny_model: Path, tmp_path: Path, place: Path | None) -> None:
    """The model is mounted read-only where SageMaker has it, or lies in the folder that MODEL names."""
    port = free_port()
    environment = {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path), "AIP_HTTP_PORT": str(port)}
    environment["AIP_PREDICT_ROUTE"] = "/score"
    command = [str(SCRIPT), "serve"]
    if place is None:
        environment["MODEL"] = str(tiny_model)
    elif mounts(tmp_path):
        mount = MOUNT.format(tmp_path, place, shlex.quote(str(tiny_model)), shlex.quote(str(SCRIPT)))
        command = ["unshare", "-rm", "sh", "-ec", mount, "sh"]
    else:
        pytest.skip("this user may not mount anything")
    process = subprocess.Popen([*command, "--max-rows", "3"], env=environment, cwd=tmp_path)
    try:

        def ready() -> bool:
            assert process.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/ping", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        until(ready, within=200)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
            answer = client.post("/score", json={"instances": ["good film"]})
            assert answer.json()["predictions"][0]["error"] is None
            assert client.post("/score", json={"instances": ["a"] * 4}).status_code == 413
            assert client.get("/info").json()["model_id"] == ("ml" if place else tiny_model.name)
    finally:
        process.terminate()
        assert process.wait(60) == 0
