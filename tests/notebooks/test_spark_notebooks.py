"""The Spark notebooks run from the first to the last as they are committed, and what they show is true."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pyarrow.parquet as pq
import pytest
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient

from torchlake.tables.record import committed_files

NOTEBOOKS = Path(__file__).parents[2] / "notebooks" / "spark"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
CHANCE = 0.5
Run = Callable[[str], str]

pytestmark = pytest.mark.timeout(900)  # a test may have to run the notebooks before its own first


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all notebooks run in."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def lake(folder: Path) -> Path:
    """What the notebooks keep there."""
    return folder / "torchlake_demo"


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Run a notebook in the folder, once; what it printed."""
    printed: dict[str, str] = {}

    def run_once(name: str) -> str:
        if name not in printed:
            notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
            kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
            client = NotebookClient(notebook, km=kernel, timeout=600, resources={"metadata": {"path": str(folder)}})
            client.execute(cleanup_kc=True)
            printed[name] = "".join(
                output.text
                for cell in notebook.cells
                for output in cell.get("outputs", ())
                if output.output_type == "stream" and output.name == "stdout"
            )
        return printed[name]

    return run_once


@pytest.fixture(scope="module")
def tables(run: Run, lake: Path) -> Path:
    """The tables that the first notebook makes."""
    run("01_data_preparation")
    return lake / "tables"


@pytest.fixture(scope="module")
def model(run: Run, tables: Path, lake: Path) -> Path:
    """The model that the second notebook trains."""
    run("02_ddp_training")
    return lake / "runs" / "ddp" / "model"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_without_outputs_and_begins_with_its_parameters(name: str) -> None:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    cells = notebook["cells"]
    assert [cell["id"] for cell in cells] == [f"cell-{number:02}" for number in range(1, len(cells) + 1)]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert code[0]["metadata"] == {"tags": ["parameters"]}
    assert "".join(code[0]["source"]).startswith('FOLDER = "torchlake_demo"')


@pytest.mark.slow  # a minute each on two busy cores: a Spark session, PyTorch in several processes
def test_data_preparation_writes_three_tables_without_common_rows(tables: Path, lake: Path) -> None:
    parts = {name: pq.read_table(tables / name) for name in ("train", "validation", "test")}
    assert sum(len(part) for part in parts.values()) == 3600
    assert 200 < len(parts["validation"]) < 400
    keys = [key for part in parts.values() for key in part["id"].to_pylist()]
    assert len(set(keys)) == 3600
    assert (lake / "encoder" / "model.safetensors").exists()


@pytest.mark.slow
def test_ddp_training_learns_and_is_finished_once(run: Run, model: Path, lake: Path) -> None:
    printed = run("02_ddp_training")
    assert "complete: True, 0 steps added" in printed
    found = re.search(r"accuracy (\S+) \((\S+) to (\S+)\), 600 rows", printed)
    assert found is not None
    assert float(found[2]) > CHANCE
    assert (model / "model.safetensors").exists()
    assert {path.name for path in (lake / "runs" / "ddp" / "logs").iterdir()} == {"rank_0.jsonl", "rank_1.jsonl"}


@pytest.mark.slow
def test_fsdp_training_is_the_same_training(run: Run, tables: Path, lake: Path) -> None:
    printed = run("03_fsdp_training")
    found = re.search(r"largest difference of (\d+) steps: (\S+)", printed)
    assert found is not None
    assert int(found[1]) > 50
    assert float(found[2]) < 1e-3
    assert "KiB  step_" in printed
    shards = {path.name for path in (lake / "runs" / "compared_fsdp" / "checkpoints").glob("step_*/*.safetensors")}
    assert {"model-00000-of-00002.safetensors", "optimizer-00001-of-00002.safetensors"} <= shards


@pytest.mark.slow
def test_inference_scores_every_row_once_in_every_way(run: Run, model: Path, lake: Path) -> None:
    printed = run("04_inference")
    assert "600 rows in 3 batches" in printed
    assert "600 rows in, 600 out, 0 failed" in printed
    assert "600 rows stand there; 0 rows/s were scored this time" in printed
    assert "sound 600" in printed
    scored, streamed = pq.read_table(committed_files(lake / "scored")), pq.read_table(lake / "streamed")
    labels = dict(zip(streamed["id"].to_pylist(), streamed["predicted_label"].to_pylist(), strict=True))
    assert dict(zip(scored["id"].to_pylist(), scored["predicted_label"].to_pylist(), strict=True)) == labels
    right = [one == other for one, other in zip(scored["predicted_label"], scored["label"], strict=True)]
    assert sum(right) / len(right) > CHANCE


@pytest.mark.slow
def test_optimised_inference_prints_its_measurements_and_uses_its_choice(run: Run, model: Path, lake: Path) -> None:
    printed = run("05_optimised_inference")
    choice = json.loads((model / "runtime.json").read_text())["runtime"]
    assert re.search(rf"^\s*{choice}\s+chosen\s", printed, re.MULTILINE)
    assert re.search(r"^\s*eager\s", printed, re.MULTILINE)
    assert f"600 rows by {choice} " in printed
    assert len(pq.read_table(committed_files(lake / "scored_optimized"))) == 600
