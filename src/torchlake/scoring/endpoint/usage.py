"""What answers cost: prices, columns, and the sums of an output.

prices.yaml    small-model: {input: 0.25, cached: 0.025, output: 2.0}     per million tokens
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from torchlake.config.yaml import read_text, read_yaml
from torchlake.errors import UsageError
from torchlake.outputs.parts import PartFolder
from torchlake.runtimes._http.answers import Answer
from torchlake.tables.formats.columnar import open_parquet

MILLION = 1_000_000
COUNTED = ("prompt_tokens", "generated_tokens", "cached_tokens")
"The columns of tokens; with prices there is also `cost`."
COST = "cost"
CHARACTERS = 4
"Of a token, on average, in a guess."


@dataclass(frozen=True, kw_only=True)
class Price:
    """The prices of a model for a million tokens."""

    input: float
    output: float
    cached: float

    def cost(self, prompt: float, generated: float, cached: float = 0) -> float:
        """Return the cost of tokens; `cached` are some of the prompt."""
        return ((prompt - cached) * self.input + cached * self.cached + generated * self.output) / MILLION

    def cost_of(self, answer: Answer) -> float | None:
        """Return the cost of an answer; None if the endpoint did not count."""
        if answer.prompt_tokens is None:
            return None
        cached = min(answer.cached_tokens or 0, answer.prompt_tokens)
        return self.cost(answer.prompt_tokens, answer.generated_tokens or 0, cached)


def read_price(prices: str | Path | Mapping[str, Any], model: str) -> Price:
    """Return the price of a model in a YAML file or a mapping. Raises ConfigError, and UsageError with its names."""
    if isinstance(prices, Mapping):
        found, where = prices, "price"
    else:
        where = str(prices)
        if not Path(prices).is_file():
            raise UsageError(f"price: {where}: there is no such file.")
        found, _ = read_yaml(read_text(Path(prices)), where)
    if not isinstance(found, Mapping) or not found:
        raise UsageError(f"{where}: expected models with their prices, such as small: {{input: 0.25, output: 2}}.")
    if model not in found:
        names = ", ".join(map(str, found))
        raise UsageError(f"{where}: it has no price of the model {model!r}; it has {names}.")
    given = found[model]
    given = given if isinstance(given, Mapping) else {}
    unknown = sorted(map(str, given.keys() - {"input", "output", "cached"}))
    if unknown or not {"input"} <= given.keys():
        problem = f"unknown {unknown[0]!r}" if unknown else "no input"
        raise UsageError(f"{where}: {model}: {problem}; expected input, output and cached, per million tokens.")
    values = {**given, "output": given.get("output", 0.0), "cached": given.get("cached", given["input"])}
    for name, value in values.items():
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise UsageError(f"{where}: {model}: {name}: expected a price of 0 or more, got {value!r}.")
    return Price(**{name: float(value) for name, value in values.items()})


def sums_of(parts: PartFolder, names: Iterable[str], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return the sums over written parts; `columns` are those of the counts, as {count: column}.

    Cost: reading these columns.
    """
    total: dict[str, Any] = dict.fromkeys(columns, 0)
    for name in names:
        with open_parquet(f"{parts.location}/{name}") as parquet:
            rows = parquet.read(columns=list(columns.values()))
        for one, column in columns.items():
            total[one] += pc.sum(rows[column]).as_py() or 0
    return total


def usage_columns(answers: list[Answer | None], price: Price | None) -> list[tuple[pa.Field, pa.Array]]:
    """Return the columns of tokens and cost, null for rows that were not asked."""
    made = []
    for name in COUNTED:
        values = [None if one is None else getattr(one, name) for one in answers]
        made.append((pa.field(name, pa.int32()), pa.array(values, pa.int32())))
    if price is not None:
        costs = [None if one is None else price.cost_of(one) for one in answers]
        made.append((pa.field(COST, pa.float64()), pa.array(costs, pa.float64())))
    return made
