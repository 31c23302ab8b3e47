"""The promise of a sink: what every file in `outputs/targets/` keeps, whatever kills, stops or races a writer."""

import hashlib
import re
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import s3_server
import tiny
from s3_server import S3Server
from scoring_runs import start_predict
from sink_jobs import Output, source_rows, write_source
from sink_kinds import KINDS, TYPES, Place
from sweeps import sweep
from torchlake import plugins

ROWS = 7
ALL = list(range(ROWS))
SHORT_S = 0.1
"Of the lease of a writer that a test stops: the next one takes over at once."
PLAIN: dict[str, Any] = {}
GROUPED = {"target_file_size": 2500}
VARIANTS = {"plain": PLAIN, "grouped": GROUPED, "partitioned": {"partition_by": ["p"]}}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server.serving() as server:
        yield server


QUICK = {"folder", "object_folder", "delta", "iceberg"}
"Of the kinds; the others differ from one of these by the storage."
every_variant = pytest.mark.parametrize("variant", sweep(VARIANTS, quick={"plain"}))
every_kind = pytest.mark.parametrize("output", KINDS, indirect=True)
renamed_or_logged = pytest.mark.parametrize("output", sweep(KINDS, quick={"folder", "delta"}), indirect=True)
put_or_logged = pytest.mark.parametrize("output", sweep(KINDS, quick={"object_folder", "iceberg"}), indirect=True)
"Kills and races: two ways to commit each in `make test`; tests/unit/tables/test_transactions.py draws many more."
tables_alone = pytest.mark.parametrize("output", sweep(KINDS, quick={"folder", "delta", "iceberg"}), indirect=True)


@pytest.fixture(params=sweep(KINDS, quick=QUICK))
def output(request: pytest.FixtureRequest, tmp_path: Path, server: S3Server) -> Output:
    return Output(kind=KINDS[request.param], place=Place(folder=tmp_path, server=server))


@pytest.fixture
def table(output: Output) -> Output:
    """An output to which rows can be added."""
    if output.kind.append is None:
        pytest.skip("a folder is written as a whole")
    return output


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "in.parquet", source_rows(ROWS))


@pytest.fixture
def more(tmp_path: Path) -> Path:
    return write_source(tmp_path / "more.parquet", source_rows(4, first=100))


def variants(output: Output) -> list[dict[str, Any]]:
    return [one for name, one in VARIANTS.items() if name != "partitioned" or output.kind.partitions]


every_site = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
SOME = ("part.done:2", "commit.before_publish:1", "commit.after_publish:1")


def sites(output: Output, source: Path, **options: Any) -> list[str]:
    """Every failpoint that a job hits, with the number of the hit."""
    log = output.place.folder / "sites"
    output.computed(source, log=log, **options)
    return log.read_text().split()


def test_every_sink_is_tested() -> None:
    assert {kind.sink for kind in KINDS.values()} == {*plugins.names("targets")}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["last variant", "all"])
@every_kind
def test_rows_are_written_once_and_the_same_job_again_does_nothing(output: Output, source: Path, every: bool) -> None:
    expected = pq.read_table(source).to_pylist()
    for name, options in enumerate(variants(output) if every else variants(output)[-1:]):
        there = output.at(str(name))
        assert there.computed(source, **options) == 4
        rows = there.kind.read(there.place)
        assert rows is not None
        found = sorted(rows.select(["id", "t", "p"]).to_pylist(), key=lambda row: row["id"])
        assert found == expected, options
        assert len({*rows["row_id"].to_pylist()}) == ROWS
        assert there.computed(source, **options) == 0
        assert there.ids() == ALL


@renamed_or_logged
@every_site
@every_variant
def test_a_job_that_is_killed_anywhere_goes_on(output: Output, source: Path, every: bool, variant: str) -> None:
    if VARIANTS[variant] not in variants(output):
        pytest.skip("no partitions")
    options = VARIANTS[variant]
    hit = sites(output.at("all"), source, **options)
    assert {*SOME} < {*hit}
    for site in hit if every else SOME:
        there = output.at(site)
        assert there.run(source, armed=f"{site}:kill9", **options) is None, site
        assert there.ids() in ([], ALL), site
        left = there.computed(source, **options)
        finished = sum(one.startswith("part.done:") for one in hit[: hit.index(site)])
        assert left <= 4 - finished, f"{site}: finished chunks were computed again"
        assert there.ids() == ALL, site
        assert there.computed(source, **options) == 0, site
        assert there.ids() == ALL, site


@put_or_logged
@every_site
@every_variant
def test_a_writer_that_wakes_after_its_successor_committed_changes_nothing(
    output: Output, source: Path, every: bool, variant: str
) -> None:
    if VARIANTS[variant] not in variants(output):
        pytest.skip("no partitions")
    options = VARIANTS[variant]
    for site in sites(output.at("all"), source, **options) if every else SOME[:2]:
        there = output.at(site)
        sleeper = there.start(source, armed=f"{site}:stop", lease_s=SHORT_S, **options)
        assert sleeper.stopped(), site
        said = there.takes_over(source, **options)
        if output.kind.fenced and "locked for" in said.get("error", ""):
            sleeper.go_on()  # it was stopped inside the lock
            assert "error" not in (sleeper.end() or {}), site
        else:
            assert "error" not in said, (site, said)
            assert there.ids() == ALL, site
            sleeper.go_on()
            sleeper.end()
        assert there.ids() == ALL, site
        assert there.computed(source, **options) == 0, site


@renamed_or_logged
@every_site
def test_a_writer_that_wakes_after_others_replaced_its_rows_changes_nothing(
    output: Output, source: Path, every: bool
) -> None:
    """The successors finish the same job, replace its rows by others, and these by the first ones."""
    for site in sites(output.at("all"), source, **GROUPED) if every else SOME[:2]:
        there = output.at(site)
        again = partial(there.takes_over, source, mode="overwrite")
        assert there.computed(source, version=1) == 4
        assert there.computed(source, version=2, mode="overwrite") == 4
        sleeper = there.start(source, armed=f"{site}:stop", lease_s=SHORT_S, version=3, mode="overwrite", **GROUPED)
        if not sleeper.stopped():
            sleeper.end()
            continue
        for version in (3, 1, 2):
            said = again(version=version)
            if "locked for" in said.get("error", ""):
                break
            assert "error" not in said, (site, said)
            assert there.ids() == ALL, (site, version)
        sleeper.go_on()
        sleeper.end()
        assert there.ids() == ALL, site
        assert "error" not in again(version=2), site
        assert there.ids() == ALL, site


@put_or_logged
@pytest.mark.parametrize("count", sweep([2, 3], quick={2}))
def test_writers_that_start_together_write_each_row_once(output: Output, source: Path, count: int) -> None:
    several = [output.start(source, armed="test.planned:1:stop") for _ in range(count)]
    assert all(writer.stopped() for writer in several)
    for writer in several:
        writer.go_on()
    said = [writer.end() for writer in several]
    assert any("computed" in (one or {}) for one in said), said
    assert all("computed" in one or "Locked: " in one["error"] for one in said if one), said
    assert output.ids() == ALL
    assert output.computed(source) == 0


@pytest.mark.parametrize("count", sweep([2, 3], quick={2}))
def test_writers_that_commit_together_write_each_row_once(output: Output, source: Path, count: int) -> None:
    """Each one takes over the lease of the one before, and all wake in the middle of the commit."""
    if output.kind.fenced:
        pytest.skip("a writer that is stopped in a commit keeps others out")
    several = []
    for _ in range(count):
        while True:
            writer = output.start(source, armed="commit.before_publish:1:stop", lease_s=SHORT_S)
            if writer.stopped():
                break
            assert "Locked: " in (writer.end() or {})["error"]
        several.append(writer)
    for writer in several:
        writer.go_on()
    said = [writer.end() for writer in several]
    assert all("computed" in one or "LeaseLost: " in one["error"] for one in said if one), said
    assert output.ids() == ALL
    assert "computed" in output.takes_over(source)
    assert output.ids() == ALL


@renamed_or_logged
def test_writers_of_different_rows_add_all_of_them(table: Output, source: Path, more: Path) -> None:
    several = {one: table.start(one, armed="test.planned:1:stop", mode="append") for one in (source, more)}
    assert all(writer.stopped() for writer in several.values())
    for writer in several.values():
        writer.go_on()
    ends = [writer.end() or {} for writer in several.values()]
    assert all("computed" in said or "Locked: " in said["error"] for said in ends), ends
    for one in several:
        assert "computed" in table.takes_over(one, mode="append")
    assert table.ids() == [*ALL, 100, 101, 102, 103]


def test_another_job_is_refused_or_replaces_the_rows(output: Output, source: Path, more: Path) -> None:
    assert output.computed(source) == 4
    said = output.run(more)
    assert said is not None
    assert said["error"].startswith(("OutputError: ", "FingerprintError: ")), said
    assert output.ids() == ALL
    assert output.computed(more, mode="overwrite") == 2
    assert output.ids() == [100, 101, 102, 103]
    assert output.computed(more, mode="overwrite") == 0
    assert output.computed(source, mode="overwrite") == 4
    assert output.ids() == ALL


def test_rows_are_added_once(output: Output, source: Path, more: Path) -> None:
    if output.kind.append is None:
        said = output.run(source, mode="append")
        assert "mode append is for Delta and Iceberg tables" in (said or {})["error"]
        assert output.ids() == []
        return
    for one in (source, more, source, more):
        output.computed(one, mode="append")
    assert output.ids() == [*ALL, 100, 101, 102, 103]
    assert output.computed(source, mode="append") == 0
    assert output.computed(more, mode="append", chunk_rows=3) == 0
    assert output.ids() == [*ALL, 100, 101, 102, 103]


@pytest.mark.parametrize(
    ("output", "mode"),
    sweep(
        product(KINDS, ["create", "append", "overwrite"]),
        quick={*product(["delta"], ["create", "append", "overwrite"]), ("iceberg", "append")},
    ),
    indirect=["output"],
)
def test_a_commit_of_another_writer_in_between(table: Output, source: Path, more: Path, mode: str) -> None:
    """It keeps its rows, or they are replaced as asked for, or the job is refused."""
    table.computed(more, mode="append")
    other = table.kind.read(table.place)
    assert other is not None
    other = other.slice(0, 1).set_column(other.column_names.index("id"), "id", pa.array([999], pa.int64()))
    before = [100, 101, 102, 103]
    if mode == "create":
        table = table.at("create")
    writer = table.start(source, armed="commit.before_publish:1:stop", mode=mode)
    assert writer.stopped()
    assert table.kind.append is not None
    table.kind.append(table.place, other)
    writer.go_on()
    said = writer.end() or {}
    if mode == "create":
        assert "has rows that this job did not write" in said["error"], said
        assert table.ids() == [999]
    else:
        assert said["computed"] == 4
        assert table.ids() == ([*ALL, *before, 999] if mode == "append" else ALL)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["last variant", "all"])
def test_no_rows_at_all(output: Output, tmp_path: Path, every: bool) -> None:
    empty = write_source(tmp_path / "empty.parquet", source_rows(0))
    for name, options in enumerate(variants(output) if every else variants(output)[-1:]):
        there = output.at(str(name))
        assert there.computed(empty, **options) == 0
        assert there.ids() == []
        assert there.computed(empty, **options) == 0


def test_failed_rows_are_kept_with_their_error(output: Output, source: Path) -> None:
    assert output.computed(source, failing="text 3", **GROUPED) == 4
    rows = output.kind.read(output.place)
    assert rows is not None
    failed = {row["id"]: row["error"] for row in rows.to_pylist() if row["error"] is not None}
    assert failed == {3: "failed: asked for"}
    assert rows.num_rows == ROWS


@pytest.mark.parametrize("output", sweep(KINDS, quick={"folder", "object_folder"}), indirect=True)  # a lock, and none
@pytest.mark.parametrize(
    "asked", [pytest.param({"overwrite": True}, id="option", marks=pytest.mark.slow), {"mode": "overwrite"}]
)
def test_to_overwrite_an_interrupted_write_tries_its_failed_rows_again(
    output: Output, source: Path, asked: dict[str, Any]
) -> None:
    """Except in an object store, where no lock keeps a writer out that still knows the first parts."""
    killed = {"armed": "commit.ready:1:kill9", "unlucky": "text 3"}
    assert output.run(source, **killed, **asked) is None
    assert output.computed(source, **asked) == (1 if output.kind.fenced else 0)
    rows = output.kind.read(output.place)
    assert rows is not None
    assert rows.num_rows - rows["error"].null_count == (0 if output.kind.fenced else 1)
    assert output.ids() == ALL


def test_files_have_about_the_size_that_is_asked_for(output: Output, tmp_path: Path) -> None:
    source = write_source(tmp_path / "in.parquet", source_rows(24))
    one_part = output.at("single")
    assert one_part.computed(source, chunk_rows=24) == 1
    assert output.computed(source, chunk_rows=4, target_file_size=1) == 6
    large = output.at("large")
    assert large.computed(source, chunk_rows=4, target_file_size=1 << 30) == 6
    for there in (one_part, output, large):
        assert there.ids() == list(range(24))


def test_partitions_of_any_value(output: Output, tmp_path: Path) -> None:
    values = ["a", None, "", "é/ü", "a b", "c%", "x=y", "..", "a:b", "'\"", "#?&", "100%25"]
    rows = source_rows(len(values)).set_column(2, "p", pa.array(values))
    source = write_source(tmp_path / "in.parquet", rows)
    if not output.kind.partitions:
        said = output.run(source, partition_by=["p"]) or {}
        assert "partition_by" in said["error"]
        return
    output.computed(source, partition_by=["p"])
    found = output.kind.read(output.place)
    assert found is not None
    by_id = {row["id"]: row["p"] for row in found.to_pylist()}
    assert by_id == {one: value or (None if output.kind.empty_is_null else value) for one, value in enumerate(values)}
    said = output.run(source, partition_by=["p", "id"]) or {}
    assert "is partitioned by ['p']; leave partition_by out." in said["error"]
    assert output.computed(source, partition_by=["p"]) == 0


def values(column: Any) -> list[Any]:
    """A column as Python values, whatever library made it: floats by their bits, decimals as whole numbers if they are,
    times of a zone as UTC."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, float):
            return struct.pack("d", value)
        if isinstance(value, datetime):
            return value.astimezone(UTC).isoformat() if value.tzinfo else value.isoformat()
        return int(value) if isinstance(value, Decimal) and value == int(value) else value

    return [plain(one) for one in column.to_pylist()]


@tables_alone
def test_a_type_is_carried_through_or_refused_before_any_row(output: Output, tmp_path: Path) -> None:
    for name in output.kind.refused:
        there = output.at(re.sub(r"\W+", "-", name).strip("-"))
        source = write_source(there.place.folder / "in.parquet", source_rows(3).append_column("x", TYPES[name]))
        said = there.run(source, log=there.place.folder / "log") or {}
        assert said.get("error", "").startswith("TableError: "), (name, said)
        assert "the column 'x' is " in said["error"]
        assert "test.read" not in (there.place.folder / "log").read_text()
        assert there.ids() == []
    rows, held = source_rows(3), [name for name in TYPES if name not in output.kind.refused]
    for number, name in enumerate(held):
        rows = rows.append_column(f"x{number}", TYPES[name])
    source = write_source(tmp_path / "in.parquet", rows)
    assert output.run(source) == {"computed": 2}
    found = output.kind.read(output.place)
    assert found is not None
    found, expected = found.sort_by("id"), pq.read_table(source)
    for number, name in enumerate(held):
        assert values(found[f"x{number}"]) == values(expected[f"x{number}"]), name


def test_a_value_that_the_format_cannot_hold_is_an_error(table: Output, tmp_path: Path) -> None:
    """Tables have microseconds."""
    source = write_source(
        tmp_path / "in.parquet", source_rows(2).append_column("x", pa.array([1, 2], pa.timestamp("ns")))
    )
    said = table.run(source) or {}
    assert "a value cannot be stored in the table's format" in said.get("error", ""), said
    assert table.ids() == []


@pytest.mark.slow
def test_every_engine_writes_the_same_bytes(output: Output, tmp_path: Path, tiny_model: Path) -> None:
    table = tmp_path / "in.parquet"
    pq.write_table(tiny.reviews(23), table)
    written = {}
    for engine in ("local", "spark", "ray"):
        there = output.at(engine)
        options = {"model": tiny_model, "table": table, "key": "id", "chunk_rows": 5, "runtime": "misbehave"}
        options |= {"output": there.kind.output(there.place), "engine": engine, "processes": 2, **there.kind.options}
        variables = {**there.place.server.environment, **there.kind.environment(there.place)}
        # Not forked: the Hub's client reads its variables when it is imported.
        process = start_predict(options, **variables)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, (engine, said)
        assert there.ids() == list(range(23))
        there.place.mirror()
        files = there.place.folder.rglob("part-*.parquet")
        # A set: `ids` may have made another copy of the bucket in the folder.
        written[engine] = sorted({(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files})
    assert len(written["local"]) == 5
    assert written["local"] == written["spark"] == written["ray"]
