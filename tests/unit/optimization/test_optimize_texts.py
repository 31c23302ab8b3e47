"""`optimize` for models that write: what agrees is judged by texts in fp32, and by probabilities in 8 bits."""

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tiny
import torchlake as tl
from torchlake.errors import UsageError
from torchlake.optimization.texts import MeasuredTexts, ReferenceTexts, compare_texts, outside_texts

PROMPTS = ["the film", "a", "the plot of this movie is", "good", "not a film , but a story", "we", "it was", "a"]


def measured(texts: list[str | None], log_probs: list[float] | None) -> MeasuredTexts:
    nothing = [np.zeros(0, np.int64)] * len(texts)
    return MeasuredTexts(
        rows=np.arange(len(texts)),
        texts=texts,
        prompts=nothing,
        answers=nothing,
        log_probs=None if log_probs is None else np.array(log_probs),
        errors={},
        by_batch_tokens={8192: 1.0},
        batch_tokens=8192,
        tokens_per_s=1.0,
        rows_per_s=1.0,
        device="cpu",
    )


REFERENCE = ReferenceTexts(
    texts=["abcd", "efgh", None, "ijkl"], tokens=np.array([10, 10, 0, 20]), log_probs=np.array([-5.0, -5.0, 0.0, -10.0])
)


def test_texts_are_compared_up_to_the_first_difference() -> None:
    found = compare_texts([measured(["abcd", "efxx", "new", "ijkl"], [-5.0, -5.2, -1.0, -10.0])], REFERENCE)
    assert (found.rows, found.failed) == (3, 0)
    assert found.agreement == pytest.approx(2 / 3)
    assert found.common == pytest.approx((1 + 0.5 + 1) / 3)
    assert found.nats == pytest.approx(-0.2 / 40)


@pytest.mark.parametrize(
    ("texts", "log_probs", "exact", "words"),
    [
        (["abcd", "efgh", "", "ijkl"], [-5.0, -5.0, 0.0, -10.0], True, None),
        (["abcd", "efxx", "", "ijkl"], [-5.0, -5.0, 0.0, -10.0], True, "66.67% of the texts are equal"),
        (["abcd", "efxx", "", "ijkl"], [-5.0, -5.1, 0.0, -10.1], False, None),
        (["abcd", "efgh", "", "ijkl"], [-5.0, -5.0, 0.0, -10.5], False, r"changes by -0\.0125 nats a token"),
        (["abcd", "efgh", "", "ijkl"], [-5.0, -5.0, 0.0, float("nan")], False, "changes by"),
        (["abcd", "efxx", "", "ijkl"], None, False, "66.67% of the texts are equal"),
        (["abcd", None, "", "ijkl"], [-5.0, -5.0, 0.0, -10.0], False, "1 of 3 rows failed"),
    ],
)
def test_fp32_is_judged_by_texts_and_8_bits_by_probabilities(
    texts: list[str | None], log_probs: list[float] | None, exact: bool, words: str | None
) -> None:
    found = compare_texts([measured(texts, log_probs)], REFERENCE)
    said = outside_texts(found, exact=exact, min_agreement=0.99)
    assert (
        said is None
        if words is None
        else said is not None and pa.compute.match_substring_regex([said], words)[0].as_py()
    )


@pytest.fixture
def model(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


def test_what_writes_fastest_and_agrees_is_chosen_and_predict_uses_it(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"text": PROMPTS})
    pq.write_table(table, tmp_path / "prompts.parquet")
    runtimes = ["eager", "ctranslate2", "onnx"]
    done = tl.optimize(model, tmp_path / "prompts.parquet", runtimes=runtimes, max_new_tokens=6, engine=tiny.Here())
    by_name = {one.runtime: one for one in done.candidates if one.threads is not None}
    assert by_name.keys() == {"eager", "ctranslate2"}
    assert by_name["ctranslate2"].agreement == 1.0
    assert abs(by_name["ctranslate2"].nats or 0.0) < 1e-4
    assert done.tokens_per_s is not None
    assert done.tokens_per_s > 0
    assert any(one.verdict.startswith("refused") for one in done.candidates if one.runtime == "onnx")
    choice = json.loads((model / "runtime.json").read_text())
    assert choice["runtime"] == done.runtime
    assert choice["task"] == "text_generation"
    out = tmp_path / "out"
    with caplog.at_level("INFO"):
        record = tl.predict(model, tmp_path / "prompts.parquet", out, max_new_tokens=6, engine=tiny.Here()).record
    assert "8 rows take about 0 minutes here" in caplog.text
    assert (record["provenance"]["runtime"], record["provenance"]["runtime_by"]) == (done.runtime, "runtime.json")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_encoder_decoders_are_measured_too(kind: Literal["bart", "t5"], tmp_path: Path) -> None:
    model = tiny.build_encoder_decoder(tmp_path / "model", kind=kind)
    done = tl.optimize(
        model, pa.table({"text": PROMPTS}), runtimes=["ctranslate2"], max_new_tokens=5, engine=tiny.Here()
    )
    (found,) = {one.runtime: one for one in done.candidates if one.runtime == "ctranslate2"}.values()
    assert found.agreement == 1.0
    assert found.nats is None or abs(found.nats) < 1e-4


@pytest.mark.slow
def test_a_choice_that_cannot_write_so_costs_speed_only(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = pa.table({"text": PROMPTS[:2]})
    tl.optimize(model, table, runtimes=["eager"], max_new_tokens=3, engine=tiny.Here(), rows=2)
    choice = json.loads((model / "runtime.json").read_text())
    (model / "runtime.json").write_text(json.dumps({**choice, "runtime": "ctranslate2"}))
    tl.predict(model, table, max_new_tokens=3, temperature=1.0, engine=tiny.Here())
    assert "does not compute temperature" in caplog.text


def test_options_of_texts_are_refused_for_a_classifier(tiny_bert: Path, tmp_path: Path) -> None:
    classifier = tiny.build_model(tmp_path / "model", encoder=tiny_bert)
    with pytest.raises(UsageError, match="for text generation only"):
        tl.optimize(classifier, pa.table({"text": ["good"]}), max_new_tokens=3, engine=tiny.Here())


def test_a_label_is_refused_for_texts(tmp_path: Path) -> None:
    model = tiny.build_language_model(tmp_path / "model")
    with pytest.raises(UsageError, match="label: text_generation is compared with the texts of eager"):
        tl.optimize(model, pa.table({"prompt": ["a"], "answer": ["b"]}), label="answer")
