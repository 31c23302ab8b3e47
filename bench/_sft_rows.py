"""The models and rows of `sft.py`: words and lengths from a seed, weights from another."""

from pathlib import Path
from typing import Any

import numpy as np

TURN = "<|start|>{{ m['role'] }}<|middle|>{{ m['content'] }}<|end|>"
ANSWER = "<|start|>assistant<|middle|>{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
TEMPLATE = (
    f"{{% for m in messages %}}{{% if m['role'] == 'assistant' %}}{ANSWER}{{% else %}}{TURN}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}<|start|>assistant<|middle|>{% endif %}"
)


def build_model(folder: Path, name: str) -> None:
    """Save a model of random weights and its tokenizer: words of two letters, so that a word is a token or two."""
    import torch
    import transformers as tf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<|start|>", "<|middle|>", "<|end|>", "<|pad|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in ("Ġ", *letters) for b in letters]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet, *(a + b for a, b in pairs)])}
    backend = Tokenizer(models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    words = tf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", pad_token="<|pad|>")
    words.chat_template = TEMPLATE
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": words.eos_token_id}
    if name == "gpt2-small":
        config: Any = tf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **ids)
    else:
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = tf.LlamaConfig(vocab_size=8192, tie_word_embeddings=True, **sizes, **ids)
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)


def text(random: np.random.Generator, mean: float) -> str:
    """Some words; their number is log-normal around `mean`."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    count = int(np.clip(random.lognormal(np.log(mean), 0.8), 1, 90))
    return " ".join("".join(random.choice(letters, random.integers(1, 8))) for _ in range(count))


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversations(rows: int) -> list[dict[str, Any]]:
    """Conversations of one to three questions, at most about 450 tokens."""
    random, made = np.random.default_rng(0), []
    for number in range(rows):
        turns = [turn("system", "answer as in a play")] if number % 2 else []
        room = 150
        for _ in range(int(random.integers(1, 4))):
            asked, said = text(random, 8), text(random, 20)
            room -= len(asked.split()) + len(said.split())
            if room < 0 and len(turns) > 1:
                break
            turns += [turn("user", asked), turn("assistant", said)]
        made.append({"messages": turns})
    return made


def preferences(rows: int) -> list[dict[str, str]]:
    """A prompt of mixed length, and two answers of mixed lengths."""
    random = np.random.default_rng(1)
    return [
        {"prompt": text(random, 20), **{name: " " + text(random, 25) for name in ("chosen", "rejected")}}
        for _ in range(rows)
    ]
