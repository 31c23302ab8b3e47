"""What a job lacks is an error before anything is tokenized and before any rank starts."""

import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry, known_implementations

import tiny
import torchlake as tl
import training_runs as runs
from torchlake.errors import MissingExtra, TableError, UsageError
from torchlake.storage.urls import filesystem_of


class Untouched(tiny.Here):
    """An engine that nothing may be run on."""

    def run_chunks(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("a chunk was run")

    def launch(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("ranks were started")


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`hide(library, module)` makes a library look as if it were not installed, to `module` of torchlake too."""

    def arm(library: str, *modules: str) -> None:
        find = importlib.machinery.PathFinder.find_spec

        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return None if name.split(".")[0] == library else find(name, path, target)

        monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", find_spec)
        for protocol, storage in known_implementations.items():
            if storage["class"].startswith(f"{library}."):
                monkeypatch.delitem(_registry, protocol, raising=False)
        for name in [*sys.modules]:
            if name == library or name.startswith((f"{library}.", *modules)):
                monkeypatch.delitem(sys.modules, name)

    return arm


@pytest.mark.parametrize(
    ("library", "extra", "overrides", "modules"),
    [
        ("peft", "lora", ["model.lora={}"], ()),
        ("mlflow", "mlflow", ["track.mlflow=store"], ()),
        ("tensorboard", "tensorboard", ["track.tensorboard=true"], ()),
        ("deepspeed", "deepspeed", ["train.strategy=deepspeed", "engine.processes=2"], ()),
        pytest.param(
            "pyspark",
            "spark",
            ["engine.name=spark"],
            ("torchlake.engines.spark", "torchlake.engines._spark"),
            marks=pytest.mark.slow,
        ),
        ("ray", "ray", ["engine.name=ray"], ("torchlake.engines.ray", "torchlake.engines._ray")),
        ("gcsfs", "gcs", ["data.validation=gs://bucket/rows.parquet"], ()),
        ("adlfs", "azure", ["data.train=az://bucket/rows.parquet"], ()),
        ("obstore", "gcs", ["train.checkpoint_folder=gs://bucket/reviews"], ()),
    ],
)
def test_a_missing_library_is_named_with_the_extra_that_installs_it(
    tmp_path: Path,
    tiny_bert: Path,
    hide: Callable[..., None],
    library: str,
    extra: str,
    overrides: list[str],
    modules: tuple[str, ...],
) -> None:
    hide(library, *modules)
    engine = None if library in ("pyspark", "ray") else Untouched()
    with pytest.raises(UsageError, match=rf"{library}.* not installed: .*pip install 'torchlake\[{extra}\]'"):
        tl.train(run=tmp_path / "run", engine=engine, overrides=overrides, **runs.job(tmp_path, tiny_bert))
    assert not (tmp_path / "run" / "prepared").exists()


@pytest.mark.parametrize("protocol", ["s3", "gs", "gcs", "abfs", "abfss", "az"])
def test_every_storage_names_its_extra(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def url_to_fs(url: str) -> Any:
        raise ImportError(f"Install {protocol}fs to access it")

    monkeypatch.setattr("fsspec.core.url_to_fs", url_to_fs)
    with pytest.raises(MissingExtra, match=rf"{protocol}://.* .*pip install 'torchlake\[(s3|gcs|azure)\]'"):
        filesystem_of(f"{protocol}://bucket/rows.parquet")


@pytest.mark.parametrize("name", ["train", "validation"])
@pytest.mark.parametrize("column", ["text", "label", "id", None])
def test_a_table_that_is_missing_or_lacks_a_column_is_named_by_its_key(
    tmp_path: Path, name: str, column: str | None
) -> None:
    """The model is not looked for either: fetching it may take minutes."""
    rows = tiny.reviews(20)
    tables = {"train": tmp_path / "train.parquet", "validation": tmp_path / "validation.parquet"}
    for table in tables.values():
        pq.write_table(rows, table)
    if column is None:
        tables[name].unlink()
    else:
        pq.write_table(rows.drop_columns([column]), tables[name])
    data = {**{key: str(table) for key, table in tables.items()}, "key": "id"}
    message = rf"^data\.{name}: .*{name}\.parquet.*" + ("" if column is None else f"no column '{column}'")
    with pytest.raises(TableError, match=message):
        tl.train(run=tmp_path / "run", engine=Untouched(), data=data, model={"base": "no/such_model"})


def test_a_wrong_runtime_is_refused_before_a_model_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^There is no runtime 'onx'\. Did you mean 'onnx'\? Runtimes: better"):
        tl.predict("no/such_model", tmp_path / "rows.parquet", tmp_path / "out", runtime="onx", engine=Untouched())


@pytest.mark.parametrize("texts", [["great film"], "great film", ["great film", "a bore"]])
def test_texts_are_no_table_and_the_message_shows_how_to_pass_them(tiny_model: Path, texts: Any) -> None:
    with pytest.raises(UsageError, match=r"torchlake\.load\(model\)\(\[\.\.\.\]\)") as error:
        tl.predict(tiny_model, texts)
    assert "a stored table or a stream needs an output folder" in str(error.value)
