"""A served model on this machine's device answers many callers as `predict` does on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import tiny
import torchlake as tl


@pytest.mark.slow
@pytest.mark.parametrize("http", [False, True])
def test_many_callers_get_the_answers_of_a_cpu(
    http: bool, tmp_path: Path, tiny_roberta: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, table = tiny.build_model(tmp_path / "model", encoder=tiny_roberta), tiny.reviews(96)
    texts = table["text"].to_pylist()
    with ThreadPoolExecutor(32) as callers:
        if http:
            pytest.importorskip("fastapi")
            from serving_runs import running

            with running(model) as server:
                answers = list(callers.map(lambda text: server.post("/invocations", {"inputs": [text]}).json(), texts))
                scores = [answer["predictions"][0]["score"] for answer in answers]
        else:
            loaded = tl.load(model)
            scores = [found[0]["score"] for found in callers.map(lambda text: loaded([text]), texts)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    expected = tl.predict(model, table, engine=tiny.Here(), runtime="eager", prefix="p_")["p_score"].to_pylist()
    assert scores == pytest.approx(expected, abs=0.02)
