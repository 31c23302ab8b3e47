"""Fused convolutions: found in models of transformers, equal to their modules, and left out where they would not be."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessorPil

import tiny
import torchlake as tl
from torchlake import plugins
from torchlake.models.spec import load_spec
from torchlake.runtimes import eager, fused

LABELS = ["bad", "fair", "good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ResNet with bottlenecks whose norms have statistics, scales and shifts."""
    made = tmp_path_factory.mktemp("resnet")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shape: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 2]}
        model = ResNetForImageClassification(ResNetConfig(num_labels=3, id2label=dict(enumerate(LABELS)), **shape))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 2.0)
                module.weight.data.uniform_(0.5, 1.5)
                module.bias.data.normal_(0, 0.2)
        model.save_pretrained(made)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(made)
    return made


def outputs(folder: Path, runtime: Any, rows: int) -> np.ndarray:
    spec = load_spec(folder, "image_classification")
    pixels = np.random.default_rng(rows).normal(size=(rows, 3, 32, 32)).astype(np.float32)
    found: np.ndarray = runtime.load(folder, spec, device="cpu")(pixel_values=pixels)
    return found


@pytest.mark.parametrize("rows", [1, 7])
def test_outputs_are_those_of_the_modules(folder: Path, rows: int) -> None:
    expected = outputs(folder, eager, rows)
    np.testing.assert_allclose(outputs(folder, fused, rows), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_every_convolution_holds_its_norm_and_its_activation(folder: Path) -> None:
    model = plugins.load("tasks", "image_classification").load_model(folder, load_spec(folder, "image_classification"))
    chains = fused._chains(model, torch.randn(1, 3, 32, 32))
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert len(norms) == len(chains)
    assert {chain.norm for chain in chains} == set(norms)
    assert sum(chain.activation is not None for chain in chains) == 7
    assert sum(chain.relu is not None for chain in chains) == 3


class Reader(torch.nn.Module):
    """Reads what a convolution returned beside the norm: folding the norm would change it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)

    def forward(self, pixel_values: torch.Tensor) -> Any:
        convolved = self.convolution(pixel_values)
        summed = convolved.mean((2, 3)) + self.norm(convolved).mean((2, 3)) * 2
        return type("Answer", (), {"logits": summed})


def test_a_change_of_outputs_is_seen() -> None:
    torch.manual_seed(0)
    model = Reader().eval()
    model.norm.running_mean.normal_()
    assert fused.fuse(model, torch.randn(2, 3, 8, 8)) > 0.01


def test_a_model_whose_outputs_change_stays_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "TOLERANCE", 0.0)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(outputs(folder, fused, 3), outputs(folder, eager, 3))
    assert "fused convolutions change outputs by" in caplog.text


def test_it_is_the_default_of_models_with_norms_on_cpus(folder: Path, tmp_path: Path) -> None:
    vision = tiny.build_vision(tmp_path / "vit")
    assert "no BatchNorm" in str(fused.refusal(vision))
    images = tiny.digits(4).select(["id", "image"])
    done = tl.predict(folder, images, tmp_path / "out", key="id", task="image_classification", engine=tiny.Here())
    assert done.record["provenance"]["runtime"] == "fused"
