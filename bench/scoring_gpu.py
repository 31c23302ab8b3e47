"""How many tokens a second does a GPU score, and what share of the card's matrix rate is that?

roberta-base's and roberta-large's shapes with random weights in bf16, 8,530 generated texts of the length of film
reviews, from text to logits: every row padded to 128, transformers' pipeline, torch.compile, and concatenated rows with
a variable-length attention kernel. In turn, in one process, best of the rounds. Without a GPU, `--tiny 1` runs a small
shape.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _gpu
from _common import SCRATCH, arguments, finish
from _limit import model_operations

from torchlake import plugins
from torchlake.errors import TorchlakeError

SHAPES = ("roberta-base", "roberta-large")
ROWS = 8530


def main() -> None:
    options = arguments(__doc__, rows=ROWS, rounds=3, tiny=0)
    if _gpu.device() == "cpu" and not options.tiny:
        print("scoring_gpu: skipped: torch finds no GPU here")
        return
    rate = _gpu.matrix_rates(256 if options.tiny else _gpu.SIZE)["bf16"]
    assert rate is not None, "every device multiplies bf16"
    texts = _gpu.texts(options.rows)
    rows: list[dict[str, Any]] = [{"name": f"{_gpu.card()}: bf16 matrix product", "tflops": rate / 1e12, "share": 1.0}]
    for shape in ("tiny",) if options.tiny else SHAPES:
        folder = _gpu.encoder(SCRATCH / f"gpu-{shape}-encoder", shape)
        rows += measure(shape, folder, texts, options.rounds, rate)
        if options.json:
            print(json.dumps({"rows": rows}), flush=True)  # what is left of a run that is stopped
    note = f"{_gpu.card()}, bf16, {len(texts):,} texts to logits, best of {options.rounds}"
    finish("scoring_gpu", rows, as_json=options.json, note=note, keep=options.rows == ROWS and not options.tiny)


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
            _gpu.seconds_of(partial(scorers[name], texts))  # compiles and warms up
            rows[name] = {"name": f"{shape}: {name}", "seconds": float("inf")}
        except (TorchlakeError, RuntimeError, ImportError) as error:
            scorers.pop(name, None)
            rows[name] = {"name": f"{shape}: {name}", "reason": (str(error).splitlines() or [""])[0][:160]}
    for _ in range(rounds):
        for name, score in scorers.items():
            rows[name]["seconds"] = min(rows[name]["seconds"], _gpu.seconds_of(partial(score, texts)))
    for name in scorers:
        seconds = rows[name]["seconds"]
        rows[name] |= {
            "rows_per_s": len(texts) / seconds,
            "tokens_per_s": sum(lengths) / seconds,
            "share": operations / seconds / rate,
        }
    return list(rows.values())


def padded(folder: Path, tokenizer: Any) -> Callable[[list[str]], object]:
    """Batches in the order of the table, every row padded to 128 tokens."""
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
                ).to(_gpu.device())
                logits.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits)
        return torch.cat(logits).float().cpu()

    return score


def by_pipeline(folder: Path, tokenizer: Any) -> Callable[[list[str]], object]:
    """transformers' pipeline."""
    from transformers import pipeline

    classify = pipeline("text-classification", model=_model(folder), tokenizer=tokenizer, device=_gpu.device())
    return lambda texts: classify(texts, batch_size=256, truncation=True)


def by_runtime(folder: Path, name: str) -> Callable[[list[str]], object]:
    """A torchlake runtime, driven as `predict` drives it, in the precision that the runtime takes on a GPU."""
    from _scoring_torchlake import read_texts, settings_of

    from torchlake.scoring.scorer import Scorer

    reason = plugins.load("runtimes", name).refusal(folder)
    if reason is not None:
        raise RuntimeError(reason)
    scorer = Scorer(settings=settings_of(folder, name))
    return lambda texts: scorer.score(read_texts(scorer, texts))


def _model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16).eval().to(_gpu.device())


if __name__ == "__main__":
    main()
