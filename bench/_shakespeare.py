"""What the benchmarks of language models share: lines of Shakespeare, a small model of random weights, perplexities."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 2_000


def lines_of_shakespeare() -> list[str]:
    """The text's lines that hold any, or the end of this benchmark with the reason."""
    folder = os.environ.get("TORCHLAKE_DATA")
    if not folder:
        print(f"{sys.argv[0]}: skipped: TORCHLAKE_DATA does not name the folder of the texts", file=sys.stderr)
        raise SystemExit(0)
    text = (Path(folder) / "tiny_shakespeare" / "input.txt").read_text()
    return [line for line in text.splitlines() if line.strip()]


def small_model(folder: Path, lines: list[str], make: Callable[[int], Any]) -> None:
    """`make(tokens)` of random weights, and a byte-level tokenizer of that many tokens trained on the lines."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    shutil.rmtree(folder, ignore_errors=True)
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(lines, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    make(len(tokenizer)).save_pretrained(folder)


def num_tokens(folder: Path, lines: list[str]) -> int:
    """Tokens of all lines, each with its end token."""
    from transformers import AutoTokenizer

    return sum(len(ids) + 1 for ids in AutoTokenizer.from_pretrained(folder)(lines)["input_ids"])


def perplexities(folder: Path, lines: list[str], block: int) -> dict[str, float]:
    """Perplexities of the lines end to end in blocks, and of each line alone, by transformers' own loss."""
    model, tokenizer = loaded(folder)
    rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(lines)["input_ids"]]
    stream = [token for row in rows for token in row]
    blocks = [stream[first : first + block] for first in range(0, len(stream) - 1, block - 1)]
    pieces = {"perplexity_blocks": blocks, "perplexity_lines": rows}
    return {name: perplexity(model, [(1, ids) for ids in some]) for name, some in pieces.items()}


def perplexity_of_answers(folder: Path, pairs: list[tuple[str, str]]) -> float:
    """The perplexity of each second text and its end token after the first one, by transformers' own loss."""
    model, tokenizer = loaded(folder)
    asked, said = (tokenizer(list(texts))["input_ids"] for texts in zip(*pairs, strict=True))
    return perplexity(
        model, [(len(one), [*one, *other, tokenizer.eos_token_id]) for one, other in zip(asked, said, strict=True)]
    )


def loaded(folder: Path) -> tuple[Any, Any]:
    """A folder's model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def perplexity(model: Any, pieces: list[tuple[int, list[int]]]) -> float:
    """The perplexity of the tokens of each piece from a place on."""
    import torch

    loss = targets = 0.0
    for first, piece in pieces:
        ids = torch.tensor([piece])
        labels = ids.clone()
        labels[0, :first] = -100
        with torch.inference_mode():
            loss += model(input_ids=ids, labels=labels).loss.item() * (len(piece) - first)
        targets += len(piece) - first
    return float(np.exp(loss / targets))
