"""Optimizers: torch's own steps, on every strategy, with checkpoints that continue on any number of ranks."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import families
import tiny
import training_runs as runs
from sweeps import examples, sweep
from torchlake import errors
from torchlake.config.sections.train import TrainConfig
from torchlake.errors import ConfigError, MissingExtra
from torchlake.optim.depth import depths, layer_scales, layers
from torchlake.optim.optimizers import check_installed, make_optimizer, set_learning_rate, trainable_names
from torchlake.optim.schedule import check, learning_rate, phases
from torchlake.strategies import _native
from torchlake.tasks._pretrained import base_model

OTHERS = ("adamw_8bit", "sgd", "adafactor", "lion")
BETWEEN_STRATEGIES = 1e-4
"A sum over two ranks rounds differently, and lion takes the sign of it."
REFUSED = {(strategy, name) for strategy in ("fsdp", "deepspeed") for name in ("adamw_8bit", "adafactor")}
REFERENCES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.7),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}
OPTIONS: dict[str, dict[str, Any]] = {"adamw": {"betas": (0.8, 0.95)}, "sgd": {"momentum": 0.7}, "adafactor": {}}


@pytest.mark.parametrize("name", ["adamw", *OTHERS])
def test_a_first_step_that_is_not_applied_changes_no_later_one(name: str) -> None:
    """Memory that was not set is NaN here; on a GPU the first step of all is such a one."""
    train = TrainConfig(optimizer=name, **OPTIONS.get(name, {}))
    try:
        check_installed(train)
    except MissingExtra as error:
        pytest.skip(str(error))
    torch.use_deterministic_algorithms(True)
    try:
        one, other = network(), network()
        for each, outcomes in ((one, (False, True, True)), (other, (True, True))):
            optimizer = make_optimizer(each, train)
            for applied in outcomes:
                each(torch.ones(4, 6)).square().sum().backward()
                _native.step(each, optimizer, torch.tensor(applied))
    finally:
        torch.use_deterministic_algorithms(False)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))


def steps(module: nn.Module, optimizer: torch.optim.Optimizer, number: int = 4) -> list[torch.Tensor]:
    """The weights after so many steps on the same inputs."""
    torch.manual_seed(6)
    for _ in range(number):
        module(torch.randn(7, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().clone() for each in module.parameters()]


@pytest.mark.parametrize("name", REFERENCES)
def test_the_steps_are_those_of_torch(name: str) -> None:
    mine, theirs = network(), network()
    train = TrainConfig.model_validate({"optimizer": name, "learning_rate": 1e-2, "weight_decay": 0.1, **OPTIONS[name]})
    found = steps(mine, make_optimizer(mine, train))
    matrices = [each for each in theirs.parameters() if each.ndim > 1]
    others = [each for each in theirs.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    for one, other in zip(found, steps(theirs, REFERENCES[name](groups)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_lion_steps_by_the_sign_of_its_moment() -> None:
    module = nn.Linear(3, 1, bias=False)
    before = module.weight.detach().clone()
    train = TrainConfig(optimizer="lion", learning_rate=0.01, weight_decay=0.5)
    optimizer = make_optimizer(module, train)
    moment = torch.zeros_like(before)
    for grad in (torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[-0.3, 4.0, -9.0]])):
        module.weight.grad = grad
        optimizer.step()
        before = before * (1 - 0.01 * 0.5) - 0.01 * (0.9 * moment + 0.1 * grad).sign()
        moment = 0.99 * moment + 0.01 * grad
        torch.testing.assert_close(module.weight.detach(), before)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OTHERS)
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2), ("deepspeed", 2)])
def test_two_ranks_give_the_losses_of_one(
    tmp_path: Path, tiny_bert: Path, optimizer: str, strategy: str, ranks: int
) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, optimizer=optimizer, layer_decay=0.8, micro_batch_tokens=256)
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    both = {**sections, "train": {**sections["train"], "strategy": strategy}}
    if (strategy, optimizer) in REFUSED:
        refused = runs.attempt(tmp_path / "two", both, ranks=ranks)
        assert f"train.strategy '{strategy}' cannot run here: train.optimizer={optimizer}" in refused.error
        assert not (tmp_path / "two").exists()
        return
    runs.succeed(tmp_path / "one", sections)
    runs.succeed(tmp_path / "two", both, ranks=ranks)
    assert runs.losses(tmp_path / "two") == pytest.approx(runs.losses(tmp_path / "one"), abs=BETWEEN_STRATEGIES)


@pytest.mark.parametrize("optimizer", sweep(OTHERS, quick=()))
def test_a_killed_run_continues_on_another_number_of_ranks(tmp_path: Path, tiny_bert: Path, optimizer: str) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, optimizer=optimizer, max_restarts=0)
    other = "ddp" if ("fsdp", optimizer) in REFUSED else "fsdp"
    runs.succeed(tmp_path / "whole", sections)
    assert runs.attempt(tmp_path / "same", sections, failpoint="rank0.step:5:raise").exit_code
    runs.succeed(tmp_path / "same", sections)
    assert runs.losses(tmp_path / "same") == runs.losses(tmp_path / "whole")
    assert runs.attempt(tmp_path / "other", sections, failpoint="rank0.step:5:raise").exit_code
    runs.succeed(tmp_path / "other", sections, ranks=2, overrides=(f"train.strategy={other}",))
    assert runs.losses(tmp_path / "other") == pytest.approx(runs.losses(tmp_path / "whole"), abs=BETWEEN_STRATEGIES)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    for name, library in {"lion": "lion-pytorch", "adamw_8bit": "bitsandbytes"}.items():
        train = TrainConfig.model_validate({"optimizer": name})
        with pytest.raises(MissingExtra, match=f"train.optimizer={name} needs the library '{library}'.*pip install"):
            check_installed(train)
        with pytest.raises(MissingExtra):
            make_optimizer(nn.Linear(2, 2), train)


FAMILIES = {
    "bert": ("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.{}.", "classifier.weight"),
    "gpt2": ("transformer.wpe.weight", "transformer.h.{}.", "transformer.ln_f.weight"),
    "t5": ("transformer.shared.weight", "transformer.encoder.block.{}.", "classification_head.dense.weight"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_learn_slower_the_deeper_they_lie(tmp_path: Path, family: str) -> None:
    base = families.build(tmp_path / "base", family, kind="classifier")
    model = base_model(base, tiny.spec_for("single_label", ("a", "b")), "AutoModelForSequenceClassification")
    embeddings, layer, head = FAMILIES[family]
    number, scales = len(layers(model)), layer_scales(model, 0.5)
    assert number >= 2
    assert scales.keys() == dict(model.named_parameters()).keys()
    assert scales[embeddings] == 0.5 ** (number + 1)
    assert scales[head] == 1.0
    for index in range(2):
        inside = {scale for name, scale in scales.items() if name.startswith(layer.format(index))}
        assert inside == {0.5 ** (number - index)}
    assert max(depths(model).values()) == number + 1
    assert layer_scales(model, None) == {}

    train = TrainConfig(learning_rate=0.1)
    optimizer, names = make_optimizer(model, train, scales), trainable_names(model, train, scales)
    parameters = dict(model.named_parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameters[name]) for name in names] == [id(each) for each in held]
    set_learning_rate(optimizer, 0.2)
    rates = {id(each): group["lr"] for group in optimizer.param_groups for each in group["params"]}
    assert all(rates[id(parameters[name])] == pytest.approx(0.2 * scales[name]) for name in names)


def test_a_model_without_layers_has_no_layer_decay() -> None:
    with pytest.raises(ConfigError, match=r"train.layer_decay: Sequential has no list of layers"):
        layer_scales(network(), 0.9)


SCHEDULES = st.sampled_from(["linear", "cosine", "constant", "wsd"])


@settings(max_examples=examples(200, quick=30))
@given(
    name=SCHEDULES,
    total=st.integers(1, 400),
    warmup=st.one_of(st.floats(0, 0.5), st.integers(1, 100)),
    cooldown=st.floats(0.01, 0.5),
    lowest=st.floats(0, 1),
)
def test_every_schedule_rises_to_the_peak_and_falls_to_the_minimum(
    name: str, total: int, warmup: float, cooldown: float, lowest: float
) -> None:
    options: dict[str, Any] = {"schedule": name, "learning_rate": 1.0}
    options |= {"warmup_steps": warmup} if isinstance(warmup, int) else {"warmup": warmup}
    options |= {"cooldown": cooldown} if name == "wsd" else {}
    options |= {"min_learning_rate": lowest} if name != "constant" else {}
    train = TrainConfig.model_validate(options)
    rising, falling = phases(total, train)
    assume(rising < total and rising + falling <= total)
    rates = [learning_rate(step, total, train) for step in range(total)]
    assert rates[:rising] == pytest.approx([(step + 1) / rising for step in range(rising)])
    assert rates[rising] == 1.0
    assert all(one >= other - 1e-12 for one, other in pairwise(rates[rising:]))
    assert all(rate >= lowest - 1e-12 for rate in rates[rising:]) or name == "constant"
    assert rates[rising : total - falling] == [1.0] * (total - falling - rising)
    if falling and name != "cosine":
        assert rates[-1] == pytest.approx(lowest + (1 - lowest) / falling)
    if name == "constant":
        assert set(rates[rising:]) == {1.0}


def test_a_cosine_is_between_its_ends_in_the_middle() -> None:
    train = TrainConfig(schedule="cosine", warmup=0.0, learning_rate=1.0, min_learning_rate=0.2)
    assert learning_rate(50, 100, train) == pytest.approx(0.6)
    assert learning_rate(25, 100, train) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)


def test_a_run_that_ends_in_its_warm_up_is_refused(tmp_path: Path, tiny_bert: Path) -> None:
    sections = runs.job(tmp_path, tiny_bert, epochs=1, warmup_steps=9)  # of 9
    refused = runs.attempt(tmp_path / "run", sections)
    assert "ConfigError: train.warmup_steps=9: the run has 9 steps" in refused.error
    with pytest.raises(ConfigError, match=r"the last 50 of them \(train.cooldown\)"):
        check(100, TrainConfig(schedule="wsd", cooldown=0.5, warmup_steps=60))
    runs.succeed(tmp_path / "run", sections, overrides=("train.warmup_steps=8",))
    rates = [line["learning_rate"] for line in runs.metrics(tmp_path / "run") if "learning_rate" in line]
    assert rates == pytest.approx([1e-3 * step / 8 for step in range(1, 9)] + [1e-3])
