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
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from torchlake.errors import OutputError

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
