"""The plan of a job by an endpoint: what it takes, with an interval that has what it took."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchlake.errors import UsageError
from torchlake.planning.spending import facts_of, plan_endpoint

FIXED: dict[str, Any] = {"endpoint": "https://example.org/v1", "model_name": "small"}
PRICE = {"small": {"input": 1.0, "output": 4.0, "cached": 0.1}}


def table_of(folder: Path, texts: list[str | None]) -> Path:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), folder / "in.parquet")
    return folder / "in.parquet"


def test_requests_tokens_cost_and_hours(tmp_path: Path) -> None:
    chance = random.Random(0)
    texts: list[str | None] = ["a" * chance.choice([40, 80, 120]) for _ in range(900)]
    table = table_of(tmp_path, [*texts, None, " "])
    limits = {"requests_per_minute": 600, "tokens_per_minute": 6_000}
    plan = plan_endpoint(table, sample_rows=100, price=PRICE, max_new_tokens=10, **limits, **FIXED)
    assert (plan.rows, plan.sampled) == (902, 100)
    assert 850 <= plan.requests <= 902
    true = sum(len(text or "") / 4 + 4 for text in texts)
    assert plan.prompt_tokens.low < true < plan.prompt_tokens.high
    assert plan.generated_tokens == (0, plan.requests * 5, plan.requests * 10)
    assert plan.cost is not None
    assert plan.hours is not None
    assert plan.cost.estimate == pytest.approx((plan.prompt_tokens.estimate + 4 * plan.generated_tokens.estimate) / 1e6)
    assert plan.hours.high == pytest.approx((plan.prompt_tokens.high + plan.generated_tokens.high) / 6_000 / 60)
    slow = plan_endpoint(table, sample_rows=100, price=PRICE, max_new_tokens=10, requests_per_minute=60, **FIXED)
    assert slow.hours == pytest.approx((slow.requests / 60 / 60,) * 3)
    assert any("a guess" in one for one in plan.assumptions)
    assert facts_of(plan)["requests"] == f"{plan.requests:,}"


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    plan = plan_endpoint(table_of(tmp_path, ["one", "two"]), api="embeddings", **FIXED)
    assert (plan.cost, plan.hours, plan.generated_tokens.high) == (None, None, 0)
    assert facts_of(plan)["time"].startswith("not known")
    with pytest.raises(UsageError, match="max_length: for a model folder"):
        plan_endpoint(tmp_path / "in.parquet", max_length=3, **FIXED)


@pytest.mark.slow
def test_a_tokenizer_counts(tmp_path: Path, tiny_gpt2: Path) -> None:
    plan = plan_endpoint(table_of(tmp_path, ["good film"] * 7), tokenizer=tiny_gpt2, api="completions", **FIXED)
    assert plan.prompt_tokens.low == plan.prompt_tokens.high
    assert plan.prompt_tokens.estimate % 7 == 0
    assert f"prompts: the tokenizer of {tiny_gpt2}" in plan.assumptions
