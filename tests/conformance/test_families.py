"""Every architecture that transformers has for a task trains, resumes and scores: a new one is tested at once.

Each is built at a tiny size as the hub has it (`tests/families.py`): decoders without a padding token, encoder-decoders
that look for an end token, models whose answers padding would change. What it must answer is what transformers answers
for a row alone, without padding.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import families
import tiny
import torchlake as tl
import training_runs as runs
from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.models.spec import load_spec

QUICK = ["bart", "gpt2", "llama", "mixtral", "modernbert", "t5", "xlnet", "xmod"]
QUICK_WRITERS = ["gpt2", "qwen3", "mixtral"]
NOT_COMPILED = ("bart", "t5", "xlnet")
QUICK_RUNTIMES = ("eager", "onnx")
ROUNDING = 1e-5
TEXTS = [
    "good",
    "a lovely film , warm and very funny",
    "the plot is dull !",
    "it was boring and we did not like all of it , but the acting is great fun " * 2,
]
EXACT = [name for name in plugins.names("runtimes") if plugins.load("runtimes", name).TOLERANCE <= ROUNDING]


VARIED = {"llama", "modernbert", "t5", "xlnet"}
"Rotary positions, packed attention, two stacks, relative positions."


def some_quick(names: list[str], quick: list[str]) -> list[Any]:
    assert set(quick) <= set(names)
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def job(folder: Path, base: Path, **model: Any) -> dict[str, Any]:
    sections = runs.job(folder, base, rows=18, max_steps=2, batch_size=4, checkpoint_every="1steps", precision="fp32")
    sections["model"] |= model
    return sections


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are computed faster by one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train_and_resume(
    folder: Path, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, thorough: bool
) -> Path:
    """The model folder of a run that failed in its second step and was resumed.

    When `thorough`, it has the bytes of a run that did not fail.
    """
    engine = runs.Inline(1)
    with monkeypatch.context() as context:
        context.setenv("TORCHLAKE_FAILPOINT", "rank0.step:2:raise")
        context.setattr("torchlake.failpoints._hits", {})
        with pytest.raises(Exception, match=r"rank0\.step"):
            tl.train(run=folder / "resumed", engine=engine, **sections)
    resumed = tl.train(run=folder / "resumed", engine=engine, **sections)
    assert resumed.steps == 1
    assert len(runs.losses(folder / "resumed")) == 2
    if thorough:
        tl.train(run=folder / "whole", engine=engine, **sections)
        assert runs.losses(folder / "resumed") == runs.losses(folder / "whole")
        assert runs.weights_sha256(folder / "resumed") == runs.weights_sha256(folder / "whole")
    return resumed.model


def alone(model: Path) -> np.ndarray:
    """The probabilities (B, C) that transformers gives each of `TEXTS` in a batch of its own."""
    stock = AutoModelForSequenceClassification.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.inference_mode():
        rows = [stock(torch.tensor([tokenizer(text)["input_ids"]])).logits.softmax(-1) for text in TEXTS]
    return torch.cat(rows).numpy()


def agrees(model: Path, runtime: str, expected: np.ndarray) -> bool:
    """Whether a runtime takes the model; what it answers then is what transformers answers."""
    module = plugins.load("runtimes", runtime)
    if module.refusal(model) is not None:
        return False
    try:
        if hasattr(module, "prepare"):
            module.prepare(model, load_spec(model), [])
        table = pa.table({"text": TEXTS})
        scored = tl.predict(model, table, engine=tiny.Here(), runtime=runtime, all_probabilities=True)
    except UsageError:
        return False
    assert scored["error"].null_count == len(TEXTS), (runtime, scored["error"].to_pylist())
    found = np.stack([scored[f"prob_{label}"].to_numpy() for label in ("bad", "good")], axis=1)
    np.testing.assert_allclose(found, expected, atol=ROUNDING, err_msg=runtime)
    return True


@pytest.mark.filterwarnings("default")  # transformers' own, of families that it is about to rename or to replace
@pytest.mark.parametrize("name", some_quick(families.classifiers(), ["llama", "t5"]))
def test_a_classifier_trains_resumes_and_scores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = families.build(tmp_path / "base", name, kind="classifier")
    model = train_and_resume(tmp_path, job(tmp_path, base), monkeypatch, thorough=name not in QUICK)
    expected = alone(model)
    assert np.ptp(expected, axis=0).max() > 100 * ROUNDING, "answers that cannot be told apart"
    runtimes = QUICK_RUNTIMES if name in QUICK else [runtime for runtime in EXACT if runtime != "compiled"]
    assert "eager" in [runtime for runtime in runtimes if agrees(model, runtime, expected)]


@pytest.mark.slow  # half a minute each
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", QUICK)
def test_a_compiled_classifier_scores(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = families.build(tmp_path / "base", name, kind="classifier")
    model = train_and_resume(tmp_path, job(tmp_path, base), monkeypatch, thorough=True)
    assert agrees(model, "compiled", alone(model)) == (name not in NOT_COMPILED)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", some_quick(families.writers(), ["mixtral"]))
def test_a_language_model_trains_resumes_and_measures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`evaluate` gives the loss that transformers gives the same blocks; answers come of every prompt."""
    base = families.build(tmp_path / "base", name, kind="writer")
    sections = job(tmp_path, base, task="text_generation", max_length=24)
    model = train_and_resume(tmp_path, sections, monkeypatch, thorough=name not in QUICK_WRITERS)
    stock, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    stream = [token for text in TEXTS for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
    total = 0.0
    for first in range(0, len(stream) - 1, 23):
        block = torch.tensor([stream[first : first + 24]])
        with torch.inference_mode():
            logits = stock(input_ids=block, use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, block[0, 1:], reduction="sum").item()
    measured = tl.evaluate(model, pa.table({"text": TEXTS}), engine=tiny.Here())
    assert measured.metrics["loss"].value == pytest.approx(total / (len(stream) - 1), rel=1e-4)
    written = tl.predict(model, pa.table({"text": TEXTS}), engine=tiny.Here(), max_new_tokens=3)
    assert written["error"].null_count == len(TEXTS), written["error"].to_pylist()
