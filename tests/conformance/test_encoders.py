"""Which encoders each runtime embeds with: vectors of every family, compared with eager's.

`encoders.json` has what is found, and `tools/reference.py` makes a page of it: null, or why not. UPDATE_ENCODERS=1
writes it.
"""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

import families
import tiny
from sweeps import sweep
from torchlake import plugins
from torchlake.errors import UsageError
from torchlake.models.spec import load_spec
from torchlake.models.write import quiet
from torchlake.processes import hardware
from torchlake.scoring.rows import ScoringSettings
from torchlake.scoring.scorer import Scorer, prepare_runtime

FOUND = Path(__file__).with_name("encoders.json")
FAMILIES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "mpnet"),
    *("modernbert", "nomic_bert", "eurobert", "gte", "jina_embeddings_v3", "deberta", "deberta-v2"),
    *("qwen3", "gemma3_text", "mistral", "t5", "bart"),
)
RUNTIMES = ("varlen", "bf16", "int8", "compiled", "zentorch", "onnx", "onnx_int8", "openvino", "openvino_int8")
COMPILED = ("compiled", "zentorch")
SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
COSINES = {"bf16": 0.99, "zentorch": 0.99, "int8": 0.98, "onnx_int8": 0.97, "openvino_int8": 0.97}
"The lowest cosine to eager's vectors; exact runtimes: 1 - 1e-5."


def build(folder: Path, family: str) -> Path:
    """An encoder of the family without a head, with random weights."""
    tokenizer = tiny.wordpiece_tokenizer()
    known = transformers.CONFIG_MAPPING[family]().to_dict()
    special = {name: tokenizer.sep_token_id for name in SPECIAL if name in known}
    special["pad_token_id"] = tokenizer.pad_token_id
    config = families.config_of(family, vocab_size=len(tokenizer), **special)
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0.0, 0.1)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def vectors(folder: Path, runtime: str, table: pa.Table) -> np.ndarray:
    settings = ScoringSettings(
        model=str(folder), runtime=runtime, task="feature_extraction", text="text", keep=(), key=None
    )
    module = plugins.load("runtimes", runtime)
    reason = module.refusal(folder)
    if reason is not None:
        raise UsageError(reason)
    if hasattr(module, "prepare"):
        prepare_runtime(settings, runtime, table)
    scorer = Scorer(settings=settings)
    scored = scorer.score(scorer.read(table, {}))
    assert scored["error"].null_count == len(table), scored["error"].drop_null()[0]
    found: np.ndarray = scorer.task.read_answers(scored, scorer.spec)
    return found


def why_not(error: UsageError) -> str:
    """The reason in the message of a refusal, without folders and what differs from run to run."""
    text = re.sub(r"/\S+: ", "", str(error))
    return re.sub(r" \(.*\)", "", text).split(". ")[0].rstrip(".")


@pytest.mark.parametrize("family", sweep(FAMILIES, quick={"mpnet"}))
def test_every_runtime_has_eagers_vectors_or_says_why_not(family: str, tmp_path: Path) -> None:
    check(family, [one for one in RUNTIMES if one not in COMPILED], tmp_path)


@pytest.mark.slow  # half a minute for each model and runtime
@pytest.mark.parametrize("runtime", COMPILED)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_encoders_have_eagers_vectors_or_say_why_not(family: str, runtime: str, tmp_path: Path) -> None:
    check(family, [runtime], tmp_path)


def check(family: str, runtimes: Sequence[str], parent: Path) -> None:
    """Compare the runtimes' vectors of a family with eager's, and what was found with `encoders.json`."""
    folder = build(parent / "model", family)
    assert load_spec(folder, "feature_extraction").dimensions == 32
    long = pa.table({"text": ["good film " * 60]})  # longer than ModernBERT's window
    table = pa.concat_tables([tiny.reviews(47).select(["text"]), long])
    expected = vectors(folder, "eager", table)
    found: dict[str, Any] = {"eager": None}
    for runtime in runtimes:
        # What is found must not depend on this CPU.
        if plugins.load("runtimes", runtime).refusal(folder) in (
            hardware.int8_refusal() or 0,
            hardware.bf16_refusal() or 0,
        ):
            continue
        try:
            ours = vectors(folder, runtime, table)
        except UsageError as error:
            found[runtime] = why_not(error)
            continue
        products = (ours * expected).sum(axis=1)
        cosines = products / np.linalg.norm(ours, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() >= COSINES.get(runtime, 1 - 1e-5), (runtime, cosines.min())
        found[runtime] = None
    known = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if os.environ.get("UPDATE_ENCODERS"):
        known = {name: {**known.get(name, {}), **(found if name == family else {})} for name in FAMILIES}
        FOUND.write_text(json.dumps(known, indent=1) + "\n")
    assert known[family] == {**known[family], **found}
