"""Executes notebooks/laptop.ipynb in an empty folder and stores its outputs in it (`make notebook`)."""

import os
import re
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

LAPTOP = Path(__file__).parents[1] / "notebooks" / "laptop.ipynb"


def execute(path: Path, folder: Path) -> NotebookNode:
    """Return the notebook with the outputs of a run in `folder`; of a bar that updates in place, the last state."""
    notebook = nbformat.read(path, as_version=4)
    # Under pytest a kernel would not capture what child processes print.
    variables = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    kernel = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=str(folder / "kernel"))
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, km=kernel, timeout=600, resources=resources, coalesce_streams=True)
    client.record_timing = False
    client.execute(cleanup_kc=True, env={**variables, "TORCHLAKE_PROGRESS": "", "HF_HUB_OFFLINE": "1"})
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def shape(notebook: NotebookNode) -> list[list[tuple[str, str]]]:
    """Return the outputs of each code cell as kinds and texts; numbers, widths and lengths of bars are left out.

    So is the rate, for which a bar has room only where it has few digits.
    """
    return [
        [
            (kind, re.sub(r"( 0 tokens/s|[\s━╸╺-])+", " ", re.sub(r"[\d.,:]+", "0", text)).strip())
            for output in cell.outputs
            for kind, text in sorted((output.get("data") or {output.name: output.text}).items())
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        nbformat.write(execute(LAPTOP, Path(scratch)), LAPTOP)
