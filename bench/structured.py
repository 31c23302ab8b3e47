"""What does a structure cost? JSON of a schema beside free text of the same lengths.

A Llama of random weights with a tokenizer of Shakespeare's lines answers prompts with JSON, sampled. Then it writes
free text to the same prompts, each as many tokens as its JSON had. Both by the writer of `predict`, on one thread, in
turn in one process; CPU seconds, and the best of the rounds. The masks are computed in a thread of the same process, so
their time counts.
"""

import os
import shutil
import time
from functools import partial
from typing import Any

import numpy as np
from _common import SCRATCH, finish, parser
from _contender import ONE_THREAD
from _fresh import alone
from _shakespeare import lines_of_shakespeare, small_model

HOME = SCRATCH / "structured"
LIMIT_S = 1_500
SCHEMA = {
    "type": "object",
    "properties": {
        "speaker": {"type": "string", "maxLength": 20},
        "mood": {"enum": ["angry", "calm", "joyful", "sad"]},
        "act": {"type": "integer", "minimum": 1, "maximum": 5},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "summary": {"type": "string", "maxLength": 80},
    },
    "required": ["speaker", "mood", "act", "words", "summary"],
}


def llama(tokens: int, layers: int, width: int) -> Any:
    """A Llama without training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_attention_heads": width // 64}
    config = LlamaConfig(vocab_size=tokens, num_hidden_layers=layers, bos_token_id=0, eos_token_id=0, **shape)
    return LlamaForCausalLM(config)


def write(setup: dict[str, Any]) -> dict[str, Any]:
    """The CPU seconds of both ways in each round, and the tokens that both write."""
    from pathlib import Path

    from transformers import AutoModelForCausalLM, AutoTokenizer

    from torchlake.models.generation import GenerationOptions
    from torchlake.models.structured.structure import read_structure
    from torchlake.runtimes.eager import writer_of

    folder = Path(setup["model"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [np.array(tokenizer(text)["input_ids"], np.int64) for text in setup["prompts"]]
    options = GenerationOptions(
        structure=read_structure({"json_schema": SCHEMA}), max_new_tokens=200, temperature=1.0, seed=1
    )
    writer = writer_of(AutoModelForCausalLM.from_pretrained(folder).eval(), folder, options)

    def written(each: list[GenerationOptions]) -> tuple[float, list[int]]:
        found: dict[int, int] = {}

        def report(ended: Any) -> None:
            found.update({one.row: int((one.text.tokens >= 0).sum()) for one in ended})

        began = time.process_time()
        for row, (ids, own) in enumerate(zip(prompts, each, strict=True)):
            writer.add(row, ids, own)
        while writer.rows:
            writer.step(report)
        return time.process_time() - began, [found[row] for row in range(len(prompts))]

    seconds: dict[str, list[float]] = {"json": [], "free": []}
    for _ in range(setup["rounds"]):
        took, lengths = written([options] * len(prompts))
        seconds["json"].append(took)
        free = [GenerationOptions(max_new_tokens=length, temperature=1.0, seed=1) for length in lengths]
        took, again = written(free)
        seconds["free"].append(took)
    return {**seconds, "tokens": sum(lengths), "free_tokens": sum(again)}


def main() -> None:
    options = parser(__doc__, prompts=16, layers=6, width=512, rounds=2).parse_args()
    os.environ.update(ONE_THREAD)
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir(parents=True)
    lines = lines_of_shakespeare()
    small_model(HOME / "base", lines, partial(llama, layers=options.layers, width=options.width))
    asked = {"model": str(HOME / "base"), "prompts": lines[: options.prompts], "rounds": options.rounds}
    found = alone(write, asked, out=HOME / "out.json", limit_s=LIMIT_S)
    rows = [{"name": name, **found} for name in ("structured",) if "reason" in found]
    if not rows:
        best = {name: min(found[name]) for name in ("free", "json")}
        counts = {"free": found["free_tokens"], "json": found["tokens"]}
        rates = {name: counts[name] / best[name] for name in best}
        rows = [
            {
                "name": name,
                "tokens": counts[name],
                "tokens_per_cpu_s": rates[name],
                "ratio": rates[name] / rates["free"],
            }
            for name in best
        ]
    finish("structured", rows, as_json=options.json)


if __name__ == "__main__":
    main()
