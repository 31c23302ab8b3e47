"""plan: tokens, padding, parameters, memory, choice; from a sample, and without a weight loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import tiny
import torchlake as tl
from torchlake import amounts
from torchlake.cli.main import main
from torchlake.config.job import load_job
from torchlake.data import batching, order, packing
from torchlake.errors import DataError, TableError, UsageError
from torchlake.models import load
from torchlake.planning import cluster, display, model_survey, workload
from torchlake.planning.terms import SHARDINGS
from torchlake.planning.workload import Workload
from torchlake.preparation.prepare import prepare
from torchlake.tasks._pretrained import base_model

FAST = {"flops": 1e12}


@pytest.fixture
def sections(tiny_bert: Path, tmp_path: Path) -> dict[str, Any]:
    """A job over 300 reviews."""
    table = tmp_path / "reviews.parquet"
    pq.write_table(tiny.reviews(300), table)
    return {
        "data": {"train": str(table), "validation": None},
        "model": {"base": str(tiny_bert)},
        "train": {"batch_size": 32, "epochs": 2},
    }


def case(lengths: np.ndarray, sections: dict[str, Any], **changes: Any) -> Workload:
    job = load_job(None, **sections)
    base = Path(job.model.base)
    shape, parameters = model_survey.survey_model(job, base, tiny.SPEC)
    setting = tl.plan(**sections, **FAST).setting
    usual = {"batch_size": 32, "micro_batch_tokens": 16384, "seed": 0, "longest": int(lengths.max())}
    return Workload(shape=shape, parameters=parameters, setting=setting, lengths=lengths, **{**usual, **changes})


# the whole verb


def test_a_small_table_is_planned_exactly(sections: dict[str, Any], tmp_path: Path) -> None:
    """Tokens and padded tokens are those that training would count, down to the last one."""
    done = tl.plan(**sections, **FAST)
    job = load_job(None, **sections)
    base = Path(job.model.base)
    spec = replace(tiny.SPEC, max_length=load.max_length(base))
    prepare(job.data.train, tmp_path / "tokens", tokenizer=base, spec=spec, engine=tiny.Here())
    parts = [pq.read_table(part, columns=["length"]) for part in (tmp_path / "tokens").glob("*.parquet")]
    lengths = pa.concat_tables(parts)["length"].to_numpy()
    assert (done.rows, done.sampled, done.unusable, done.training_rows) == (300, 300, 0, 300)
    assert done.steps == 2 * 10
    assert done.tokens.total == lengths.sum()
    assert done.tokens.error == 0
    assert done.tokens.longest == lengths.max()
    padded = 0
    for batch in order.epoch_batches(lengths, batch_size=32, seed=0, epoch=0):
        (share,) = batching.micro_batches(lengths[batch], world_size=1, micro_batch_tokens=16384)
        padded += sum(len(rows) * lengths[batch][rows].max() for rows in share)
    assert done.padding.sorted == pytest.approx(1 - lengths.sum() / padded)
    assert done.padding.sorted < done.padding.arrival < done.padding.max_length
    assert done.padding.max_length == pytest.approx(1 - lengths.mean() / spec.max_length)


def test_a_language_model_is_planned_in_the_blocks_that_it_trains_on(
    sections: dict[str, Any], tiny_gpt2: Path, tmp_path: Path
) -> None:
    texts = {"base": str(tiny_gpt2), "task": "text_generation", "max_length": 24}
    sections = sections | {"model": texts, "train": {"batch_size": 8, "epochs": 2, "micro_batch_tokens": 96}}
    done = tl.plan(**sections, **FAST)
    job = load_job(None, **sections)
    spec = replace(tiny.SPEC, task="text_generation", problem="next_token", labels=(), label=None, max_length=24)
    prepare(job.data.train, tmp_path / "tokens", tokenizer=tiny_gpt2, spec=spec, engine=tiny.Here())
    parts = [pq.read_table(part, columns=["length"]) for part in (tmp_path / "tokens").glob("*.parquet")]
    lengths = pa.concat_tables(parts)["length"].to_numpy()
    assert (done.training_rows, done.tokens.total, done.tokens.longest) == (300, lengths.sum(), lengths.max())
    assert done.blocks == packing.num_blocks(int(lengths.sum()), 24)
    assert done.steps == 2 * -(-done.blocks // 8)
    assert done.micro_batch == (4, 24)
    assert done.padding.sorted < 0.01 < done.padding.arrival, "the last block alone is padded"
    words = load.load_tokenizer(tiny_gpt2)
    assert done.strategies[0].memory.activations > 96 * len(words) * 8, "the logits of a micro-batch and their gradient"
    assert f"in {done.blocks:,} blocks" in display.facts(done)["table"]
    sampled = tl.plan(**sections, **FAST, sample_rows=150)
    assert sampled.blocks == pytest.approx(done.blocks, rel=0.1)
    adapted = tl.plan(**sections | {"model": texts | {"lora": {"rank": 4}}}, **FAST).parameters
    assert adapted.trainable == adapted.total - done.parameters.total, "the head of a language model stays frozen"


def test_what_would_be_cut_is_planned(sections: dict[str, Any]) -> None:
    """The numbers that preparing the table counts; a hint where they are many."""
    sections["model"]["max_length"] = 12
    done = tl.plan(**sections, **FAST)
    texts = pq.read_table(sections["data"]["train"])["text"].to_pylist()
    whole = np.array([len(ids) for ids in load.load_tokenizer(sections["model"]["base"])(texts)["input_ids"]])
    lost = np.maximum(whole - 12, 0)
    assert done.tokens.truncated == pytest.approx((lost > 0).mean())
    assert done.tokens.cut == pytest.approx(lost.sum() / whole.sum())
    said = display.facts(done)["truncated"]
    assert f"{(lost > 0).mean():.1%} of rows are cut" in said
    assert "model.max_length" in said
    sections["model"]["max_length"] = 64
    assert "model.max_length" not in display.facts(tl.plan(**sections, **FAST))["truncated"]


def test_the_parameters_are_those_of_the_model(sections: dict[str, Any], tiny_bert: Path) -> None:
    done = tl.plan(**sections, **FAST)
    model = base_model(tiny_bert, tiny.SPEC, "AutoModelForSequenceClassification")
    assert done.parameters.total == sum(parameter.numel() for parameter in model.parameters())
    assert done.parameters.trainable == done.parameters.total
    layers = model.bert.encoder.layer
    assert done.parameters.layer == sum(parameter.numel() for parameter in layers[0].parameters())
    assert done.parameters.units == done.shape.layers == 2
    assert (done.shape.hidden, done.shape.feed_forward, done.shape.heads) == (32, 64, 2)
    assert not done.shape.gated


def test_no_weights_are_read(sections: dict[str, Any], tiny_bert: Path, tmp_path: Path) -> None:
    base = shutil.copytree(tiny_bert, tmp_path / "base")
    save_file({"other": torch.zeros(1)}, base / "model.safetensors")
    bare = sections | {"model": {"base": str(base)}}
    assert tl.plan(**bare, **FAST).parameters == tl.plan(**sections, **FAST).parameters


def test_lora_trains_the_adapters_and_the_head(sections: dict[str, Any]) -> None:
    whole = tl.plan(**sections, **FAST).parameters
    lora = sections["model"] | {"lora": {"rank": 4, "targets": ["query", "value"]}}
    adapted = tl.plan(**sections | {"model": lora}, **FAST)
    added = 2 * 2 * 4 * (32 + 32)
    head = 32 * 32 + 32 + 32 * 2 + 2  # the pooler and the classifier, which peft copies
    assert adapted.parameters.total == whole.total + added + head
    assert adapted.parameters.trainable == added + head
    assert adapted.parameters.matrices_trainable == added
    assert adapted.strategies[0].memory.optimizer == 8 * adapted.parameters.trainable


def test_a_large_table_is_sampled(sections: dict[str, Any], tmp_path: Path) -> None:
    """The estimate of the tokens lies within four of its own standard errors."""
    pq.write_table(tiny.reviews(5000, seed=1), tmp_path / "large.parquet", row_group_size=700)
    large = sections | {"data": {"train": str(tmp_path / "large.parquet"), "validation": {"fraction": 0.1}}}
    everything = tl.plan(**large, **FAST, sample_rows=5000)
    some = tl.plan(**large, **FAST, sample_rows=400)
    assert (everything.sampled, some.sampled) == (5000, 400)
    assert everything.training_rows == some.training_rows == 4500
    assert everything.tokens.error == 0 < some.tokens.error
    assert abs(some.tokens.total - everything.tokens.total) < 4 * some.tokens.error
    assert some.padding.sorted == pytest.approx(everything.padding.sorted, abs=0.05)
    assert some == tl.plan(**large, **FAST, sample_rows=400, gpu_memory=None) or some.cluster.flops == 1e12


def test_rows_without_text_or_label_are_counted(sections: dict[str, Any], tmp_path: Path) -> None:
    rows = tiny.reviews(20).to_pylist()
    rows[3]["text"], rows[4]["text"], rows[5]["label"] = None, "  ", None
    table = tmp_path / "holes.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    done = tl.plan(**sections | {"data": {"train": str(table), "validation": None}}, **FAST)
    assert (done.rows, done.unusable, done.training_rows) == (20, 3, 17)


def test_frames_are_planned_too(sections: dict[str, Any]) -> None:
    frame = sections | {"data": {"train": tiny.reviews(300), "validation": None}}
    assert tl.plan(**frame, **FAST).tokens == tl.plan(**sections, **FAST).tokens


def test_a_class_that_the_sample_missed_is_found(sections: dict[str, Any], tmp_path: Path) -> None:
    table = tiny.reviews(3000)
    labels = ["good"] * 2999 + ["bad"]
    pq.write_table(table.set_column(2, "label", pa.array(labels)), tmp_path / "rare.parquet")
    rare = sections | {"data": {"train": str(tmp_path / "rare.parquet"), "validation": None}}
    assert tl.plan(**rare, **FAST, sample_rows=10).shape.outputs == 2


# the choice


def test_one_process_takes_single_and_several_what_is_fastest(sections: dict[str, Any]) -> None:
    one, four = (tl.plan(**sections, **FAST, processes=number) for number in (1, 4))
    assert (one.choice, one.remedies) == ("single", ())
    assert "simpler, on 1 rank" in one.reason
    assert four.choice == "ddp"
    obstacles = {each.strategy: each.obstacle for each in four.strategies}
    assert obstacles["single"] == "runs on 1 process"
    assert obstacles["ddp"] is None
    seconds = {each.strategy: each.time.overlapped for each in four.strategies if each.obstacle is None}
    assert seconds["ddp"] <= 1.1 * min(seconds.values()), "the simplest of those that are about as fast"


def test_what_does_not_fit_is_told_with_what_would(sections: dict[str, Any]) -> None:
    """A GPU that cannot hold the activations; and one that cannot hold anything."""
    large = sections | {"train": {"batch_size": 4096, "micro_batch_tokens": 2**20}}
    needed = tl.plan(**large, **FAST, gpu_memory="80GiB").strategies[0].memory
    room = (needed.peak - needed.activations / 2) / 0.9
    tight = tl.plan(**large, **FAST, gpu_memory=room)
    assert tight.choice is None
    assert tight.reason.startswith("No strategy fits into 90% of a rank's ")
    assert any(remedy.startswith("train.micro_batch_tokens=") for remedy in tight.remedies)
    smaller = int(tight.remedies[0].split(":")[0].split("=")[1])
    again = tl.plan(**large, **FAST, gpu_memory=room, overrides=[f"train.micro_batch_tokens={smaller}"])
    assert again.choice == "single"
    hopeless = tl.plan(**sections, **FAST, gpu_memory="1MiB")
    assert hopeless.choice is None
    assert hopeless.remedies == (
        "None of smaller micro-batches, more processes, checkpointing and LoRA is enough alone.",
    )


def test_the_strategy_of_the_job_is_held_against_the_fastest(sections: dict[str, Any]) -> None:
    asked = sections | {"train": sections["train"] | {"strategy": "single"}}
    assert "The job asks for single: runs on 1 process." in tl.plan(**asked, **FAST, processes=4).reason


def test_the_batch_stays_and_ranks_run_out_of_rows(sections: dict[str, Any]) -> None:
    done = tl.plan(**sections, **FAST)
    assert [one.ranks for one in done.scaling] == [1, 8, 64, 512]
    efficiency = [one.efficiency for one in done.scaling]
    assert efficiency[0] == pytest.approx(1)
    assert efficiency == sorted(efficiency, reverse=True)
    assert efficiency[3] < 32 / 512
    assert all(one.time.computing >= done.scaling[2].time.computing for one in done.scaling)


def test_what_is_assumed_is_said(sections: dict[str, Any]) -> None:
    given = tl.plan(**sections, flops="2T", bandwidth="12.5GB", latency=1e-5)
    assert given.cluster.flops == 2e12
    assert given.cluster.within == given.cluster.across
    assert given.cluster.across.bandwidth == 12.5e9
    assert "as given" in given.assumptions[0]
    assert "(bandwidth given, latency given)" in given.assumptions[1]
    elsewhere = tl.plan(**sections, gpu_memory="24GB")
    assert elsewhere.setting.gpu
    assert elsewhere.memory_limit == 24e9
    assert "bandwidth assumed" in elsewhere.assumptions[1]
    assert not any("glibc" in said for said in elsewhere.assumptions)
    offloading = sections | {"train": {"fsdp": {"shard_ranks": 2}}}
    assert "not in the figures: train.fsdp.shard_ranks" in tl.plan(**offloading, **FAST).assumptions[-1]


def test_the_speed_is_measured_where_it_is_not_given(sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MEASURED_S", 0.01)
    done = tl.plan(**sections)
    assert done.cluster.flops > 1e6
    assert f"{cluster.TRAINING_EFFICIENCY:.0%} of a matrix product's" in done.assumptions[0]


# the command line


def test_the_command_prints_tables_and_json(
    sections: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(sections))
    words = ["plan", str(job), "--processes", "2", "--gpu-memory", "80GiB", "--flops", "100T"]
    assert main(words) == 0
    printed = capfd.readouterr().out
    for said in ("300 rows, all sampled", "fsdp reshard=true", "taken", "a batch has 32 rows: 480 ranks have none"):
        assert said in printed
    assert main([*words, "--json"]) == 0
    value = json.loads(capfd.readouterr().out)
    assert value["choice"] in ("ddp", "fsdp reshard=false", "fsdp reshard=true")
    assert [one["ranks"] for one in value["scaling"]] == [1, 8, 64, 512]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu_memory": "much"}, "gpu_memory: 'much' is not an amount"),
        ({"gpu_memory": "80"}, 'gpu_memory: 80 has no unit; write "80GB" or "80GiB"'),
        ({"gpu_memory": 80}, 'gpu_memory: 80 has no unit; write "80GB" or "80GiB"'),
        ({"bandwidth": "12.5"}, 'bandwidth: 12.5 has no unit; write "12.5GB" or "12.5GiB"'),
        ({"bandwidth": "-1GB"}, "bandwidth: '-1GB' is not an amount"),
        ({"flops": 0}, "flops: 0 is not an amount"),
        ({"latency": 0}, "above 0"),
        ({"processes": 0}, "1 or more"),
        ({"sample_rows": 0}, "1 or more"),
    ],
)
def test_wrong_arguments_are_usage_errors(sections: dict[str, Any], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        tl.plan(**sections, **options)


def test_wrong_tables_are_named(sections: dict[str, Any], tmp_path: Path) -> None:
    table = tmp_path / "empty.parquet"
    pq.write_table(tiny.reviews(5).slice(0, 0), table)
    with pytest.raises(DataError, match=r"empty\.parquet: none of 0 sampled rows"):
        tl.plan(**sections | {"data": {"train": str(table), "validation": None}}, **FAST)
    with pytest.raises(TableError, match="no column 'review'"):
        tl.plan(**sections, **FAST, overrides=["data.text=review"])


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GiB", 80 * 2**30), ("24 GB", 24e9), ("80G", 80e9), ("12.5GB/s", 12.5e9), ("512 mib", 2**29), (2**31, 2.0**31)],
)
def test_sizes(text: str | float, value: float) -> None:
    assert amounts.size_in_bytes(text, "gpu_memory") == value


@pytest.mark.parametrize(("text", "value"), [("120T", 120e12), ("1.5PFLOP/s", 1.5e15), ("1e12", 1e12), (5, 5.0)])
def test_operations(text: str | float, value: float) -> None:
    assert amounts.operations(text, "flops") == value


@given(number=st.floats(1e-3, 1e15), unit=st.sampled_from(["", " ", "b", "B", "/s", "FLOP", "GB", "gib", "TB", "K"]))
def test_bytes_have_a_unit_or_are_refused_with_one(number: float, unit: str) -> None:
    """No text without a unit is taken for bytes, whatever the number."""
    text = f"{number}{unit}"
    if unit.lower() in ("b", "gb", "gib", "tb", "k") and "e-" not in text:
        assert amounts.size_in_bytes(text, "gpu_memory") >= number
    else:
        with pytest.raises(UsageError, match="has no unit|is not an amount"):
            amounts.size_in_bytes(text, "gpu_memory")


# what stands for the table


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=200), rows=st.integers(1, 10**9))
def test_the_longest_row_is_no_shorter_than_the_samples_and_no_longer_than_allowed(
    lengths: list[int], rows: int
) -> None:
    estimate = workload.longest_row(np.array(lengths), rows=rows, limit=512)
    assert max(lengths) <= estimate <= 512


def test_the_longest_row_of_an_exponential_tail_is_about_right() -> None:
    table = np.ceil(np.random.default_rng(0).exponential(30.0, 200_000)).astype(np.int64)
    estimate = workload.longest_row(table[:2000], rows=200_000, limit=100_000)
    assert estimate == pytest.approx(table.max(), rel=0.25)


@given(
    lengths=st.lists(st.integers(1, 128), min_size=1, max_size=300),
    ranks=st.integers(1, 16),
    batch_size=st.integers(1, 64),
    tokens=st.integers(1, 2000),
)
def test_no_micro_batch_is_larger_than_the_planned_one(
    lengths: list[int], ranks: int, batch_size: int, tokens: int
) -> None:
    rows = np.array(lengths)
    planned = Workload(
        shape=None,  # type: ignore[arg-type]  # not looked at
        parameters=None,  # type: ignore[arg-type]
        setting=None,  # type: ignore[arg-type]
        lengths=rows,
        longest=int(rows.max()),
        batch_size=batch_size,
        micro_batch_tokens=tokens,
        seed=0,
    )
    most, length = workload.largest_micro_batch(planned, ranks)
    for batch in order.epoch_batches(rows, batch_size=batch_size, seed=0, epoch=0):
        for share in batching.micro_batches(rows[batch], world_size=ranks, micro_batch_tokens=tokens):
            for micro in share:
                assert len(micro) * rows[batch][micro].max(initial=0) <= most * length


def test_sorting_more_rows_than_the_sample_has(sections: dict[str, Any]) -> None:
    """Batches as large as the sample are planned as sorted in windows of 32 of them, as training does."""
    lengths = np.random.default_rng(0).integers(5, 100, 500)
    representative_lengths = workload.representative_lengths(lengths, rows=10**6, batch_size=256, seed=0)
    assert len(representative_lengths) == 256 * order.WINDOW_BATCHES
    assert set(representative_lengths) <= set(lengths)
    planned = case(representative_lengths, sections, batch_size=256)
    assert workload.padding(planned, lengths, ranks=1, max_length=128).sorted < 0.05


def test_more_ranks_than_rows_of_a_batch_cost_no_time(sections: dict[str, Any]) -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 500)
    planned = case(lengths, sections, batch_size=32)
    many, as_many = workload.work(planned, 10**12), workload.work(planned, 32)
    assert many == as_many
    padded = [workload.padding(planned, lengths, ranks=ranks, max_length=128) for ranks in (10**12, 33, 32)]
    assert padded[0] == padded[1] == padded[2]


def test_every_strategy_has_a_place(sections: dict[str, Any]) -> None:
    from torchlake import plugins

    assert set(plugins.names("strategies")) <= {sharding.plugin for sharding in SHARDINGS}
