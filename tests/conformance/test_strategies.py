"""What every strategy promises (see torchlake/strategies/__init__.py); a new file there is held to it unasked."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import families
import training_runs as runs
from sweeps import sweep
from torchlake import plugins
from torchlake.config.sections.train import TrainConfig
from torchlake.distributed import Group

NAMES = plugins.names("strategies")
TOLERANCE = 1e-5


def ranks(name: str) -> int:
    limit = plugins.load("strategies", name).MAX_RANKS
    return 2 if limit is None else min(2, limit)


@pytest.mark.parametrize("name", NAMES)
def test_it_declares_what_it_can(name: str) -> None:
    strategy = plugins.load("strategies", name)
    assert strategy.MAX_RANKS is None or strategy.MAX_RANKS >= 1
    assert set(strategy.never) <= set(plugins.names("tasks"))
    assert all(reason for reason in strategy.never.values())


def skip_where_it_cannot_run(name: str) -> None:
    reason = plugins.load("strategies", name).refusal(TrainConfig())
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", sweep((name for name in NAMES if name != "single"), quick=()))
def test_one_rank_trains_like_single(name: str, tmp_path: Path, tiny_bert: Path) -> None:
    skip_where_it_cannot_run(name)
    sections = runs.job(tmp_path, tiny_bert, rows=40, batch_size=10, clip_norm=0.5, strategy="single")
    runs.succeed(tmp_path / "single", sections)
    sections["train"]["strategy"] = name
    runs.succeed(tmp_path / name, sections, ranks=1)
    assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> tuple[Path, dict[str, Any]]:
    """A run of `single` and its job: one batch of each epoch has one row."""
    folder = tmp_path_factory.mktemp("single")
    sections = runs.job(
        folder,
        tiny_bert,
        rows=47,
        batch_size=17,
        micro_batch_tokens=64,
        clip_norm=0.5,
        checkpoint_every="2steps",
        strategy="single",
    )
    runs.succeed(folder / "run", sections)
    assert sorted(line["rows"] for line in runs.metrics(folder / "run") if "loss" in line) == [1, 1, *[17] * 4]
    return folder / "run", sections


@pytest.mark.parametrize("name", sweep(NAMES, quick={*NAMES} - {"single"}))
def test_it_trains_like_single(name: str, tmp_path: Path, single: tuple[Path, dict[str, Any]]) -> None:
    """The losses of `single`, over batches of one row too, and a model that loads without the strategy."""
    skip_where_it_cannot_run(name)
    one_run, sections = single
    sections = {**sections, "train": {**sections["train"], "strategy": name}}
    runs.succeed(tmp_path / name, sections, ranks=ranks(name))
    expected = runs.losses(one_run)
    assert runs.losses(tmp_path / name) == pytest.approx(expected, abs=TOLERANCE)
    norms = [[line["grad_norm"] for line in runs.metrics(run) if "loss" in line] for run in (one_run, tmp_path / name)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    from safetensors.torch import load_file

    one, other = (load_file(run / "model" / "model.safetensors") for run in (one_run, tmp_path / name))
    assert one.keys() == other.keys()
    # A softmax does not see a key's bias: its gradient is rounding alone, which AdamW makes steps of full length from.
    seen = [key for key in one if not key.endswith("key.bias")]
    assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in seen)


@pytest.mark.parametrize("name", sweep((name for name in NAMES if name != "single"), quick=()))
def test_it_trains_a_language_model_like_single(name: str, tmp_path: Path, tiny_gpt2: Path) -> None:
    """Packed blocks, and weights that are tied."""
    skip_where_it_cannot_run(name)
    sections = runs.job(tmp_path, tiny_gpt2, rows=40, epochs=1, batch_size=5, micro_batch_tokens=50, strategy="single")
    sections["model"] |= {"task": "text_generation", "max_length": 24}
    one = runs.succeed(tmp_path / "single", sections)
    sections["train"]["strategy"] = name
    other = runs.succeed(tmp_path / name, sections, ranks=ranks(name))
    assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)
    assert other.metrics == pytest.approx(one.metrics, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "single"])
def test_it_trains_an_encoder_decoder_like_single(name: str, tmp_path: Path) -> None:
    """Two lists of layers, and ranks without a row: BART computes only rows with an end token."""
    skip_where_it_cannot_run(name)
    base = families.build(tmp_path / "base", "bart", kind="classifier", dropout=False)
    sections = runs.job(tmp_path, base, rows=20, epochs=1, batch_size=5, micro_batch_tokens=1, strategy="single")
    runs.succeed(tmp_path / "single", sections)
    sections["train"]["strategy"] = name
    runs.succeed(tmp_path / name, sections, ranks=ranks(name))
    assert runs.losses(tmp_path / name) == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


def llama_job(tmp_path: Path, kind: Literal["classifier", "writer"]) -> dict[str, Any]:
    """A job for a model that has a plan for tensor parallelism: two layers of four heads."""
    base = families.build(tmp_path / "base", "llama", kind=kind, dropout=False)
    options = {"rows": 60, "epochs": 1, "batch_size": 10, "micro_batch_tokens": 64, "clip_norm": 0.5}
    sections = runs.job(tmp_path, base, strategy="single", **options)
    if kind == "writer":
        sections["model"] |= {"task": "text_generation", "max_length": 24}
    return sections


def with_split_layers(sections: dict[str, Any], **fsdp: Any) -> dict[str, Any]:
    return {**sections, "train": {**sections["train"], "strategy": "fsdp", "fsdp": {"tensor_parallel": 2, **fsdp}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("classifier", 2),
        ("writer", 2),
        ("classifier", 4),
    ],
)
def test_split_layers_train_like_single(kind: Literal["classifier", "writer"], number: int, tmp_path: Path) -> None:
    """Two ranks see the same rows; with four, each part is also sharded over the two pairs."""
    sections = llama_job(tmp_path, kind)
    one = runs.succeed(tmp_path / "single", sections)
    other = runs.succeed(tmp_path / "split", with_split_layers(sections), ranks=number)
    lines = [[line for line in runs.metrics(tmp_path / run) if "loss" in line] for run in ("split", "single")]
    for name in ("loss", "grad_norm", "rows", "tokens"):
        found, expected = ([line[name] for line in each] for each in lines)
        assert found == pytest.approx(expected, abs=TOLERANCE, rel=1e-4), name
    assert other.metrics == pytest.approx(one.metrics, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fsdp"), [(2, {}), (4, {}), (8, {"shard_ranks": 2})])
def test_a_checkpoint_of_split_layers_continues_whole_and_split_again(
    number: int, fsdp: dict[str, Any], tmp_path: Path
) -> None:
    """Split, then whole on one rank, then split: the losses of `single`."""
    sections = llama_job(tmp_path, "classifier")
    split = with_split_layers(sections, **fsdp)
    stop = ("train.max_restarts=0", "train.checkpoint_every=1steps")
    for job, ranks, place in ((split, number, "rank0.step:3"), (sections, 1, "rank0.step:2")):
        stopped = runs.attempt(tmp_path / "run", job, ranks=ranks, failpoint=f"{place}:raise", overrides=stop)
        assert stopped.exit_code == 70
    assert runs.succeed(tmp_path / "run", split, ranks=number, overrides=stop).steps == 2
    runs.succeed(tmp_path / "single", sections)
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(tmp_path / "single"), abs=TOLERANCE)


@pytest.mark.parametrize("name", sweep(NAMES, quick={"fsdp"}))
def test_its_checkpoint_continues_under_any_other(
    name: str, tmp_path: Path, single: tuple[Path, dict[str, Any]]
) -> None:
    skip_where_it_cannot_run(name)
    one_run, sections = single
    sections = {**sections, "train": {**sections["train"], "strategy": name}}
    stopped = runs.attempt(
        tmp_path / "run",
        sections,
        ranks=ranks(name),
        failpoint="rank0.step:6:raise",
        overrides=("train.max_restarts=0",),
    )
    assert stopped.exit_code == 70
    sections["train"]["strategy"] = "single"
    assert runs.succeed(tmp_path / "run", sections).steps == 2
    assert runs.losses(tmp_path / "run") == pytest.approx(runs.losses(one_run), abs=TOLERANCE)


def test_single_is_the_model_itself() -> None:
    single = plugins.load("strategies", "single")
    model = nn.Linear(2, 2)
    group = Group(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    module, optimizer = single.wrap(
        model, lambda shared: torch.optim.AdamW(shared.parameters(), fused=True), group=group, train=TrainConfig()
    )
    assert module is model
    with single.no_sync(model):
        single.backward(model, model(torch.ones(1, 2)).sum() * 100)
    before = single.clip_norm(model, 1.0, 10.0)
    assert float(before) == pytest.approx(float(torch.tensor([10.0] * 6).norm()))
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    assert float(gradients.norm()) == pytest.approx(1.0, rel=1e-4)
    single.step(model, optimizer, torch.tensor(True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert single.model_shard(model, ["weight", "bias"], group).keys() == {"weight", "bias"}
