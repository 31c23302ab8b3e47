"""Every architecture of transformers that has a head for a task: scored as transformers scores it, or refused.

`models.json` has what is found, and `tools/reference.py` makes a page of it: null, or why not. UPDATE_MODELS=1 writes
it. A model is tiny and has random weights; its rows have different lengths and one ends in the end token. torchlake
computes them in one batch, transformers one after the other.
"""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoConfig

import families
import tiny
import torchlake as tl
from sweeps import sweep
from torchlake.errors import DataError, TorchlakeError
from torchlake.models.config import HEADS, POSITIONS_AFTER_PADDING, architectures_of
from torchlake.models.write import quiet
from torchlake.runtimes import fused
from torchlake.scoring.options.settings import known_spec
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import Scorer

FOUND = Path(__file__).with_name("models.json")
AUTO = {
    "text_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
    "token_classification": "AutoModelForTokenClassification",
    "question_answering": "AutoModelForQuestionAnswering",
    "text_generation": "AutoModelForCausalLM",
    "text2text_generation": "AutoModelForSeq2SeqLM",
}
WRITES = ("text_generation", "text2text_generation")
LABELS = {"token_classification": {0: "O", 1: "B-PER", 2: "I-PER"}}
AGREEMENT = 1e-4
"Relative to the largest logit."
FAILS = "; transformers fails, too"
NEW_TOKENS = 6
QUESTION = "what is it ?"
CASES = [(task, name) for task in HEADS for name in architectures_of(task)]
QUICK = {
    *(("text_classification", name) for name in ("llama", "bart", "xlnet")),
    *(("image_classification", name) for name in ("resnet",)),
    ("token_classification", "roberta"),
    ("question_answering", "distilbert"),
    ("text_generation", "qwen2"),
    *(("text2text_generation", name) for name in ("marian", "t5")),
}


def texts_for(end: str, *, last: bool = True) -> list[str]:
    """Rows of different lengths, one of which has the end token at its end or, as a prompt to continue, within it."""
    one = f"a film that we like {end}" if last else f"a film {end} that we like"
    return ["a good film", one, "it was boring and we did not like all of it , but the acting is great"]


def images() -> list[bytes]:
    """Pictures of noise in one size."""
    made = []
    for seed in range(3):
        file = io.BytesIO()
        pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "PNG")
        made.append(file.getvalue())
    return made


def tokenizer_for(task: str, name: str, config: Any) -> Any:
    """A tokenizer as the family has: GPT-2's kind for decoders, BART's for encoder-decoders, else BERT's."""
    if task == "text_generation":
        return tiny.language_tokenizer()
    if config.is_encoder_decoder or name == "longformer":  # which looks for the separators of RoBERTa's pairs
        return tiny.bpe_tokenizer()
    padded = getattr(config.get_text_config(), "pad_token_id", None) is not None or name in POSITIONS_AFTER_PADDING
    return tiny.wordpiece_tokenizer() if padded else tiny.language_tokenizer()


def build(folder: Path, task: str, name: str) -> Path:
    """A tiny model of the family with the head of the task, and random weights."""
    if task == "image_classification":
        config = families.image_config_of(name)
        pixels = families.OWN.get(name, {}).get("image_size", families.IMAGE_SIZES["image_size"])
        processor = transformers.ViTImageProcessorPil(size={"height": pixels, "width": pixels})
        processor.save_pretrained(folder)
    else:
        usual = transformers.CONFIG_MAPPING[name]()
        tokenizer = tokenizer_for(task, name, usual)
        special: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 2}
        if task not in WRITES and not usual.is_encoder_decoder and tokenizer.sep_token is not None:
            special["eos_token_id"] = tokenizer.sep_token_id
        if getattr(usual.get_text_config(), "pad_token_id", None) is not None or name in POSITIONS_AFTER_PADDING:
            special["pad_token_id"] = 1 if tokenizer.pad_token is None else tokenizer.pad_token_id
        if usual.is_encoder_decoder:
            special["decoder_start_token_id"] = 1
        if task == "text_generation" and name == "reformer":
            special["is_decoder"] = True
        own = families.OWN.get(name, {})
        special = {key: value for key, value in special.items() if key not in own}
        made = families.composite_config_of if usual.sub_configs else families.config_of
        config = made(name, **special)
        tokenizer.save_pretrained(folder)
    config.architectures = [architectures_of(task)[name][-1]]
    if task not in WRITES:
        config.num_labels = 2 if task == "question_answering" else 3
        config.id2label = LABELS.get(task, {0: "bad", 1: "fair", 2: "good"})
        config.id2label = {0: "start", 1: "end"} if task == "question_answering" else config.id2label
    auto: Any = getattr(transformers, AUTO[task])
    with torch.random.fork_rng(), quiet():
        with torch.device("meta"):
            numbers = sum(each.numel() for each in auto.from_config(config).parameters())
        assert numbers < 70_000_000, f"{name} is not tiny: {numbers:,} parameters"
        torch.manual_seed(0)
        model = auto.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1 and task != "image_classification":
                parameter.data.normal_(0.0, 0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight.data[module.padding_idx] = 0
            if isinstance(module, torch.nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        if task in WRITES:
            ends = {"eos_token_id": 2, "pad_token_id": special.get("pad_token_id", 2)}
            if config.is_encoder_decoder:
                ends["decoder_start_token_id"] = special["decoder_start_token_id"]
            model.generation_config = transformers.GenerationConfig(**ends)
        model.save_pretrained(folder)
    return folder


def ours(folder: Path, task: str, runtime: str = "eager") -> list[Any]:
    """torchlake's outputs of all rows in one batch, or its texts."""
    if task in WRITES:
        table = pa.table({"text": texts_of(folder, task)})
        found = tl.predict(folder, table, task=task, max_new_tokens=NEW_TOKENS, max_error_rate=1.0, engine=tiny.Here())
        for reason in found["error"].drop_null().to_pylist():
            raise DataError(reason)
        texts: list[str] = found["generated_text"].to_pylist()
        return texts
    rows = pa.array(images()) if task == "image_classification" else pa.array(texts_of(folder, task))
    inputs = {
        "image_classification": {"image": rows},
        "question_answering": {"question": pa.array([QUESTION] * len(rows)), "context": rows},
    }.get(task, {"text": rows})
    names = {name: name for name in inputs if name != "text"}
    settings = ScoringSettings(
        model=str(folder),
        runtime=runtime,
        task=task,
        text="" if names else "text",
        inputs=names,
        task_options=dict(known_spec(folder, task).options),
        keep=(),
        key=None,
    )
    scorer = Scorer(settings=settings)
    work = scorer.read(pa.table(inputs), {})
    assert not work.errors, work.errors
    batch = scorer.task.checked_batch(work.features.arrays, np.arange(len(rows)), scorer.processor, scorer.spec)
    return list(scorer.forward(**batch))


def texts_of(folder: Path, task: str) -> list[str]:
    """The rows of a model that reads texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if task == "question_answering" and AutoConfig.from_pretrained(folder).model_type == "longformer":
        return texts_for("")  # it computes rows of three separators only
    return texts_for(tokenizer.eos_token or tokenizer.sep_token, last=task != "text_generation")


def theirs(folder: Path, task: str) -> list[Any]:
    """What transformers computes, one row after the other."""
    with quiet():
        model = getattr(transformers, AUTO[task]).from_pretrained(folder).eval()
    if task == "image_classification":
        processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        made = [processor(Image.open(io.BytesIO(one)), return_tensors="pt") for one in images()]
        with torch.inference_mode():
            return [model(pixel_values=one["pixel_values"]).logits[0].numpy() for one in made]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found: list[Any] = []
    for text in texts_of(folder, task):
        pair = (QUESTION, text) if task == "question_answering" else (text,)
        ids = tokenizer(*pair, return_tensors="pt")["input_ids"]
        sent = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.inference_mode(), quiet():
            if task in WRITES:
                made = model.generate(**sent, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)[0]
                cut = 0 if model.config.is_encoder_decoder else ids.shape[1]
                found.append(tokenizer.decode(made[cut:], skip_special_tokens=True))
            elif task == "question_answering":
                out = model(**sent)
                found.append(torch.stack([out.start_logits, out.end_logits], dim=-1)[0].numpy())
            else:
                found.append(model(**sent).logits[0].numpy())
    return found


def why_not(error: TorchlakeError) -> str:
    """The reason in the message of a refusal, without folders, and without torch's errors, which differ by machine."""
    text = re.sub(r"/\S+: ", "", str(error))
    return re.sub(r" \((?!ValueError|AssertionError).*\)", "", text).split(". ")[0].rstrip(".")


def computes(folder: Path, task: str) -> bool:
    """Whether transformers computes the rows."""
    try:
        return bool(theirs(folder, task))
    except Exception:
        return False


def check(folder: Path, task: str, name: str) -> str | None:
    """Why torchlake refuses the model; None if it scores it as transformers does."""
    if name in families.NOT_TINY:
        return f"not tried: {families.NOT_TINY[name]}"
    build(folder, task, name)
    try:
        made = ours(folder, task)
    except TorchlakeError as error:
        return why_not(error) + ("" if computes(folder, task) else FAILS)
    fast = [ours(folder, task, "fused")] if task == "image_classification" and fused.refusal(folder) is None else []
    for rows in (made, *fast):
        for one, other in zip(rows, theirs(folder, task), strict=True):
            if task in WRITES:
                assert one == other
            else:
                one = one[tuple(map(slice, other.shape))]
                assert np.abs(one - other).max() <= AGREEMENT * max(1.0, np.abs(other).max())
    return None


@pytest.mark.filterwarnings("default")  # transformers' own, of families that it is about to rename or to replace
@pytest.mark.parametrize(("task", "name"), sweep(CASES, quick=QUICK))
def test_an_architecture_is_scored_as_transformers_does_or_refused(task: str, name: str, tmp_path: Path) -> None:
    found = check(tmp_path / "model", task, name)
    known = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if os.environ.get("UPDATE_MODELS"):
        known.setdefault(task, {})[name] = found
        known = {one: {each: known.get(one, {}).get(each, "?") for each in architectures_of(one)} for one in HEADS}
        FOUND.write_text(json.dumps(known, indent=1) + "\n")
    assert known[task][name] == found


def test_the_table_has_every_architecture() -> None:
    known = json.loads(FOUND.read_text())
    assert {task: set(names) for task, names in known.items()} == {task: set(architectures_of(task)) for task in HEADS}
