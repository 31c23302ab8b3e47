"""Training faults that test_training_faults leaves open: a collective that one rank skips, and damage by seed."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

import training_runs as runs

BOUNDED = ("train.max_restarts=0", "train.collective_timeout=4s")


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> dict[str, Any]:
    """18 steps, a checkpoint every 3."""
    return runs.job(tmp_path_factory.mktemp("job"), tiny_bert)


def rank_1_skips_a_collective() -> None:
    """In its third step rank 1 answers for itself instead of asking the others."""
    from torchlake import distributed

    sum_on_device = distributed.sum_on_device

    def skipping(group: Any, values: Any, doing: str) -> Any:
        if group.rank == 1 and doing == "working on step 3":
            return values
        return sum_on_device(group, values, doing)

    distributed.sum_on_device = skipping


def test_a_rank_that_skips_a_collective_ends_the_run_in_words(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Case 42: no hang, and nothing kept of a step that added up half of the rows.

    gloo itself ends a rank whose message has another size than it waits for; else the collective times out.
    """
    failed = runs.attempt(tmp_path / "run", sections, ranks=2, stub=rank_1_skips_a_collective, overrides=BOUNDED)
    assert failed.exit_code == 70
    assert re.search("rank [01] (was killed|of 2 gave up waiting)", failed.error)
    assert runs.checkpoints(tmp_path / "run") == []


def test_damage_anywhere_in_a_checkpoint_is_noticed(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Case 46: a seeded bit of a random file of the newest checkpoint is flipped; the one before is used."""
    chance = random.Random(3)
    assert runs.attempt(tmp_path / "run", sections, failpoint="rank0.step:8:kill9").exit_code < 0
    newest = tmp_path / "run" / "checkpoints" / "step_00000006"
    path = chance.choice(sorted(newest.iterdir()))
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    assert runs.succeed(tmp_path / "run", sections).steps == 15
    assert newest.with_name("step_00000006.torn").is_dir()
