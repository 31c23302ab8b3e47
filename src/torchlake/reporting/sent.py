"""What trackers get of the page of a run's validation rows: scores per class, the worst rows, the confusion matrix."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchlake import atomic_io
from torchlake.reporting import figures
from torchlake.reporting.page import shown_rows


@dataclass(frozen=True)
class Evaluated:
    """What trackers get of the page of the validation rows."""

    tables: dict[str, tuple[list[str], list[list[Any]]]]
    "Columns and rows by name."
    confusion: bytes | None
    "A PNG; None without matplotlib, or for other tasks."

    @classmethod
    def of(cls, run: Path) -> "Evaluated":
        """Return what a run's folder has; nothing if there is no page."""
        folder = run / "eval"
        if not (folder / "eval.json").is_file():
            return cls({}, None)
        facts = atomic_io.read_json(folder / "eval.json")
        found, tables = facts["sections"], {}
        scores = found.get("classes") or found.get("labels") or found.get("entities", {}).get("types", [])
        if scores:
            names = ["precision", "recall", "f1"]
            rows = [[one["label"], one["rows"], *(one[name][0] for name in names)] for one in scores]
            tables["per_class"] = (["label", "rows", *names], rows)
        worst = [row for _, row in sorted(shown_rows(folder / "rows.parquet", found.get("worst", [])).items())]
        if worst:
            worst.sort(key=lambda row: -row["loss"])
            kept = [name for name in worst[0] if name not in ("right", "truncated", "error", "tokens")]
            tables["worst_rows"] = (kept, [[_cell(row[name]) for name in kept] for row in worst])
        counts = found.get("confusion", {}).get("counts")
        drawn = figures.png(figures.confusion(counts, found["confusion"]["labels"])) if counts else None
        return cls(tables, drawn)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)


def summaries(found: Evaluated) -> Iterator[Any]:
    """Yield the tables as text, and the picture, as TensorBoard has them."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    for name, (columns, rows) in found.tables.items():
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ")[:200] for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *cells]]
        text = TensorProto(
            dtype=DT_STRING,
            string_val=["\n".join(lines).encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        yield Summary.Value(tag=f"evaluation/{name}", tensor=text, metadata=about)
    if found.confusion is not None:
        width, height = struct.unpack(">II", found.confusion[16:24])  # of the PNG header
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=found.confusion)
        yield Summary.Value(tag="evaluation/confusion", image=image)
