"""How fast do models write on a CPU: transformers' `generate`, `eager`, CTranslate2 by itself and as a runtime?

Llama-160M's and GPT-2-small's shapes with random weights continue words of Shakespeare, greedily. `generate` gets
them in one batch; the library by itself gets them as its documentation says; torchlake does all that `predict`
does with a chunk, tokenizing included. One thread, CPU seconds; the contenders take turns, and the best of the rounds
counts. `equal` is the share of texts that are `generate`'s; of random weights, 8 bits change nearly every text.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import SCRATCH, finish, parser
from _contender import ONE_THREAD
from _shakespeare import lines_of_shakespeare, small_model

os.environ.update(ONE_THREAD)

import ctranslate2
import pyarrow as pa
import torch
import transformers

from torchlake import plugins
from torchlake.models.load import load_tokenizer
from torchlake.models.spec import load_spec
from torchlake.runtimes import _ctranslate2_export
from torchlake.scoring.options.settings import scoring_settings
from torchlake.scoring.scorer import Scorer

WIDE = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-160M": ("llama", {**WIDE, "intermediate_size": 3072, "vocab_size": 32_000, "tie_word_embeddings": False}),
    "GPT-2-small": ("gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}),
}
KINDS = {"ctranslate2": "float32", "ctranslate2_int8": "int8"}
Texts = list[list[int]]


def build(name: str) -> Path:
    """The model of a shape, with a tokenizer whose tokens are the first of the model's."""
    kind, shape = SHAPES[name]
    folder = SCRATCH / f"writing-{kind}"
    if not (folder / "config.json").exists():
        made: Any = transformers.CONFIG_MAPPING[kind]
        config = made(**shape, bos_token_id=None, eos_token_id=0)
        small_model(folder, lines_of_shakespeare(), lambda _: transformers.AutoModelForCausalLM.from_config(config))
    return folder


class Kept:
    """A writer that keeps the tokens of its texts: most of them are none of the tokenizer's."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.found = writer, dict[int, list[int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def step(self, report: Callable[[Any], None]) -> None:
        def told(ended: Any) -> None:
            self.found |= {one.row: one.text.tokens[one.text.tokens >= 0].tolist() for one in ended}
            report(ended)

        self.writer.step(told)


def ways_of(folder: Path, texts: list[str], new_tokens: int) -> dict[str, Callable[[], Texts]]:
    """The contenders: each returns the tokens of the texts."""
    prompts: Texts = load_tokenizer(folder)(texts)["input_ids"]
    spec, order = load_spec(folder), np.argsort([len(prompt) for prompt in prompts]).tolist()
    model = plugins.load("tasks", spec.task).load_model(folder, spec)

    def generate() -> Texts:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return [[token for token in row[width:] if token] for row in made.tolist()]

    def bare(name: str) -> Callable[[], Texts]:
        place = folder / "runtimes" / name
        names = _ctranslate2_export.vocabulary(place)
        library = ctranslate2.Generator(str(place), compute_type=KINDS[name], intra_threads=1, inter_threads=1)
        rows = [[names[token] for token in prompts[row]] for row in order]

        def write() -> Texts:
            made = library.generate_batch(rows, max_length=new_tokens, include_prompt_in_result=False)
            return [made[order.index(row)].sequences_ids[0] for row in range(len(rows))]

        return write

    def torchlake(runtime: str) -> Callable[[], Texts]:
        settings, _, _ = scoring_settings(folder, runtime, {"max_new_tokens": new_tokens}, text=None)
        scorer = Scorer(settings=settings)
        kept = scorer.writer = Kept(scorer.writer)
        table = pa.table({"text": texts})

        def write() -> Texts:
            scorer.score(scorer.read(table, {}))
            return [kept.found[row] for row in range(len(texts))]

        return write

    for name in KINDS:
        if not (folder / "runtimes" / name).exists():
            plugins.load("runtimes", name).prepare(folder, spec, [])
    ways: dict[str, Callable[[], Texts]] = {"generate": generate, "torchlake eager": torchlake("eager")}
    for name in KINDS:
        ways |= {f"bare {name}": bare(name), f"torchlake {name}": torchlake(name)}
    return ways


def main() -> None:
    options = parser(__doc__, prompts=16, new_tokens=32, rounds=2).parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    random, found = np.random.default_rng(0), []
    for name in SHAPES:
        words = " ".join(lines_of_shakespeare()).split()
        lengths = np.clip(random.gamma(4, 8, options.prompts).astype(int), 4, 100)
        starts = random.integers(0, len(words) - 100, options.prompts)
        prompts = [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
        ways = ways_of(build(name), prompts, options.new_tokens)
        texts, seconds = {}, dict.fromkeys(ways, float("inf"))
        for _ in range(options.rounds):
            for way, write in ways.items():
                began = time.process_time()
                texts[way] = write()
                seconds[way] = min(seconds[way], time.process_time() - began)
        for way, took in seconds.items():
            equal = np.mean([own == wanted for own, wanted in zip(texts[way], texts["generate"], strict=True)])
            speed = sum(map(len, texts[way])) / took
            found.append({"name": f"{name}: {way}", "tokens_per_cpu_s": speed, "ratio": seconds["generate"] / took})
            found[-1]["equal"] = float(equal)
    note = (
        f"{options.prompts} prompts, {options.new_tokens} new tokens each, one thread; best of {options.rounds} rounds"
    )
    finish("writing", found, as_json=options.json, note=f"{note}; ratio: to generate")


if __name__ == "__main__":
    main()
