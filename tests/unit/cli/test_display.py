"""How results become lines of text."""

import pytest

from torchlake.display import wrapped

LINE = "warning: 17 of 17 classes are rare (' delivery' 3, \"it's late\" 2, 'a very long name of a class' 1); it's so"


@pytest.mark.parametrize("columns", [30, 40, 60, 80])
def test_names_in_quotes_stay_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = wrapped([LINE, "", "  "])
    assert "\n".join(lines).count("' delivery'") == 1
    if columns > 35:
        for name in ('"it\'s late"', "'a very long name of a class'"):
            assert any(name in line for line in lines), lines
    assert max(map(len, lines)) < columns
    assert " ".join(" ".join(lines).split()) == " ".join(LINE.split()), "nothing is lost"
    assert lines[-2:] == ["", ""]
