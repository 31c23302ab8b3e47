"""Every code block of the README and of docs/ runs, with tiny models and tables in the place of real ones.

The blocks of a page run in one process and one folder (`code_blocks.py`). `NOT_RUN` lists all blocks that no test runs.
"""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adbc_driver_sqlite.dbapi as sqlite
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from huggingface_hub import constants
from pyiceberg import catalog
from transformers import AutoModelForSequenceClassification

import fake_endpoint
import hub_repositories
import s3_server
import task_cases
import tiny
from code_blocks import ROOT, Block, check_block, read_blocks, run_block
from torchlake.cli.main import main

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(900)  # trainings and clusters, one after the other
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES if read_blocks(page)]
ORCHESTRATORS = "their libraries need an environment of their own: `make orchestrators` runs it"
NOT_RUN = {
    ("docs/how-to/hub.md", "hf upload"): "the test's Hub has datasets only",
    ("docs/how-to/hub.md", "hf repos create"): "the test's Hub makes a dataset when it is asked for",
    ("docs/how-to/object-storage.md", "export AWS_ACCESS_KEY_ID=..."): "placeholders; the test sets its own",
    ("docs/how-to/object-storage.md", "torchlake predict runs/from_s3/model s3://lake/reviews_delta"): "its tables and "
    "catalog: tests/unit/tables/test_object_stores.py reads such ones",
    ("docs/how-to/orchestrators.md", "# dags/reviews.py"): ORCHESTRATORS,
    ("docs/how-to/orchestrators.md", "# assets.py"): ORCHESTRATORS,
    ("docs/how-to/vllm.md", "torchlake runtime-env vllm"): "vLLM needs an environment of its own: "
    "tests/unit/runtimes/test_foreign.py has another engine",
}
"Page and beginning of the block: why it is not run."
ON_SPARK = {"docs/how-to/spark.md"}
ON_STREAM = {"docs/how-to/streams.md"}
ON_RAY = {"docs/how-to/ray.md", "docs/explanation/engines.md"}
ON_S3 = {"docs/how-to/object-storage.md"}
ON_HUB = {"docs/how-to/hub.md"}
ON_ENDPOINT = {"docs/how-to/endpoints.md"}
QUICK = {"docs/reference/labels.md", "docs/reference/python.md"}
"Pages whose blocks run in `make test`; the others take longer, and run in `make faults`."
SCORED = {
    f"docs/how-to/{name}.md"
    for name in (
        "comparing",
        "errors",
        "evaluating",
        "export",
        "outputs",
        "queries",
        "scoring",
        "selecting",
        "serving",
        "writing",
    )
}
"Pages that begin with a model that the reader has from another page."
FINISHED = {"docs/how-to/troubleshooting.md"}
"Pages that begin with a finished run and its output."
WITHOUT_JOB = {"docs/tutorial.md"}
"Pages that begin without a job file, and write the first one."
JOB = """\
data: {train: reviews.parquet, validation: {fraction: 0.2}, text: text, label: label}
model: {base: roberta-base}
train: {epochs: 1, batch_size: 32}
"""
SCRIPT = "import os, sys\nprint('rank', os.environ['RANK'], *sys.argv[1:])\n"


def runs(block: Block) -> bool:
    return not any(block.page == page and block.head.startswith(head) for page, head in NOT_RUN)


def test_the_list_of_blocks_that_are_not_run_is_short_and_true() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page)]
    for (page, head), reason in NOT_RUN.items():
        assert len([block for block in blocks if block.page == page and block.head.startswith(head)]) == 1, (page, head)
        assert reason
    assert len(NOT_RUN) < 8
    assert len(blocks) > 40
    assert {
        *ON_SPARK,
        *ON_STREAM,
        *ON_RAY,
        *ON_S3,
        *ON_HUB,
        *ON_ENDPOINT,
        *QUICK,
        *SCORED,
        *FINISHED,
        *WITHOUT_JOB,
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_block_can_be_read(name: str) -> None:
    """Quick: commands and their options exist, Python compiles, jobs are valid."""
    for block in read_blocks(ROOT / name):
        check_block(block)


def write_tables(folder: Path) -> None:
    """The tables that the pages name, with some of the reviews' stars and topics."""
    for seed, name in enumerate(("reviews", "new", "test", "export")):
        table = tiny.reviews(160 if name == "reviews" else 40, seed=seed)
        stars = [5 if label == "good" else 1 + row % 2 for row, label in enumerate(table["label"].to_pylist())]
        table = table.append_column("stars", pa.array(stars)) if name != "new" else table.drop_columns("label")
        pq.write_table(table, folder / f"{name}.parquet")
        pa.csv.write_csv(table, folder / f"{name}.csv", pa.csv.WriteOptions(delimiter=";" if name == "export" else ","))
    pq.write_table(tiny.reviews(160).select(["text"]), folder / "lines.parquet")
    pq.write_table(task_cases.searches(160), folder / "pairs.parquet")
    with sqlite.connect(f"file:{folder}/shop.db") as connection, connection.cursor() as cursor:
        cursor.adbc_ingest("reviews", tiny.reviews(40))
        connection.commit()
    pq.write_table(pa.table({"text": ["a good", "the bad film"]}), folder / "prompts.parquet")
    pq.write_table(task_cases.questions(60), folder / "questions.parquet")
    pq.write_table(task_cases.verdicts(60), folder / "summaries.parquet")
    for row in tiny.digits(60).to_pylist():
        image = folder / "photos" / str(row["label"]) / f"{row['id']}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(row["image"]["bytes"])


def add_photos(folder: Path) -> None:
    shutil.copytree(folder / "photos", folder / "new_photos")


def add_cross_encoder(folder: Path) -> None:
    """A reranker as others publish them: one output, and no task.json."""
    path = tiny.build_pair_encoder(folder / "ms-marco-MiniLM", kind="bert")
    with tiny.quiet():
        AutoModelForSequenceClassification.from_pretrained(path, num_labels=1).save_pretrained(path)


def add_preferences(folder: Path) -> None:
    tiny.build_language_model(folder / "runs" / "lines" / "model", kind="llama", max_position_embeddings=512)
    for rows, name in ((160, "pairs"), (40, "test")):
        table = task_cases.preferences(rows)
        pq.write_table(table.rename_columns({"opening": "prompt"}), folder / f"{name}.parquet")
    pq.write_table(pa.table({"prompt": ["the film was", "the plot was"]}), folder / "prompts.parquet")


def add_tickets(folder: Path) -> None:
    """The schema and the grammar that the page shows, and rows for them."""
    page = (ROOT / "docs/how-to/structured-answers.md").read_text(encoding="utf-8")
    for language, name in (("json", "ticket.json"), ("lark", "dates.lark")):
        [shown] = re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        (folder / name).write_text(shown, encoding="utf-8")
    tiny.build_language_model(folder / "chat-model", kind="llama", max_position_embeddings=512)
    for name in ("tickets", "letters"):
        shutil.copy(folder / "new.parquet", folder / f"{name}.parquet")


ADDED = {
    "docs/how-to/images.md": add_photos,
    "docs/how-to/pairs.md": add_cross_encoder,
    "docs/how-to/preferences.md": add_preferences,
    "docs/how-to/structured-answers.md": add_tickets,
}
"What single pages take for granted besides the tables and models of all."


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_roberta: Path, tiny_gpt2: Path) -> Path:
    """The current folder, with models under the names that the pages use."""
    monkeypatch.setattr(catalog, "_ENV_CONFIG", catalog._ENV_CONFIG)  # a page may write another one
    for name in ("roberta-base", "roberta-large"):
        shutil.copytree(tiny_roberta, tmp_path / name)
    shutil.copytree(tiny_gpt2, tmp_path / "gpt2")
    write_tables(tmp_path)
    tiny.build_language_model(tmp_path / "llama-70b", kind="llama", num_key_value_heads=4)
    tiny.build_vision(tmp_path / "vit-base")
    tiny.build_encoder_decoder(tmp_path / "t5-small")
    tiny.build_translator(tmp_path / "mbart-large-50")
    task_cases.build_entailment(tmp_path / "nli-model")
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # modules that a page writes, which a script beside them would import
    return tmp_path


def run_page(name: str, namespace: dict[str, Any] | None = None, places: dict[str, str] | None = None) -> None:
    names = {} if namespace is None else namespace
    names["__name__"] = "__main__"
    for block in read_blocks(ROOT / name):
        if runs(block):
            run_block(block, names, places or {})


def local_pages() -> list[Any]:
    slow = pytest.mark.slow  # several trainings each
    names = [name for name in NAMES if name not in ON_SPARK | ON_STREAM | ON_RAY | ON_S3 | ON_HUB | ON_ENDPOINT]
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in names]


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")  # by MLflow
@pytest.mark.parametrize("name", local_pages())
def test_the_blocks_of_a_page_run(name: str, folder: Path, tiny_model: Path, tiny_gpt2: Path) -> None:
    if name in WITHOUT_JOB:
        (folder / "job.yaml").unlink()
    if name in SCORED:
        shutil.copytree(tiny_model, folder / "runs" / "reviews" / "model")
        shutil.copytree(tiny_gpt2, folder / "runs" / "chat" / "model")
    if name in ADDED:
        ADDED[name](folder)
    if name in FINISHED:
        assert main(["train", "job.yaml"]) == main(["predict", "runs/job/model", "new.parquet", "scored"]) == 0
    run_page(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_S3))
def test_the_blocks_run_on_s3(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server.serving() as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        server.put("reviews/train.parquet", (folder / "reviews.parquet").read_bytes())
        server.put("reviews/new-1.parquet", (folder / "new.parquet").read_bytes())
        run_page(name)
        assert any(key.endswith(".parquet") for key in server.keys("scored"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_ENDPOINT))
def test_the_blocks_run_beside_an_endpoint(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODEL_KEY", "a key of the test")
    with fake_endpoint.serving(key="a key of the test") as endpoint:
        run_page(name, places={"https://host/v1": endpoint.url})
        assert len(endpoint.requests) == 160  # the call in Python finds the output of the command, and pays nothing


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
@pytest.mark.parametrize("name", sorted(ON_HUB))
def test_the_blocks_run_on_the_hub(name: str, folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_model, folder / "runs" / "reviews" / "model")
    with hub_repositories.serving() as address:
        for setting, value in hub_repositories.client_settings(address, str(folder / "home")).items():
            monkeypatch.setattr(constants, setting, value)
        run_page(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_SPARK))
def test_the_blocks_run_on_spark(name: str, folder: Path, tiny_model: Path, spark: "SparkSession") -> None:
    shutil.copytree(tiny_model, folder / "shared" / "models" / "reviews")
    shutil.copy(folder / "new.parquet", folder / "shared" / "new.parquet")
    frame = spark.read.parquet(str(folder / "new.parquet"))
    frame.createOrReplaceTempView("reviews")
    run_page(name, {"spark": spark}, {"/mnt/shared": str(folder / "shared"), "main.reviews": "reviews"})


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ON_STREAM))
def test_the_blocks_run_on_a_stream(name: str, folder: Path, tiny_model: Path, spark: "SparkSession") -> None:
    shutil.copytree(tiny_model, folder / "runs" / "reviews" / "model")
    (folder / "incoming").mkdir()
    shutil.copy(folder / "new.parquet", folder / "incoming" / "new.parquet")
    names: dict[str, Any] = {"spark": spark}
    # Paths are Spark's, whose process has a current folder of its own.
    run_page(name, names, {f'"{path}': f'"{folder}/{path}' for path in ("incoming/", "lake/", "checkpoints/", "runs/")})
    try:
        names["query"].processAllAvailable()
    finally:
        names["query"].stop()
    assert DeltaTable(folder / "lake" / "labels").to_pyarrow_table().num_rows == 40


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("name", sorted(ON_RAY))
def test_the_blocks_run_on_ray(name: str, folder: Path, tiny_model: Path, spark: "SparkSession") -> None:
    import ray.data

    shutil.copytree(tiny_model, folder / "shared" / "models" / "reviews")
    shutil.copy(folder / "new.parquet", folder / "shared" / "new.parquet")
    frame = spark.read.parquet(str(folder / "reviews.parquet"))
    frame.createOrReplaceTempView("reviews")
    dataset = ray.data.read_parquet(str(folder / "new.parquet"))
    new = spark.read.parquet(str(folder / "new.parquet"))
    namespace = {"spark": spark, "spark_df": frame, "new_spark_df": new, "ray_dataset": dataset}
    run_page(name, namespace, {"/mnt/shared": str(folder / "shared")})
