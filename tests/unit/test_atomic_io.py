"""Files that are whole or absent, whoever else writes them at the same time."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import torchlake
from torchlake import atomic_io
from torchlake.config.job import load_job
from torchlake.errors import StorageError
from torchlake.models import load
from torchlake.models.spec import load_spec
from torchlake.runs import folder
from torchlake.storage import lease

WRITERS = 8


def together(work: Callable[[int], None]) -> None:
    """`work` of 0 to 7 at the same time, in one process: writers of one process id, as in two containers."""
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(work, range(WRITERS)))


def test_writers_of_one_process_id_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    contents = [bytes([65 + writer]) * (1 << 20) for writer in range(WRITERS)]

    def write(writer: int) -> None:
        for _ in range(20):
            atomic_io.write_bytes(path, contents[writer], site="test")
            assert path.read_bytes() in contents

    together(write)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_temporary_names_are_hidden_and_never_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model"
    names = {atomic_io.temporary_path(path) for _ in range(1000)}
    assert len(names) == 1000
    for name in names:
        assert re.fullmatch(r"\.model\.[0-9a-f]{16}\.tmp", name.name)
        assert name.parent == tmp_path


def test_no_temporary_name_is_made_of_a_process_id() -> None:
    """Every file of the source uses `atomic_io.temporary_path`, or a random name."""
    named = re.compile(r"getpid\(\)[^\n]*\.tmp|\.tmp[^\n]*getpid\(\)")
    source = Path(torchlake.__file__).parent
    assert [path.name for path in source.rglob("*.py") if named.search(path.read_text(encoding="utf-8"))] == []


def test_leftovers_are_those_of_this_path(tmp_path: Path) -> None:
    old, new = tmp_path / ".model.77.tmp", atomic_io.temporary_path(tmp_path / "model")
    others = [atomic_io.temporary_path(tmp_path / "model.v2"), tmp_path / ".model.tmp", tmp_path / "model.0a.tmp"]
    for path in (old, new, *others):
        path.mkdir()
    assert sorted(atomic_io.stale_temporaries(tmp_path / "model")) == sorted([old, new])


@pytest.mark.parametrize("left", [".{name}.77.tmp", ".{name}.0123456789abcdef.tmp"])
def test_what_killed_writers_left_is_removed_where_the_next_one_begins(
    tmp_path: Path, tiny_model: Path, left: str
) -> None:
    """The lease, the job file, a token cache, a model folder: as `durable` names them, and as it once did."""
    job = load_job(None, data={"train": "t.parquet"}, model={"base": "m"})
    folder.claim(tmp_path, job)
    places = [
        tmp_path / left.format(name=folder.JOB_FILE),
        tmp_path / "cache" / left.format(name="train"),
        tmp_path / ".staging" / left.format(name="lease.json"),
        tmp_path / left.format(name="model"),
    ]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"half")
    lease.acquire(tmp_path / ".staging", 60.0, name="run").release()
    folder.claim(tmp_path, job)
    assert [place for place in places[:3] if place.exists()] == []
    places[3].write_bytes(b"half")
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    spec = load_spec(tiny_model)
    load.save_model_folder(tmp_path / "model", model, model.config, tokenizer, spec, card={})
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_private_folder_is_of_this_user_and_nobody_else_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    atomic_io.make_private_folder(folder)
    atomic_io.make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    atomic_io.make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700, "of an earlier version"
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(StorageError, match="is not a folder of this user"):
        atomic_io.make_private_folder(link)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a folder of this user"):
        atomic_io.make_private_folder(tmp_path / "file")
