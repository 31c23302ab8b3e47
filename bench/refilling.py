"""How much faster are texts written if rows that end give their places to others, and beginnings are computed once?

A Llama from random weights in fp32 on one core. `ends`: texts end at lengths drawn from 4 to 64, by an end
that the writers do not foresee; `same`: all have 64 tokens; `beginning`: prompts share a system prompt of 500 tokens
and have 40 of their own. Contenders, each in a process of its own: batches until the longest text ends (transformers'
`generate` with the same budget), and refilled. CPU seconds decide; the texts must be equal.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from _common import SCRATCH, finish, parser
from _contender import ONE_THREAD
from _fresh import alone
from _shakespeare import lines_of_shakespeare, small_model

NEW = 64
BUDGET_TOKENS = 8192
LIMIT_S = 1_500
HOME = SCRATCH / "refilling"


def llama(tokens: int, layers: int, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokens,
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=2048,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def write(setup: dict[str, Any], case: str, refilled: bool) -> dict[str, Any]:
    """Write all texts, and return the CPU seconds and the texts."""
    from torchlake.jobs.worker.texts import Budget, Prompt, Texts
    from torchlake.models.generation import GenerationOptions
    from torchlake.models.spec import load_spec
    from torchlake.runtimes import eager
    from torchlake.runtimes._writing.session import session_of
    from torchlake.runtimes._writing.static import StaticWriter

    options, folder = GenerationOptions(max_new_tokens=NEW), Path(setup["model"])
    model = eager.load_model(folder, load_spec(folder), "cpu")
    size, drawn = model.config.vocab_size, np.random.default_rng(0)
    static = StaticWriter(model, folder, options)
    (end,) = static.ends
    lengths = drawn.integers(4, NEW + 1, setup["rows"]) if case == "ends" else np.full(setup["rows"], NEW)
    head = drawn.integers(1, size, 500 if case == "beginning" else 0)
    own = [40] * setup["rows"] if case == "beginning" else drawn.integers(10, 60, setup["rows"])
    prompts = [
        Prompt(row=row, ids=np.concatenate([head, drawn.integers(1, size, count)]), options=options)
        for row, count in enumerate(own)
    ]
    row_of = static.row_of

    def ending(number: int, *given: Any) -> Any:
        """A row whose text ends after its length."""
        row = row_of(number, *given)
        take = row.take
        row.take = lambda token: take(token if len(row.tokens) < lengths[number] else end)
        return row

    static.row_of = ending  # type: ignore[method-assign]
    writer = session_of(model, static) if refilled else static
    assert writer is not None, "the model is a Llama"
    waiting = [prompts]
    began = time.process_time()
    rows = dict(
        Texts(
            writer=writer,
            budget=Budget(tokens=BUDGET_TOKENS, rows=1024),
            more=lambda: waiting.pop() if waiting else [],
        ).write()
    )
    seconds = time.process_time() - began
    texts = [rows[row].text.tokens.tolist() for row in range(len(prompts))]  # type: ignore[union-attr]
    return {"seconds": seconds, "new": int(lengths.sum()), "texts": texts}


def main() -> None:
    options = parser(__doc__, rows=128, layers=4, width=256, rounds=1).parse_args()
    os.environ.update(ONE_THREAD)
    HOME.mkdir(parents=True, exist_ok=True)
    small_model(
        HOME / "base", lines_of_shakespeare()[:2000], lambda tokens: llama(tokens, options.layers, options.width)
    )
    setup = {"model": str(HOME / "base"), "rows": options.rows}
    rows = []
    for case in ("ends", "same", "beginning"):
        best: dict[bool, dict[str, Any]] = {}
        for _ in range(options.rounds):
            for refilled in (False, True):
                done = alone(write, setup, case, refilled, out=HOME / "out.json", limit_s=LIMIT_S)
                if done.get("seconds", 1e9) <= best.get(refilled, done).get("seconds", 1e9):
                    best[refilled] = done
        for refilled, done in best.items():
            row: dict[str, Any] = {"name": f"{case}: {'refilled' if refilled else 'batches'}"}
            if "seconds" in done and "seconds" in best[False]:
                row["tokens_per_s"] = done["new"] / done["seconds"]
                row["ratio"] = best[False]["seconds"] / done["seconds"]
                row["same_texts"] = float(
                    np.mean([a == b for a, b in zip(done["texts"], best[False]["texts"], strict=True)])
                )
            rows.append({**row, **({"reason": done["reason"]} if "reason" in done else {})})
    note = (
        f"Llama of {options.layers} layers of {options.width}, {options.rows} prompts of 10 to 60 tokens (beginning: "
        f"500 and 40), up to {NEW} new tokens, greedy, fp32, one core, CPU seconds, best of {options.rounds}"
    )
    finish("refilling", rows, as_json=options.json, note=note, keep=options.rows == 128)


if __name__ == "__main__":
    main()
