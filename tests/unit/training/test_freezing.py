"""model.freeze: what it names stays as it is, to the bit, on every strategy, and needs no gradient and no moments."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import families
import tiny
import torchlake as tl
import training_runs as runs
from sweeps import sweep
from torchlake.config.job import load_job
from torchlake.errors import ConfigError
from torchlake.optim.depth import freeze, frozen_names, layers, untrained_layers
from torchlake.tasks._pretrained import base_model

FAMILIES = {
    "bert": ("bert.embeddings.", "bert.encoder.layer.{}.", {"bert.pooler.dense", "classifier"}),
    "gpt2": ("transformer.w", "transformer.h.{}.", {"score"}),
    "t5": ("transformer.shared.", "transformer.encoder.block.{}.", {"classification_head"}),
}


def classifier(folder: Path, family: str) -> Any:
    base = families.build(folder, family, kind="classifier")
    return base_model(base, tiny.spec_for("single_label", ("a", "b")), "AutoModelForSequenceClassification")


@pytest.mark.parametrize("family", FAMILIES)
def test_words_numbers_and_patterns_name_the_parameters(tmp_path: Path, family: str) -> None:
    model = classifier(tmp_path / "base", family)
    embeddings, layer, heads = FAMILIES[family]
    every = {name for name, _ in model.named_parameters()}
    first = {name for name in every if name.startswith(layer.format(0))}
    words = {name for name in every if name.startswith(embeddings)}
    assert first
    assert words
    assert frozen_names(model, "embeddings") == words
    assert frozen_names(model, 1) == words | first
    assert frozen_names(model, "body") == {name for name in every if not name.startswith(tuple(heads))}
    assert frozen_names(model, (layer.format(0).rstrip("."),)) == first
    assert frozen_names(model, ("*.bias",)) == {name for name in every if name.endswith(".bias")}
    with pytest.raises(ConfigError, match=r"model.freeze: 'bart' matches no parameter; the names are "):
        frozen_names(model, ("*.bias", "bart"))
    with pytest.raises(ConfigError, match=rf"model.freeze=99: {type(model).__name__} has {len(layers(model))} layers"):
        freeze(model, 99)
    with pytest.raises(ConfigError, match=r"no parameter of .* would be trained"):
        freeze(model, ("*",))
    freeze(model, 1)
    assert {name for name, each in model.named_parameters() if not each.requires_grad} == words | first
    assert untrained_layers(model) == 1


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    sweep([("single", 1), ("ddp", 2), ("fsdp", 2), ("deepspeed", 2)], quick=[("fsdp", 2)]),
)
@pytest.mark.parametrize("precision", sweep(["fp32", "bf16_weights"], quick=["bf16_weights"]))
def test_what_is_frozen_stays_to_the_bit(
    tmp_path: Path, tiny_bert: Path, strategy: str, ranks: int, precision: str
) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    options: dict[str, Any] = {"epochs": 1, "strategy": strategy, "precision": precision, "max_restarts": 0}
    sections = runs.job(tmp_path, tiny_bert, rows=64, **options)
    sections["model"]["freeze"] = 1
    # Killed in the middle and continued.
    assert runs.attempt(tmp_path / "run", sections, ranks=ranks, failpoint="rank0.step:4:raise").exit_code
    done = runs.succeed(tmp_path / "run", sections, ranks=ranks)
    assert done.steps == 3
    before, after = load_file(tiny_bert / "model.safetensors"), load_file(tmp_path / "run/model/model.safetensors")
    frozen = ("bert.embeddings.", "bert.encoder.layer.0.")
    compared = {
        name: torch.equal(tensor, before.get(name.removeprefix("bert."), before.get(name, torch.empty(0))))
        for name, tensor in after.items()
        if "pooler" not in name and "classifier" not in name
    }
    assert compared == {name: name.startswith(frozen) for name in compared}
    assert any(compared.values())
    assert not all(compared.values())


def test_a_head_that_is_frozen_is_the_one_that_was_drawn(tmp_path: Path, tiny_bert: Path) -> None:
    """The run's accuracy on its own rows is that of the model folder: both have the head that the seed draws."""
    sections = runs.job(tmp_path, tiny_bert, epochs=1, seed=3)
    sections["data"]["validation"] = sections["data"]["train"]
    sections["model"]["freeze"] = ["classifier"]
    done = runs.succeed(tmp_path / "run", sections)
    assert done.metrics is not None
    found = tl.evaluate(tmp_path / "run/model", sections["data"]["train"])
    assert found.metrics["macro_f1"].value == pytest.approx(done.metrics["macro_f1"])
    torch.manual_seed(3)
    drawn = base_model(tiny_bert, tiny.spec_for("single_label", ("bad", "good")), "AutoModelForSequenceClassification")
    kept = load_file(tmp_path / "run/model/model.safetensors")["classifier.weight"]
    assert torch.equal(kept, drawn.state_dict()["classifier.weight"])


def test_a_plan_counts_what_is_frozen(tmp_path: Path, tiny_bert: Path) -> None:
    pq.write_table(tiny.reviews(64), tmp_path / "reviews.parquet")
    job = {"data": {"train": str(tmp_path / "reviews.parquet")}, "train": {"precision": "fp32"}}
    whole = tl.plan(model={"base": str(tiny_bert)}, flops="1G", **job)
    part = tl.plan(model={"base": str(tiny_bert), "freeze": 1}, flops="1G", **job)
    assert part.parameters.trainable < whole.parameters.trainable
    assert part.parameters.total == whole.parameters.total
    one, other = part.strategies[0].memory, whole.strategies[0].memory
    assert one.gradients == 4 * part.parameters.trainable
    assert one.optimizer == 8 * part.parameters.trainable
    assert one.activations < other.activations
    assert part.strategies[0].time.computing < whole.strategies[0].time.computing
    lion = tl.plan(model={"base": str(tiny_bert)}, flops="1G", **{**job, "train": {"optimizer": "lion"}})
    assert lion.strategies[0].memory.optimizer == 4 * whole.parameters.trainable


def test_adapters_freeze_by_themselves() -> None:
    with pytest.raises(ConfigError, match="model.lora already freezes everything except adapters and head"):
        load_job(None, data={"train": "t"}, model={"base": "b", "lora": {"rank": 2}, "freeze": "body"})
