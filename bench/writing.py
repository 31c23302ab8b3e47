"""How fast do models write on a CPU: transformers' `generate`, `eager`, CTranslate2 by itself and as a runtime?

Llama-160M's and GPT-2-small's shapes with random weights continue prompts of random words, greedily. `generate` gets
them sorted, in one batch; the library by itself gets them as its documentation says; torchlake does all that `predict`
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

os.environ.update(ONE_THREAD)

import ctranslate2
import pyarrow as pa
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from torchlake import plugins
from torchlake.models.load import load_spec
from torchlake.runtimes import _ctranslate2_export
from torchlake.scoring.options import scoring_settings
from torchlake.scoring.scorer import Scorer

WIDE = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-160M": ("llama", {**WIDE, "intermediate_size": 3072, "vocab_size": 32_000, "tie_word_embeddings": False}),
    "GPT-2-small": ("gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_257}),
}
KINDS = {"ctranslate2": "float32", "ctranslate2_int8": "int8"}
Texts = list[list[int]]


def build(name: str) -> Path:
    """The model of a shape, in which word 17 is token 17."""
    kind, shape = SHAPES[name]
    folder = SCRATCH / f"writing-{kind}"
    if (folder / "config.json").exists():
        return folder
    backend = Tokenizer(models.WordLevel({str(number): number for number in range(shape["vocab_size"])}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="2", unk_token="0")
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[kind](**shape, bos_token_id=None, eos_token_id=2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ways_of(folder: Path, prompts: Texts, new_tokens: int) -> dict[str, Callable[[], Texts]]:
    """The contenders: each returns the tokens of the texts."""
    spec, order = load_spec(folder), np.argsort([len(prompt) for prompt in prompts]).tolist()
    model = plugins.load("tasks", spec.task).load_model(folder, spec)

    def generate() -> Texts:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return [[token for token in row[width:] if token != 2] for row in made.tolist()]

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
        table = pa.table({"text": [" ".join(map(str, prompt)) for prompt in prompts]})

        def write() -> Texts:
            texts = scorer.score(scorer.read(table, {}))["generated_text"].to_pylist()
            return [[int(word) for word in text.split()] for text in texts]

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
    for name, (_, shape) in SHAPES.items():
        lengths = np.clip(random.gamma(4, 11, options.prompts).astype(int), 4, 160)
        prompts = [random.integers(3, shape["vocab_size"], length).tolist() for length in lengths]
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
