"""The laptop notebook runs as it is committed, and its stored outputs are those of a run, fit to be read on GitHub."""

import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from laptop_notebook import LAPTOP, execute, shape


@pytest.fixture(scope="module")
def stored() -> NotebookNode:
    return nbformat.read(LAPTOP, as_version=4)


def test_what_is_stored_is_small_and_names_no_machine(stored: NotebookNode) -> None:
    nbformat.validate(stored)
    assert set(stored.metadata) == {"kernelspec", "language_info"}
    assert [cell.id for cell in stored.cells] == [f"cell-{number:02}" for number in range(1, len(stored.cells) + 1)]
    assert all(set(cell.metadata) <= {"tags"} for cell in stored.cells)
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = json.dumps([cell.outputs for cell in code])
    assert len(outputs) < 40_000
    assert not re.search(r"/home/|/root/|/tmp/|/usr/|site-packages|Warning|Traceback|\\r|\\u001b", outputs)


@pytest.mark.slow  # it trains
@pytest.mark.timeout(900)
def test_the_stored_outputs_are_those_of_a_run(stored: NotebookNode, tmp_path: Path) -> None:
    made = execute(LAPTOP, tmp_path)
    assert shape(made) == shape(stored), "run `make notebook`"
    assert sum(map(len, shape(stored))) > 10
