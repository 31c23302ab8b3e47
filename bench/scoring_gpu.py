"""How many tokens a second does a GPU score, and what share of the card's matrix rate is that?

roberta-base's and roberta-large's shapes with random weights in bf16, the 8,530 Rotten Tomatoes training reviews from
text to logits: every row padded to 128, transformers' pipeline, torch.compile, and rows laid end to end with a
variable-length attention kernel. In turn, in one process, best of the rounds. Without a GPU it says so and measures
nothing.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, arguments, finish, random_model, reviews
from _limit import model_operations

from torchlake import plugins
from torchlake.errors import TorchlakeError

SHAPES: dict[str, dict[str, int]] = {
    "roberta-base": {},
    "roberta-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
}
SIZE = 8192  # of the square matrices that give the card's rate


def main() -> None:
    options = arguments(__doc__, rows=8530, rounds=3)
    import torch

    if not torch.cuda.is_available():
        print("scoring_gpu: skipped: torch finds no GPU here")
        return
    card, rate = torch.cuda.get_device_name(), matrix_rate()
    texts = pq.read_table(reviews() / "train.parquet")["text"].slice(0, options.rows).to_pylist()
    rows: list[dict[str, Any]] = [{"name": f"{card}: bf16 matrix product", "tflops": rate / 1e12, "share": 1.0}]
    for shape, sizes in SHAPES.items():
        folder = random_model(SCRATCH / f"{shape}-shape", **sizes)
        rows += measure(shape, folder, texts, options.rounds, rate)
    note = f"{card}, bf16, {len(texts):,} reviews, text to logits, best of {options.rounds}"
    finish("scoring_gpu", rows, as_json=options.json, note=note, keep=options.rows == 8530)


def measure(shape: str, folder: Path, texts: list[str], rounds: int, rate: float) -> list[dict[str, Any]]:
    """One row per contender, with the reason where it does not run."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = [len(row) for row in tokenizer(texts, truncation=True, max_length=512)["input_ids"]]
    operations = model_operations(folder, lengths) * len(texts)
    makers: dict[str, Callable[[], Callable[[list[str]], object]]] = {
        "eager, padded to 128, batch 256": partial(padded, folder, tokenizer),
        "transformers pipeline, batch 256": partial(by_pipeline, folder, tokenizer),
        **{f"torchlake {name}": partial(by_runtime, folder, name) for name in ("eager", "compiled", "varlen")},
    }
    scorers: dict[str, Callable[[list[str]], object]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name, make in makers.items():
        try:
            scorers[name] = make()
            seconds_of(scorers[name], texts)  # compiles and warms up
            rows[name] = {"name": f"{shape}: {name}", "seconds": float("inf")}
        except (TorchlakeError, RuntimeError, ImportError) as error:
            scorers.pop(name, None)
            rows[name] = {"name": f"{shape}: {name}", "reason": (str(error).splitlines() or [""])[0][:160]}
    for _ in range(rounds):
        for name, score in scorers.items():
            rows[name]["seconds"] = min(rows[name]["seconds"], seconds_of(score, texts))
    for name in scorers:
        seconds = rows[name]["seconds"]
        rows[name] |= {
            "rows_per_s": len(texts) / seconds,
            "tokens_per_s": sum(lengths) / seconds,
            "share": operations / seconds / rate,
        }
    return list(rows.values())


def padded(folder: Path, tokenizer: Any) -> Callable[[list[str]], object]:
    """The seed's rectangles on a GPU, without autograd."""
    import torch

    model = _model(folder)

    def score(texts: list[str]) -> object:
        logits = []
        with torch.inference_mode():
            for first in range(0, len(texts), 256):
                batch = tokenizer(
                    texts[first : first + 256],
                    padding="max_length",
                    max_length=128,
                    truncation=True,
                    return_tensors="pt",
                ).to("cuda")
                logits.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
        return torch.cat(logits).float().cpu()

    return score


def by_pipeline(folder: Path, tokenizer: Any) -> Callable[[list[str]], object]:
    """transformers' own way."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=_model(folder), tokenizer=tokenizer, device="cuda")
    return lambda texts: classify(texts, batch_size=256, truncation=True)


def by_runtime(folder: Path, name: str) -> Callable[[list[str]], object]:
    """A torchlake runtime, driven as `predict` drives it, in the precision that the runtime takes on a GPU."""
    from _scoring_torchlake import settings_of

    from torchlake.scoring.scorer import Scorer

    reason = plugins.load("runtimes", name).refusal(folder)
    if reason is not None:
        raise RuntimeError(reason)
    scorer = Scorer(settings=settings_of(folder, name))
    return lambda texts: scorer.score(scorer.tokenize(pa.array(texts, pa.string()), {}))


def matrix_rate() -> float:
    """Operations a second of the card's bf16 matrix product, best of several."""
    import torch

    a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    return 2 * SIZE**3 / min(seconds_of(lambda _: a @ a, []) for _ in range(20))


def seconds_of(work: Callable[[list[str]], object], texts: list[str]) -> float:
    """Wall time until the device has finished too."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    work(texts)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval().to("cuda")


if __name__ == "__main__":
    main()
