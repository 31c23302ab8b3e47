"""Strikes: who was running when the process died, and what follows from it."""

from pathlib import Path

from torchlake.strikes import Strikes


def die(strikes: Strikes) -> None:
    """Leave the file as a killed process would."""
    import os

    os.close(strikes._file)


def test_a_first_death_makes_the_running_rows_suspects(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([1, 2, 3])
    strikes.running([7, 8])
    die(strikes)
    again = Strikes(tmp_path / "0.json")
    assert (again.suspects, again.quarantined) == ([7, 8], {})


def test_a_second_death_alone_quarantines_the_row(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([7, 8])
    die(strikes)
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([7])
    strikes.running([8])
    die(strikes)
    strikes = Strikes(tmp_path / "0.json")
    assert strikes.suspects == [7]
    assert strikes.quarantined == {8: "killed_process: twice"}


def test_one_death_never_quarantines_a_row_that_happened_to_be_alone(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([5])
    die(strikes)
    again = Strikes(tmp_path / "0.json")
    assert (again.suspects, again.quarantined) == ([5], {})


def test_a_death_between_batches_blames_nobody(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([5])
    strikes.running([])
    die(strikes)
    assert Strikes(tmp_path / "0.json").suspects == []


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([4])
    die(strikes)
    with open(tmp_path / "0.json", "a") as file:
        file.write("[5, 6")
    assert Strikes(tmp_path / "0.json").suspects == [4]


def test_a_stack_left_by_the_watchdog_is_a_timeout(tmp_path: Path) -> None:
    for _ in range(2):
        strikes = Strikes(tmp_path / "0.json")
        strikes.running([4])
        strikes.trace.write_text("Timeout (0:00:02)!")
        die(strikes)
    assert Strikes(tmp_path / "0.json").quarantined == {4: "timeout: gave no answer, twice"}


def test_a_finished_chunk_leaves_nothing(tmp_path: Path) -> None:
    strikes = Strikes(tmp_path / "0.json")
    strikes.running([4])
    strikes.close()
    assert list(tmp_path.iterdir()) == []
