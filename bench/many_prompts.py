"""Do 100,000 prompts take as much memory as a tenth of them, and how much writing do kills repeat?

A Llama of two layers with random weights continues random words of Shakespeare greedily, on every engine with two
processes; every thousandth prompt is null. Each job is a process of its own. Then the job on the local engine is killed
at random times, with all of its processes, as often as asked, and goes on to its end. What it
wrote more than a job without kills was repeated. Rows, their order, errors and texts must be the same each time, and
some texts those of transformers' `generate` for the prompt alone.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, parser
from _counted_writer import NOTES, counted
from _on_engines import set_up
from _shakespeare import lines_of_shakespeare, small_model

HOME = SCRATCH / "many-prompts"
NEW_TOKENS, PROCESSES, NULL_EVERY, COMPARED = 8, 2, 1_000, 50
ENGINES, KILLED = ("local", "spark", "ray"), "local, killed"
PARTS = "parts.json"
"What calls for parts of the measurements have measured, so that the whole need not run at once."
Result = dict[str, Any]


def llama(tokens: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=tokens, bos_token_id=0, eos_token_id=0, **sizes))


def write_table(path: Path, words: list[str]) -> None:
    """As many prompts of three to twelve words as its name says."""
    random, rows = np.random.default_rng(0), int(path.stem)
    texts = [" ".join(words[at] for at in random.integers(0, len(words), random.integers(3, 13))) for _ in range(rows)]
    kept = [None if at % NULL_EVERY == NULL_EVERY - 1 else text for at, text in enumerate(texts)]
    pq.write_table(pa.table({"id": range(rows), "text": pa.array(kept, pa.string())}), path)


def job(engine: str, source: str, output: str) -> None:
    """What a job's process runs; it prints its own peak memory."""
    import torchlake as tl
    from torchlake.engines import make_engine

    master = {"master": f"local[{PROCESSES}]"} if engine == "spark" else {}
    tl.predict(
        HOME / "model",
        source,
        output,
        runtime=counted,
        key="id",
        max_new_tokens=NEW_TOKENS,
        engine=make_engine(engine, PROCESSES, **master),
    )
    print(json.dumps({"driver_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def start(engine: str, source: Path, output: Path, notes: Path) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--job", engine, str(source), str(output)]
    environment = {**os.environ, NOTES: str(notes)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)


def noted(notes: Path) -> tuple[int, float]:
    """Tokens written, and the most memory of a worker in MiB."""
    lines = [line.split() for line in notes.read_text().splitlines()] if notes.exists() else []
    return sum(int(tokens) for tokens, _ in lines), max((int(peak) / 1024 for _, peak in lines), default=0.0)


def whole(engine: str, source: Path, output: Path) -> Result:
    """A job without kills."""
    notes = output.with_suffix(".notes")
    began = time.perf_counter()
    process = start(engine, source, output, notes)
    out, _ = process.communicate()
    seconds = time.perf_counter() - began
    assert process.returncode == 0, f"{engine} ended with {process.returncode}"
    tokens, worker_mib = noted(notes)
    rows = pq.read_metadata(source).num_rows
    result = {"seconds": seconds, "rows_per_s": rows / seconds, "tokens": tokens, "tokens_per_s": tokens / seconds}
    return {**result, "worker_mib": worker_mib, **json.loads(out.splitlines()[-1])}


def killed(source: Path, output: Path, before: Result, options: Any, usual_s: float) -> Result:
    """The same job, killed at random times, and what it wrote in all; `before` is how far an earlier call came."""
    notes, done, began = output.with_suffix(".notes"), before.get("kills", 0), time.perf_counter()
    chance = random.Random(done)
    while True:
        process = start("local", source, output, notes)
        told = noted(notes)[0]
        while done < options.kills and process.poll() is None and noted(notes)[0] == told:
            time.sleep(0.2)  # until it writes: a kill before costs nothing
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=chance.uniform(0.0, usual_s / options.kills) if done < options.kills else None)
        if process.returncode is not None:
            assert process.returncode == 0, process.returncode
            return {"kills": done, "tokens": noted(notes)[0]}
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done += 1
        print(f"  killed {done} times, {noted(notes)[0]:,} tokens", file=sys.stderr, flush=True)
        if time.perf_counter() - began > options.limit_s:
            return {"kills": done}


def check(output: Path, source: Path) -> pa.Table:
    """The rows of an output, after a look at their order and errors."""
    made, given = pq.read_table(output), pq.read_table(source)
    assert made["id"].equals(given["id"]), "rows are in their order, each once"
    expected = [None if text is not None else "null_input" for text in given["text"].to_pylist()]
    assert made["error"].to_pylist() == expected
    return made


def alone(source: Path, made: pa.Table) -> float:
    """The share of some texts that are those of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(HOME / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    equal = []
    for row in np.linspace(0, made.num_rows - 2, COMPARED).astype(int).tolist():
        ids = tokenizer(pq.read_table(source)["text"][row].as_py() or "a", return_tensors="pt")
        with torch.inference_mode():
            text = model.generate(**ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        text = tokenizer.decode(text[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        equal.append(made["error"][row].as_py() is not None or text == made["generated_text"][row].as_py())
    return float(np.mean(equal))


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        job(*sys.argv[2:])
        return
    options_parser = parser(__doc__, rows=100_000, kills=20, limit_s=3_600)
    options_parser.add_argument("--only", nargs="*", default=[*ENGINES, KILLED], help="default: all four")
    options = options_parser.parse_args()
    set_up()
    few, many = (HOME / f"{rows}.parquet" for rows in (options.rows // 10, options.rows))
    known: dict[str, Result] = {}
    if ENGINES[0] in options.only:
        shutil.rmtree(HOME, ignore_errors=True)
        HOME.mkdir(parents=True)
        lines = lines_of_shakespeare()
        small_model(HOME / "model", lines, llama)
        words = sorted({word for line in lines for word in line.split()})
        for path in (few, many):
            write_table(path, words)
    else:
        known = json.loads((HOME / PARTS).read_text())
    first = HOME / f"{ENGINES[0]}-{many.stem}"
    for engine in (one for one in ENGINES if one in options.only):
        for source in (few, many):
            output, name = HOME / f"{engine}-{source.stem}", f"{engine}, {int(source.stem):,} prompts"
            known[name] = whole(engine, source, output)
            print(f"  {name}: {known[name]}", file=sys.stderr, flush=True)
        assert check(output, many).equals(pq.read_table(first)), f"the texts of {engine} are those of {ENGINES[0]}"
    usual = known[f"{ENGINES[0]}, {options.rows:,} prompts"]
    if "equal_alone" not in usual:
        usual["equal_alone"] = alone(many, pq.read_table(first))
    if KILLED in options.only:
        output = HOME / KILLED
        result = killed(many, output, known.get(KILLED, {}), options, usual["seconds"])
        known[KILLED] = result
        if "tokens" in result:
            assert check(output, many).equals(pq.read_table(first)), "after kills the texts are the same"
            repeated = result["tokens"] - usual["tokens"]
            result["repeated_s_per_kill"] = repeated / usual["tokens_per_s"] / max(1, result["kills"])
    (HOME / PARTS).write_text(json.dumps(known))
    note = (
        f"two layers of 64, {NEW_TOKENS} new tokens, greedy, {PROCESSES} processes of one thread; order, errors and "
        "texts are equal in all rows; repeated: tokens written more than once, at the usual speed, for each kill"
    )
    rows = [{"name": name, **result} for name, result in known.items()]
    finish(
        "many_prompts",
        rows,
        as_json=options.json,
        note=note,
        keep=options.rows == 100_000 and "tokens" in known.get(KILLED, {}),
    )


if __name__ == "__main__":
    main()
