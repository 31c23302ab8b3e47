"""Generated tables for the demo: reviews from a small grammar (`demo.yaml`), and questions about Shakespeare's lines.

Each review has a verdict: stated directly ("the plot is gripping"), by denying its opposite ("not dull at all"), or by
weighing two sides ("a dull first hour, but the ending redeems it"). Neutral sentences extend it to 4 to 60 words.
Counting words predicts the verdict clearly worse than reading them. Training rows do not use the last fifth of a list,
test rows not the first fifth, so some words and phrases of the test are new. 3 % of the labels are wrong on purpose.

The questions are about 216 lines of tiny Shakespeare (`demo.txt`): who says one, how it continues, how many words it
has, and to look one up by a tool. Answers are computed. Test questions are about parts of lines that training does not
ask for.
"""

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchlake.errors import OutputError

log = logging.getLogger(__name__)

NOISE = 0.03
TEST_SHARE = 1 / 6
MIN_WORDS, MAX_WORDS = 4, 60
OPPOSITE = {"positive": "negative", "negative": "positive"}
# Shares of direct verdicts, denials, two sides, and contradicted expectations.
KINDS = {"outright": 0.56, "denial": 0.20, "weighing": 0.16, "expectation": 0.08}

GRAMMAR: dict[str, Any] = yaml.safe_load(files("torchlake.cli").joinpath("demo.yaml").read_text(encoding="utf-8"))
"The lists of words and sentences."
LINES = [
    line.split(": ", 1) for line in files("torchlake.cli").joinpath("demo.txt").read_text(encoding="utf-8").splitlines()
]
"Speakers and what they say, in one line each."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "find_line", "parameters": {"speaker": "string", "word": "string"}},
}
TEMPLATE = (
    "{% if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"The chat template of the small model."
LEARNING = {"warmup": 0.05, "micro_batch_tokens": 4096, "batch_size": 8}
"How it is trained."
ANSWER_TOKENS = 40
"The most tokens of an answer; the longest call of the tool has 34."
COUNT = {"type": "integer", "minimum": 1, "maximum": 30}
FIELDS = {"speaker": {"enum": sorted({speaker for speaker, _ in LINES})}, "words": COUNT}
SCHEMA: dict[str, Any] = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
"Its answers as JSON."


def write_reviews(folder: str | Path, rows: int = 2400, seed: int = 0) -> tuple[Path, Path]:
    """Write `folder`/train.parquet (5/6 of the rows) and test.parquet, and return their paths.

    Columns: id (unique), text (unique), label ("positive" or "negative"), all strings. The same seed gives the same
    tables. rows: 12 to 50,000. Raises OutputError if the folder cannot be created.
    """
    assert 12 <= rows <= 50_000, "sizes for which the grammar has enough texts"
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}. Name another folder.") from error
    test_rows = round(rows * TEST_SHARE)
    seen: set[str] = set()
    paths = (folder / "train.parquet", folder / "test.parquet")
    for stream, (path, count) in enumerate(zip(paths, (rows - test_rows, test_rows), strict=True)):
        rng = np.random.Generator(np.random.Philox([seed, stream]))
        pq.write_table(_reviews(rng, path.stem, count, seen), path, compression="zstd", write_page_checksum=True)
    return paths


def _reviews(rng: np.random.Generator, split: str, count: int, seen: set[str]) -> pa.Table:
    texts: list[str] = []
    labels: list[str] = []
    while len(texts) < count:
        verdict = ("positive", "negative")[len(texts) % 2]
        text = _review(rng, split, verdict)
        if text in seen or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            continue
        seen.add(text)
        texts.append(text)
        labels.append(OPPOSITE[verdict] if rng.random() < NOISE else verdict)
    order = rng.permutation(count)
    return pa.table(
        {
            "id": [f"{split}-{row:05d}" for row in range(count)],
            "text": [texts[row] for row in order],
            "label": [labels[row] for row in order],
        }
    )


def _review(rng: np.random.Generator, split: str, verdict: str) -> str:
    """Return a review: the sentence with the verdict among a random number of neutral ones."""
    sentences = [_sentence(rng, split, verdict) + "."]
    for _ in range(rng.geometric(0.55) - 1):
        sentences.insert(int(rng.integers(len(sentences) + 1)), _fill(rng, split, GRAMMAR["neutral"], verdict))
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", " ".join(sentences))
    return re.sub(r"(?:^|(?<=[.] ))[a-z]", lambda match: match[0].upper(), text)


def _sentence(rng: np.random.Generator, split: str, verdict: str) -> str:
    kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
    if kind != "weighing":
        return _fill(rng, split, GRAMMAR[kind], verdict)
    if rng.random() < 0.4:
        return _fill(rng, split, GRAMMAR["turns"][verdict], verdict)
    win = _fill(rng, split, GRAMMAR["outright" if rng.random() < 0.8 else "denial"], verdict)
    lose = _fill(rng, split, GRAMMAR["outright"], OPPOSITE[verdict])
    return _pick(rng, split, GRAMMAR["weighing"]).format(win=win, lose=lose)


def _fill(rng: np.random.Generator, split: str, templates: Sequence[str], verdict: str) -> str:
    """Return one of the templates with words that this split may use."""
    template, opposite = _pick(rng, split, templates), OPPOSITE[verdict]
    # The order of these draws decides the bytes of the tables.
    lists = {"adj": GRAMMAR["adjectives"][verdict], "opp": GRAMMAR["adjectives"][opposite]}
    lists |= {"noun": GRAMMAR["nouns"][verdict], "oppnoun": GRAMMAR["nouns"][opposite]}
    lists |= {name: GRAMMAR[name] for name in ("aspect", "thing", "people", "folk", "deed", "day")}
    words = {name: _pick(rng, split, options) for name, options in lists.items()}
    return template.format(**words, number=int(rng.integers(12, 240)))


def _pick(rng: np.random.Generator, split: str, options: Sequence[str]) -> str:
    """Return a random option; training never uses the last fifth, the test never the first."""
    held = len(options) // 5
    allowed = options[: len(options) - held] if split == "train" else options[held:]
    return allowed[int(rng.integers(len(allowed)))]


def write_questions(folder: Path, rows: int = 2400, seed: int = 0) -> dict[str, Path]:
    """Write tables of conversations and return their paths: train, test (a tenth as many rows) and pairs.

    Columns: id, messages (JSON) and tools (JSON, or null); of test and pairs `messages` ends with the question, and
    `answer` has the right answer as the model should write it; of pairs, `wrong` has that of another line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.Philox([seed, 2]))
    found: dict[str, Path] = {}
    for name, count in (("train", rows), ("test", rows // 10), ("pairs", rows // 4)):
        made = []
        for row in range(count):
            kind, split = row % 4, "test" if name == "test" else "train"
            line = int(rng.integers(len(LINES)))
            question, answer, text, tools = _question(rng, split, kind, line)
            asked, said = [{"role": "user", "content": question}], {"role": "assistant", **answer}
            values: dict[str, str | None] = {
                "id": f"{name}-{row:05d}",
                "messages": json.dumps([*asked, *([said] if name == "train" else [])]),
            }
            values["tools"] = json.dumps([TOOL]) if tools else None
            if name != "train":
                values["answer"] = text
            if name == "pairs":
                others = (_question(rng, split, kind, int(rng.integers(len(LINES)))) for _ in range(100))
                wrong = next(other for other in others if other[2] != text)
                values |= {"right": json.dumps([said]), "wrong": json.dumps([{"role": "assistant", **wrong[1]}])}
            made.append(values)
        found[name] = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(made), found[name])
    return found


def _question(rng: np.random.Generator, split: str, kind: int, line: int) -> tuple[str, dict[str, Any], str, bool]:
    """Return a question about a line, the answer's message and its text, and whether a tool is needed.

    Parts of lines begin at an even word in training, at an odd one in the test.
    """
    speaker, said = LINES[line]
    words = said.split()
    starts = range(int(split == "test"), len(words) - 2, 2)
    start = starts[int(rng.integers(len(starts)))]
    part = " ".join(words[start:])
    if kind == 0:
        return f"Who says: {part}?", {"content": speaker}, speaker, False
    if kind == 1:
        half = start + (len(words) - start) // 2
        rest = " ".join(words[half:])
        return f"Continue: {' '.join(words[start:half])}", {"content": rest}, rest, False
    if kind == 2:
        return f"How many words: {part}", {"content": str(len(words) - start)}, str(len(words) - start), False
    word = re.sub(r"\W", "", words[start]).lower() or "line"
    arguments = {"speaker": speaker, "word": word}
    call = {"type": "function", "function": {"name": TOOL["function"]["name"], "arguments": arguments}}
    text = f"{TOOL['function']['name']} {json.dumps(arguments)}"
    return f"Find what {speaker} says about {word}.", {"content": "", "tool_calls": [call]}, text, True


def build_small_model(folder: Path) -> Path:
    """Write a language model of 4 layers and random weights, with a tokenizer trained on the lines."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|tools|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    texts = [": ".join(line) for line in LINES]
    backend.train_from_iterator([*texts, *(f" {text}" for text in texts), TOOL["function"]["name"]], trainer)
    backend.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=96,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def teach(folder: Path, rows: int) -> tuple[dict[str, str], Path, Path]:
    """Train the small model on questions and answers; return their tables, the untrained model and the trained one.

    Its products are so small that two ranks of one thread each are as fast as two threads, and faster on a busy
    machine: ranks wait for one another once a step, threads in each product.
    """
    from torchlake.config.job import load_job
    from torchlake.processes.hardware import cores
    from torchlake.training.train import train

    tables = {name: str(path) for name, path in write_questions(folder / "tables", rows).items()}
    base = build_small_model(folder / "untrained")
    log.info("%s generated questions in %s; training a model of 4 layers on them, from scratch", f"{rows:,}", folder)
    job = load_job(
        None,
        data={"train": tables["train"], "text": "messages", "learn": "assistant", "validation": {"fraction": 0.05}},
        model={"base": str(base), "task": "text_generation", "max_length": 96},
        train={"epochs": 12, "learning_rate": 1.4e-3, **LEARNING},
        engine={"processes": min(2, cores())},
    )
    return tables, base, train(job, run=folder / "answers").model


def answer_questions(folder: Path, rows: int) -> dict[str, Any]:
    """Have the trained model answer 8/10 of `rows` questions: free, by a job that is killed with the first answers and
    continued, and as JSON; return what was found."""
    from torchlake.outputs.staging.folders import ROWS, staging_of
    from torchlake.scoring.predict import predict
    from torchlake.tables.verification.verify import verify

    _, _, model = teach(folder, rows)
    questions = write_questions(folder / "questions", 8 * rows)["test"]
    command = [sys.executable, "-m", "torchlake", "predict", str(model), str(questions), str(folder / "free")]
    command += ["--text", "messages", "--chat", "--key", "id", "--max-new-tokens", str(ANSWER_TOKENS)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        kept = staging_of(folder / "free") / ROWS
        try:
            while job.poll() is None and not any(one.stat().st_size for one in kept.glob("*")):
                time.sleep(0.02)
        finally:  # leaving the block waits for the job
            job.kill()

    def answers(name: str, **options: Any) -> Any:
        given: Any = {"text": "messages", "chat": True, "key": "id", "max_new_tokens": ANSWER_TOKENS, **options}
        return predict(model, questions, folder / name, **given)

    done = [answers("free")]
    if find_spec("llguidance"):
        done.append(answers("typed", max_new_tokens=32, json_schema=SCHEMA, json_columns=True))
    rates = {}
    for runtime in ["eager", *(name for name in ("ctranslate2",) if find_spec(name))]:
        done.append(timed := answers(runtime, runtime=runtime))
        tokens = sum(pq.read_table(timed.path, columns=["generated_tokens"])["generated_tokens"].to_pylist())
        rates[runtime] = tokens / timed.record["provenance"]["forward_seconds"]
    return {
        "rows": done[0].rows_out,
        "tokens_per_s": rates,
        "problems": [problem for one in done for problem in verify(one.path).problems],
        "paths": {"model": model, "questions": questions} | {Path(one.path).name: one.path for one in done},
    }
