"""Are tagged words and similar sentences learned as well as by the loops that people write for them?

Tokens: names of people and places in film reviews, distinguished only by the words before them, as half of the names
are both; the test has other reviews. By hand: transformers' Trainer with its collator for token classification, labels
on first tokens, measured by seqeval. Sentences: a review and what is left of it after some words were taken out; the
similarity is the share that is left. By hand: sentence-transformers' trainer, CosineSimilarityLoss and evaluator. The
same base (MiniLM), rows, batch, steps, rate and schedule in fp32 for both, several seeds, one process on all cores.
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from _common import SCRATCH, finish, minilm, parser, reviews
from _recipes import LONGEST, Recipe, arguments, by_sentence_transformers, by_torchlake, sentence_model

BATCH = 32
RATES = {"tokens": 2e-4, "sentences": 5e-5}
ROWS = {"train": 960, "test": 500}
NAMES = {"PERSON": "Morgan Casey Jamie Riley Robin", "PLACE": "Berlin Oslo Madrid Cairo Lima"}
BOTH = "Paris Jordan Florence Austin Sydney Chelsea Dakota Logan Lincoln Houston"
BEFORE = {"PERSON": ("played by", "says", "thanks to", "with"), "PLACE": ("shot in", "set in", "thanks to", "near")}
TAGS = ["O", "B-PERSON", "I-PERSON", "B-PLACE", "I-PLACE"]


def main() -> None:
    options = parser(__doc__, seeds=2, epochs=2)
    options.add_argument("--train", help="for a process of this benchmark: what it trains, as JSON")
    given = options.parse_args()
    if given.train:
        os.environ.update(TORCHLAKE_PROGRESS="0", WANDB_DISABLED="true")
        setup = json.loads(given.train)
        print(json.dumps(globals()[f"{setup['task']}_by_{setup['kind']}"](setup)))
        return
    rows = []
    for task, metric in (("tokens", "f1 of spans"), ("sentences", "Spearman's correlation")):
        folder = SCRATCH / "task-accuracy" / task
        folder.mkdir(parents=True, exist_ok=True)
        for part, number in ROWS.items():
            texts = pq.read_table(reviews() / f"{part}.parquet", columns=["text"])["text"].to_pylist()
            pq.write_table(globals()[task](texts, number), folder / f"{part}.parquet")
        for kind in ("torchlake", "hand"):
            found = [measured(task, kind, folder, seed, given.epochs) for seed in range(given.seeds)]
            rows.append(
                {
                    "name": f"{task}: {'torchlake' if kind == 'torchlake' else 'by hand'}",
                    "metric": metric,
                    "base": found[0].get("base"),
                    "trained": statistics.mean(one["trained"] for one in found),
                    "lowest": min(one["trained"] for one in found),
                    "highest": max(one["trained"] for one in found),
                }
            )
    note = (
        f"{ROWS['train']} rows, {given.epochs} epochs, batches of {BATCH}, {given.seeds} seeds; {ROWS['test']} tested"
    )
    finish("task_accuracy", rows, as_json=given.json, note=note)


def measured(task: str, kind: str, folder: Path, seed: int, epochs: int) -> dict[str, float]:
    output = folder / f"{kind}-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    setup = {"task": task, "kind": kind, "folder": str(folder), "output": str(output), "seed": seed, "epochs": epochs}
    command = [sys.executable, __file__, "--train", json.dumps(setup)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(f"  {task} by {kind}, seed {seed}: {done.stdout.splitlines()[-1]}", file=sys.stderr, flush=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def tokens(texts: list[str], number: int) -> pa.Table:
    """Lists of words with a tag each: every review has two names in it."""
    chance, rows = random.Random(0), []
    for text in texts[:number]:
        words = text.split()[:20]
        tags = ["O"] * len(words)
        for _ in range(2):
            label = chance.choice(list(NAMES))
            name = [chance.choice((NAMES[label] + " " + BOTH).split()) for _ in range(chance.choice((1, 2)))]
            before, at = chance.choice(BEFORE[label]).split(), chance.choice([*gaps(tags)])
            words[at:at] = before + name
            tags[at:at] = ["O"] * len(before) + [f"B-{label}", *[f"I-{label}"] * (len(name) - 1)]
        rows.append({"id": len(rows), "text": words, "label": tags})
    return pa.Table.from_pylist(rows)


def gaps(tags: list[str]) -> list[int]:
    """The places between words that are not inside of a name."""
    return [at for at in range(len(tags) + 1) if at == len(tags) or not tags[at].startswith("I-")]


def sentences(texts: list[str], number: int) -> pa.Table:
    """Reviews, what is left of them, and the share that is left."""
    chance, rows = random.Random(0), []
    for text in texts[:number]:
        words = text.split()
        kept = sorted(chance.sample(range(len(words)), chance.randint(1, len(words))))
        other = " ".join(words[at] for at in kept)
        rows.append({"id": len(rows), "text": text, "other": other, "label": len(kept) / len(words)})
    return pa.Table.from_pylist(rows)


def recipe_of(setup: dict[str, Any]) -> Recipe:
    steps = setup["epochs"] * ROWS["train"] // BATCH
    return Recipe(setup["output"], batch=BATCH, rate=RATES[setup["task"]], steps=steps, seed=setup["seed"])


def tokens_by_torchlake(setup: dict[str, Any]) -> dict[str, float]:
    import torchlake as tl

    data = {"train": f"{setup['folder']}/train.parquet"}
    model, _ = by_torchlake(recipe_of(setup), data, "token_classification")
    return {"trained": float(tl.evaluate(model, f"{setup['folder']}/test.parquet").metrics["f1"])}


def tokens_by_hand(setup: dict[str, Any]) -> dict[str, float]:
    from datasets import Dataset
    from seqeval.metrics import f1_score
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    tokenizer = AutoTokenizer.from_pretrained(minilm())

    def prepared(part: str) -> Any:
        rows = pq.read_table(f"{setup['folder']}/{part}.parquet").to_pydict()
        found = tokenizer(rows["text"], is_split_into_words=True, truncation=True, max_length=LONGEST)
        every = []
        for row, tags in enumerate(rows["label"]):
            labels, last = [], None
            for place in found.word_ids(row):
                labels.append(-100 if place is None or place == last else TAGS.index(tags[place]))
                last = place
            every.append(labels)
        return Dataset.from_dict({**found, "labels": every})

    train, test = prepared("train"), prepared("test")
    set_seed(setup["seed"])  # of the head's first weights
    trainer = Trainer(
        model=AutoModelForTokenClassification.from_pretrained(minilm(), num_labels=len(TAGS)),
        args=arguments(recipe_of(setup), TrainingArguments),
        train_dataset=train,
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    trainer.train()
    found = trainer.predict(test)
    pairs = [
        [(TAGS[label], TAGS[tag]) for label, tag in zip(labels, tags, strict=True) if label != -100]
        for labels, tags in zip(found.label_ids, found.predictions.argmax(-1), strict=True)
    ]
    truth, guess = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
    return {"trained": float(f1_score(truth, guess))}


def sentences_by_torchlake(setup: dict[str, Any]) -> dict[str, float]:
    import torchlake as tl

    given = {"text": "text", "text_pair": "other", "label": "label"}
    data = {"train": f"{setup['folder']}/train.parquet", "problem": "regression", **given}
    model, _ = by_torchlake(recipe_of(setup), data, "feature_extraction")
    test, folders = f"{setup['folder']}/test.parquet", {"base": minilm(), "trained": model}
    found = {name: tl.evaluate(at, test, task="feature_extraction", **given) for name, at in folders.items()}
    return {name: float(one.metrics["spearman"]) for name, one in found.items()}


def sentences_by_hand(setup: dict[str, Any]) -> dict[str, float]:
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss

    model, columns = sentence_model(), ["text", "other", "label"]
    train, test = (pq.read_table(f"{setup['folder']}/{part}.parquet", columns=columns).to_pydict() for part in ROWS)
    evaluator = EmbeddingSimilarityEvaluator(*(test[name] for name in columns), main_similarity="cosine")
    base = evaluator(model)["spearman_cosine"]
    by_sentence_transformers(recipe_of(setup), model, train, CosineSimilarityLoss(model))
    return {"base": float(base), "trained": float(evaluator(model)["spearman_cosine"])}


if __name__ == "__main__":
    main()
