"""What the GPU benchmarks share: the card's matrix rates, models of known shapes, texts for them, a clock.

Everything is generated from a seed, so that a machine without a network and without the review tables runs them too.
Without a GPU the same code runs on the CPU with `tiny` shapes, which shows that it works and nothing else.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

ENCODERS: dict[str, dict[str, int]] = {
    "roberta-base": {},
    "roberta-large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
}
LANGUAGE_MODELS: dict[str, dict[str, int]] = {
    # Llama 3.2 1B.
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    },
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 4096,
        "max_position_embeddings": 512,
    },
}
WORDS = 4000
MEAN_WORDS, SPREAD = 3.0, 0.45
"Mean and standard deviation of the logarithm of a row's number of words: a median of 20 words, as in film reviews."
SIZE = 8192
"Rows and columns of the matrices whose product gives the card's rate."
REPEATS = 20


def device() -> Literal["cuda", "cpu"]:
    """Return where the benchmarks run."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def card() -> str:
    """Return the name of the GPU, or "CPU"."""
    import torch

    return torch.cuda.get_device_name() if device() == "cuda" else "CPU"


def synchronize() -> None:
    """Wait until the device has finished."""
    import torch

    if device() == "cuda":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call, until the device has finished."""
    synchronize()
    began = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - began


def matrix_rates(size: int = SIZE) -> dict[str, float | None]:
    """Return operations per second of a product of random matrices in bf16, fp16, TF32 and int8; None: unsupported."""
    return {name: _rate(name, size) for name in ("bf16", "fp16", "tf32", "int8")}


def _rate(name: str, size: int) -> float | None:
    import torch

    before = torch.get_float32_matmul_precision()
    try:
        if name == "int8":
            left = torch.randint(-127, 127, (size, size), device=device(), dtype=torch.int8)
            work: Callable[[], object] = lambda: torch._int_mm(left, left.T)  # noqa: E731
        else:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32}[name]
            torch.set_float32_matmul_precision("high" if name == "tf32" else before)
            values = torch.randn(size, size, device=device(), dtype=dtype)
            work = lambda: values @ values  # noqa: E731
        work()
        return 2 * size**3 / min(seconds_of(work) for _ in range(REPEATS))
    except RuntimeError:
        return None
    finally:
        torch.set_float32_matmul_precision(before)


def texts(rows: int, seed: int = 0) -> list[str]:
    """Return generated texts with the lengths of film reviews."""
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(MEAN_WORDS, SPREAD, rows).astype(int), 2, 80)
    # Common words first, as in real texts.
    words = np.minimum(generator.geometric(0.002, int(lengths.sum())), WORDS) - 1
    ends = np.cumsum(lengths)
    return [
        " ".join(f"w{word}" for word in words[end - length : end]) for end, length in zip(ends, lengths, strict=True)
    ]


def labels(rows: list[str]) -> list[str]:
    """Return a label for each text, decided by its first word."""
    return ["good" if row.split()[0] < "w4" else "bad" for row in rows]


def tokenizer(*, language_model: bool) -> Any:
    """Return a tokenizer with one token per generated word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>"]
    names = [*special, *(f"w{number}" for number in range(WORDS))]
    found = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options: dict[str, Any] = {"eos_token": "</s>", "unk_token": "<unk>"}
    if not language_model:
        found.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
        options |= {"bos_token": "<s>", "pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **options)


def encoder(folder: Path, shape: str) -> Path:
    """Save a RoBERTa classifier of that shape with random weights in `folder`; returns the folder."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=50_265,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=2,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **ENCODERS[shape],
    )
    return _save(folder, RobertaForSequenceClassification, config, tokenizer(language_model=False))


def language_model(folder: Path, shape: str) -> Path:
    """Save a Llama of that shape with random weights in `folder`; returns the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        **LANGUAGE_MODELS[shape],
    )
    return _save(folder, LlamaForCausalLM, config, tokenizer(language_model=True))


def _save(folder: Path, kind: Any, config: Any, words: Any) -> Path:
    import torch

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device(device()):  # drawing a billion numbers takes a CPU minutes
            model = kind(config)
        model.save_pretrained(folder)
        words.save_pretrained(folder)
    return folder
