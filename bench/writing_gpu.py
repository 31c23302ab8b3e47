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
folder, prompts, new = json.load(open(sys.argv[1]))
llm = LLM(model=folder, dtype="bfloat16", max_model_len=max(map(len, prompts)) + new)
given = [{"prompt_token_ids": ids} for ids in prompts]
how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
best = float("inf")
for _ in range(3):
    began = time.perf_counter()
    llm.generate(given, how)
    best = min(best, time.perf_counter() - began)
print(json.dumps({"seconds": best}))
"""


def main() -> None:
    given = parser(__doc__, rows=1024, new_tokens=128, rounds=2, tiny=0)
    given.add_argument("--vllm", default="", help="Python of an environment with vLLM")
    given.add_argument("--only", default="", help="contenders whose names have this")
    options = given.parse_args()
    if _gpu.device() == "cpu" and not options.tiny:
        print("writing_gpu: skipped: torch finds no GPU here")
        return
    shape = "tiny" if options.tiny else "llama-1b"
    folder = _gpu.language_model(SCRATCH / f"gpu-{shape}-language-model", shape)
    texts = _gpu.texts(options.rows)
    makers: dict[str, Callable[[], Callable[[], float | None]]] = {
        f"generate, batches of {BATCH}": partial(by_generate, folder, texts, options.new_tokens),
        "generate_batch": partial(by_generate_batch, folder, texts, options.new_tokens),
        "torchlake eager": partial(by_torchlake, folder, texts, options.new_tokens, "eager"),
        "torchlake bf16": partial(by_torchlake, folder, texts, options.new_tokens, "bf16"),
        "bare vLLM": partial(by_vllm, folder, texts, options.new_tokens, options.vllm),
        "torchlake vllm": partial(by_torchlake, folder, texts, options.new_tokens, "vllm", python=options.vllm),
    }
    rows: list[dict[str, Any]] = []
    for name, make in makers.items():
        if options.only not in name:
            continue
        row: dict[str, Any] = {"name": name}
        try:
            write = make()
            best = min(took(write) for _ in range(options.rounds + 1))  # the first one warms up
            row["tokens_per_s"] = options.rows * options.new_tokens / best
            row["ratio"] = row["tokens_per_s"] / rows[0].get("tokens_per_s", row["tokens_per_s"]) if rows else 1.0
        except Exception as error:  # a contender that cannot run here costs its own row only
            row["reason"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        rows.append(row)
        if options.json:
            print(json.dumps({"rows": rows}), flush=True)  # what is left of a run that is stopped
    note = f"{_gpu.card()}, {shape}, bf16, {options.rows:,} prompts of about 22 tokens, {options.new_tokens} new each"
    finish("writing_gpu", rows, as_json=options.json, note=note, keep=not options.tiny and not options.only)


def took(write: Callable[[], float | None]) -> float:
    """The seconds of a call, or those that it says."""
    told: list[float | None] = []
    whole = _gpu.seconds_of(lambda: told.append(write()))
    return told[0] or whole


def prompts_of(folder: Path, texts: list[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    found: list[list[int]] = AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    return found


def model_of(folder: Path, **options: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval().to(_gpu.device())


def by_generate(folder: Path, texts: list[str], new: int) -> Callable[[], float | None]:
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


def by_generate_batch(folder: Path, texts: list[str], new: int) -> Callable[[], float | None]:
    from transformers import GenerationConfig

    model, prompts = model_of(folder), prompts_of(folder, texts)
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def write() -> None:
        made = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        assert sum(len(one.generated_tokens) for one in made.values()) == len(prompts) * new

    return write


def by_torchlake(
    folder: Path, texts: list[str], new: int, runtime: str, python: str = ""
) -> Callable[[], float | None]:
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


def by_vllm(folder: Path, texts: list[str], new: int, python: str) -> Callable[[], float | None]:
    if not python:
        raise RuntimeError("--vllm names no Python")
    given = SCRATCH / "writing_gpu.json"
    given.write_text(json.dumps([str(folder), prompts_of(folder, texts), new]))

    def write() -> float:
        done = subprocess.run(
            [python, "-c", BARE_VLLM, str(given)], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])

    return write


if __name__ == "__main__":
    main()
