"""How many tokens a second does a GPU write: torchlake, transformers' `generate`, and vLLM by itself and as a runtime?

A model of Llama 3.2 1B's shape with random weights in bf16 continues generated texts greedily, as many tokens for each,
so that no contender saves work by ending. `generate` gets batches of 64, sorted by length; `generate_batch` is
transformers' own continuous batching; torchlake gets the table as `predict` does. vLLM needs an environment of its own:
--vllm names its Python, and without one its rows say so. Best of the rounds. Without a GPU, `--tiny 1` runs a small
shape.
"""

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _gpu
import pyarrow as pa
from _common import SCRATCH, finish, parser

BATCH = 64
LIMIT_S = 400
BARE_VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
folder, prompts, new, rounds = json.load(open(sys.argv[1]))
llm = LLM(model=folder, dtype="bfloat16", max_model_len=max(map(len, prompts)) + new)
given = [{"prompt_token_ids": ids} for ids in prompts]
how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
best = float("inf")
for _ in range(rounds + 1):  # the first one warms up
    began = time.perf_counter()
    llm.generate(given, how)
    best = min(best, time.perf_counter() - began)
print(json.dumps({"seconds": best}))
"""


def main() -> None:
    words = parser(__doc__, rows=1024, new_tokens=128, rounds=2, tiny=0)
    words.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    words.add_argument("--only", default="", help="contenders whose names have this")
    options = words.parse_args()
    if _gpu.device() == "cpu" and not options.tiny:
        print("writing_gpu: skipped: torch finds no GPU here")
        return
    shape = "tiny" if options.tiny else "llama-1b"
    folder = _gpu.language_model(SCRATCH / f"gpu-{shape}-language-model", shape)
    texts = _gpu.texts(options.rows)
    given = (folder, texts, options.new_tokens)

    def best_of(make: Callable[..., Callable[[], None]], *more: str) -> float:
        write = make(*given, *more)
        return min(_gpu.seconds_of(write) for _ in range(options.rounds + 1))  # the first one warms up

    contenders: dict[str, Callable[[], float]] = {
        f"generate, batches of {BATCH}": partial(best_of, by_generate),
        "generate_batch": partial(best_of, by_generate_batch),
        "torchlake eager": partial(best_of, by_torchlake, "eager"),
        "torchlake bf16": partial(best_of, by_torchlake, "bf16"),
        "bare vLLM": partial(bare_vllm, *given, options.rounds, options.vllm),
        "torchlake vllm": partial(best_of, by_torchlake, "vllm", options.vllm),
    }
    rows: list[dict[str, Any]] = []
    for name, measure in contenders.items():
        if options.only not in name:
            continue
        row: dict[str, Any] = {"name": name}
        try:
            row["tokens_per_s"] = options.rows * options.new_tokens / measure()
            row["ratio"] = row["tokens_per_s"] / rows[0].get("tokens_per_s", row["tokens_per_s"]) if rows else 1.0
        except Exception as error:  # a contender that cannot run here costs its own row only
            row["reason"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        rows.append(row)
        if options.json:
            print(json.dumps({"rows": rows}), flush=True)  # what is left of a run that is stopped
    note = f"{_gpu.card()}, {shape}, bf16, {options.rows:,} prompts of about 22 tokens, {options.new_tokens} new each"
    finish("writing_gpu", rows, as_json=options.json, note=note, keep=not options.tiny and not options.only)


def prompts_of(folder: Path, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    found: list[list[int]] = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    return found


def model_of(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to(_gpu.device())


def by_generate(folder: Path, texts: list[str], new: int) -> Callable[[], None]:
    import torch

    model, prompts = model_of(folder), sorted(prompts_of(folder, texts), key=len)

    def write() -> None:
        for first in range(0, len(prompts), BATCH):
            some = prompts[first : first + BATCH]
            width = max(map(len, some))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in some], device=_gpu.device())
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in some], device=_gpu.device())
            with torch.inference_mode():
                made = model.generate(
                    ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
                )
            assert made.shape == (len(some), width + new)

    return write


def by_generate_batch(folder: Path, texts: list[str], new: int) -> Callable[[], None]:
    from transformers import GenerationConfig

    model, prompts = model_of(folder), prompts_of(folder, texts)
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def write() -> None:
        made = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        assert sum(len(one.generated_tokens) for one in made.values()) == len(prompts) * new

    return write


def by_torchlake(folder: Path, texts: list[str], new: int, runtime: str, python: str = "") -> Callable[[], None]:
    from torchlake.scoring.options.settings import scoring_settings
    from torchlake.scoring.scorer import Scorer

    own = {"runtime_python": python} if runtime == "vllm" else {}
    if runtime == "vllm" and not python:
        raise RuntimeError("--vllm names no Python")
    how = {"max_new_tokens": new, "min_new_tokens": new}
    settings, _, _ = scoring_settings(folder, runtime, how, text=None, task="text_generation", **own)
    scorer = Scorer(settings=settings)
    table = pa.table({"text": texts})

    def write() -> None:
        before = scorer.written
        scored = scorer.score(scorer.read(table, {}))
        assert scored["error"].null_count == len(texts)
        assert scorer.written - before == len(texts) * new

    return write


def bare_vllm(folder: Path, texts: list[str], new: int, rounds: int, python: str) -> float:
    if not python:
        raise RuntimeError("--vllm names no Python")
    given = SCRATCH / "writing_gpu.json"
    given.write_text(json.dumps([str(folder), prompts_of(folder, texts), new, rounds]))
    done = subprocess.run(
        [python, "-c", BARE_VLLM, str(given)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


if __name__ == "__main__":
    main()
