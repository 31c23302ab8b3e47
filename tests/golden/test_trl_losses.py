"""Jobs reach the losses of TRL on the same rows: step 1 within 1e-5, the first 20 steps within 1e-3.

`tools/golden_trl.py` writes the files, with the rows, in an environment of TRL's own. Here rows are packed, there they
are not.
"""

from pathlib import Path

import pytest

import training_runs as runs
import trl_cases
from sweeps import sweep

FIRST, LATER = 1e-5, 1e-3
CASES = [(case, model, "marked") for case in trl_cases.SETTINGS for model in trl_cases.MODELS]
CASES += [("sft_messages", model, "unmarked") for model in trl_cases.MODELS]


@pytest.mark.parametrize(("case", "model", "template"), sweep(CASES, quick={CASES[0]}))
def test_a_job_reaches_the_losses_of_trl(tmp_path: Path, case: str, model: str, template: str) -> None:
    rows, settings, columns = trl_cases.read(case)
    base = trl_cases.build_model(tmp_path / "base", model, template)
    runs.succeed(tmp_path / "run", trl_cases.sections(tmp_path, base, settings, rows, trl_cases.STEPS))
    found, wanted = runs.losses(tmp_path / "run"), list(columns[model].values())
    assert found[0] == pytest.approx(wanted[0], abs=FIRST)
    assert found == pytest.approx(wanted, abs=LATER)


@pytest.mark.slow
def test_the_first_loss_of_each_family_is_that_of_trl_unpacked(tmp_path: Path) -> None:
    rows, settings, columns = trl_cases.read("sft_families")
    for family in (name for name in trl_cases.FAMILIES if name != "mamba"):  # its scan has no 1e-5 in fp32
        base = trl_cases.build_model(tmp_path / family / "base", family)
        runs.succeed(tmp_path / family / "run", trl_cases.sections(tmp_path, base, settings, rows, 1))
        [found] = runs.losses(tmp_path / family / "run")
        assert found == pytest.approx(columns["unpacked"][family], abs=FIRST), family
