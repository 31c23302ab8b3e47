"""`init` guesses pairs of texts by the names of their columns only, and says so in the job file."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import task_cases
from torchlake.config.job import load_job
from torchlake.errors import TableError, UsageError
from torchlake.preparation.first_job import FirstJob, write_first_job
from torchlake.tables.formats.sniffing import recognized
from torchlake.tables.formats.streams import Dialect
from torchlake.tables.table import open_table


def written(folder: Path, table: pa.Table, **options: str) -> tuple[Path, str, str | None]:
    pq.write_table(table, folder / "in.parquet")
    done = write_first_job(str(folder / "in.parquet"), output=folder / "job.yaml", force=True, **options)
    return done.path, done.text, done.text_pair


@pytest.mark.parametrize("names", [("question", "answer"), ("Premise", "Hypothesis"), ("sentence1", "sentence2")])
def test_usual_names_are_a_pair(names: tuple[str, str], tmp_path: Path) -> None:
    table = task_cases.pairs(40).rename_columns({"question": names[0], "answer": names[1]})
    path, *found = written(tmp_path, table)
    assert found == list(names)
    job = load_job(path)
    assert (job.data.text, job.data.text_pair, job.data.label) == (*names, "label")
    assert "# The second text of each pair. Delete this line if the rows are not pairs." in path.read_text()


def test_other_columns_are_no_pair(tmp_path: Path) -> None:
    table = task_cases.pairs(40)
    with pytest.raises(UsageError, match="several columns hold texts"):
        written(tmp_path, table.rename_columns({"answer": "remark"}))
    assert written(tmp_path, table.rename_columns({"question": "text"}))[1:] == ("text", None)


def test_given_columns_are_a_pair(tmp_path: Path) -> None:
    table = task_cases.pairs(40).rename_columns({"question": "left", "answer": "right"})
    assert written(tmp_path, table, text="left", text_pair="right")[1:] == ("left", "right")
    assert written(tmp_path, table, text_pair="left")[1:] == ("right", "left")
    with pytest.raises(UsageError, match="--text-pair id: the column holds int64, not text"):
        written(tmp_path, table, text="left", text_pair="id")
    with pytest.raises(UsageError, match="cannot be both"):
        written(tmp_path, table, text="left", text_pair="left")


def written_csv(
    folder: Path, mark: str, encoding: str, *, extra: bytes = b""
) -> tuple[dict[str, str | None], FirstJob]:
    lines = [mark.join(("id", "text", "label"))]
    lines += [mark.join((str(n), f'"café {n}, très tôt"', "late" if n % 2 else "early")) for n in range(40)]
    (folder / "in.csv").write_bytes("\n".join(lines).encode(encoding) + extra)
    done = write_first_job(str(folder / "in.csv"), output=folder / "job.yaml", force=True)
    csv = load_job(done.path).data.csv
    return {"delimiter": csv.delimiter, "encoding": csv.encoding}, done


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16"])
def test_how_a_csv_file_is_written_is_recognized(mark: str, encoding: str, tmp_path: Path) -> None:
    csv, done = written_csv(tmp_path, mark, encoding)
    assert csv == {"delimiter": None if mark == "," else mark, "encoding": encoding.removesuffix("-sig")}
    assert (done.rows, done.text, done.classes) == (40, "text", {"early": 20, "late": 20})
    assert ("--csv" in done.warnings[0]) == (csv != {"delimiter": None, "encoding": "utf-8"})


def test_an_encoding_is_not_guessed_without_evidence(tmp_path: Path) -> None:
    assert written_csv(tmp_path, ",", "utf-8", extra=b"\n41,\xff\xfe,late")[0]["encoding"] == "utf-8"
    assert written_csv(tmp_path, ";", "latin-1", extra="\n41;“5 €”;late".encode("cp1252"))[0]["encoding"] == "cp1252"
    text = "\n".join(["text,label", *[f"{n} довольно поздно,{'ab'[n % 2]}" for n in range(30)]])
    assert recognized_bytes(tmp_path, text.encode("cp1251")) == {}
    assert recognized_bytes(tmp_path, b"text,label\na;b;c,x\nd;e;f,y") == {}
    assert recognized_bytes(tmp_path, b"text\none\ntwo") == {}
    assert recognized_bytes(tmp_path, b"") == {}
    assert recognized_bytes(tmp_path, b"id;text, long;label\n1;a, b;x\n2;c;y") == {"delimiter": ";"}


def recognized_bytes(folder: Path, content: bytes) -> dict[str, str]:
    (folder / "some.csv").write_bytes(content)
    return recognized(str(folder / "some.csv"), Dialect())


def test_a_header_with_other_marks_and_encodings_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_bytes(b"id;text, long;label\n1;a, b;x\n")
    with pytest.raises(TableError, match=r"--csv 'delimiter=;'"):
        open_table(tmp_path / "in.csv", columns=["label"])
    (tmp_path / "in.csv").write_bytes("id,numéro\n1,2\n".encode("latin-1"))
    with pytest.raises(TableError, match="--csv encoding=latin-1"):
        open_table(tmp_path / "in.csv")


def test_labels_that_look_like_several_are_pointed_out(tmp_path: Path) -> None:
    labels = ["late|damaged", "late", "damaged", "lost"] * 10
    path, *_ = written(tmp_path, pa.table({"text": [f"it is number {n}" for n in range(40)], "label": labels}))
    assert '# label_separator: "|"' in path.read_text().replace("'", '"')
    path, *_ = written(
        tmp_path, pa.table({"text": [f"it is number {n}" for n in range(40)], "label": ["a, b", "c, d"] * 20})
    )
    assert "label_separator" not in path.read_text()
