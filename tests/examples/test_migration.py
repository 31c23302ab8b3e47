"""The examples of a migration: the script before and the script after have the same losses on two processes.

Horovod and Petastorm need other versions of their dependencies than torchlake does. Their scripts run with the Python
that HOROVOD_PYTHON or PETASTORM_PYTHON names; `make migration` makes the second one. Without them the scripts after are
compared with a computation in this process.
"""

import json
import os
import re
import runpy
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DistributedSampler

import tiny
from torchlake.launching.launch import launch_script
from torchlake.processes.interrupts import restored_interrupt

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "migration"
FROM = ["horovod", "hugging_face_trainer", "petastorm", "ray_train", "torch_distributor"]
HOROVOD = """
    Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min Product ProcessSet Sum SyncBatchNorm
    add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
    alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
    broadcast_optimizer_state broadcast_parameters ccl_built cross_rank cross_size cuda_built ddl_built elastic
    global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async grouped_allreduce
    grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
    grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled
    mpi_threads_supported nccl_built poll rank reducescatter reducescatter_async remove_process_set rocm_built shutdown
    size sparse_allreduce_async start_timeline stop_timeline synchronize
"""
"The public names of horovod.torch 0.28.1, the last release."
TOLERANCE = 2e-6
"Of a loss around 1 that is printed with six digits: the order of sums is all that differs."

pytestmark = pytest.mark.timeout(600)  # every process imports several large libraries first


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """203 points around a line, in 11 row groups: neither divides by two."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=203)
    path = tmp_path_factory.mktemp("points") / "points.parquet"
    table = pa.table({"id": np.arange(203), "x": x, "y": 3 * x + 1 + generator.normal(size=203)})
    pq.write_table(table, path, row_group_size=20)
    return path


def losses(printed: str) -> list[float]:
    """The losses of lines like `epoch 1, 203 rows, loss 0.123456` and `step 1, loss 0.123456`, which are in order."""
    found = re.findall(r"(?:epoch|step) (\d+),.*? loss ([\d.]+)$", printed, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [float(loss) for _, loss in found]


def ids_read(printed: str, epoch: int) -> list[list[int]]:
    """The ids that each rank read in an epoch, in its order."""
    (found,) = re.findall(rf"^epoch {epoch}, ids (.+)$", printed, re.MULTILINE)
    parts: list[list[int]] = json.loads(found)
    return parts


def run_torchrun(python: str, script: Path, *words: object) -> str:
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return _output([str(word) for word in command], environment)


def run_here(script: Path, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    """The script as `python SCRIPT WORDS` runs it, in this process, which has the session's clusters."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, words)])
    with restored_interrupt():  # Ray Train replaces the handler
        runpy.run_path(str(script), run_name="__main__")


def _output(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", FROM)
def test_every_library_has_a_page_and_two_scripts(name: str) -> None:
    page = (ROOT / "docs" / "migration" / f"{name}.md").read_text(encoding="utf-8")
    for script in ("before", "after"):
        assert f"examples/migration/{name}/{script}.py" in page
        assert (EXAMPLES / name / f"{script}.py").exists()
    assert sorted(path.name for path in EXAMPLES.iterdir()) == FROM


@pytest.mark.parametrize("name", FROM)
def test_the_changes_on_a_page_are_those_of_the_scripts(name: str) -> None:
    page = (ROOT / "docs" / "migration" / f"{name}.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    for sign, script in (("-", "before"), ("+", "after")):
        lines = [line[1:] for line in diff.splitlines() if line.startswith(sign)]
        code = [line.partition("  #")[0] for line in (EXAMPLES / name / f"{script}.py").read_text().splitlines()]
        assert lines
        assert [line for line in lines if line not in code] == []


def test_the_page_names_every_call_of_horovod() -> None:
    page = (ROOT / "docs" / "migration" / "horovod.md").read_text(encoding="utf-8")
    assert [name for name in HOROVOD.split() if not re.search(rf"\b{name}\b", page)] == []


@pytest.fixture
def horovod_losses() -> list[float]:
    """The losses of the script after Horovod, from the mean of both ranks' gradients in one process."""
    torch.manual_seed(0)
    images, digits = load_digits(return_X_y=True)
    pixels = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    targets = torch.tensor(digits)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    samplers = [DistributedSampler(range(len(targets)), num_replicas=2, rank=rank) for rank in range(2)]
    means = []
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        shares = [torch.tensor(list(sampler)).split(64) for sampler in samplers]
        total = 0.0
        for rows in zip(*shares, strict=True):
            optimizer.zero_grad()
            for share in rows:
                loss = nn.functional.cross_entropy(model(pixels[share]), targets[share]) / 2
                loss.backward()
                total += loss.item()
            optimizer.step()
        means.append(total / len(shares[0]))
    return means


@pytest.mark.slow  # as above
def test_after_horovod(horovod_losses: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    launch_script(str(EXAMPLES / "horovod" / "after.py"), processes=2)
    printed = capfd.readouterr().out
    assert printed.count("2 ranks") == 3
    assert losses(printed) == pytest.approx(horovod_losses, abs=TOLERANCE)
    assert horovod_losses[-1] < 0.5 * horovod_losses[0]


@pytest.mark.skipif("HOROVOD_PYTHON" not in os.environ, reason="HOROVOD_PYTHON names no Python with Horovod")
def test_before_horovod(horovod_losses: list[float]) -> None:
    horovodrun = Path(os.environ["HOROVOD_PYTHON"]).parent / "horovodrun"
    script = EXAMPLES / "horovod" / "before.py"
    environment = {**os.environ, "PYTHONPATH": "", "PATH": f"{horovodrun.parent}:{os.environ['PATH']}"}
    printed = _output([str(horovodrun), "-np", "2", "--gloo", "python", str(script)], environment)
    lines = "\n".join(line.partition("<stdout>:")[2] for line in printed.splitlines())
    assert losses(lines) == pytest.approx(horovod_losses, abs=TOLERANCE)


def expected_losses(points: Path) -> list[float]:
    """The losses of three steps of gradient descent on all points at once."""
    table = pq.read_table(points)
    x, y = np.stack([table["x"], np.ones(len(table))]), table["y"].to_numpy()
    weights, means = np.zeros(2), []
    for _ in range(3):
        errors = weights @ x - y
        means.append(float(np.mean(errors**2)))
        weights -= 0.1 * 2 * x @ errors / len(y)
    return means


@pytest.mark.slow
def test_after_petastorm(points: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = str(EXAMPLES / "petastorm" / "after.py")
    launch_script(script, [str(points), "--ids"], processes=2)
    printed = capfd.readouterr().out
    assert losses(printed) == pytest.approx(expected_losses(points), abs=TOLERANCE)
    epochs = [ids_read(printed, epoch) for epoch in (1, 2, 3)]
    for parts in epochs:
        assert [len(part) for part in parts] == [101, 102]
        assert sorted(chain(*parts)) == list(range(203))
    assert epochs[0][0] != epochs[1][0] != epochs[2][0]

    launch_script(script, [str(points), "--ids", "--epoch", "1", "--skip", "47"], processes=2)
    resumed = capfd.readouterr().out
    assert ids_read(resumed, 2) == [part[47:] for part in epochs[1]]
    assert ids_read(resumed, 3) == epochs[2]


@pytest.mark.skipif("PETASTORM_PYTHON" not in os.environ, reason="PETASTORM_PYTHON names no Python with Petastorm")
def test_before_petastorm(points: Path) -> None:
    printed = run_torchrun(os.environ["PETASTORM_PYTHON"], EXAMPLES / "petastorm" / "before.py", points, "--ids")
    assert losses(printed) == pytest.approx(expected_losses(points), abs=TOLERANCE)
    for epoch in (1, 2, 3):
        assert sorted(chain(*ids_read(printed, epoch))) == list(range(203))


@pytest.mark.slow  # TorchDistributor alone takes 10 s and more
@pytest.mark.usefixtures("spark")
def test_torch_distributor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _assert_equal_losses("torch_distributor", monkeypatch, capsys)


@pytest.mark.slow  # TorchTrainer alone takes 20 s
@pytest.mark.usefixtures("ray")
def test_ray_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _assert_equal_losses("ray_train", monkeypatch, capsys)


def _assert_equal_losses(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for script in ("before", "after"):
        run_here(EXAMPLES / name / f"{script}.py", monkeypatch)
        found.append(losses(capsys.readouterr().out))
    before, after = found
    assert len(before) == 3
    assert after == pytest.approx(before, abs=TOLERANCE)
    assert after[-1] < 0.5 * after[0]


@pytest.mark.slow  # four processes that import transformers
def test_hugging_face_trainer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step has all rows, because the two choose them in different orders."""
    table = tmp_path / "reviews.parquet"
    pq.write_table(tiny.reviews(32), table)
    words = ["--epochs", 8, "--batch-size", 32, "--learning-rate", "5e-3"]
    folder = EXAMPLES / "hugging_face_trainer"
    before = losses(run_torchrun(sys.executable, folder / "before.py", tiny_model, table, tmp_path / "before", *words))
    run_here(folder / "after.py", monkeypatch, tiny_model, table, tmp_path / "after", *words)
    after = losses(capsys.readouterr().out)
    assert len(before) == 8
    assert after == pytest.approx(before, abs=1e-4)
    assert after[-1] < 0.5 * after[0]
