"""How fast are modern encoders scored without padding, beside transformers' own forward pass on the same rows?

ModernBERT-base, DeBERTa-v3-base, XLM-R-base and a decoder of 0.6 billion parameters (Qwen 3) in their shapes, with few
layers and random weights, classify 96 rows of random tokens with the lengths of short texts. `varlen` and `eager` get
batches of 1,024 padded tokens sorted by length, as `predict` makes them; transformers gets these, and batches of 32 in
the order of arrival, as its pipeline makes them. One thread, fp32, without tokenizing. CPU time; the contenders take
turns and the best of the rounds counts. `difference` is that of a probability. `rate` relates the operations of the
body's products, also of those that `varlen` skips in the last layer because the head does not read them, to the highest
rate at which the faster library multiplied 1,024 rows by 768 x 3,072 in these rounds.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from _common import SCRATCH, finish, minilm, parser
from _contender import ONE_THREAD

os.environ.update(ONE_THREAD)

import torch
import transformers

from torchlake.data.batching import length_batches
from torchlake.models.spec import load_spec
from torchlake.runtimes import _products, eager, varlen

WORDS, LONGEST, BUDGET, ARRIVING = 30_522, 128, 1024, 32
WIDE = {"hidden_size": 768, "num_attention_heads": 12, "vocab_size": WORDS, "pad_token_id": 0, "num_labels": 2}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ModernBERT-base, 4 layers": ("modernbert", {**WIDE, "num_hidden_layers": 4, "intermediate_size": 1152}),
    "DeBERTa-v3-base, 3 layers": (
        "deberta-v2",
        {
            **WIDE,
            "num_hidden_layers": 3,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": -1,
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "XLM-R-base, 3 layers": (
        "xlm-roberta",
        {**WIDE, "num_hidden_layers": 3, "intermediate_size": 3072, "max_position_embeddings": 514},
    ),
    "Qwen3-0.6B, 2 layers": (
        "qwen3",
        {
            **WIDE,
            "hidden_size": 1024,
            "num_hidden_layers": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
        },
    ),
}
Batch = dict[str, np.ndarray]
Forward = Callable[..., np.ndarray]


def batches_of(rows: list[np.ndarray], *, ordered: bool) -> Iterator[Batch]:
    """Batches of padded rows, sorted by length within a budget of tokens or 32 in the order of arrival."""
    lengths = np.array([len(row) for row in rows])
    cuts = (
        length_batches(lengths, batch_tokens=BUDGET, max_rows=len(rows))
        if ordered
        else np.array_split(np.arange(len(rows)), np.arange(ARRIVING, len(rows), ARRIVING))
    )
    for cut in cuts:
        ids = np.zeros((len(cut), lengths[cut].max()), dtype=np.int64)
        for place, row in enumerate(cut):
            ids[place, : lengths[row]] = rows[row]
        yield {"rows": cut, "input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}


def probabilities(forward: Forward, batches: list[Batch]) -> np.ndarray:
    """The probabilities (N, C) of all rows, in their order."""
    logits = [forward(input_ids=each["input_ids"], attention_mask=each["attention_mask"]) for each in batches]
    order = np.argsort(np.concatenate([each["rows"] for each in batches]))
    return np.asarray(torch.softmax(torch.from_numpy(np.concatenate(logits)[order]), -1))


def measure(name: str, rows: list[np.ndarray], rounds: int) -> list[dict[str, Any]]:
    """The rows of one shape."""
    kind, shape = SHAPES[name]
    folder = SCRATCH / f"encoders-{kind}"
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**shape)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    if not (folder / "config.json").exists():
        model.save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(minilm() / file, folder)
    spec = load_spec(folder)

    def plain(input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            ids, mask = torch.from_numpy(input_ids), torch.from_numpy(attention_mask)
            return np.asarray(model(input_ids=ids, attention_mask=mask).logits)

    model.load_state_dict(transformers.AutoModelForSequenceClassification.from_pretrained(folder).state_dict())
    by_length, arriving = (list(batches_of(rows, ordered=ordered)) for ordered in (True, False))
    ways: dict[str, tuple[Forward, list[Batch]]] = {
        "transformers, batches of 32": (plain, arriving),
        "transformers, sorted": (plain, by_length),
        "torchlake eager": (eager.load(folder, spec, device="cpu"), by_length),
        "torchlake varlen": (varlen.load(folder, spec, device="cpu"), by_length),
    }
    seconds, base, fastest = dict.fromkeys(ways, float("inf")), next(iter(ways)), 0.0
    answers = {way: probabilities(*ways[way]) for way in ways}  # warm, too
    for _ in range(rounds):
        for way, (forward, batches) in ways.items():
            fastest = max(fastest, limit())
            seconds[way] = min(seconds[way], clocked(lambda forward=forward, b=batches: probabilities(forward, b)))
    weights = sum(each.numel() for part, each in model.named_parameters() if each.ndim == 2 and "embed" not in part)
    operations = 2 * weights * sum(map(len, rows))
    made = []
    for way, took in seconds.items():
        row: dict[str, Any] = {"name": f"{name}: {way}", "rows_per_s": len(rows) / took}
        row |= {"ratio": seconds[base] / took, "difference": float(np.abs(answers[way] - answers[base]).max())}
        made.append(row | {"rate": operations / took / fastest})
    return made


def limit() -> float:
    """Operations per second of a large product, by the faster of torch's default and oneDNN."""
    x, weight = torch.randn(BUDGET, 768), torch.randn(3072, 768)
    with torch.inference_mode():
        ways = (lambda: torch.nn.functional.linear(x, weight), lambda: _products.product(x, weight, None))
        best = min(clocked(way) for way in ways for _ in range(10))
    return 2 * BUDGET * 768 * 3072 / best


def clocked(run: Callable[[], Any]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    options = parser(__doc__, rows=96, rounds=2).parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    random = np.random.default_rng(0)
    lengths = np.clip(random.gamma(3, 9, options.rows).astype(int), 4, LONGEST)
    rows = [random.integers(1000, 20_000, length) for length in lengths]
    found = [row for name in SHAPES for row in measure(name, rows, options.rounds)]
    note = (
        f"{options.rows} rows of {lengths.mean():.1f} tokens, fp32, one thread, without tokenizing; best of "
        f"{options.rounds} rounds; ratio: to transformers in batches of {ARRIVING}"
    )
    finish("encoders", found, as_json=options.json, note=note)


if __name__ == "__main__":
    main()
